"""Object stores through obstore: ranges, documents and listings. `_sink` uploads large files."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from saev_store.errors import ArgumentError, NotFoundError, SaevStoreError, StoreExistsError, TransportError
from saev_store.transport._remote import RemoteTransport, again, task_group
from saev_store.transport.base import IN_FLIGHT, Buffer, Entry, Transport, far_cost
from saev_store.transport.checks import Run, check_ranges, copy_into, cut_runs, joined_runs, run_end, too_big, too_short
from saev_store.transport.credentials import StorageOptions
from saev_store.transport.obstore._client import ObstoreClient, fork_error, is_forked, running_loop, status_of
from saev_store.transport.obstore._options import only_obstore_understands
from saev_store.transport.obstore._sink import ObstoreSink

if TYPE_CHECKING:
    from obstore import ObjectMeta

    from saev_store.transport.fsspec._transport import FsspecTransport

#: Longer ranges are fetched in pieces of this size, side by side.
PIECE_BYTES = 8 << 20
#: Where as many pieces as may be under way would take longer than this, one after the other, what has arrived of a piece is counted
#: in steps, so that slow is told from stalled: they share the line, and all of them may end late. It costs another copy, which does
#: not matter where the line is the limit.
_SLOW_S, _STEP_BYTES = 10.0, 64 << 10
#: A longer document is sent in parts: two requests more, but what is lost on the way is less.
_MOST_PUT_AT_ONCE = 32 << 20
#: S3 copies larger objects in parts only.
_MOST_COPIED_AT_ONCE = 5 << 30
#: How long a creation is repeated that met another conditional write of the same object.
_UNDECIDED_S = 1.5
_FAR = far_cost(cpu_s=1e-4, piece_bytes=PIECE_BYTES)


class ObstoreTransport(RemoteTransport[ObstoreClient]):
    """`s3://`, `gs://`, `az://` and `http(s)://` through obstore. Each returned buffer is read-only memory of its own.

    The first range of a file pins its size and ETag: if they change, reading the file is an error, never a mixture of two
    objects; `close` unpins all files. Every operation has a time-out of `timeout_s` plus one second per MiB that it moves,
    retries included.

    obstore does not work after `fork`. A forked child reads through fsspec, with the same options; writing there is a
    `ForkError`, and so is reading where fsspec cannot.

    Args:
        url: The root.
        storage_options: As fsspec's file systems understand them, or obstore's own names. Never part of a message, of `repr`
            or of a pickle that outlives this process and its children.
        timeout_s: Time-out of one operation.

    Raises:
        ArgumentError: obstore has no equivalent for an option.
        MissingDependencyError: obstore is not installed.
    """

    cost = _FAR

    def __init__(
        self, url: str, storage_options: Mapping[str, object] | None = None, *, timeout_s: float = 60.0
    ) -> None:
        super().__init__(ObstoreClient(url, StorageOptions(storage_options or {}), timeout_s))
        self.name = f"obstore:{self.client.place.kind}"
        self._in_child: FsspecTransport | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_in_child": None}

    def close(self) -> None:
        """Unpin all files and free unused memory; connections stay open for other transports."""
        super().close()
        self.client.idle_parts.clear()

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """The whole of a small file in one request, whose body is not read if it is longer than allowed."""
        below = self.below(path)
        if is_forked():
            return self._forked().read(path, max_bytes=max_bytes)
        import obstore

        async def get() -> bytes:
            answer = await obstore.get_async(self.client.store, self.key(below))
            if max_bytes is not None and answer.meta["size"] > max_bytes:
                raise too_big(self.where(below), size=answer.meta["size"], max_bytes=max_bytes)
            return bytes(await answer.bytes_async())

        client = self.client
        data = client.call("read", self.where(below), lambda: client.slot(get), nbytes=max_bytes or 0)
        client.requests.add("read", read=len(data))
        return data

    def size(self, path: str) -> int:
        below = self.below(path)
        if is_forked():
            return self._forked().size(path)
        return self.client.call("look at it", self.where(below), lambda: self._size(below))

    async def _size(self, below: str) -> int:
        import obstore

        client = self.client
        client.requests.add("size")
        head = partial(client.slot, lambda: obstore.head_async(client.store, self.key(below)))
        return (await again(head, client.passes))["size"]

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        """One read-only buffer per range, each of exactly the length asked for; empty ranges cost no request.

        Raises:
            CorruptShardError: the file ends before a range does.
            TransportError: the file is not the one that was read before, or the server sent something else.
        """
        below = self.below(path)
        check_ranges(self.where(below), starts, ends)
        if is_forked():
            return self._forked().get_ranges(path, starts=starts, ends=ends)
        wanted = list(zip(starts, ends, strict=True))

        async def fetch() -> list[Buffer]:
            async with task_group() as group:
                tasks = [group.create_task(self._range(below, start, end)) for start, end in wanted if end > start]
            found = iter(tasks)
            return [next(found).result() if end > start else b"" for start, end in wanted]

        nbytes = sum(ends) - sum(starts) if max(ends, default=0) < 1 << 50 else 0
        return self.client.call("read", self.where(below), fetch, nbytes=nbytes)

    async def _range(self, below: str, start: int, end: int) -> Buffer:
        """One range, in one request or in several."""
        # Memory for a long range is not taken before the file is known to be long enough.
        parts = await self._piece(below, start, min(end, start + PIECE_BYTES), needed=end)
        if len(parts) == 1 and len(parts[0]) == end - start:
            return memoryview(parts[0]).toreadonly()
        whole = memoryview(bytearray(end - start))
        filled = copy_into([whole], parts)
        await self._fill_all(below, _pieces([(start + filled, [whole[filled:]])]))
        return whole.toreadonly()

    async def _piece(self, below: str, start: int, end: int, *, needed: int = 0) -> list[Buffer]:
        """The bytes of one request, in parts as they arrive; `needed` is the end of the range that it is a piece of.

        Raises:
            CorruptShardError: the object ends before `needed`.
            TransportError: it is not the one that was read before, or the server sent something else.
        """
        import obstore

        client, where, needed = self.client, self.where(below), max(end, needed)

        async def get() -> list[Buffer]:
            began = time.monotonic()
            answer = await obstore.get_async(client.store, self.key(below), options={"range": (start, end)})
            self._check(below, answer.meta, needed=needed)
            if end - start <= _STEP_BYTES or (end - start) * client.s_per_byte * IN_FLIGHT < _SLOW_S:
                parts: list[Buffer] = [memoryview(await answer.bytes_async())]
                client.requests.add("get_ranges", read=len(parts[0]))
            else:
                parts = []
                async for part in answer.stream(min_chunk_size=_STEP_BYTES):
                    client.requests.add("get_ranges", read=len(part), requests=not parts)
                    parts.append(part)
            if end - start > _STEP_BYTES:
                client.s_per_byte = (time.monotonic() - began) / (end - start)
            if (n_came := sum(map(len, parts))) != end - start:
                raise TransportError(
                    f"{n_came:,} bytes came for the range {start:,}:{end:,}", where=where, transient=True
                )
            return parts

        try:
            # Beyond obstore's own tries, which take a second or two.
            return await again(lambda: client.slot(get), client.passes)
        except SaevStoreError:
            raise
        except Exception as error:
            if status_of(error) == 416 and (size := await self._size(below)) < needed:
                raise too_short(where, size=size, needed=needed) from None
            raise

    def _check(self, below: str, meta: ObjectMeta, *, needed: int) -> None:
        """That an answer is of the object that was read before, and that it is long enough."""
        version = meta.get("e_tag") or str(meta.get("last_modified"))
        self.pins.check(below, (version, meta["size"]), where=self.where(below))
        if meta["size"] < needed:
            raise too_short(self.where(below), size=meta["size"], needed=needed)

    def readinto(self, path: str, *, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Fetch the ranges in pieces, side by side, and copy each into its place as it arrives."""
        below = self.below(path)
        where = self.where(below)
        pieces = _pieces(joined_runs(where, starts, buffers))
        if is_forked():
            self._forked().readinto(path, starts=starts, buffers=buffers)
            return
        nbytes = sum(run_end(piece) - piece[0] for piece in pieces)
        try:
            self.client.call("read", where, lambda: self._fill_all(below, pieces), nbytes=nbytes)
        except BaseException:
            # The wait can end before the reads do; pieces that arrive later must not be copied.
            self.client.in_loop(pieces.clear)
            raise

    async def _fill_all(self, below: str, pieces: list[Run]) -> None:
        """Fetch pieces side by side and copy each into its place; `pieces` is cleared to stop the copying."""

        async def fill(number: int) -> None:
            parts = await self._piece(below, pieces[number][0], run_end(pieces[number]))
            if pieces:
                copy_into(pieces[number][1], parts)

        async with task_group() as group:
            for number in range(len(pieces)):
                group.create_task(fill(number))

    def version(self, path: str) -> str | None:
        return self._forked().version(path) if is_forked() else super().version(path)

    def list(self, path: str = "") -> Sequence[Entry]:
        below = self.below(path) if path else self._folder
        if is_forked():
            return self._forked().list(path)
        import obstore

        client, key = self.client, self.key(below)
        client.requests.add("list")
        found = client.call(
            "list",
            self.where(below),
            lambda: obstore.list_with_delimiter_async(client.store, key or None),  # pyright: ignore[reportUnknownMemberType]  # Arrow tables, declared without types
        )
        base = f"{path}/" if path else ""
        folders = [base + name.rstrip("/").rpartition("/")[2] for name in found["common_prefixes"]]
        entries = {name: Entry(name, is_dir=True, size=None) for name in folders}
        for meta in found["objects"]:
            name = base + meta["path"].rpartition("/")[2]
            if meta["path"] != key:  # a placeholder for the folder itself
                entries.setdefault(name, Entry(name, False, meta["size"], meta["last_modified"].timestamp()))
        if not entries and key:
            raise NotFoundError("there is no such folder", where=self.where(below))
        return [entries[name] for name in sorted(entries)]

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, path: str, data: Buffer) -> None:
        import obstore

        client, below, content = self.client, self.below(path), bytes(data)
        in_parts = len(content) > _MOST_PUT_AT_ONCE
        client.call(
            "write",
            self.where(below),
            lambda: client.slot(
                lambda: obstore.put_async(client.store, self.key(below), content, use_multipart=in_parts)
            ),
            nbytes=len(content),
        )
        client.requests.add("put", written=len(content))
        self.pins.forget(below)

    def create(self, path: str, data: Buffer) -> None:
        """Create a file unless its name is taken: the service decides between writers that race.

        A lost answer can make a creation that succeeded look failed, also as `StoreExistsError`: read the file back to
        know.
        """
        import obstore

        client, below, content = self.client, self.below(path), bytes(data)

        async def attempt() -> None:
            client.requests.add("create", written=len(content))
            await obstore.put_async(client.store, self.key(below), content, mode="create")

        # 409: nothing is decided yet
        attempts = partial(again, attempt, lambda error: status_of(error) == 409, for_s=_UNDECIDED_S)
        try:
            client.call("create", self.where(below), lambda: client.slot(attempts), nbytes=len(content))
        except StoreExistsError:
            raise StoreExistsError("the file already exists", where=self.where(below)) from None
        self.pins.forget(below)

    def delete(self, path: str) -> None:
        import obstore

        client, below = self.client, self.below(path)

        async def itself() -> None:
            with contextlib.suppress(FileNotFoundError):
                await obstore.delete_async(client.store, self.key(below))

        async def delete() -> None:
            # A prefix is whole parts of names: "a" finds "a/b", not "ab", and not "a" itself.
            listed = obstore.list(client.store, prefix=self.key(below))  # pyright: ignore[reportUnknownMemberType] (Arrow tables)
            _, below_it = await asyncio.gather(itself(), listed.collect_async())
            if found := [meta["path"] for meta in below_it]:
                await obstore.delete_async(client.store, found)

        client.requests.add("delete")
        client.call("delete", self.where(below), delete)
        self.pins.forget(below)

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, resume: bool = False) -> ObstoreSink:
        """An upload that runs while it is written, and appears when it is committed; `resume` then replaces the old file."""
        running_loop()  # or a ForkError, before anything is written
        if not resume:
            self._check_absent(path)
        return ObstoreSink(self, path, used_nbytes=used_nbytes, file_nbytes=file_nbytes)

    def copy_within(self, source: Transport, source_path: str, path: str) -> bool:
        """Let the service copy a file; False from another bucket, for large objects, or with other options."""
        if not isinstance(source, ObstoreTransport):
            return False
        ours, theirs, below = self.client, source.client, self.below(path)
        same_bucket = (ours.place.kind, ours.place.bucket) == (theirs.place.kind, theirs.place.bucket)
        if ours.place.kind == "http" or not same_bucket or ours.options.all != theirs.options.all:
            return False
        size, from_key = source.size(source_path), source.key(source.below(source_path))
        if size > _MOST_COPIED_AT_ONCE:
            return False
        import obstore

        self.pins.forget(below)
        ours.requests.add("copy_within")
        ours.call(
            "copy",
            self.where(below),
            lambda: ours.slot(lambda: obstore.copy_async(ours.store, from_key, self.key(below))),
            nbytes=size // 16,
        )
        return True

    def key(self, below: str) -> str:
        prefix = self.client.place.prefix
        return f"{prefix}/{below}" if prefix and below else prefix or below

    def _forked(self) -> FsspecTransport:
        """Reads in a forked child.

        Raises:
            ForkError: fsspec is not installed, or would read something else with these options.
        """
        from saev_store.transport.fsspec._transport import FsspecTransport

        client = self.client
        if self._in_child is None:
            # Only for S3 do both clients name versions alike.
            pins = self.pins if client.place.kind == "s3" else None
            try:
                if names := only_obstore_understands(client.place, client.options.all):
                    raise ArgumentError(f"only obstore understands {', '.join(names)}", where="storage_options")
                self._in_child = FsspecTransport(client.url, client.options.all, timeout_s=client.timeout_s, pins=pins)
            except SaevStoreError as error:
                raise fork_error(f", and fsspec cannot read instead: {error}") from error
        return self._in_child.at(self._folder)


def _pieces(runs: Sequence[Run]) -> list[Run]:
    """The same runs, cut into pieces of at most `PIECE_BYTES`."""
    return [piece for run in runs for part in cut_runs([run], PIECE_BYTES) for piece in part]
