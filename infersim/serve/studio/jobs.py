"""Long work in processes of its own: it says what it found bit by bit, and ends when nobody listens any more."""

import asyncio
import json
import multiprocessing
from collections.abc import AsyncGenerator
from typing import Any

from .work import work

WARM = "infersim.serve.studio.warm"


class Jobs:
    """A server of processes that have everything loaded: one starts in some milliseconds, and is killed when it is out
    of date, so that it cannot slow down the next answer."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([WARM])

    def warm(self) -> None:
        """Starts the server: the first job finds it ready."""
        process = self.context.Process(target=_nothing, daemon=True)
        process.start()
        process.join()

    async def run(self, kind: str, arguments: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """What the job says, until it is done; closing the iterator kills it."""
        receiver, sender = self.context.Pipe(duplex=False)
        process = self.context.Process(target=work, args=(sender, kind, arguments), daemon=True)
        await asyncio.to_thread(process.start)
        sender.close()
        try:
            while True:
                try:
                    message = json.loads(await asyncio.to_thread(receiver.recv_bytes))
                except (EOFError, OSError):
                    yield {"errors": ["infersim: the work ended before it was done; please report this"], "done": True}
                    return
                yield message
                if message.get("done"):
                    return
        finally:
            process.kill()
            receiver.close()
            await asyncio.to_thread(process.join)  # its server may take a while to say so: nobody waits for that


def _nothing() -> None:
    pass
