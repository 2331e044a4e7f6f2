"""Where independent simulations run: this machine's cores, or a Ray cluster. The results are the same."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from infersim.config.errors import InputError
from infersim.interrupt import uninterrupted

EXECUTORS = ("local", "ray")
ROUNDS = 4  # tasks per worker handed to a Ray cluster at a time: it reports back only when all of them are done


def map_unordered(
    function: Callable[[Any], Any],
    tasks: Sequence[Any],
    workers: int = -1,
    executor: str = "local",
    address: str | None = None,
) -> Iterator[Any]:
    """Yields function(task) of every task as it is finished, in any order. workers: -1 for every core there is.

    InputError if the executor is unknown, not installed or not reachable. Ray's nodes must have infersim installed.
    """
    import joblib

    if executor not in EXECUTORS:
        raise InputError(f"--executor {executor}: must be one of {', '.join(EXECUTORS)}")
    if address is not None and executor != "ray":
        raise InputError("--address: is that of a Ray cluster; needs --executor ray")
    if not tasks:
        return
    job = joblib.delayed(function)
    if executor == "ray":
        cores = _connect_ray(address)
        workers = cores if workers < 0 else workers
        with joblib.parallel_config(backend="ray", n_jobs=workers), joblib.Parallel() as pool:  # its processes stay
            for start in range(0, len(tasks), ROUNDS * workers):
                yield from pool(job(task) for task in tasks[start : start + ROUNDS * workers])
    else:
        pool = joblib.Parallel(n_jobs=min(workers, len(tasks)), return_as="generator_unordered")
        with uninterrupted():  # workers start in here and stay deaf: they are ended by us
            results = pool(job(task) for task in tasks)
        yield from results


def _connect_ray(address: str | None) -> int:
    """Connects to a cluster and registers it with joblib; how many cores it has."""
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError:
        raise InputError("--executor ray: Ray is not installed; must be, by pip install 'infersim[ray]'") from None
    try:
        ray.init(address=address or "auto", ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"--address {address or 'auto'}: no Ray cluster answers there: {reason}") from None
    register_ray()
    return int(ray.cluster_resources().get("CPU", 1))
