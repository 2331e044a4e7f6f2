"""Records on disk: what ended is read again only for the result, so it need not stay in memory."""

import mmap
import sys
import tempfile
import weakref
from typing import IO

import numpy as np

from infersim.engine.memory import grown

STEP = 2**20  # bytes by which a file grows


class OnDisk:
    """Grows arrays, one of each dtype, in files without a name where temporary files are ($TMPDIR).

    Growing maps a file anew, and pages that nobody has touched since no longer count as the process's memory. Where a
    file cannot grow memory is used from then on, and a line says so.
    """

    def __init__(self) -> None:
        self._files: dict[np.dtype, IO[bytes] | None] = {}

    def __call__(self, array: np.ndarray, used: int, size: int) -> np.ndarray:
        """The array, or with its first `used` rows one of at least `size` rows."""
        if size <= len(array):
            return array
        dtype = array.dtype
        try:
            if dtype not in self._files:
                new = self._files[dtype] = tempfile.TemporaryFile()  # noqa: SIM115
                weakref.finalize(self, new.close)
            if (file := self._files[dtype]) is None:
                return grown(array, used, size)
            before = file.seek(0, 2)
            wanted = -(-size * dtype.itemsize // STEP) * STEP
            for _ in range((wanted - before) // STEP):  # written: on a full disk that is an error, a hole would kill
                file.write(bytes(STEP))
            file.flush()
            rows = np.frombuffer(mmap.mmap(file.fileno(), wanted), dtype, wanted // dtype.itemsize)
        except OSError as error:
            self._files[dtype] = None
            text = f"records stay in memory from now on: {tempfile.gettempdir()}: {error.strerror}"
            print(text, file=sys.stderr, flush=True)
            return grown(array, used, size)
        if not before:
            rows[:used] = array[:used]
        return rows
