"""What a read will cost before it is done: requests, bytes, and a price from a small table.

The plan of a read is arithmetic, so it can be made and counted without reading: by the same code that reads.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from saev_store.errors import ArgumentError
from saev_store.indexing import Block, Points
from saev_store.layout import IntArray
from saev_store.reader import Fetched, FloatArray, Reader
from saev_store.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from saev_store.reader import Box

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
    """What a read costs; `str()` is a sentence for people.

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
        raise ArgumentError("prices is a mapping of schemes to saev_store.cost.Price", where="prices")
    scheme = transport.url.partition("::")[2] or transport.url
    scheme = scheme.partition("://")[0].lower()
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


class Planner(Reader):
    """A reader that counts what it would ask for, and asks for nothing.

    It knows what the reader it is made from knows: which shards' sizes were looked at, and which are mapped.

    Args:
        reader: Of the store.
    """

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader.transport, reader.layout, readable=reader._readable)
        self._unchecked = set(reader._unchecked)
        self._maps = dict(reader._maps)
        self.requests = self.bytes_read = 0
        #: Lengths of the maps that would be made, by shard: once each, however much is read through them.
        self.mapped: dict[int, int] = {}

    def plan(self, request: Block | Points) -> None:
        """Count what `read_block` or `read_points` would ask for."""
        if isinstance(request, Block):
            self.read_block(request, nowhere(request.full_shape))
        else:
            self.read_points(request, nowhere(request.shape))

    def forget_sizes(self) -> set[int]:
        """Take it that all sizes are known; the shards whose sizes are not."""
        unknown, self._unchecked = self._unchecked, set()
        return unknown

    def _check_size(self, shard_idx: int) -> None:
        self._unchecked.discard(shard_idx)
        self.requests += 1

    def _mapped(self, shard_idx: int) -> FloatArray:
        found = self._maps.get(shard_idx)
        if found is None:
            n = self._readable.get(shard_idx, self.layout.examples_in(shard_idx))
            found = self._maps[shard_idx] = nowhere((n, *self.layout.shape[1:]))
            self.mapped[shard_idx] = found.nbytes
            self.count(found.nbytes)
        return found

    def _copy_mapped(self, shard_idx: int, box: Box, target: FloatArray) -> None:
        direct = self._direct_runs(box, target)
        if direct is None:
            self._mapped(shard_idx)
        else:
            self.requests += direct.count
            self.bytes_read += target.nbytes

    def _gather(self, shard_idx: int, vector: IntArray, place: IntArray | None, out: FloatArray) -> None:
        if self._resident:
            self._mapped(shard_idx)
        else:
            self._fetch_rows(shard_idx, vector, place, out)

    def _fetch(self, shard_idx: int, starts: IntArray, ends: IntArray) -> Iterator[Fetched]:
        del shard_idx
        spans = self._spans(starts, ends)
        for length in (spans.ends - spans.starts).tolist():
            self.count(length)
        return iter(())

    def count(self, nbytes: int) -> None:
        """Count a range of that many bytes."""
        self.requests += -(-nbytes // int(min(self.transport.cost.piece_bytes, 1 << 62)))
        self.bytes_read += nbytes


def nowhere(shape: tuple[int, ...]) -> FloatArray:
    """An array of a shape that takes the memory of one number: for plans, which nobody reads."""
    return np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), shape, (0,) * len(shape))
