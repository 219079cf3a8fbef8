"""Reading LLMBATCH: batches as views, records, and the file as a source of records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, SupportsIndex, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray
from saev_store.errors import CorruptShardError, MissingDependencyError
from saev_store.sources._files import describe_digest, digest_files, file_identity, is_resident
from saev_store.sources._source import DigestScope, NumberedSource, check_index, check_positions, steps, text_card
from saev_store.sources.address import Url, full_url, locate
from saev_store.sources.llmbatch.header import HEADER_NBYTES, ITEMSIZE, Header, parse_header
from saev_store.transport.fetch import fetch_ranges

if TYPE_CHECKING:
    import torch

    from saev_store.problems import Problem
    from saev_store.transport import Buffer, Engine, Transport
    from saev_store.validation import Report

TOKEN = np.dtype("<u4")
TokenArray: TypeAlias = npt.NDArray[np.uint32]


class BatchFileReader(NumberedSource):
    """An open LLMBATCH file: `read_batch(i)` returns batches, `reader[i]` returns records in file order.

    A record is one row of a batch: `seq_len` token ids. As a source (`len`, `reader[i]`, `batches`) the reader counts
    records.

    If the transport maps files, arrays are read-only views of the map and stay valid after `close`. Truncating a mapped
    file ends the process: use `engine="pread"` where that can happen. Other transports return fresh arrays.

    Args:
        path: The `.batch` file: a path, any fsspec URL, or, with `transport`, a path below its root.
        storage_options: Options of the fsspec file system.
        engine: As in `open_transport`.
        transport: Read through this transport.

    Attributes:
        transport, path: What bytes are read through, and the file's path below its root.
        url: The file's address, without credentials.
        header: The checked header; its numbers are attributes, too.
        is_resident: Whether batches are views of memory, so that nothing is fetched.

    Raises:
        NotFoundError: the file does not exist.
        DocumentError: the header breaks a rule; `UnknownProtocolError` for a later version.
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
        self.transport, self.path = locate(path, storage_options, engine=engine, transport=transport)
        self.url = full_url(self.transport, self.path)
        self._identity = file_identity(self.transport, self.path)
        self.header, self.problems = self.read_header()
        header = self.header
        self.batch_size, self.seq_len, self.seed = header.batch_size, header.seq_len, header.seed
        self.num_batches, self.total_records = header.num_batches, header.total_records
        self._sampled_digest: str | None = None
        self.is_resident = is_resident(self.transport)
        #: The mapped file as one array, which makes a batch one index away.
        self._whole: TokenArray | None = self._map() if self.is_resident else None
        self._closed = False

    def read_header(self) -> tuple[Header, tuple[Problem, ...]]:
        """Read and check the header again; raises as opening does."""
        nbytes = self.transport.size(self.path)
        (raw,) = self.transport.get_ranges(self.path, starts=[0], ends=[min(nbytes, HEADER_NBYTES)])
        return parse_header(bytes(raw), file_nbytes=nbytes, where=self.url)

    def _map(self) -> TokenArray:
        (whole,) = self.transport.get_ranges(self.path, starts=[0], ends=[self.header.file_nbytes])
        return _as_batches(whole, self.header, self.num_batches, HEADER_NBYTES)

    def _reopen_if_closed(self) -> None:
        """Compare the header again after `close`, which has released the transport's pin of the file."""
        if not self._closed:
            return
        header, _ = self.read_header()
        if header != self.header or file_identity(self.transport, self.path) != self._identity:
            raise CorruptShardError(
                "another file has this name since the reader was closed", where=self.url, remedy="Open it again."
            )
        if self.is_resident:
            self._whole = self._map()
        self._closed = False

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (type(self), self.transport, self.path))

    @property
    def nbytes(self) -> int:
        """Bytes of all token ids, without padding."""
        return self.num_batches * self.header.raw_batch_nbytes

    def __len__(self) -> int:
        return self.num_batches * self.batch_size

    def __repr__(self) -> str:
        facts = {
            "batches": f"{self.num_batches:,} of {self.batch_size} records x {self.seq_len} tokens (uint32)",
            "records": f"{len(self):,} of {self.total_records:,} given to the writer",
            "seed": self.seed,
            "read through": self.transport.name,
        }
        return text_card(f"LLMBATCH {self.url}", facts, self.problems)

    # -- batches -------------------------------------------------------------------------------------------------------

    def read_batch(self, batch_index: SupportsIndex) -> TokenArray:
        """Return one batch: uint32, shape (batch_size, seq_len), read-only; a view where the file is mapped.

        Raises:
            SelectionError: there is no such batch.
        """
        whole = self._whole
        if whole is None or type(batch_index) is not int or not 0 <= batch_index < self.num_batches:
            index = check_index(batch_index, self.num_batches, what="batch")
            self._reopen_if_closed()
            if self._whole is None:
                start = self.header.offset(index)
                ends = [start + self.header.raw_batch_nbytes]
                (part,) = self.transport.get_ranges(self.path, starts=[start], ends=ends)
                return cast("TokenArray", _as_batches(part, self.header, 1, 0)[0])
            whole, batch_index = self._whole, index
        return cast("TokenArray", whole[batch_index])

    def read_batch_torch(self, batch_index: SupportsIndex) -> torch.Tensor:
        """Return one batch as a tensor that owns its memory: int64, shape (batch_size, seq_len).

        Raises:
            MissingDependencyError: torch is not installed.
        """
        return as_tensor(self.read_batch(batch_index))

    def read_batches(self, batch_indices: npt.ArrayLike | slice) -> TokenArray:
        """Return several batches in the order asked for: uint32, shape (n, batch_size, seq_len), fresh memory.

        Neighbours share a request where that is cheaper.
        """
        wanted = check_positions(batch_indices, self.num_batches, what="batch")
        out = np.empty((len(wanted), self.batch_size, self.seq_len), TOKEN)
        self._reopen_if_closed()
        if self._whole is not None:
            np.take(self._whole, wanted, axis=0, out=out)
        else:
            # Whole slots, so that neighbours are one range.
            slot = self.header.padded_batch_nbytes
            self._fetch(HEADER_NBYTES + wanted * slot, slot, out)
        return out

    # -- records -------------------------------------------------------------------------------------------------------

    def __getitem__(self, index: SupportsIndex) -> TokenArray:
        """Return a record by its place in the file: uint32, shape (seq_len,), read-only."""
        place = check_index(index, len(self), what="record")
        if self.is_resident:
            batch_idx, row = divmod(place, self.batch_size)
            return cast("TokenArray", self.read_batch(batch_idx)[row])
        found = self.rows([place])[0]
        found.flags.writeable = False
        return found

    def rows(self, indices: npt.ArrayLike | slice) -> TokenArray:
        """Return records by their places in the file: uint32, shape (n, seq_len), fresh memory."""
        wanted = check_positions(indices, len(self), what="record")
        batch_idx, row = np.divmod(wanted, np.int64(self.batch_size))
        out = np.empty((len(wanted), self.seq_len), TOKEN)
        self._reopen_if_closed()
        if self._whole is not None:
            out[:] = self._whole[batch_idx, row]
        else:
            starts = HEADER_NBYTES + batch_idx * self.header.padded_batch_nbytes + row * (self.seq_len * ITEMSIZE)
            self._fetch(starts, self.seq_len * ITEMSIZE, out)
        return out

    def batches(self, batch_size: int, *, start: int = 0, drop_last: bool = False) -> Iterator[TokenArray]:
        """Iterate over consecutive records in file order, as fresh arrays of shape (batch_size, seq_len)."""
        for first, end in steps(len(self), batch_size, start=start, drop_last=drop_last):
            yield self.rows(slice(first, end))

    def _fetch(self, starts: IntArray, nbytes: int, out: TokenArray) -> None:
        """Fill `out[i]` from the first of the `nbytes` bytes at `starts[i]`."""
        for tokens, part in zip(
            out, fetch_ranges(self.transport, self.path, starts.tolist(), (starts + nbytes).tolist()), strict=True
        ):
            tokens[...] = np.frombuffer(part, TOKEN, tokens.size).reshape(tokens.shape)

    # -- as a source -----------------------------------------------------------------------------------------------------

    def describe(self, *, digest: DigestScope = "sampled") -> dict[str, object]:
        """Describe the file for `metadata.data` of a store that is recorded from it."""
        return {
            "format": self.format,
            "url": self.url,
            "n_samples": len(self),
            "mapping": "example i is record i, in file order: row i % batch_size of batch i // batch_size",
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "digest": describe_digest(self.transport, self._sized_files(), scope=digest),
        }

    def _sized_files(self) -> Sequence[tuple[str, int]]:
        return [(self.path, self.header.file_nbytes)]

    def digest(self, *, scope: DigestScope = "full", progress: bool | None = None) -> str:
        """Compute the xxh3_128 digest of the file, 32 hex digits; the sampled one is computed once."""
        if scope == "sampled" and self._sampled_digest is not None:
            return self._sampled_digest
        found = digest_files(self.transport, self._sized_files(), scope=scope, progress=progress)
        self._sampled_digest = found if scope == "sampled" else self._sampled_digest
        return found

    def validate(self, *, deep: bool = False, progress: bool | None = None) -> Report:
        """Report what is wrong: size and header; `deep` also reads every byte and checks the padding."""
        from saev_store.sources.llmbatch.check import validate

        return validate(self, deep=deep, progress=progress)

    def close(self) -> None:
        """Release maps and connections; returned views stay valid, and later reads open the file again."""
        self._whole, self._closed = None, True
        self.transport.close()


def as_tensor(tokens: TokenArray) -> torch.Tensor:
    """Token ids as int64 in a tensor that owns its memory: torch's embeddings take no uint32."""
    try:
        import torch
    except ImportError:
        raise MissingDependencyError(
            "tensors need torch", remedy="pip install 'saev-store[torch]', or read NumPy arrays."
        ) from None
    return torch.from_numpy(tokens.astype(np.int64))  # pyright: ignore[reportUnknownMemberType]  # the stubs


def _as_batches(buffer: Buffer, header: Header, n_batches: int, offset: int) -> TokenArray:
    """View bytes as batches, read-only, shape (n_batches, batch_size, seq_len)."""
    shape = (n_batches, header.batch_size, header.seq_len)
    if n_batches == 0:
        return np.zeros(shape, TOKEN)
    strides = (header.padded_batch_nbytes, header.seq_len * ITEMSIZE, ITEMSIZE)
    found = np.ndarray(shape, TOKEN, buffer, offset, strides)
    found.flags.writeable = False
    return found


def _reopen(kind: type[BatchFileReader], transport: Transport, path: str) -> BatchFileReader:
    return kind(path, transport=transport)
