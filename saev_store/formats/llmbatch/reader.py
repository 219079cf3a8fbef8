"""Reading LLMBATCH: any batch as a view, any record, and the whole as a source of records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, SupportsIndex, cast

import numpy as np
import numpy.typing as npt

from saev_store.errors import ArgumentError, NotFoundError, SelectionError, brief
from saev_store.formats._address import Url, full_url, locate
from saev_store.formats._digest import describe_digest, digest_files
from saev_store.formats._ranges import fetch
from saev_store.formats._source import DigestScope, NumberedSource, check_index, steps, text_card
from saev_store.formats.llmbatch._files import TOKEN, Files, TokenArray, open_files, read_manifest
from saev_store.formats.llmbatch.header import ITEMSIZE
from saev_store.formats.llmbatch.manifest import SUFFIX, Manifest
from saev_store.formats.llmbatch.order import RecordOrder
from saev_store.layout import IntArray

if TYPE_CHECKING:
    import torch

    from saev_store.inspect import Report
    from saev_store.problems import Problem
    from saev_store.transport import Engine, Transport


class BatchFileReader(NumberedSource):
    """An LLMBATCH file, or a set of them, opened: `read_batch(i)` for batches, `reader[i]` for records in file order.

    A record is one row of a batch: `seq_len` token ids. As a source (`len`, `reader[i]`, `batches`) the reader counts
    records as they stand in the file; `record(n)` finds the n-th record that the writer was given.

    Where the transport maps files, arrays are read-only views of the map that stay valid after `close`; a file that is
    cut while it is mapped ends the process, so use `engine="pread"` where that can happen. Elsewhere they are fresh.

    Args:
        path: The `.batch` file, or the manifest of a set (its `.json` may be left out): a path, any fsspec URL, or, with
            `transport`, a path below its root.
        storage_options: What fsspec hands to the file system.
        engine: As in `open_transport`.
        transport: Read through this one.

    Raises:
        NotFoundError: there is no such file.
        DocumentError: the header breaks a rule; `UnknownProtocolError` if it is of a later version.
        CorruptShardError: the file is longer or shorter than its header says.
    """

    format = "llmbatch"

    def __init__(
        self,
        path: Url,
        storage_options: Mapping[str, object] | None = None,
        *,
        engine: Engine = "auto",
        transport: Transport | None = None,
    ) -> None:
        self._transport, self._path = locate(path, storage_options, engine=engine, transport=transport)
        self._files = Files(self._transport, open_files(self._transport, self._path))
        opened = self._files.opened
        first = opened.headers[0]
        self.batch_size, self.seq_len, self.seed = first.batch_size, first.seq_len, first.seed
        self.num_batches = int(self._files.ends[-1])
        #: Records given to the writer; those beyond `len(reader)` were dropped.
        self.total_records = opened.manifest.total_records if opened.manifest else first.total_records
        self._manifest: Manifest | None = opened.manifest
        self._order: RecordOrder | None = None
        # The whole of a single mapped file: one index away from any batch.
        self._whole = self._files.array(0) if self._files.resident and opened.manifest is None else None

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (type(self), self._transport, self._path))

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The file's address, without credentials."""
        return full_url(self._transport, self._path)

    @property
    def path(self) -> str:
        """The path below the transport's root that was opened."""
        return self._path

    @property
    def transport(self) -> Transport:
        """What the bytes are read through."""
        return self._transport

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is odd about the header, although all batches can be read."""
        return self._files.opened.problems

    @property
    def is_resident(self) -> bool:
        """Whether batches are views of memory: nothing has to be fetched."""
        return self._files.resident

    @property
    def file_names(self) -> tuple[str, ...]:
        """Paths of the files, below the transport's root."""
        return self._files.opened.names

    @property
    def nbytes(self) -> int:
        """Bytes of all token ids, padding excluded."""
        return self.num_batches * self.batch_size * self.seq_len * ITEMSIZE

    def __len__(self) -> int:
        return self.num_batches * self.batch_size

    def __repr__(self) -> str:
        facts = {
            "batches": f"{self.num_batches:,} of {self.batch_size} records x {self.seq_len} tokens (uint32)",
            "records": f"{len(self):,} of {self.total_records:,} given to the writer",
            "files": len(self.file_names),
            "seed": self.seed,
            "read through": self._transport.name,
        }
        return text_card(f"LLMBATCH {self.url}", facts, self.problems)

    # -- batches -------------------------------------------------------------------------------------------------------

    def read_batch(self, batch_index: SupportsIndex) -> TokenArray:
        """One batch: uint32, shape (batch_size, seq_len), read-only; a view of the file where it is mapped.

        Raises:
            SelectionError: there is no such batch.
        """
        whole = self._whole
        if whole is not None and type(batch_index) is int and 0 <= batch_index < self.num_batches:
            return cast("TokenArray", whole[batch_index])
        index = check_index(batch_index, self.num_batches, what="batch")
        file_idx, first = self._place(index)
        return cast("TokenArray", self._files.run(file_idx, first, first + 1)[0])

    def read_batch_torch(self, batch_index: SupportsIndex) -> torch.Tensor:
        """One batch as a tensor of its own: int64, shape (batch_size, seq_len).

        Raises:
            MissingDependencyError: torch is not installed.
        """
        from saev_store.formats.llmbatch._torch import as_tensor

        return as_tensor(self.read_batch(batch_index))

    def read_batches(self, batch_indices: npt.ArrayLike | slice) -> TokenArray:
        """Several batches in the order asked for: uint32, shape (n, batch_size, seq_len), fresh memory.

        Neighbours are fetched together where that saves requests.
        """
        wanted = _positions(batch_indices, self.num_batches, what="batch")
        out = np.empty((len(wanted), self.batch_size, self.seq_len), TOKEN)
        header = self._files.opened.headers[0]
        return self._gather(wanted, out, header.padded_batch_nbytes, header.raw_batch_nbytes, per_batch=1)

    def iter_runs(self, batches: IntArray, *, max_nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Cut an order of batches into runs (file, first, end) that lie next to each other in one file.

        A run has at most `max_nbytes` (and at least one batch).
        """
        longest = max(1, max_nbytes // self._files.opened.headers[0].padded_batch_nbytes)
        file_idx = np.searchsorted(self._files.ends, batches, side="right")
        breaks = np.flatnonzero((np.diff(batches) != 1) | (np.diff(file_idx) != 0)) + 1
        for begin, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), len(batches)], strict=True):
            for at in range(begin, stop, longest):
                file, first = self._place(int(batches[at]))
                yield file, first, first + min(longest, stop - at)

    def read_run(self, file_idx: int, first: int, end: int) -> TokenArray:
        """The batches of a run, shape (end - first, batch_size, seq_len): one request, or a view."""
        return self._files.run(file_idx, first, end)

    def _place(self, batch_idx: int) -> tuple[int, int]:
        ends = self._files.ends
        file_idx = int(np.searchsorted(ends, batch_idx, side="right")) if len(ends) > 1 else 0
        return file_idx, batch_idx - (int(ends[file_idx - 1]) if file_idx else 0)

    # -- records -------------------------------------------------------------------------------------------------------

    def __getitem__(self, index: SupportsIndex) -> TokenArray:
        """A record by its place in the file: uint32, shape (seq_len,), read-only."""
        batch_idx, row = divmod(check_index(index, len(self), what="record"), self.batch_size)
        if self._files.resident:
            return cast("TokenArray", self.read_batch(batch_idx)[row])
        found = self.rows([batch_idx * self.batch_size + row])[0]
        found.flags.writeable = False
        return found

    def rows(self, indices: npt.ArrayLike | slice) -> TokenArray:
        """Records by their places in the file: uint32, shape (n, seq_len), fresh memory."""
        wanted = _positions(indices, len(self), what="record")
        out = np.empty((len(wanted), self.seq_len), TOKEN)
        return self._gather(wanted, out, None, self.seq_len * ITEMSIZE, per_batch=self.batch_size)

    def batches(self, batch_size: int, *, start: int = 0, drop_last: bool = False) -> Iterator[TokenArray]:
        """Consecutive records in file order, as fresh arrays of shape (batch_size, seq_len)."""
        for first, end in steps(len(self), batch_size, start=start, drop_last=drop_last):
            yield self.rows(slice(first, end))

    @property
    def has_order(self) -> bool:
        """Whether it is recorded how the writer shuffled: only our writer does, in the manifest beside the file."""
        try:
            self._record_order()
        except NotFoundError:
            return False
        return True

    def record(self, number: SupportsIndex) -> TokenArray:
        """The record that was the `number`-th of the writer's source: uint32, shape (seq_len,).

        Raises:
            NotFoundError: the order was not recorded (another program wrote the file), or the record was dropped.
            CorruptShardError: the manifest describes another file.
        """
        return self.records([check_index(number, self.total_records, what="record")])[0]

    def records(self, numbers: npt.ArrayLike | slice) -> TokenArray:
        """Records by their numbers in the writer's source: uint32, shape (n, seq_len), fresh memory."""
        return self.rows(self.places_of(numbers))

    def places_of(self, numbers: npt.ArrayLike | slice, *, dropped_ok: bool = False) -> IntArray:
        """Places in the file of records, by their numbers in the writer's source.

        Args:
            numbers: From 0 to `total_records - 1`.
            dropped_ok: Give a place that does not exist, `len(reader)` or more, to a record that was dropped.

        Raises:
            NotFoundError: as in `record`.
        """
        wanted = _positions(numbers, self.total_records, what="record")
        places = self._record_order().places(wanted)
        dropped = np.flatnonzero(places >= len(self))
        if len(dropped) and not dropped_ok:
            raise NotFoundError(
                f"record {int(wanted[dropped[0]])} was dropped: {self.total_records:,} records do not fill batches of "
                f"{self.batch_size}",
                where=self.url,
            )
        return places

    def numbers_of(self, places: npt.ArrayLike | slice) -> IntArray:
        """The inverse of `places_of`: which records of the writer's source stand at places of the file."""
        return self._record_order().records(_positions(places, len(self), what="record"))

    def _record_order(self) -> RecordOrder:
        if self._order is None:
            if self._manifest is None:
                self._manifest = self._manifest_beside()
            self._order = RecordOrder(self._manifest.total_records, self._manifest.seed)
        return self._order

    def _manifest_beside(self) -> Manifest:
        try:
            manifest = read_manifest(self._transport, self._path + SUFFIX)
        except NotFoundError:
            raise NotFoundError(
                "how the records were shuffled is not recorded: there is no manifest beside the file",
                where=self.url,
                remedy="Only files that saev_store wrote have one; records by place (`reader[i]`) work for every file.",
            ) from None
        from saev_store.formats.llmbatch.check import check_digest

        check_digest(self, manifest, scope="sampled")
        return manifest

    # -- reading scattered things ----------------------------------------------------------------------------------------

    def _gather(
        self, wanted: IntArray, out: TokenArray, stride: int | None, nbytes: int, *, per_batch: int
    ) -> TokenArray:
        """Fill `out[i]` with thing `wanted[i]`: batches (`per_batch` 1) or records."""
        files = self._files
        batch_idx, row = np.divmod(wanted, np.int64(per_batch))
        file_idx = np.searchsorted(files.ends, batch_idx, side="right")
        for file in np.unique(file_idx).tolist():
            here = np.flatnonzero(file_idx == file)
            local = batch_idx[here] - (int(files.ends[file - 1]) if file else 0)
            if files.resident:
                source = files.array(file)
                out[here] = source[local] if stride is not None else source[local, row[here]]
                continue
            files.check(file)
            starts = files.opened.headers[file].offset(0) + local * files.opened.headers[file].padded_batch_nbytes
            self._fetch(files.opened.names[file], starts + row[here] * nbytes, nbytes, here, out)
        return out

    def _fetch(self, name: str, starts: IntArray, nbytes: int, places: IntArray, out: TokenArray) -> None:
        spans, parts, order = fetch(self._transport, name, starts, starts + nbytes)
        starts, places = starts[order], places[order]
        flat = out.reshape(len(out), -1)
        for span, part in enumerate(parts):
            tokens = np.frombuffer(part, TOKEN)
            for i in range(int(spans.first[span]), int(spans.first[span + 1])):
                at = int(starts[i] - spans.starts[span]) // ITEMSIZE
                flat[places[i]] = tokens[at : at + nbytes // ITEMSIZE]

    # -- as a source -----------------------------------------------------------------------------------------------------

    def describe(self, *, digest: DigestScope = "sampled") -> dict[str, object]:
        """What a store recorded from these records says about them in `metadata.data`."""
        return {
            "format": self.format,
            "url": self.url,
            "n_samples": len(self),
            "mapping": "example i is record i, in file order: row i % batch_size of batch i // batch_size",
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "digest": describe_digest(self._transport, self.sized_files(), scope=digest),
        }

    def sized_files(self) -> Sequence[tuple[str, int]]:
        """Path and size of every file."""
        opened = self._files.opened
        return [(name, header.file_nbytes) for name, header in zip(opened.names, opened.headers, strict=True)]

    def digest(self, *, scope: DigestScope = "full", progress: bool | None = None) -> str:
        """The xxh3_128 digest of all files, 32 hex digits."""
        return digest_files(self._transport, self.sized_files(), scope=scope, progress=progress)

    def validate(self, *, deep: bool = False, progress: bool | None = None) -> Report:
        """What is wrong: sizes, headers and the manifest; `deep` also reads padding and digests."""
        from saev_store.formats.llmbatch.check import validate

        return validate(self, deep=deep, progress=progress)

    def close(self) -> None:
        """Let go of maps and connections; views that were handed out stay valid."""
        self._files.forget()
        self._transport.close()


def _reopen(kind: type[BatchFileReader], transport: Transport, path: str) -> BatchFileReader:
    return kind(path, transport=transport)


def _positions(wanted: npt.ArrayLike | slice, n: int, *, what: str) -> IntArray:
    if isinstance(wanted, slice):
        try:
            return np.arange(*wanted.indices(n), dtype=np.int64)
        except (TypeError, ValueError) as error:
            raise SelectionError(f"{brief(wanted)} is no slice of {what}s: {error}", where=what) from None
    try:
        found = np.asarray(wanted)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{brief(wanted)} is no list of {what}s: {error}", where=what) from None
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise SelectionError(f"{brief(wanted)} is no list of {what}s: pass integers", where=what)
    if found.size and (int(found.min()) < -n or int(found.max()) >= n):
        raise SelectionError(f"{what}s from {int(found.min())} to {int(found.max())} of {n} were asked for", where=what)
    found = found.astype(np.int64)
    return np.where(found < 0, found + n, found)
