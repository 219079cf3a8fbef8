"""Work on shards: by threads of this process, or by the workers of a dask cluster."""

# distributed has partial types: futures and clients are unknown to the type checker.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from saev_store._runtime.optional import need
from saev_store._runtime.threads import ahead, n_cores
from saev_store.errors import ArgumentError, TransportError, brief

if TYPE_CHECKING:
    from distributed import Client

S = TypeVar("S")
T = TypeVar("T")
_CONNECT_TIMEOUT_S = 10


def map_shards(function: Callable[[S], T], shards: Sequence[S], client: Client | str | None = None) -> Generator[T]:
    """Yield the results of `function` on each shard, in order. Closing the generator, or an error, cancels what is left.

    Args:
        function: Works on one shard; picklable if there is a client. If a worker dies, it is called again on another one.
        shards: Its arguments.
        client: A `distributed.Client` or the address of a scheduler; None: threads of this process, one per core.

    Raises:
        ArgumentError: `client` is something else, or asynchronous.
        TransportError: no scheduler answers, it went away, or a shard was lost with several workers.
    """
    if client is None:
        yield from ahead(function, shards, n_cores())
        return
    with ExitStack() as stack:
        cluster = stack.enter_context(_connected(client)) if isinstance(client, str) else client
        if not hasattr(cluster, "submit") or cluster.asynchronous:
            remedy = 'Pass a synchronous distributed.Client, or the address of a scheduler such as "tcp://…".'
            raise ArgumentError(f"cannot use {brief(client)}", where="client", remedy=remedy)
        from distributed import KilledWorker

        begun = deque(cluster.submit(function, shard, pure=False) for shard in shards)
        try:
            while begun:
                yield begun.popleft().result()  # what is not kept here leaves its worker
        except (CancelledError, KilledWorker) as error:
            raise TransportError(f"the cluster gave up a task, or its workers died: {error}", where="client") from error
        finally:
            for future in begun:
                future.cancel()


def _connected(address: str) -> Client:
    need("distributed", install="distributed", where="client")
    from distributed import Client

    try:
        return Client(address, timeout=_CONNECT_TIMEOUT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise TransportError(f"no dask scheduler answers: {error}", where=address) from error
