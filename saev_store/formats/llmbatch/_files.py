"""The files behind a reader of LLMBATCH: one, or those of a set, each opened when it is first needed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from saev_store.errors import CorruptShardError, NotFoundError
from saev_store.formats._address import full_url
from saev_store.formats.llmbatch.header import HEADER_NBYTES, ITEMSIZE, Header, parse_header
from saev_store.formats.llmbatch.manifest import MAX_NBYTES, SUFFIX, Manifest, parse_manifest
from saev_store.problems import Problem
from saev_store.transport import Buffer, Transport

TOKEN = np.dtype("<u4")
TokenArray = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Opened:
    """What opening found out.

    Attributes:
        manifest: For a set of files; None for one file, whatever lies beside it.
        names: Paths of the files.
        headers: What each file's header says, or in a set must say.
        problems: Oddities of a single file's header.
    """

    manifest: Manifest | None
    names: tuple[str, ...]
    headers: tuple[Header, ...]
    problems: tuple[Problem, ...]


def open_files(transport: Transport, path: str) -> Opened:
    """One file by its name, or a set by that of its manifest (with or without `.json`)."""
    if not path.endswith(SUFFIX):
        try:
            header, problems = read_header(transport, path)
        except NotFoundError as error:
            try:
                return _open_set(transport, path + SUFFIX)
            except NotFoundError:
                raise error from None
        return Opened(None, (path,), (header,), problems)
    return _open_set(transport, path)


def _open_set(transport: Transport, path: str) -> Opened:
    manifest = read_manifest(transport, path)
    folder = path.rpartition("/")[0]
    names = tuple(f"{folder}/{file.name}" if folder else file.name for file in manifest.files)
    return Opened(manifest, names, tuple(manifest.header(i) for i in range(len(names))), ())


def read_manifest(transport: Transport, path: str) -> Manifest:
    """A manifest, checked."""
    return parse_manifest(transport.read(path, max_bytes=MAX_NBYTES), where=full_url(transport, path))


def read_header(transport: Transport, path: str) -> tuple[Header, tuple[Problem, ...]]:
    """A file's header, compared with the file's size."""
    nbytes = transport.size(path)
    (raw,) = transport.get_ranges(path, starts=[0], ends=[min(nbytes, HEADER_NBYTES)])
    return parse_header(bytes(raw), file_nbytes=nbytes, where=full_url(transport, path))


def is_resident(transport: Transport) -> bool:
    """Whether ranges are views of memory: then a whole file is looked at as one array, and nothing is fetched."""
    return math.isinf(transport.cost.max_gap_bytes) and math.isinf(transport.cost.max_request_bytes)


class Files:
    """Batches of all files as one numbered run.

    Args:
        transport: Where the files are.
        opened: What `open_files` found.
    """

    def __init__(self, transport: Transport, opened: Opened) -> None:
        self.transport, self.opened = transport, opened
        self.ends = np.cumsum([header.num_batches for header in opened.headers], dtype=np.int64)
        self.resident = is_resident(transport)
        self._checked = {0} if opened.manifest is None else set[int]()
        self._arrays: dict[int, TokenArray] = {}

    def check(self, file_idx: int) -> None:
        """Compare a file of a set with the manifest, once.

        Raises:
            CorruptShardError: its header is another one than the manifest promises.
        """
        if file_idx in self._checked:
            return
        name, promised = self.opened.names[file_idx], self.opened.headers[file_idx]
        header, _ = read_header(self.transport, name)
        if header != promised:
            raise CorruptShardError(
                f"its header says {header}, but the manifest {promised}",
                where=full_url(self.transport, name),
                remedy="The file was replaced: restore it, or write the set again.",
            )
        self._checked.add(file_idx)

    def array(self, file_idx: int) -> TokenArray:
        """A resident file as a read-only view of shape (num_batches, batch_size, seq_len)."""
        found = self._arrays.get(file_idx)
        if found is None:
            self.check(file_idx)
            name, header = self.opened.names[file_idx], self.opened.headers[file_idx]
            (whole,) = self.transport.get_ranges(name, starts=[0], ends=[header.file_nbytes])
            found = self._arrays[file_idx] = _batches(whole, header, header.num_batches, HEADER_NBYTES)
        return found

    def forget(self) -> None:
        """Let go of the views."""
        self._arrays = {}

    def run(self, file_idx: int, first: int, end: int) -> TokenArray:
        """Consecutive batches of one file, read as one range (a view where the file is resident)."""
        if self.resident:
            return self.array(file_idx)[first:end]
        self.check(file_idx)
        name, header = self.opened.names[file_idx], self.opened.headers[file_idx]
        start, stop = header.offset(first), header.offset(end - 1) + header.raw_batch_nbytes
        (part,) = self.transport.get_ranges(name, starts=[start], ends=[stop])
        return _batches(part, header, end - first, 0)


def _batches(buffer: Buffer, header: Header, n_batches: int, offset: int) -> TokenArray:
    shape = (n_batches, header.batch_size, header.seq_len)
    if n_batches == 0:
        return np.zeros(shape, TOKEN)
    strides = (header.padded_batch_nbytes, header.seq_len * ITEMSIZE, ITEMSIZE)
    found = np.ndarray(shape, TOKEN, buffer, offset, strides)
    found.flags.writeable = False
    return found
