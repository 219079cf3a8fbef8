"""Work on a dask cluster: the client to use, and the results of tasks that outlive their workers."""

# distributed has partial types: futures and clients are unknown to the type checker.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar, cast

from saev_store._runtime.optional import need
from saev_store._runtime.threads import ahead, n_cores
from saev_store.errors import ArgumentError, TransportError, brief

if TYPE_CHECKING:
    from distributed import Client, Future

S = TypeVar("S")
T = TypeVar("T")

#: Upper bound on the tasks of one call: a scheduler spends about a millisecond on each.
MAX_TASKS = 4096
_CONNECT_TIMEOUT_S = 10
#: How long tasks wait for a first worker, or for one after the last was lost, where dask's configuration does not say it.
NO_WORKERS_TIMEOUT_S = 600.0
_NO_WORKERS_KEY = "distributed.scheduler.no-workers-timeout"


def map_shards(function: Callable[[S], T], shards: Sequence[S], client: Client | str | None = None) -> Generator[T]:
    """Yield the results of `function` on each shard, in order.

    Args:
        function: Works on one shard; picklable if there is a client.
        shards: Its arguments.
        client: A `distributed.Client` or the address of a scheduler; None: threads of this process, one per core.

    Raises:
        ArgumentError, MissingDependencyError, TransportError: as `connected` and `results`.
        Exception: the error of `function`.

    >>> list(map_shards(abs, [-3, 1, -2]))
    [3, 1, 2]
    """
    if client is None:
        yield from ahead(function, shards, n_cores())
        return
    with connected(client) as cluster:
        yield from results(cluster, function, shards)


