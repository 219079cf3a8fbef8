"""A small exact model of Google Cloud Storage: generations, and what requests with preconditions do.

Written from the documented behaviour: every write of an object makes a new generation; `ifGenerationMatch=0` means "only if
there is no live object"; a precondition that does not hold answers 412 and changes nothing; reads and listings see every
write that was answered. It is the reference that the publishing protocol is tried against, because no emulator decides
races as Google does. Each request is one step: what happens between two steps is up to a test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

from api import MemoryTransport

from saev_store.errors import NotFoundError, StoreExistsError, TransportError
from saev_store.transport import Counters, Entry, ReadCost


@dataclass(frozen=True)
class Answer:
    """What a request gets: an HTTP status, and the object's generation and content where there is one."""

    status: int
    generation: int = 0
    content: bytes = b""


@dataclass
class GcsModel:
    """One bucket.

    Attributes:
        objects: name -> (generation, content) of the live objects.
        step: Called before each request takes effect; may block, so that a test decides who is next.
        lose: Whether the answer to a request that took effect is lost on the way back.
    """

    objects: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    step: Callable[[str], None] = lambda _: None
    lose: Callable[[str], bool] = lambda _: False

    def __post_init__(self) -> None:
        self._generations = itertools.count(1_000_001)

    def insert(self, name: str, content: bytes, *, if_generation_match: int | None = None) -> Answer:
        """`POST /upload/…/o`, also as `PUT` with `x-goog-if-generation-match` in the XML interface."""
        self.step(f"insert {name}")
        live = self.objects.get(name, (0, b""))[0]
        if if_generation_match is not None and if_generation_match != live:
            return Answer(412)
        self.objects[name] = (next(self._generations), bytes(content))
        return Answer(200, self.objects[name][0])

    def get(self, name: str, *, if_generation_match: int | None = None, generation: int | None = None) -> Answer:
        """`GET /o/NAME?alt=media`."""
        self.step(f"get {name}")
        if name not in self.objects or generation not in {None, self.objects[name][0]}:
            return Answer(404)
        live, content = self.objects[name]
        if if_generation_match is not None and if_generation_match != live:
            return Answer(412)
        return Answer(200, live, content)

    def delete(self, name: str, *, if_generation_match: int | None = None) -> Answer:
        """`DELETE /o/NAME`."""
        self.step(f"delete {name}")
        if name not in self.objects:
            return Answer(404)
        if if_generation_match is not None and if_generation_match != self.objects[name][0]:
            return Answer(412)
        del self.objects[name]
        return Answer(204)

    def compose(self, name: str, sources: list[str], *, if_generation_match: int | None = None) -> Answer:
        """`POST /o/NAME/compose`: at most 32 sources, all of which exist."""
        self.step(f"compose {name}")
        if not 1 <= len(sources) <= 32:
            return Answer(400)
        if any(source not in self.objects for source in sources):
            return Answer(404)
        if if_generation_match is not None and if_generation_match != self.objects.get(name, (0, b""))[0]:
            return Answer(412)
        content = b"".join(self.objects[source][1] for source in sources)
        self.objects[name] = (next(self._generations), content)
        return Answer(200, self.objects[name][0])

    def list(self, prefix: str) -> list[str]:
        """`GET /o?prefix=…`."""
        self.step(f"list {prefix}")
        return sorted(name for name in self.objects if name.startswith(prefix))


class GcsModelTransport:
    """The requests that our transports for Google send for each operation, sent to the model instead."""

    pads, name, url = False, "gcs-model", "gs://model"
    is_local, local_path, reads_into = False, None, False
    cost = ReadCost(1 << 20, 16 << 20)
    counters = Counters()

    is_local, local_path, reads_into = False, None, False

    def __init__(self, model: GcsModel) -> None:
        self.model = model

    def _answered(self, doing: str, answer: Answer) -> Answer:
        if answer.status < 300 and self.model.lose(doing):
            raise TransportError("the answer was lost", where=doing, transient=True)
        return answer

    def read(self, path, *, max_bytes=None):
        answer = self._answered(f"read {path}", self.model.get(path))
        if answer.status == 404:
            raise NotFoundError("there is no such object", where=path)
        return answer.content

    def size(self, path):
        return len(self.read(path))

    def get_ranges(self, path, *, starts, ends):
        content = self.read(path)
        return [content[start:end] for start, end in zip(starts, ends, strict=True)]

    def readinto(self, path, *, starts, buffers):
        ends = [start + len(buffer) for start, buffer in zip(starts, buffers, strict=True)]
        for found, buffer in zip(self.get_ranges(path, starts=starts, ends=ends), buffers, strict=True):
            buffer[:] = found

    def version(self, path):
        return ""

    def put(self, path, data):
        self._answered(f"put {path}", self.model.insert(path, bytes(data)))

    def create(self, path, data):
        answer = self._answered(f"create {path}", self.model.insert(path, bytes(data), if_generation_match=0))
        if answer.status == 412:
            raise StoreExistsError("somebody has created this already", where=path)

    def delete(self, path):
        for name in self.model.list(path):
            if name == path or name.startswith(f"{path}/"):
                self.model.delete(name)

    def list(self, path=""):
        base = f"{path}/" if path else ""
        names = {name.removeprefix(base).partition("/")[0]: name for name in self.model.list(base)}
        if not names and path:
            raise NotFoundError("there is no such folder", where=path)
        return [
            Entry(base + name, is_dir=base + name != full, size=None if base + name != full else 0)
            for name, full in sorted(names.items())
        ]

    def open_sink(self, path, *, used_nbytes, file_nbytes, resume=False):
        if not resume and self.model.get(path).status == 200:
            raise StoreExistsError("a file lies there already", where=path)
        return _Sink(self, path, used_nbytes, file_nbytes)

    def lock(self, path):
        return nullcontext()

    def close(self):
        pass


class _Sink:
    """Collected in memory, then inserted in one request."""

    def __init__(self, transport, path, used_nbytes, file_nbytes) -> None:
        self._transport, self._path = transport, path
        self._inner = MemoryTransport()
        self._sink = self._inner.open_sink("x", used_nbytes=used_nbytes, file_nbytes=file_nbytes)
        self.write = self._sink.write

    def sync(self):
        return 0

    def keep(self, nbytes):
        pass

    def read_back(self, start, end):
        return b""

    def commit(self, *, check_size=True):
        self._sink.commit()
        self._transport.put(self._path, self._inner.read("x"))

    def abort(self):
        pass
