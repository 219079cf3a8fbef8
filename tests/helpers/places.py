"""The suites of stores, writers, Zarr views and loaders over a bucket: `pytest --place swift+obstore tests/store/test_store.py …`.

`.ci/run` takes the quickest suites to one place on each server, `bash .ci/long places` takes all of them to all places.

What a test does with a folder on disk it then does with a bucket: every transport of a local folder below pytest's temporary
folder (or of a sample) becomes one of the bucket, files that a test puts or damages on disk are sent before the next
operation, and what is written to the bucket is fetched to where the test looks for it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from cloud_servers import new_gcs_json_bucket, new_gcs_xml_bucket, new_swift_bucket
from servers import Bucket, new_moto_bucket
from transports import Wrapper

from saev_store.transport import Buffer, Entry, Sink, Transport, open_transport
from saev_store.transport import open as _open

PLACES = {
    "moto+obstore": (new_moto_bucket, "obstore"),
    "moto+fsspec": (new_moto_bucket, "fsspec"),
    "swift+obstore": (new_swift_bucket, "obstore"),
    "swift+fsspec": (new_swift_bucket, "fsspec"),
    "gcs+obstore": (new_gcs_xml_bucket, "obstore"),
    "gcs+fsspec": (new_gcs_json_bucket, "fsspec"),
}
SAMPLES = Path(__file__).parents[1] / "data"

#: What is about files of this machine, and why; all other tests of the suites have to pass.
LOCAL_ONLY = {
    "test_store.py::test_views_share_the_map_and_are_read_only": "views are of mapped files",
    "test_store.py::test_labels_of_a_wrong_size_are_an_error": "sizes are looked at when a local store is opened",
    "test_store.py::test_cards_tell_and_escape": "whether there are labels is not asked for",
    "test_loader_faults.py::test_short_reads_are_continued": "faults of preadv; those of servers: test_cloud_faults.py",
    "test_loader_faults.py::test_passing_failures_are_retried": "the same",
    "test_loader_faults.py::test_lasting_failures_name_the_file": "the same",
    "test_loader_faults.py::test_the_system_is_told_and_told_otherwise": "of the page cache",
    "test_loader_faults.py::test_a_shard_that_is_cut_mid_epoch": "a replaced object is an error of its own: test_cloud_pins.py",
    "test_loader_medium.py::test_by_what_the_system_says": "of kinds of local disks",
    "test_loader_rows.py::test_pages_are_kept_where_that_was_chosen": "a bucket has no pages",
    "test_torch_loaders.py::test_a_disk_is_told_of_many_vectors_at_once": "of the page cache",
    "test_torch_loaders.py::test_indexed_batches_from_a_disk": "of a kind of local disk, pretended",
}

#: The same for one place.
ELSEWHERE_ONLY = {
    "gcs+obstore": {
        "test_loader_faults.py::test_loaders_work_in_children[fork]": "the shim's options are obstore's own: ForkError",
        "test_torch_loaders.py::test_indexed_with_pytorchs_loader[ours-2]": "the same: its workers are forked",
        "test_torch_loaders.py::test_indexed_with_pytorchs_loader[default-2]": "the same",
        "test_store.py::test_stores_work_in_other_processes[fork-mmap]": "the shim's options are obstore's own: ForkError",
        "test_store.py::test_stores_work_in_other_processes[fork-pread]": "the same",
    },
}

#: What was last known to be the same here and there, by absolute path.
_KNOWN: dict[str, tuple[int, int, int]] = {}
#: Readers' threads do one after the other what moves files here and there.
_MOVING = threading.RLock()
#: What a test does to files behind the package's back goes another way than what the package does.
_BACK: list[Transport] = []


def _seen(path: str) -> tuple[int, int, int] | None:
    with contextlib.suppress(OSError):
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            return status.st_ino, status.st_mtime_ns, status.st_size
    return None


class Placed(Wrapper):
    """A folder of a bucket that stands for a local one."""

    def __init__(self, inner: Transport, folder: str) -> None:
        super().__init__(inner)
        self._local = folder

    def _arguments(self) -> tuple[object, ...]:
        return (self._local,)

    @property
    def name(self) -> str:
        return self._inner.name

    def _send(self) -> None:
        if not _BACK:  # a process that was spawned: the one that runs the tests has sent everything
            return
        with _MOVING:
            self._send_all()

    def _send_all(self) -> None:
        there: set[str] = set()
        for folder, _, names in os.walk(self._local, followlinks=True):
            for name in names:
                path = f"{folder}/{name}"
                # A file that is being written on this machine is not there yet; one that was fetched is.
                if (".saev_store.tmp-" in name and path not in _KNOWN) or (seen := _seen(path)) is None:
                    continue
                there.add(path)
                if _KNOWN.get(path) != seen:
                    _BACK[0].put(path.lstrip("/"), Path(path).read_bytes())
                    _KNOWN[path] = seen
        for path in [path for path in _KNOWN if path.startswith(f"{self._local}/") and path not in there]:
            _BACK[0].delete(path.lstrip("/"))
            _KNOWN.pop(path, None)

    def _fetch(self, path: str) -> None:
        local = f"{self._local}/{path}"
        with _MOVING:
            os.makedirs(os.path.dirname(local), exist_ok=True)
            Path(local).write_bytes(self._inner.read(path))
            _KNOWN[local] = _seen(local)

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        self._send()
        return self._inner.read(path, max_bytes=max_bytes)

    def size(self, path: str) -> int:
        self._send()
        return self._inner.size(path)

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        self._send()
        return self._inner.get_ranges(path, starts=starts, ends=ends)

    def readinto(self, path: str, *, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        self._send()
        self._inner.readinto(path, starts=starts, buffers=buffers)

    def list(self, path: str = "") -> Sequence[Entry]:
        self._send()
        return self._inner.list(path)

    def at(self, path: str) -> Placed:
        return Placed(self._inner.at(path), f"{self._local}/{path}" if path else self._local)

    def put(self, path: str, data: Buffer) -> None:
        self._send()
        self._inner.put(path, data)
        self._fetch(path)

    def create(self, path: str, data: Buffer) -> None:
        self._send()
        self._inner.create(path, data)
        self._fetch(path)

    def delete(self, path: str) -> None:
        self._send()
        self._inner.delete(path)
        with _MOVING:
            self._forget(path)

    def _forget(self, path: str) -> None:
        local = f"{self._local}/{path}"
        for folder, _, names in os.walk(local, topdown=False):
            for name in names:
                os.unlink(f"{folder}/{name}")
                _KNOWN.pop(f"{folder}/{name}", None)
            os.rmdir(folder)
        if os.path.lexists(local):
            os.unlink(local)
        _KNOWN.pop(local, None)
        folder = os.path.dirname(local)  # buckets have no empty folders
        while folder != self._local and os.path.isdir(folder) and not os.listdir(folder):
            os.rmdir(folder)
            folder = os.path.dirname(folder)

    def open_sink(self, path: str, *, used_nbytes: int, file_nbytes: int, replace: bool = False) -> Sink:
        self._send()
        inner = self._inner.open_sink(path, used_nbytes=used_nbytes, file_nbytes=file_nbytes, replace=replace)
        return PlacedSink(inner, self, path)

    def copy_within(self, source: Transport, source_path: str, path: str) -> bool:
        self._send()
        while isinstance(source, Wrapper):
            source = source.inner
        done = self._inner.copy_within(source, source_path, path)
        if done:
            self._fetch(path)
        return done

    def lock(self, path: str) -> contextlib.AbstractContextManager[object]:
        return self._inner.lock(path)

    #: The tests look for the zeros that a local store has at its end.
    pads = True


class PlacedSink:
    """A sink whose file is fetched when it is committed."""

    def __init__(self, inner: Sink, transport: Placed, path: str) -> None:
        self._inner, self._transport, self._path = inner, transport, path

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def commit(self, *, check_size: bool = True) -> None:
        self._inner.commit()
        self._transport._fetch(self._path)


def take_place(name: str, temporary: Path) -> None:
    """From now on local folders are folders of a bucket."""
    make, engine = PLACES[name]
    bucket: Bucket = make()
    if "key" in bucket.options:  # credentials do not travel to other processes: they have them in their environment
        os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = (
            bucket.options["key"],
            bucket.options["secret"],
        )
        bucket = Bucket(bucket.url, {"endpoint_url": bucket.options["endpoint_url"]})
    _BACK.append(open_transport(bucket.url, bucket.options, engine=engine))
    roots = (f"{temporary}/", f"{SAMPLES}/")

    def replaced(local: type) -> object:
        def opened(path: str) -> object:
            where = os.path.abspath(path)
            if where.startswith(roots):  # the same path in the bucket, so that messages name it
                return Placed(open_transport(bucket.url + where, bucket.options, engine=engine), where)
            return local(path)

        return opened

    _open.MmapTransport = replaced(_open.MmapTransport)
    _open.PreadTransport = replaced(_open.PreadTransport)


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is about files of this machine."""
    here = tuple(ELSEWHERE_ONLY.get(config.getoption("--place"), ()))

    def is_out(name: str) -> bool:
        return name.partition("[")[0] in LOCAL_ONLY or (bool(here) and name.startswith(here))

    left = [item for item in items if is_out(f"{item.path.name}::{item.nodeid.partition('::')[2]}")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]
