"""Writing LLMBATCH: from an array, or from a stream of any length in bounded memory.

Both writers shuffle in the order of `RecordOrder`, so the same records, seed and batch size give the same bytes. Files
appear under their names when they are complete; the manifest, which records the order and the digests, appears last.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from saev_store.errors import ArgumentError, SaevStoreError, brief
from saev_store.formats._address import Url, locate
from saev_store.formats._digest import RunningDigests
from saev_store.formats._new_file import NewFile, refuse_existing
from saev_store.formats._source import check_count
from saev_store.formats.llmbatch._buckets import Buckets
from saev_store.formats.llmbatch._files import TOKEN, TokenArray, read_manifest
from saev_store.formats.llmbatch.header import ITEMSIZE, MAX_U32, Header
from saev_store.formats.llmbatch.manifest import SUFFIX, Manifest, ManifestFile
from saev_store.formats.llmbatch.order import RecordOrder
from saev_store.transport import Writes
from saev_store.transport._checks import os_errors
from saev_store.writer._progress import Progress

if TYPE_CHECKING:
    from saev_store.transport import Engine, Transport

_PIECE_BYTES = 8 << 20
#: Memory of the streaming writer, unless it is told otherwise.
MEMORY_NBYTES = 1 << 30
_MAX_TOTAL = 2**48


def write_batch_file(
    output_path: Url,
    tokens_array: npt.ArrayLike,
    batch_size: int,
    seq_len: int | None = None,
    seed: int = 0,
    *,
    max_batches_per_file: int | None = None,
    manifest: bool = True,
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
    engine: Engine = "auto",
    transport: Transport | None = None,
    progress: bool | None = None,
) -> int:
    """Shuffle the records of an array, form batches and write them; the number of batches.

    Records that do not fill the last batch are dropped. The array may be a memory map larger than memory.

    Args:
        output_path: The `.batch` file: a path, any fsspec URL, or, with `transport`, a path below its root.
        tokens_array: Shape (records, seq_len), integers from 0 to 2^32 - 1.
        batch_size: Records in a batch.
        seq_len: Tokens of a record: must be the array's, if given.
        seed: From 0 to 2^32 - 1; kept in the header.
        max_batches_per_file: Write a set: files `NAME-00000.batch`, … of at most so many batches, and a manifest.
        manifest: Write `NAME.batch.json` beside it, which lets records be found by their numbers. A set needs it.
        overwrite: Replace files of these names.
        storage_options: What fsspec hands to the file system.
        engine: As in `open_transport`.
        transport: Write through this one.
        progress: Show a bar on stderr; default: when it is a terminal.

    Raises:
        ArgumentError: the array is not of that shape, or a number is out of range.
        StoreExistsError: a file of that name is there, and `overwrite` is false.
    """
    tokens = np.asanyarray(tokens_array)
    if tokens.ndim != 2 or tokens.shape[1] < 1:
        raise ArgumentError(f"the shape is {tokens.shape}; it must be (records, seq_len)", where="tokens_array")
    if seq_len is not None and seq_len != tokens.shape[1]:
        raise ArgumentError(f"seq_len is {brief(seq_len)}, but records have {tokens.shape[1]} tokens", where="seq_len")
    target = _Target(
        output_path, len(tokens), batch_size, tokens.shape[1], seed, max_batches_per_file=max_batches_per_file,
        manifest=manifest, overwrite=overwrite, storage_options=storage_options, engine=engine, transport=transport,
    )  # fmt: skip

    def pieces() -> Iterator[TokenArray]:
        step = max(1, _PIECE_BYTES // (target.seq_len * ITEMSIZE))
        for start in range(0, target.n_kept, step):
            places = np.arange(start, min(start + step, target.n_kept), dtype=np.int64)
            yield as_tokens(tokens[target.order.records(places)])

    return target.write(pieces(), progress=progress)


def write_batch_dataset(
    output_path: Url,
    tokens_iter: Iterable[npt.ArrayLike],
    total_records: int | None = None,
    batch_size: int = 32,
    seq_len: int | None = None,
    seed: int = 0,
    *,
    memory_nbytes: int = MEMORY_NBYTES,
    max_batches_per_file: int | None = None,
    manifest: bool = True,
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
    engine: Engine = "auto",
    transport: Transport | None = None,
    progress: bool | None = None,
) -> int:
    """Shuffle a stream of records globally, form batches and write them; the number of batches.

    Memory stays within `memory_nbytes` and some MiB, however long the stream is. Where the records need more, they pass
    through a temporary file in `$TMPDIR` of their size plus eight bytes each (twice that if `total_records` is not known).
    The result is byte for byte that of `write_batch_file`.

    Args:
        output_path: As in `write_batch_file`.
        tokens_iter: Arrays of shape (seq_len,), or of shape (n, seq_len) for several records at once.
        total_records: How many records will come; None counts them first.
        batch_size: Records in a batch.
        seq_len: Tokens of a record; by default those of the first one.
        seed: From 0 to 2^32 - 1; kept in the header.
        memory_nbytes: Memory for shuffling.
        max_batches_per_file: As in `write_batch_file`.
        manifest: As in `write_batch_file`.
        overwrite: As in `write_batch_file`.
        storage_options: What fsspec hands to the file system.
        engine: As in `open_transport`.
        transport: Write through this one.
        progress: Show a bar on stderr; default: when it is a terminal.

    Raises:
        ArgumentError: a record has another shape, more or fewer come than announced, or a number is out of range.
        StoreExistsError: a file of that name is there, and `overwrite` is false.
    """
    memory_nbytes = check_count(memory_nbytes, name="memory_nbytes")
    stream = _Stream(tokens_iter, seq_len)
    if total_records is None:
        with _Spool(stream) as spool:
            return write_batch_dataset(
                output_path, spool, len(spool), batch_size, spool.seq_len, seed, memory_nbytes=memory_nbytes,
                max_batches_per_file=max_batches_per_file, manifest=manifest, overwrite=overwrite,
                storage_options=storage_options, engine=engine, transport=transport, progress=progress,
            )  # fmt: skip
    total_records = check_count(total_records, name="total_records", least=0, most=_MAX_TOTAL)
    target = _Target(
        output_path, total_records, batch_size, stream.seq_len, seed, max_batches_per_file=max_batches_per_file,
        manifest=manifest, overwrite=overwrite, storage_options=storage_options, engine=engine, transport=transport,
    )  # fmt: skip
    with Buckets(target.n_kept, target.seq_len, memory_nbytes=memory_nbytes) as buckets:
        _scatter(stream, buckets, target, progress=progress)
        return target.write(buckets.take(max(1, _PIECE_BYTES // (target.seq_len * ITEMSIZE))), progress=progress)


def _scatter(stream: _Stream, buckets: Buckets, target: _Target, *, progress: bool | None) -> None:
    n, total = 0, target.total_records
    nbytes = total * target.seq_len * ITEMSIZE
    with Progress(nbytes, "shuffle", shown=False if buckets.in_memory else progress) as bar:
        for records in stream:
            n += len(records)
            if n > total:
                raise ArgumentError(f"more than the announced {total:,} records came", where="total_records")
            places = target.order.places(np.arange(n - len(records), n, dtype=np.int64))
            kept = np.flatnonzero(places < target.n_kept)
            buckets.put(places[kept], records[kept])
            bar.advance(records.nbytes)
    if n < total:
        raise ArgumentError(f"{n:,} records came, {total:,} were announced", where="total_records")


def as_tokens(values: npt.ArrayLike) -> TokenArray:
    """Token ids as uint32.

    Raises:
        ArgumentError: they are no integers, or some are outside 0 to 2^32 - 1.
    """
    found = np.asarray(values)
    if found.dtype.kind not in "iu" and found.size:
        raise ArgumentError(f"token ids are {found.dtype}; they must be integers", where="tokens")
    if found.size and not np.can_cast(found.dtype, TOKEN, "safe"):
        low, high = int(found.min()), int(found.max())
        if low < 0 or high > MAX_U32:
            raise ArgumentError(f"token ids reach from {low} to {high}; uint32 holds 0 to {MAX_U32}", where="tokens")
    return found.astype(TOKEN, copy=False)


class _Stream:
    """What a caller's iterable gives, as arrays of shape (n, seq_len) uint32 with about a MiB each."""

    def __init__(self, items: Iterable[npt.ArrayLike], seq_len: int | None) -> None:
        self._items = iter(items)
        self._first: TokenArray | None = None
        if seq_len is None:
            self._first = next((self._as_records(item, None) for item in self._items), None)
            if self._first is None:
                raise ArgumentError("no record came, so seq_len must be given", where="seq_len")
            seq_len = self._first.shape[1]
        self.seq_len = check_count(seq_len, name="seq_len", most=MAX_U32)

    @staticmethod
    def _as_records(item: npt.ArrayLike, seq_len: int | None) -> TokenArray:
        found = np.asarray(item)
        records = found[None] if found.ndim == 1 else found
        if records.ndim != 2 or records.shape[1] != (seq_len or records.shape[1]) or not records.shape[1]:
            raise ArgumentError(
                f"a record of shape {found.shape} came; it must be ({seq_len or 'seq_len'},), or several in a "
                "two-dimensional array",
                where="tokens_iter",
            )
        return as_tokens(records)

    def __iter__(self) -> Iterator[TokenArray]:
        waiting: list[TokenArray] = [] if self._first is None else [self._first]
        n, enough = sum(map(len, waiting)), max(1, (1 << 20) // (self.seq_len * ITEMSIZE))
        for item in self._items:
            records = self._as_records(item, self.seq_len)
            waiting.append(records)
            n += len(records)
            if n >= enough:
                yield waiting[0] if len(waiting) == 1 else np.concatenate(waiting)
                waiting, n = [], 0
        if n:
            yield np.concatenate(waiting)


class _Spool:
    """A stream of unknown length, written down in order and counted; iterating reads it back."""

    def __init__(self, stream: _Stream) -> None:
        self.seq_len, self._n = stream.seq_len, 0
        with os_errors(tempfile.gettempdir(), "collect records"):
            self._file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `__exit__`)
            try:
                for records in stream:
                    self._file.write(memoryview(np.ascontiguousarray(records)).cast("B"))
                    self._n += len(records)
            except BaseException:
                self._file.close()
                raise

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[TokenArray]:
        self._file.seek(0)
        step = max(1, (1 << 20) // (self.seq_len * ITEMSIZE))
        for start in range(0, self._n, step):
            n = min(step, self._n - start)
            with os_errors(tempfile.gettempdir(), "read"):
                yield np.frombuffer(self._file.read(n * self.seq_len * ITEMSIZE), TOKEN).reshape(n, self.seq_len)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class _Target:
    """Where batches go: one file, or a set."""

    def __init__(
        self,
        output_path: Url,
        total_records: int,
        batch_size: int,
        seq_len: int,
        seed: int,
        *,
        max_batches_per_file: int | None,
        manifest: bool,
        overwrite: bool,
        storage_options: Mapping[str, object] | None,
        engine: Engine,
        transport: Transport | None,
    ) -> None:
        self.transport, self.path = locate(output_path, storage_options, engine=engine, transport=transport)
        batch_size = check_count(batch_size, name="batch_size", most=MAX_U32)
        self.seq_len = check_count(seq_len, name="seq_len", most=MAX_U32)
        seed = check_count(seed, name="seed", least=0, most=MAX_U32)
        self.total_records = total_records
        n_batches = total_records // batch_size
        if not self.path.endswith(".batch"):
            raise ArgumentError(f"{self.path!r} does not end in .batch", where="output_path")
        names, counts = [self.path.rpartition("/")[2]], [n_batches]
        self.is_set = max_batches_per_file is not None
        if max_batches_per_file is not None:
            most = check_count(max_batches_per_file, name="max_batches_per_file")
            counts = [min(most, n_batches - first) for first in range(0, n_batches, most)] or [0]
            names = [f"{names[0].removesuffix('.batch')}-{i:05d}.batch" for i in range(len(counts))]
        elif total_records > MAX_U32:
            raise ArgumentError(
                f"{total_records:,} records are more than one header can count ({MAX_U32:,})",
                where="total_records",
                remedy="Pass max_batches_per_file to write a set.",
            )
        if self.is_set and not manifest:
            raise ArgumentError("a set of files is nothing without its manifest", where="manifest")
        files = tuple(ManifestFile(name, count, "", "") for name, count in zip(names, counts, strict=True))
        self.plan = Manifest(batch_size, self.seq_len, seed, total_records, files)
        self.n_kept = n_batches * batch_size
        self.order = RecordOrder(total_records, seed)
        self._with_manifest, self._overwrite = manifest, overwrite
        folder, slash, _ = self.path.rpartition("/")
        self.paths = [f"{folder}{slash}{name}" for name in names]
        if not overwrite:
            for path in {*self.paths, *([self.path + SUFFIX] if manifest else []), self.path}:
                refuse_existing(self.transport, path)

    def write(self, pieces: Iterator[TokenArray], *, progress: bool | None) -> int:
        """Write all files from records in file order, then the manifest."""
        rows = _Rows(pieces, self.seq_len)
        written: list[ManifestFile] = []
        total = sum(self.plan.header(i).file_nbytes for i in range(len(self.paths)))
        replaced = self._old_files() if self._overwrite else set[str]()
        if self._overwrite:
            # The old manifest belongs to the old files.
            self._delete(self.path + SUFFIX)
        with Progress(total, "write", shown=progress) as bar:
            for file_idx, path in enumerate(self.paths):
                written.append(self._write_file(file_idx, path, rows, bar))
        plan = self.plan
        if self.is_set and self._overwrite:
            self._delete(self.path)  # a single file of that name would be found before the set
        if self._with_manifest:
            done = Manifest(plan.batch_size, plan.seq_len, plan.seed, plan.total_records, tuple(written))
            data = done.to_bytes()
            with NewFile(self.transport, self.path + SUFFIX, nbytes=len(data), overwrite=self._overwrite) as file:
                file.write(data)
                file.commit()
        for path in replaced - {*self.paths, self.path}:
            self._delete(path)
        return plan.num_batches

    def _old_files(self) -> set[str]:
        """The files of a set that lies there; those that the new data do not use are deleted in the end."""
        folder, slash, name = self.path.rpartition("/")
        try:
            manifest = read_manifest(self.transport, self.path + SUFFIX)
        except SaevStoreError:
            return set()
        # Whatever else a manifest may name is not ours to delete.
        ours = re.compile(re.escape(name.removesuffix(".batch")) + r"-\d{5,}\.batch")
        return {f"{folder}{slash}{file.name}" for file in manifest.files if ours.fullmatch(file.name)}

    def _delete(self, path: str) -> None:
        if isinstance(self.transport, Writes):
            self.transport.delete(path)

    def _write_file(self, file_idx: int, path: str, rows: _Rows, bar: Progress) -> ManifestFile:
        header, entry = self.plan.header(file_idx), self.plan.files[file_idx]
        digests = RunningDigests(header.file_nbytes)
        with NewFile(self.transport, path, nbytes=header.file_nbytes, overwrite=self._overwrite) as file:
            for data in _pages(header, rows):
                file.write(data)
                digests.update(data)
                bar.advance(len(data))
            file.commit()
        return ManifestFile(entry.name, entry.num_batches, digests.sampled, digests.full)


def _pages(header: Header, rows: _Rows) -> Iterator[memoryview]:
    """The bytes of a file, in pieces of whole batches, or of whole records where a batch is very large."""
    yield memoryview(header.to_bytes())
    slot, raw = header.padded_batch_nbytes, header.raw_batch_nbytes
    if slot > _PIECE_BYTES:
        for _ in range(header.num_batches):
            for piece in rows.some(header.batch_size):
                yield memoryview(piece.view(np.uint8)).cast("B")
            yield memoryview(bytes(slot - raw))
        return
    per_piece = _PIECE_BYTES // slot
    for first in range(0, header.num_batches, per_piece):
        n = min(per_piece, header.num_batches - first)
        slots = np.zeros((n, slot), np.uint8)
        at = 0
        for piece in rows.some(n * header.batch_size):
            # Where a batch's records end inside a piece, its padding comes before the next record.
            batch_idx, row = np.divmod(np.arange(at, at + len(piece)), header.batch_size)
            tokens = slots[:, :raw].view(TOKEN).reshape(n, header.batch_size, header.seq_len)
            tokens[batch_idx, row] = piece
            at += len(piece)
        yield memoryview(slots).cast("B")


class _Rows:
    """Records in file order, taken a number at a time however they come."""

    def __init__(self, pieces: Iterator[TokenArray], seq_len: int) -> None:
        self._pieces = pieces
        self._left: TokenArray = np.empty((0, seq_len), TOKEN)

    def some(self, n: int) -> Iterator[TokenArray]:
        """The next `n` records, in C-contiguous pieces."""
        while n:
            if not len(self._left):
                self._left = np.ascontiguousarray(next(self._pieces))
            piece, self._left = self._left[:n], self._left[n:]
            n -= len(piece)
            yield piece
