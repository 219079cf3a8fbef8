"""What a read will cost before it is done: requests, bytes, and a price from a small table.

The plan of a read is arithmetic: an estimate counts the very plan that the read would execute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from saev_store.core.dtypes import StoredDtype
from saev_store.core.indexing import Block, Key, length, parse_key
from saev_store.core.layout import IntArray, Layout
from saev_store.core.plan import Part, Runs
from saev_store.errors import ArgumentError
from saev_store.store.reader import Reader
from saev_store.transport import Transport

_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "adl": "az"}


@dataclass(frozen=True, slots=True)
class Price:
    """What a service takes for reading, in dollars; where nothing is known, nothing.

    Attributes:
        per_1000_requests: For a thousand requests that read.
        per_gb_out: For 10^9 bytes that leave the service's network; inside its region they are free.
    """

    per_1000_requests: float = 0.0
    per_gb_out: float = 0.0


Prices: TypeAlias = Mapping[str, Price]

#: List prices when this was written, by scheme of the address: standard class, cheapest region, the first terabytes out.
#: Look yours up, and edit it or pass `prices=` where yours differ: another region or class, a contract, a server of your own.
PRICES: MutableMapping[str, Price] = {
    "s3": Price(per_1000_requests=0.0004, per_gb_out=0.09),
    "gs": Price(per_1000_requests=0.0004, per_gb_out=0.12),
    "az": Price(per_1000_requests=0.0005, per_gb_out=0.087),
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a read costs; `str()` is one sentence.

    Attributes:
        requests: Requests to the server; system calls and maps locally. What a client tries again by itself is extra.
        bytes_read: Bytes that travel: what is wanted, and the gaps that are cheaper to read than to leave out.
        bytes_wanted: Bytes of the result.
        request_dollars: For the requests.
        transfer_dollars: For the bytes, if they leave the service's network; reading inside the region is free.

    >>> estimate(Price(0.0004, 0.09), requests=5_000, bytes_read=2 * 10**9, bytes_wanted=10**9).transfer_dollars
    0.18
    """

    requests: int
    bytes_read: int
    bytes_wanted: int
    request_dollars: float
    transfer_dollars: float

    def __str__(self) -> str:
        text = f"{self.requests:,} requests, {self.bytes_read / 1e6:,.3f} MB"
        if self.bytes_read > self.bytes_wanted:
            text += f" for {self.bytes_wanted / 1e6:,.3f} MB"
        if self.request_dollars or self.transfer_dollars:
            text += f": ${self.request_dollars:.4f}, and ${self.transfer_dollars:.4f} if they leave the region"
        return text


def price_of(transport: Transport, prices: Prices | None = None) -> Price:
    """What the service behind a transport takes, by the scheme of its address; nothing where the table has no entry.

    Raises:
        ArgumentError: `prices` is no table of `Price`.
    """
    table = PRICES if prices is None else prices
    if not isinstance(table, Mapping) or not all(isinstance(price, Price) for price in table.values()):  # pyright: ignore[reportUnnecessaryIsInstance] (callers may not check types)
        raise ArgumentError("prices is a mapping of schemes to saev_store.store.estimate.Price", where="prices")
    scheme = transport.url.rpartition("::")[2].partition("://")[0].lower()  # of a chain the last link
    return table.get(_ALIASES.get(scheme, scheme), Price())


def estimate(price: Price, *, requests: int, bytes_read: int, bytes_wanted: int) -> Estimate:
    """The same numbers with their price."""
    return Estimate(
        requests,
        bytes_read,
        bytes_wanted,
        request_dollars=requests / 1000 * price.per_1000_requests,
        transfer_dollars=bytes_read / 1e9 * price.per_gb_out,
    )


def estimate_read(
    reader: Reader, key: Key, *, prices: Prices | None = None, dtype: StoredDtype | None = None
) -> Estimate:
    """What reading `key` will cost, or would cost of a store of another dtype; see `ShardStore.estimate`.

    Raises:
        SelectionError: the key does not fit the tensor.
        ArgumentError: there is no such dtype.
        CorruptShardError: more than a million ranges of a far store would be planned, and the size of its first shard, which is then
            requested, is not what the documents say.
    """
    reader.check_wide()
    request = parse_key(key, reader.layout.shape)
    if isinstance(request, Block):
        reader.check_large(_n_ranges(request, reader.layout))
    if dtype is not None and dtype != reader.layout.dtype:
        reader = reader.of_dtype(dtype)
    count = PlanCount(reader)
    count.add(reader.plan(request))
    return count.estimate(math.prod(request.shape) * reader.layout.itemsize, prices)


def _n_ranges(block: Block, layout: Layout) -> int:
    """At most so many ranges of a shard are a block, before neighbours are merged."""
    examples, layers, tokens, _ = map(length, block.axes)
    n_examples = min(examples, layout.examples_per_shard)
    if tokens < layout.tokens_per_example:
        return n_examples * layers * tokens
    return n_examples if layers == layout.n_layers else n_examples * layers


class PlanCount:
    """Requests and bytes of plans. The size of a shard is requested once, and a shard is mapped once.

    Args:
        reader: Of the store; it has which sizes were compared and which shards are mapped.

    Attributes:
        requests: Requests so far.
        bytes_read: Bytes so far.
        mapped: Bytes that will be mapped, by shard; part of `bytes_read`.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._sized: set[int] = set()
        self.requests = self.bytes_read = 0
        self.mapped: dict[int, int] = {}

    def add(self, plan: Iterable[Part], *, sizes: bool = True) -> None:
        """Count what executing a plan requests.

        Args:
            plan: What `Reader.plan` gives.
            sizes: Whether to count the requests for the sizes of shards.
        """
        cost, layout = self._reader.transport.cost, self._reader.layout
        for part in plan:
            for step in part.steps:
                if sizes:
                    self.add_size(step.shard_idx)
                if not isinstance(step, Runs):
                    self.add_map(step.shard_idx)
                elif math.isinf(cost.max_gap_bytes):  # a shard that could be mapped is read in runs as they are
                    self.requests += len(step.first)
                    self.bytes_read += len(step.first) * step.n_vectors * layout.vector_nbytes
                else:
                    spans = step.spans(layout, cost)
                    self._add_ranges(spans.ends - spans.starts)

    def add_size(self, shard_idx: int) -> None:
        """Count the request for the size of a shard, unless it is known."""
        if shard_idx not in self._sized and self._reader.is_unchecked(shard_idx):
            self._sized.add(shard_idx)
            self.requests += 1

    def add_map(self, shard_idx: int) -> None:
        """Count the mapping of a shard, unless it is mapped."""
        if shard_idx not in self.mapped and (nbytes := self._reader.unmapped_nbytes(shard_idx)):
            self.mapped[shard_idx] = nbytes
            self.add_range(nbytes)

    def add_range(self, nbytes: int) -> None:
        """Count one range of that many bytes."""
        self._add_ranges(np.array([nbytes], dtype=np.int64))

    def estimate(self, bytes_wanted: int, prices: Prices | None = None) -> Estimate:
        """What was counted, with its price."""
        price = price_of(self._reader.transport, prices)
        return estimate(price, requests=self.requests, bytes_read=self.bytes_read, bytes_wanted=bytes_wanted)

    def _add_ranges(self, nbytes: IntArray) -> None:
        piece = int(min(self._reader.transport.cost.max_request_bytes, 1 << 62))
        self.requests += int((-(-nbytes // piece)).sum())
        self.bytes_read += int(nbytes.sum())
