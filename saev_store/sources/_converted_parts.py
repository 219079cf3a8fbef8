"""The parts of a converted file, which the workers of a cluster write beside it: what is done, what is left."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

from saev_store._runtime.cluster import map_shards
from saev_store._runtime.progress import Progress
from saev_store.errors import (
    CorruptShardError,
    IncompleteStoreError,
    NotFoundError,
    StoreExistsError,
    TransportError,
)
from saev_store.sources.address import full_url
from saev_store.transport import Transport
from saev_store.transport.durable import TEMP_PREFIX

if TYPE_CHECKING:
    from distributed import Client

#: A scheduler spends some milliseconds on a part.
MAX_PARTS = 1024
_MAX_DOCUMENT_BYTES = 16 << 20


class Receipt(NamedTuple):
    """What is known of a finished part.

    Attributes:
        name: The part's file in the folder of parts, without an ending.
        nbytes: Its bytes, where it is one file; else 0.
        digest: Of its contents, as the worker computed them from the source.
    """

    name: str
    nbytes: int
    digest: str


class Place(NamedTuple):
    """The folder of the parts of one file.

    Attributes:
        transport: The storage of that file.
        folder: The folder's path there.
    """

    transport: Transport
    folder: str

    @property
    def writes(self) -> Transport:
        """The storage, which can be written."""
        return self.transport

    def part_path(self, receipt: Receipt) -> str:
        """The path of a part, without an ending."""
        return f"{self.folder}/{receipt.name}"

    def new_name(self, part_idx: int) -> str:
        """A file name for a part. A task that is run twice at once writes two files, and the last receipt counts."""
        return f"{_name(part_idx)}-{secrets.token_hex(6)}"

    def read_receipt(self, part_idx: int) -> Receipt | None:
        """The receipt of a part; None where it is not finished."""
        raw = _read(self.transport, f"{self.folder}/{_name(part_idx)}.json")
        try:
            given = cast("Mapping[str, object]", json.loads(raw or b"{}"))
            name, nbytes, digest = (given.get(key) for key in Receipt._fields)
        except (ValueError, AttributeError, RecursionError):
            return None
        if isinstance(name, str) and name.startswith(_name(part_idx)) and "/" not in name:
            return Receipt(name, nbytes, digest) if isinstance(nbytes, int) and isinstance(digest, str) else None
        return None

    def put_receipt(self, part_idx: int, receipt: Receipt) -> None:
        """Say that a part is finished."""
        self.writes.put(f"{self.folder}/{_name(part_idx)}.json", json.dumps(receipt._asdict()).encode())

    def delete_receipt(self, part_idx: int) -> None:
        """Say that a part is not finished."""
        self.writes.delete(f"{self.folder}/{_name(part_idx)}.json")


def place_of(transport: Transport, path: str) -> Place:
    """Where the parts of a file are: in a hidden folder beside it."""
    folder, slash, name = path.rpartition("/")
    return Place(transport, f"{folder}{slash}{TEMP_PREFIX}{name}.parts")


def part_ranges(n: int, n_parts: int) -> list[tuple[int, int]]:
    """The half-open ranges of `n` things in at most `n_parts` parts, of which no two differ in length by more than one.

    >>> part_ranges(5, 2)
    [(0, 2), (2, 5)]
    """
    n_parts = max(1, min(n, n_parts, MAX_PARTS))
    return list(pairwise(n * i // n_parts for i in range(n_parts + 1)))


@contextmanager
def begun(place: Place, conversion: Mapping[str, object]) -> Generator[None]:
    """A block that works on the parts of one conversion; where it ends without an error the parts are deleted.

    Raises:
        IncompleteStoreError: the parts there are of another conversion.
        WriterConflictError: another process works on them, as far as the storage has locks.
    """
    mark, path, where = json.dumps(conversion, sort_keys=True).encode(), f"{place.folder}/conversion.json", _url(place)
    lock = f"{place.folder}.lock"
    with place.writes.lock(lock):
        try:
            place.writes.create(path, mark)
        except StoreExistsError:
            if _read(place.transport, path) != mark:
                raise IncompleteStoreError(
                    "parts of another conversion to this file are there, unfinished",
                    where=where,
                    remedy="Continue that one, with its source and options; or delete this folder.",
                ) from None
        yield
        place.writes.delete(place.folder)
        if place.transport.local_path is not None:
            place.writes.delete(lock)


def written_parts(
    client: Client | str | None,
    place: Place,
    write: Callable[[Place, tuple[int, tuple[int, int]]], Receipt],
    ranges: Sequence[tuple[int, int]],
    bar: Progress,
) -> list[Receipt]:
    """The receipts of all parts; what is not finished is written by the workers, each part a task.

    Raises:
        TransportError: the workers do not write to the folder that this process sees.
    """
    kept = {part_idx: place.read_receipt(part_idx) for part_idx in range(len(ranges))}
    left = [part_idx for part_idx, receipt in kept.items() if receipt is None]
    bar.advance(sum(end - first for part_idx, (first, end) in enumerate(ranges) if kept[part_idx] is not None))
    tasks = [(part_idx, ranges[part_idx]) for part_idx in left]
    with closing(map_shards(partial(write, place), tasks, client)) as found:
        for (part_idx, (first, end)), receipt in zip(tasks, found, strict=True):
            if place.read_receipt(part_idx) is None:
                raise TransportError(
                    f"a worker has written part {part_idx}, but it is not there",
                    where=_url(place),
                    remedy="Convert to an address that means the same to this process and to all workers.",
                )
            kept[part_idx] = receipt
            bar.advance(end - first)
    return [receipt for receipt in kept.values() if receipt is not None]


def check_read_back(
    client: Client | str | None,
    digest_of: Callable[[tuple[int, int]], str],
    ranges: Sequence[tuple[int, int]],
    receipts: Sequence[Receipt],
    *,
    where: str,
    bar: Progress,
    place: Place | None = None,
) -> None:
    """Read the finished file by the workers, and compare each range with the digest of its part.

    Raises:
        CorruptShardError: they differ. The part in `place` then counts as not finished, so that another call writes it again.
    """
    with closing(map_shards(digest_of, ranges, client)) as found:
        for part_idx, ((first, end), receipt, digest) in enumerate(zip(ranges, receipts, found, strict=True)):
            if digest != receipt.digest:
                if place is not None:
                    place.delete_receipt(part_idx)
                raise CorruptShardError(
                    "read back, the file differs from the source", where=where, remedy="Write it again."
                )
            bar.advance(end - first)


def _name(part_idx: int) -> str:
    return f"part-{part_idx:06d}"


def _url(place: Place) -> str:
    return full_url(place.transport, place.folder)


def _read(transport: Transport, path: str) -> bytes | None:
    try:
        return transport.read(path, max_bytes=_MAX_DOCUMENT_BYTES)
    except NotFoundError:
        return None
