"""Reads LLMBATCH: batches as views, records, and the file as a source of records."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, SupportsIndex, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from saev_store._runtime.progress import Progress
from saev_store.core.arguments import check_flag
from saev_store.core.layout import IntArray
from saev_store.errors import CorruptShardError, MissingDependencyError, SaevStoreError
from saev_store.problems import Problem
from saev_store.sources._files import chunks, describe_digest, digest_files, is_resident
from saev_store.sources._source import DigestScope, Source, check_index, check_positions, text_card
from saev_store.sources.address import Url, full_url, locate
from saev_store.sources.llmbatch.header import HEADER_NBYTES, ITEMSIZE, Header, parse_header
from saev_store.validation import Report

if TYPE_CHECKING:
    import torch

    from saev_store.transport import Engine, Transport

TOKEN = np.dtype("<u4")
TokenArray: TypeAlias = npt.NDArray[np.uint32]


class BatchFileReader(Source[TokenArray]):
    """An open LLMBATCH file: `read_batch(i)` returns batches, `reader[i]` returns records in file order.

    A record is one row of a batch: `seq_len` token ids. As a source the reader counts records.

    If the transport maps files, arrays are read-only views of the map and stay valid after `close`. Truncating a mapped
    file ends the process: use `engine="pread"` where that can happen. Other transports return fresh arrays.

    Args:
        path: The `.batch` file: a path, any fsspec URL, or, with `transport`, a path below its root.
        storage_options, engine, transport: As in `open_source`.

    Attributes:
        transport, path: The storage, and the file's path below its root.
        header: The checked header; its numbers are attributes, too.
        nbytes: Bytes of all tokens.
        is_resident: True if batches are views of memory, so that nothing is fetched.

    Raises:
        NotFoundError: the file does not exist.
        DocumentError: the header breaks a rule; `UnknownProtocolError` for a later version.
        CorruptShardError: the file is longer or shorter than its header requires.
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
        self.header, self.problems = header, _ = self._read_header()
        self._version = self.transport.version(self.path)
        self.batch_size, self.seq_len, self.seed = header.batch_size, header.seq_len, header.seed
        self.num_batches, self.total_records = header.num_batches, header.total_records
        self.nbytes = self.num_batches * header.raw_batch_nbytes
        self.is_resident, self._closed = is_resident(self.transport), False
        #: The mapped file as one array.
        self._whole: TokenArray | None = self._map() if self.is_resident else None

    def _read_header(self) -> tuple[Header, tuple[Problem, ...]]:
        nbytes = self.transport.size(self.path)
        (raw,) = self.transport.get_ranges(self.path, starts=[0], ends=[min(nbytes, HEADER_NBYTES)])
        return parse_header(bytes(raw), file_nbytes=nbytes, where=self.url)

    def _map(self) -> TokenArray:
        """View the file as batches, read-only, shape (num_batches, batch_size, seq_len)."""
        header = self.header
        shape = (header.num_batches, header.batch_size, header.seq_len)
        if header.num_batches == 0:
            return np.zeros(shape, TOKEN)
        (whole,) = self.transport.get_ranges(self.path, starts=[0], ends=[header.file_nbytes])
        strides = (header.padded_batch_nbytes, header.seq_len * ITEMSIZE, ITEMSIZE)
        found = np.ndarray(shape, TOKEN, whole, HEADER_NBYTES, strides)
        found.flags.writeable = False
        return found

    def _reopen_if_closed(self) -> None:
        """Compare the header again after `close`, which has released the transport's pin of the file."""
        if self._closed:
            header, _ = self._read_header()
            if header != self.header or self.transport.version(self.path) != self._version:
                message = "another file has this name since the reader was closed"
                raise CorruptShardError(message, where=self.url, remedy="Open it again.")
            self._whole = self._map() if self.is_resident else None
            self._closed = False

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), transport=self.transport), (self.path,)

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
        """Return a batch: uint32, shape (batch_size, seq_len), read-only; negative numbers count from the end.

        Raises:
            SelectionError: there is no such batch.
        """
        whole = self._whole
        if whole is not None and type(batch_index) is int and 0 <= batch_index < self.num_batches:
            return whole[batch_index]  # twice as fast as the general way
        index = check_index(batch_index, self.num_batches, what="batch")
        self._reopen_if_closed()
        found = cast(
            "TokenArray", (self.read_batches([index]) if self._whole is None else self._whole[index : index + 1])[0]
        )
        found.flags.writeable = False
        return found

    def read_batch_torch(self, batch_index: SupportsIndex) -> torch.Tensor:
        """Return a batch as an int64 tensor that owns its memory.

        Raises:
            SelectionError: there is no such batch.
            MissingDependencyError: torch is not installed.
        """
        return as_tensor(self.read_batch(batch_index))

    def read_batches(self, batch_indices: npt.ArrayLike | slice) -> TokenArray:
        """Return several batches in the order asked for: uint32, shape (n, batch_size, seq_len), fresh memory.

        Neighbours share a request if that is cheaper.
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
            return cast("TokenArray", self.read_batch(place // self.batch_size)[place % self.batch_size])
        found = cast("TokenArray", self.rows([place])[0])
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

    def _fetch(self, starts: IntArray, nbytes: int, out: TokenArray) -> None:
        """Fill `out[i]` from the first of the `nbytes` bytes at `starts[i]`."""
        parts = self.transport.get_ranges(self.path, starts=starts.tolist(), ends=(starts + nbytes).tolist())
        for tokens, part in zip(out, parts, strict=True):
            tokens[...] = np.frombuffer(part, TOKEN, tokens.size).reshape(tokens.shape)

    # -- as a source -----------------------------------------------------------------------------------------------------

    def sampled_digest(self) -> str:
        """The sampled digest of the file, as `describe` has it."""
        return digest_files(self.transport, [(self.path, self.header.file_nbytes)], scope="sampled")

    def describe(self, *, digest: DigestScope = "sampled") -> dict[str, object]:
        """Describe the file for `metadata.data` of a store that is recorded from it."""
        return {
            "format": self.format,
            "url": self.url,
            "n_samples": len(self),
            "mapping": "example i is record i, in file order: row i % batch_size of batch i // batch_size",
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "digest": describe_digest(self.transport, [(self.path, self.header.file_nbytes)], scope=digest),
        }

    def validate(self, *, deep: bool = False, progress: bool | None = None) -> Report:
        """Report what is wrong: size and header; `deep` also reads every byte and checks the padding.

        A file of n batches counts as n times batch_size examples.
        """
        deep = check_flag(deep, name="deep")
        started, problems, checked = time.perf_counter(), list(self.problems), 0
        try:
            now, _ = self._read_header()
            if now != self.header:
                raise CorruptShardError(f"the header was {self.header}, and is {now} now", where=self.url)
            if deep:
                with Progress(self.header.file_nbytes, "checking", shown=progress) as bar:
                    problems += self._check_padding(bar)
                checked = self.header.file_nbytes
        except SaevStoreError as error:
            lost = ((0, len(self)),) if len(self) else ()
            problems.append(Problem(error.kind, error.message, where=self.url, lost=lost))
        elapsed_s = time.perf_counter() - started
        return Report(self.url, len(self), 1, tuple(problems), deep, checked, elapsed_s)

    def _check_padding(self, bar: Progress) -> list[Problem]:
        """Read every byte, and report the first padding byte that is not zero."""
        first, start = -1, 0
        slot, raw_nbytes = self.header.padded_batch_nbytes, self.header.raw_batch_nbytes
        bar.advance(HEADER_NBYTES)  # compared before
        for part in chunks(self.transport, self.path, self.header.file_nbytes, start=HEADER_NBYTES):
            offsets = start + np.flatnonzero(np.frombuffer(part, np.uint8))
            odd = offsets[offsets % slot >= raw_nbytes]
            first = int(odd[0]) if first < 0 and len(odd) else first
            start += len(part)
            bar.advance(len(part))
        if first < 0:
            return []
        message = f"padding of batch {first // slot} must be zero; byte {HEADER_NBYTES + first:,} is not"
        return [Problem("padding_not_zero", message, where=self.url, severity="warning")]

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
            "tensors need torch", where="output", remedy="pip install 'saev-store[torch]', or read NumPy arrays."
        ) from None
    return torch.from_numpy(tokens.astype(np.int64))  # pyright: ignore[reportUnknownMemberType]  # the stubs