@contextmanager
def connected(client: Client | str) -> Generator[Client]:
    """The given client, or one for the given address, which is closed afterwards.

    In a task of a cluster, the task leaves its worker's threads meanwhile: it would wait for tasks that need the thread.

    Raises:
        ArgumentError: the client is asynchronous, or no client at all; the address has no port, or an unknown scheme.
        MissingDependencyError: an address is given, and distributed is not installed.
        TransportError: no scheduler answers at the address.
    """
    if not isinstance(client, str):
        if not hasattr(client, "submit"):
            raise ArgumentError(
                f"client is {brief(client)}; it must be a distributed.Client, or the address of a scheduler",
                where="client",
                remedy='Pass distributed.Client("tcp://…").',
            )
        if client.asynchronous:
            raise ArgumentError(
                "the client is asynchronous, and this call waits for its result",
                where="client",
                remedy="Pass its scheduler's address instead.",
            )
        with _seceded():
            yield client
        return
    need("distributed", install="distributed", where="client")
    from distributed import Client
    from distributed.comm.addressing import get_address_host_port

    try:
        if not client.startswith("inproc://"):
            get_address_host_port(client)  # pyright: ignore[reportUnknownMemberType]  # no types
    except ValueError as error:  # else it is tried for a while
        raise ArgumentError(f"{client!r} is no address of a scheduler: {error}", where="client") from error
    try:
        opened = Client(client, timeout=_CONNECT_TIMEOUT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise TransportError(f"no dask scheduler answers: {error}", where=client) from error
    with opened, _seceded():
        yield opened


@contextmanager
def _seceded() -> Generator[None]:
    """A block in which a task does not occupy a thread of its worker; nothing outside of tasks."""
    if "distributed" not in sys.modules:
        yield
        return
    from distributed import rejoin, secede

    try:
        secede()
    except (
        ValueError,
        AttributeError,
        KeyError,
    ):  # in no task, in one that has no thread of the worker, or that left before
        yield
        return
    try:
        yield
    finally:
        rejoin()


def active_client() -> Client | None:
    """The active client if it is synchronous; None in a task of a cluster."""
    if "distributed" not in sys.modules:
        return None
    from distributed import default_client, get_worker

    with suppress(ValueError):
        get_worker()
        return None  # this task occupies a thread of a worker, and would wait for tasks that need one
    with suppress(ValueError):
        client = cast("Client", default_client())
        return None if client.asynchronous else client
    return None


def results(client: Client, call: Callable[[S], T], tasks: Iterable[S]) -> Generator[T]:
    """The results of `call` on each task, in order. Closing the generator, or an error, cancels the tasks that are left.

    A result leaves its worker as soon as it is there. A worker that dies therefore costs the tasks that it was working on, which the
    scheduler gives to others.

    Raises:
        TransportError: a task was lost with several workers, the scheduler went away, or there was no worker for the time that
            dask's configuration calls `distributed.scheduler.no-workers-timeout`; 10 minutes where it says nothing.
    """
    from distributed import KilledWorker, as_completed
    from distributed.scheduler import NoValidWorkerError, NoWorkerError

    places = {client.submit(call, task, pure=False): place for place, task in enumerate(tasks)}
    waiting, place = dict[int, T](), 0
    watch = _NoWorkers()
    try:
        watch.begin(places)
        for future, result in as_completed(list(places), client.loop, with_results=True):
            if future.cancelled():  # its result is an error that nobody has raised
                raise CancelledError(str(result))
            waiting[places.pop(future)] = result
            del future  # else the worker keeps the result while it is used here, and another one repeats the task if that one dies
            while place in waiting:
                yield waiting.pop(place)
                place += 1
    except KilledWorker as error:
        raise TransportError(
            f"the workers that had a task died, one after the other: {error}",
            where="client",
            remedy="Look at their logs; give them more memory, or fewer threads.",
        ) from error
    except (NoValidWorkerError, NoWorkerError) as error:
        raise _no_workers() from error
    except CancelledError as error:
        if watch.gave_up:
            raise _no_workers() from error
        raise TransportError(f"the cluster gave up a task: {error}", where="client", remedy="Call again.") from error
    finally:
        watch.close()
        for future in places:  # an error keeps them, so they are not released
            with suppress(Exception):  # the scheduler may be what is gone
                future.cancel()


class _NoWorkers:
    """Cancels tasks when there was no worker for a while; a scheduler by itself would wait for ever.

    Attributes:
        gave_up: Whether it has cancelled them.
    """

    def __init__(self) -> None:
        self.gave_up, self._closed = False, threading.Event()

    def begin(self, futures: Mapping[Future[T], int]) -> None:
        """Watch, in a thread."""
        if futures:
            # The caller's client may be another object that submits.
            client = cast("Client", next(iter(futures)).client)
            watch = partial(self._watch, client, futures, _no_workers_timeout_s())
            threading.Thread(target=watch, name="saev_store no workers", daemon=True).start()

    def close(self) -> None:
        """End watching."""
        self._closed.set()

    def _watch(self, client: Client, futures: Mapping[Future[T], int], timeout_s: float) -> None:
        # A future that is kept here would keep its result on a worker, with which it is lost. Only the mapping is, from which the
        # caller takes each that is done.
        since = time.monotonic()
        while not self._closed.wait(min(5.0, timeout_s / 4)):
            n_workers = 1
            with suppress(Exception):  # the scheduler may be what is gone, of which the tasks tell
                n_workers = len(client.scheduler_info(n_workers=1)["workers"])
            if n_workers:
                since = time.monotonic()
            elif time.monotonic() - since > timeout_s:
                self.gave_up = True
                with suppress(Exception):
                    client.cancel(list(futures))
                return


def _no_workers_timeout_s() -> float:
    """How long tasks wait for workers."""
    import dask.config
    from dask.utils import parse_timedelta

    found = dask.config.get(_NO_WORKERS_KEY, None)
    return NO_WORKERS_TIMEOUT_S if found is None else float(parse_timedelta(found))


def _no_workers() -> TransportError:
    return TransportError(
        f"the cluster had no worker for {_no_workers_timeout_s():,g} s, so nothing was done",
        where="client",
        remedy="Start workers and call again; or let tasks wait longer: "
        "DASK_DISTRIBUTED__SCHEDULER__NO_WORKERS_TIMEOUT='12 hours'.",
    )


def equal_parts(items: Sequence[T]) -> list[Sequence[T]]:
    """Consecutive items, at most `MAX_TASKS` parts of which no two differ in length by more than one.

    >>> equal_parts([4, 5])
    [[4], [5]]
    """
    n = min(len(items), MAX_TASKS)
    cuts = [len(items) * i // n for i in range(n + 1)] if n else [0]
    return [items[start:end] for start, end in pairwise(cuts)]
