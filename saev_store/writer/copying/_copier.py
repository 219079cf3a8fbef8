"""The large files of a copy, one by one: read, digested, written, read back; here or by the workers of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from saev_store._runtime.cluster import connected, results
from saev_store._runtime.progress import Progress
from saev_store._runtime.threads import ahead
from saev_store.errors import TransportError
from saev_store.transport import Transport
from saev_store.writer import Digests, FileDigests
from saev_store.writer._digests import BLOCK_BYTES, block_ranges, digest
from saev_store.writer._shard_file import Receipt, parse_receipt
from saev_store.writer.copying._source import damaged
from saev_store.writer.folder import Folder, receipt_path

if TYPE_CHECKING:
    from distributed import Client

    from saev_store.store.store import ShardStore

_N_AHEAD = 4


class CopiedFile(NamedTuple):
    """One large file to copy; `shard_idx` is None for token arrays."""

    name: str
    shard_idx: int | None
    used_nbytes: int
    file_nbytes: int


def copied_on_cluster(
    client: Client | str,
    store: ShardStore,
    folder: Folder,
    promised: Digests | None,
    files: Sequence[CopiedFile],
    bar: Progress,
) -> dict[str, FileDigests]:
    """Copy files by the workers of a cluster, each file a task; their digests by name.

    A file whose worker was lost is copied again, by another one.

    Raises:
        TransportError: the workers do not write to the folder that this process sees.
    """
    copy = partial(_copy_on_worker, store.unmapped(), folder.transport, folder.name)
    # A task gets the digests of its file: those of all files would be sent with every task.
    tasks = [(file, None if promised is None else _only(promised, file)) for file in files]
    found = dict[str, FileDigests]()
    with connected(client) as cluster, closing(results(cluster, copy, tasks)) as copied:
        for file, digests in zip(files, copied, strict=True):
            if folder.size(file.name) != file.file_nbytes:
                raise TransportError(
                    "a worker has copied the file, but it is not there",
                    where=folder.where(file.name),
                    remedy="Copy to an address that means the same to this process and to all workers.",
                )
            found[file.name] = digests
            bar.advance(file.used_nbytes)
    return found


def _only(promised: Digests, file: CopiedFile) -> Digests:
    """The digests of one file."""
    of_file = {file.name: promised.files[file.name]} if file.name in promised.files else {}
    return Digests(promised.block_bytes, of_file)


def _copy_on_worker(
    store: ShardStore, root: Transport, name: str, task: tuple[CopiedFile, Digests | None]
) -> FileDigests:
    """What a task does."""
    file, promised = task
    with Progress(0, "copying", shown=False) as bar:
        return Copier(store, Folder(root, name), promised).copy(file, bar)


class Copier:
    """Copies large files block by block; digests what it reads and reads back what it wrote. Bytes count once for progress."""

    def __init__(self, store: ShardStore, folder: Folder, promised: Digests | None) -> None:
        self._source, self._folder = Folder(store.transport, ""), folder
        self._layout = store.layout
        self._promised = promised
        self.block_bytes = promised.block_bytes if promised else BLOCK_BYTES

    def copy(self, file: CopiedFile, bar: Progress) -> FileDigests:
        """Copy a file, unless an earlier attempt has; its digests."""
        kept = self._kept(file)
        if kept is not None:
            bar.advance(file.used_nbytes)
            return kept
        if self._is_copied_within(file):
            sent = self._of_source(file)
            bar.advance(file.used_nbytes)
        else:
            sent = self._transfer(file, bar)
        wrong = self._first_difference(file, sent)
        if wrong is not None:
            block_idx = wrong[0] // self.block_bytes
            block = self._source.get_range(file.name, *wrong)
            if digest(memoryview(block)) != sent.digests[block_idx]:
                raise damaged(self._source, file.name, block_idx)
            raise TransportError(
                f"block {block_idx} of the copy is not what was sent",
                where=self._folder.where(file.name),
                remedy="Copy again; if it happens twice, suspect the disk or the network.",
            )
        if file.shard_idx is not None:
            receipt = Receipt(file.used_nbytes, complete=True, digests=sent.digests, tokens=None)
            self._folder.put(receipt_path(file.shard_idx), receipt.to_bytes())
        return sent

    def _kept(self, file: CopiedFile) -> FileDigests | None:
        """The digests of a file that an earlier attempt has finished, after reading it again."""
        if file.shard_idx is None:
            return None
        raw = self._folder.read(receipt_path(file.shard_idx))
        receipt = parse_receipt(raw, self._layout, file.shard_idx, self.block_bytes) if raw is not None else None
        if receipt is None or self._folder.size(file.name) != file.file_nbytes:
            return None
        if receipt.file != self._of_source(file):  # of another recording, which was there then
            return None
        return receipt.file if self._first_difference(file, receipt.file) is None else None

    def _promise(self, file: CopiedFile) -> FileDigests | None:
        """What the source's digests.json says of a file."""
        promised = self._promised.files.get(file.name) if self._promised else None
        return promised if promised is not None and promised.nbytes == file.used_nbytes else None

    def _of_source(self, file: CopiedFile) -> FileDigests:
        """What the source promises of a file; where it promises nothing, what is read there."""
        blocks = list(block_ranges(file.used_nbytes, self.block_bytes))
        promise = self._promise(file)
        return promise or FileDigests(file.used_nbytes, tuple(self._source.digests(file.name, blocks)))

    def _first_difference(self, file: CopiedFile, digests: FileDigests) -> tuple[int, int] | None:
        """The first block of the copy, read again, that has another digest."""
        self._folder.transport.close()  # a map of an earlier file must not answer for this one
        return self._folder.first_difference(file.name, digests, self.block_bytes)

    def _is_copied_within(self, file: CopiedFile) -> bool:
        """Whether the service has copied the file; else this machine has to."""
        to, source = self._folder.transport, self._source.transport
        if source.size(file.name) != file.file_nbytes:
            return False
        return to.copy_within(source, file.name, self._folder.path(file.name))

    def _transfer(self, file: CopiedFile, bar: Progress) -> FileDigests:
        """Read the file from the source, compare it with what is promised, and write it; its digests."""

        def read(wanted: tuple[int, int]) -> memoryview:
            return memoryview(self._source.get_range(file.name, *wanted))

        digests: list[str] = []
        promise = self._promise(file)
        sink = self._folder.open_sink(file.name, used_nbytes=file.used_nbytes, file_nbytes=file.file_nbytes)
        try:
            offset = 0
            for block in ahead(read, list(block_ranges(file.used_nbytes, self.block_bytes)), _N_AHEAD):
                digests.append(digest(block))
                if promise is not None and digests[-1] != promise.digests[len(digests) - 1]:
                    raise damaged(self._source, file.name, len(digests) - 1)
                sink.write(offset, [block])
                offset += len(block)
                bar.advance(len(block))
            sink.commit()
        except BaseException:
            sink.abort()
            raise
        return FileDigests(file.used_nbytes, tuple(digests))
