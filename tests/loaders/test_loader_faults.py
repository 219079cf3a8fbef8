"""When reading goes wrong: a correct retry or an error that names the file; never a wrong row, a hang or a leak."""

from __future__ import annotations

import errno
import gc
import itertools
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from api import PreadTransport
from plain_stores import Plain, plain_store
from range_server import serving
from transports import Wrapper
from waiting import HANG_S, soon

from saev_store import ShardStore
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DeadlineError,
    ForkError,
    MissingShardError,
    NotFoundError,
    SaevStoreError,
)
from saev_store.loaders import OrderedLoader, ShuffledLoader
from saev_store.loaders._iteration import Group, Iteration, StoppedError
from saev_store.loaders._metrics import Totals
from saev_store.order import Partition
from saev_store.transport import Counters
from saev_store.transport._obstore_client import IN_FLIGHT
from saev_store.transport.files import DESCRIPTORS


@pytest.fixture
def plain(tmp_path) -> Plain:
    return plain_store(tmp_path, n=24, tokens=7, per_shard=5, d_model=640)


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("saev-")]


KINDS = {
    "ordered": (OrderedLoader, {}),
    "block": (ShuffledLoader, {"window_blocks": 3}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(plain: Plain, kind: str, **options):
    cls, more = KINDS[kind]
    engine = options.pop("engine", "pread")
    return cls(ShardStore.open(plain.path, engine=engine).sel(layer=5, tokens="content"), **{"batch_size": 8, "n_threads": 2, **more, **options})  # fmt: skip


def check(plain: Plain, loader) -> None:
    n = 0
    for batch in loader:
        np.testing.assert_array_equal(batch["act"], plain.acts[batch["example_idx"], 1, batch["token_idx"] + 1])
        n += len(batch["act"])
    assert n == loader.n_samples


@every_kind
def test_short_reads_are_continued(plain, kind, monkeypatch):
    """The system may return fewer bytes than asked for, at any byte."""
    real = os.preadv

    def short(fd, buffers, offset, flags=0):
        if not flags and sum(view.nbytes for view in buffers) > 33:
            n = 0
            for view in buffers:
                part = view[: 33 - n]
                n += real(fd, [part], offset + n)
                if n >= 33:
                    break
            return n
        return real(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", short)
    check(plain, make(plain, kind))


@every_kind
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_passing_failures_are_retried(plain, kind, code, monkeypatch):
    real, failures = os.preadv, iter(range(3))

    def flaky(fd, buffers, offset, flags=0):
        if not flags and next(failures, None) is not None:
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset, flags)

    loader = make(plain, kind)
    monkeypatch.setattr(os, "preadv", flaky)
    check(plain, loader)
    assert loader.metrics().n_retries == 3


@every_kind
def test_a_passing_failure_does_not_let_a_replaced_file_in(plain, kind, monkeypatch):
    """A network file system answers ESTALE just where a file was replaced: the retry must not read the new one."""
    loader, real, failures = make(plain, kind), os.preadv, iter([True])
    store = loader._rows.reader
    for shard in range(plain.n_shards):
        store.transport.get_ranges(plain.shard(shard).name, starts=[0], ends=[4])
    for shard in range(plain.n_shards):
        other = plain.path / "other"
        other.write_bytes(bytes(plain.shard(shard).stat().st_size))
        os.replace(other, plain.shard(shard))
    DESCRIPTORS.forget("")

    def flaky(fd, buffers, offset, flags=0):
        if not flags and next(failures, False):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", flaky)
    with pytest.raises(CorruptShardError, match="another file has taken the place"):
        check(plain, loader)


@every_kind
def test_a_shard_that_is_cut_mid_epoch(plain, kind):
    loader = make(plain, kind)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    os.truncate(plain.shard(2), plain.shard_nbytes // 3)
    with pytest.raises(CorruptShardError, match=r"acts000002\.bin"):
        check(plain, loader)


@every_kind
def test_a_shard_that_is_deleted_mid_epoch(plain, kind):
    """An open file lives on; one that is opened afterwards is missing, and named."""
    loader = make(plain, kind)
    loader._rows.reader.transport.close()
    plain.shard(4).unlink()
    with pytest.raises((CorruptShardError, NotFoundError), match=r"acts000004\.bin"):
        check(plain, loader)


@every_kind
def test_lost_examples_are_not_handed_out(plain, kind):
    os.truncate(plain.shard(1), plain.example_nbytes * 2)
    cls, more = KINDS[kind]
    store = ShardStore.open(plain.path, damaged_ok=True)
    with pytest.raises(CorruptShardError, match=r"acts000001\.bin"):
        list(cls(store.sel(layer=5, tokens="content"), batch_size=8, **more))
    fine = [example for example in range(24) if example not in (7, 8, 9)]
    loader = cls(store.sel(layer=5, tokens="content", examples=fine), batch_size=8, **more)
    check(plain, loader)


class Hanging(Wrapper):
    """Never answers once `hang` is set, until `release` is."""

    def __init__(self, inner):
        super().__init__(inner)
        self.hang, self.release = threading.Event(), threading.Event()

    def _around(self, operation, nbytes, call):
        if self.hang.is_set() and operation in ("readinto", "get_ranges"):
            self.release.wait(20)
        return call()


#: Time-out of loaders that read from a disk, too: longer than a busy machine takes for a batch.
LIMIT_S = 1.2


class Late(Hanging):
    """What was asked for while it hangs comes when its memory may be another's, and is wrong."""

    def readinto(self, path, *, starts, buffers):
        is_late = self.hang.is_set()
        super().readinto(path, starts=starts, buffers=buffers)
        if is_late:
            for buffer in buffers:
                buffer[:] = b"\x7f" * buffer.nbytes


@every_kind
def test_a_read_that_hangs_is_a_time_out(plain, kind):
    """Neither the time-out nor closing waits for the read; memory that it may still write to is not used again."""
    transport = Late(PreadTransport(plain.path))
    cls, more = KINDS[kind]
    loader = cls(ShardStore.open(transport).sel(layer=5), batch_size=8, batch_timeout_s=LIMIT_S, n_threads=2, **more)
    check_layer(plain, list(loader))
    transport.hang.set()
    try:
        with pytest.raises(DeadlineError, match=rf"no batch and nothing read within {LIMIT_S} s.*acts00000\d\.bin"):
            next(iter(loader))
        strays = [thread for thread in threading.enumerate() if thread.name.startswith("saev-read")]
        assert strays, "closing waited for a read that hangs"
        transport.hang.clear()
        loader.set_epoch(0)
        iterator = iter(loader)
        batches = [next(iterator)]
    finally:
        transport.release.set()
    for thread in strays:
        thread.join(HANG_S)
    batches += iterator
    assert our_threads() == []
    check_layer(plain, batches)


def iteration(n_threads: int = 0, *, helps: bool = False) -> Iteration:
    return Iteration(n_threads, 1, Totals(4), helps=helps)


def test_the_maker_of_batches_can_read_too():
    """Queued tasks, the oldest first; what tells a thread to end stays for the thread; errors and ends as in a thread."""
    run, done = iteration(helps=True), list[str]()

    def fail() -> None:
        raise KeyError("x")

    def late() -> None:
        third.n_left = 0  # as if a thread had been at it
        done.append("late")

    first = run.read([(lambda: done.append("first"), "a"), (lambda: done.append("second"), "b")])
    later = run.read([(fail, "c")])
    run.wait(first)
    assert done == ["first", "second"]
    with pytest.raises(KeyError):
        run.wait(later)
    run._tasks.put(None)
    third = Group(1)
    threading.Timer(0.05, late).start()
    run.wait(third)
    assert done[-1] == "late"
    assert run._tasks.get() is None
    last = run.read([(lambda: done.append("last"), "d")])
    run.stop.set()
    with pytest.raises(StoppedError):
        run.wait(last)
    assert "last" not in done


def test_a_plan_that_is_wrong_is_no_hang(plain, monkeypatch):
    monkeypatch.setattr(Partition, "placed_rows", lambda part, n_ahead: 1)
    with pytest.raises(SaevStoreError, match="no room for the rows that come next"):
        list(make(plain, "block"))


def test_a_stopped_process_has_not_waited(monkeypatch):
    """Ctrl-Z for an hour, or a machine that was suspended, is no time-out: only time in which a batch could be made is."""
    clock = iter(range(0, 10**9, 3600))
    run, go_on, batch = iteration(), threading.Event(), {"act": np.zeros(1)}

    def batches():
        assert go_on.wait(HANG_S)
        yield batch

    fake = SimpleNamespace(monotonic=lambda: next(clock), perf_counter=time.perf_counter)
    monkeypatch.setattr("saev_store.loaders._iteration.time", fake)
    run.start(batches)
    threading.Timer(0.3, go_on.set).start()
    assert run.get(30, lambda: 0) is batch
    monkeypatch.undo()
    with pytest.raises(DeadlineError, match=r"no batch and nothing read within 0.3 s"):
        iteration().get(0.3, lambda: 0)
    run.close()


def test_bytes_that_arrive_are_no_time_out():
    """A first batch may need a window's worth of a slow link: the time-out is for no progress."""
    n_bytes = iter((*range(8), *(8 for _ in range(99))))
    with pytest.raises(DeadlineError):
        iteration().get(0.05, lambda: next(n_bytes))
    assert next(n_bytes) == 8


@every_kind
def test_requests_that_come_in_are_no_time_out(plain, kind):
    """On a slow link no read may be finished within the time-out, while the transport counts what has come."""
    n_bytes = itertools.count()

    class Counting(Hanging):
        @property
        def counters(self):
            return Counters(bytes_read=next(n_bytes) if self.hang.is_set() else 0)

    transport = Counting(PreadTransport(plain.path))
    cls, more = KINDS[kind]
    loader = cls(ShardStore.open(transport).sel(layer=5), batch_size=8, batch_timeout_s=LIMIT_S, n_threads=2, **more)
    transport.hang.set()
    threading.Timer(2 * LIMIT_S, transport.release.set).start()
    check_layer(plain, list(loader))
    assert next(n_bytes) > 3


def check_layer(plain: Plain, batches) -> None:
    for batch in batches:
        np.testing.assert_array_equal(batch["act"], plain.acts[batch["example_idx"], 1, batch["token_idx"] + 1])
    assert sum(len(batch["act"]) for batch in batches) == plain.acts.shape[0] * plain.acts.shape[2]


def test_a_server_that_fails_now_and_then(plain):
    pytest.importorskip("aiohttp")
    with serving(plain.path) as (url, handler):
        store = ShardStore.open(url)
        for handler.faults in ("503", "truncated"):
            for cls in (OrderedLoader, ShuffledLoader):
                check(plain, cls(store.sel(layer=5, tokens="content"), batch_size=32, n_threads=4))
        assert handler.counter > 20


@pytest.mark.parametrize("cls", [OrderedLoader, ShuffledLoader])
def test_a_far_shard_that_is_deleted_mid_epoch(plain, cls):
    """Batches made of other shards are right; then comes an error that names the file."""
    pytest.importorskip("aiohttp")
    with serving(plain.path) as (url, _):
        more = {"window_blocks": 2, "n_partitions": 1} if cls is ShuffledLoader else {}
        loader = cls(ShardStore.open(url).sel(layer=5, tokens="content"), batch_size=8, n_threads=2, **more)
        check(plain, loader)  # sizes of all shards are known now
        plain.shard(3).unlink()
        n = 0
        with pytest.raises(MissingShardError, match=r"acts000003\.bin") as raised:
            for batch in loader:
                np.testing.assert_array_equal(batch["act"], plain.acts[batch["example_idx"], 1, batch["token_idx"] + 1])
                n += len(batch["act"])
        assert n < loader.n_samples
        assert isinstance(raised.value, FileNotFoundError)


def test_nothing_leaks(plain):
    """100 times made, begun and left in every way: no thread, descriptor, child or memory file stays."""
    psutil = pytest.importorskip("psutil")
    process = psutil.Process()

    def once(number: int) -> None:
        kind, way = number % len(KINDS), number // len(KINDS)
        loader = make(plain, list(KINDS)[kind], engine=("pread", "mmap")[way // 4 % 2])
        iterator = iter(loader)
        for _ in range(number % 7):
            next(iterator)
        if way % 4 == 0:
            loader.close()
        elif way % 4 == 1:
            list(iterator)
        elif way % 4 == 2:
            iter(loader).close()

    def held() -> tuple[int, ...]:
        soon(lambda: our_threads() == [])  # those of what was dropped end in a moment
        links = [_link(link) for link in os.listdir("/proc/self/fd")]
        # A client keeps connections, up to a number.
        sockets = [link for link in links if link.startswith("socket:")]
        n_beyond = max(len(sockets) - IN_FLIGHT, 0)
        return len(links) - len(sockets), n_beyond, len(our_threads()), len(process.children(recursive=True))

    for number in range(8 * len(KINDS)):
        once(number)
    gc.collect()
    before = held()
    memory = process.memory_info().rss
    for number in range(100):
        once(number)
    gc.collect()
    after = held()
    assert all(now <= then for now, then in zip(after, before, strict=True))  # fewer where another test's things went
    assert process.memory_info().rss - memory < 32 << 20
    assert not [link for link in os.listdir("/proc/self/fd") if "memfd" in _link(link)]


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_a_context_manager_ends_everything(plain):
    with make(plain, "block") as loader:
        next(iter(loader))
    assert our_threads() == []
    loader.shutdown()
    assert len(list(loader)) == len(loader)  # and can be used again


def test_killed_while_it_reads(plain, tmp_path):
    """kill -9 at random points leaves nothing behind: there are no helpers, no files, no shared memory."""
    psutil = pytest.importorskip("psutil")
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from saev_store import ShardStore\nfrom saev_store.loaders import ShuffledLoader\n"
        f"loader = ShuffledLoader(ShardStore.open({str(plain.path)!r}).sel(layer=5), batch_size=8)\n"
        "print('ready', flush=True)\n"
        "while True:\n    for batch in loader: pass\n"
    )
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    files = sorted(os.listdir(plain.path))
    for delay_s in (0.0, 0.05):
        process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        time.sleep(delay_s)
        assert psutil.Process(process.pid).children() == []
        process.kill()
        process.communicate()
    assert sorted(os.listdir(plain.path)) == files
    if shared:
        assert not [name for name in set(os.listdir("/dev/shm")) - shared if "saev" in name]


def _child_epoch(loader, pipe) -> None:
    pipe.send(sum(len(batch["act"]) for batch in loader))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_loaders_work_in_children(plain, method):
    loader = make(plain, "block")
    n = sum(len(batch["act"]) for batch in loader)
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    # Inherited by a forked child, made anew in the others.
    work, argument = (_child_epoch, loader) if method == "fork" else (_make_and_count, str(plain.path))
    child = context.Process(target=work, args=(argument, theirs))
    child.start()
    assert ours.poll(60)
    assert ours.recv() == n
    child.join(HANG_S)
    assert child.exitcode == 0


def _make_and_count(path: str, pipe) -> None:
    loader = ShuffledLoader(ShardStore.open(path).sel(layer=5, tokens="content"), batch_size=8)
    pipe.send(sum(len(batch["act"]) for batch in loader))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_an_iterator_does_not_survive_fork(plain):
    loader = make(plain, "block")
    iterator = iter(loader)
    next(iterator)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            next(iterator)
            text = "handed out a batch"
        except ForkError:
            text = "ForkError"
        except BaseException as error:
            text = repr(error)
        os.write(write, text.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    assert os.read(read, 1000) == b"ForkError"
    os.close(read)
    assert len(list(iterator)) == len(loader) - 1


@every_kind
def test_the_system_is_told_and_told_otherwise(plain, kind, monkeypatch):
    """Read-ahead is off while a layer is picked out, and on again afterwards; nothing is forgotten of a small store."""
    said: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, length, what: said.append((fd, what)))
    check(plain, make(plain, kind))
    told = {fd for fd, what in said if what == os.POSIX_FADV_RANDOM}
    assert len(told) == plain.n_shards
    assert {fd for fd, what in said if what == os.POSIX_FADV_NORMAL} == told
    assert not [fd for fd, what in said if what == os.POSIX_FADV_DONTNEED]
    monkeypatch.setattr(os, "sysconf", lambda name: 1)  # a machine with a byte of memory
    check(plain, make(plain, kind))
    assert [fd for fd, what in said if what == os.POSIX_FADV_DONTNEED]


# -- threads that are refused, loaders that are closed by others -------------------------------------------------------


@every_kind
def test_a_loader_that_is_closed_while_its_thread_starts(plain, kind, monkeypatch):
    loader, start = make(plain, kind), threading.Thread.start
    starting, closer = threading.Event(), threading.Thread(target=loader.close)

    def slow(thread):
        if thread.name.startswith("saev-batches"):
            starting.set()
            start(closer)
            time.sleep(0.1)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", slow)
        with pytest.raises(ArgumentError, match="was closed"):
            batches = iter(loader)
            closer.join(HANG_S)  # else a short epoch might be over first
            list(batches)
    assert starting.is_set()
    assert soon(lambda: our_threads() == [])


@every_kind
def test_an_iterator_that_waits_while_its_loader_is_closed_does_not_end_the_epoch(plain, kind, monkeypatch):
    loader, waits = make(plain, kind), threading.Event()
    get = Iteration.get

    def closing(iteration, timeout_s, progress):
        if waits.is_set():
            iteration._ready.clear()  # the next batch is still to come
            iteration.stop.set()
        return get(iteration, timeout_s, progress)

    monkeypatch.setattr(Iteration, "get", closing)
    batches = iter(loader)
    next(batches)
    waits.set()
    with pytest.raises(ArgumentError, match="was closed"):
        next(batches)
    assert (loader.epoch, loader.next_batch) == (0, 1)
    loader.close()


def test_a_state_that_does_not_fit_another_world_is_refused_each_time(plain, monkeypatch):
    loader = make(plain, "block")
    loader.load_state_dict({**loader.state_dict(), "batch": 3})
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for _ in range(2):
        with pytest.raises(ArgumentError, match="global_batch_size"):
            len(loader)
    with pytest.raises(ArgumentError, match="global_batch_size"):
        iter(loader)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert (loader.next_batch, len(list(loader))) == (3, len(loader) - 3)
