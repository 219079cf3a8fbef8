"""Work on a dask cluster: the client to use, and the results of tasks that outlive their workers."""

# distributed has partial types: futures and clients are unknown to the type checker.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar, cast

from saev_store._runtime.optional import need
from saev_store.errors import ArgumentError, TransportError, brief

if TYPE_CHECKING:
    from distributed import Client

S = TypeVar("S")
T = TypeVar("T")

#: Upper bound on the tasks of one call: a scheduler spends about a millisecond on each.
MAX_TASKS = 4096
_CONNECT_TIMEOUT_S = 10


@contextmanager
def connected(client: Client | str) -> Generator[Client]:
    """The given client, or one for the given address, which is closed afterwards.

    Raises:
        ArgumentError: the client is asynchronous, or no client at all.
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
        yield client
        return
    need("distributed", install="distributed", where="client")
    from distributed import Client

    try:
        opened = Client(client, timeout=_CONNECT_TIMEOUT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise TransportError(f"no dask scheduler answers: {error}", where=client) from error
    with opened:
        yield opened


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
        TransportError: a task was lost with several workers, or the scheduler went away.
    """
    from distributed import KilledWorker, as_completed

    places = {client.submit(call, task, pure=False): place for place, task in enumerate(tasks)}
    waiting, place = dict[int, T](), 0
    try:
        for future, result in as_completed(list(places), client.loop, with_results=True):
            waiting[places.pop(future)] = result
            while place in waiting:
                yield waiting.pop(place)
                place += 1
    except KilledWorker as error:
        raise TransportError(
            f"the workers that had a task died, one after the other: {error}",
            where="client",
            remedy="Look at their logs; give them more memory, or fewer threads.",
        ) from error
    except CancelledError as error:
        raise TransportError(f"the cluster gave up a task: {error}", where="client", remedy="Call again.") from error
    finally:
        for future in places:  # an error keeps them, so they are not released
            with suppress(Exception):  # the scheduler may be what is gone
                future.cancel()


def equal_parts(items: Sequence[T]) -> list[Sequence[T]]:
    """Consecutive items, at most `MAX_TASKS` parts of which no two differ in length by more than one.

    >>> equal_parts([4, 5])
    [[4], [5]]
    """
    n = min(len(items), MAX_TASKS)
    cuts = [len(items) * i // n for i in range(n + 1)] if n else [0]
    return [items[start:end] for start, end in pairwise(cuts)]
