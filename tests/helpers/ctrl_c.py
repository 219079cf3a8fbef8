"""A process that presses Ctrl-C on itself while a loader is at work, and says how long it went on afterwards.

    python tests/helpers/ctrl_c.py SITUATION STORE FIFO [any]

Ctrl-C is a real SIGINT: to the whole process group, as from a terminal, or (`any`) to one thread that is not the main one,
which then is not woken by it. It comes when reads are in the state that is wanted (which they tell through the named pipe
FIFO, also from a worker process), never after a time. What is printed when nothing of Python is left to run is JSON:
`awake_s` and `elapsed_s`, from then on.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import http.server
import json
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

#: How often the clock of `Awake` beats.
BEAT_S = 0.01


class Awake:
    """Counts the seconds in which this process could run, whatever else the machine does.

    A thread asks to be woken every hundredth of a second. When it is woken later than that, the process was stopped, or
    waited for a processor: of such a time only what the process computed itself is counted.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        never, then, computed = threading.Event(), time.monotonic(), time.process_time()
        while not never.wait(BEAT_S):
            now, computing = time.monotonic(), time.process_time()
            self.seconds += min(now - then, max(BEAT_S, computing - computed))
            then, computed = now, computing


class CtrlC:
    """Presses Ctrl-C once a read hangs and the main thread is where it is wanted; tells what came of it when all is over."""

    def __init__(self, fifo: str, *, any_thread: bool) -> None:
        self._awake, self._any_thread = Awake(), any_thread
        os.mkfifo(fifo)
        self._told = os.open(fifo, os.O_RDWR)  # both ends: nobody waits for the other to open his
        self._pressed: tuple[float, float] | None = None
        # The first function registered is the last that is called.
        atexit.register(self._report)

    def press_when(self, ready: Callable[[], bool]) -> None:
        """In a thread of its own: wait for a read, then until `ready`, then press."""
        threading.Thread(target=self._press, args=(ready,), daemon=True).start()

    def _press(self, ready: Callable[[], bool]) -> None:
        os.read(self._told, 1)
        never = threading.Event()
        while not ready():
            never.wait(BEAT_S)
        self._pressed = time.monotonic(), self._awake.seconds
        if self._any_thread:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        else:
            os.killpg(0, signal.SIGINT)

    def _report(self) -> None:
        at, awake_s = self._pressed or (0.0, 0.0)
        after = {"elapsed_s": time.monotonic() - at, "awake_s": self._awake.seconds - awake_s}
        sys.stdout.write(json.dumps(after) + "\n")
        sys.stdout.flush()


def main_thread_waits() -> bool:
    """Whether the main thread waits: for another thread, or for another process."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    where = (threading.__file__, "wait"), (selectors.__file__, "select")
    return frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) in where


def tell(fifo: str) -> None:
    """A read is under way."""
    Path(fifo).write_bytes(b"!")


def hang(fifo: str) -> None:
    """A read that never ends."""
    tell(fifo)
    threading.Event().wait()


def hang_worker(fifo: str, number: int) -> None:
    """All reads of a worker process hang."""
    del number
    from saev_store.transport import MmapTransport, PreadTransport

    for transport in (MmapTransport, PreadTransport):
        transport.readinto = lambda *_, **__: hang(fifo)


@contextlib.contextmanager
def stuck_server(folder: Path, hang: Callable[[], None], *, n_whole: int = 0):
    """The address of a folder by ranges; after so many whole answers of a shard only the first half of one comes."""
    answered: collections.Counter[str] = collections.Counter()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = folder / Path(self.path).name
            if not path.exists():
                self.send_error(404)
                return
            data, asked = path.read_bytes(), self.headers.get("Range")
            self.send_response(206 if asked else 200)
            if asked:
                size, (start, end) = len(data), asked.removeprefix("bytes=").split("-")
                data = data[int(start) : int(end) + 1 if end else size]
                self.send_header("Content-Range", f"bytes {start}-{int(start) + len(data) - 1}/{size}")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", '"always the same"')
            self.end_headers()
            answered[path.name] += body
            if body and path.suffix == ".bin" and answered[path.name] > n_whole:
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                hang()
            elif body:
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/{folder.name}"


def local(path: str, situation: str, fifo: str) -> object:
    """A store whose reads hang, or take a tenth of a second, or are as they are."""
    from saev_store import ShardStore
    from saev_store.transport import PreadTransport
    from saev_store.transport.limit import Wrapper

    class Watched(Wrapper):
        def _around(self, operation: str, nbytes: int, call: Callable[[], object]) -> object:
            if operation == "readinto":
                tell(fifo)
                if situation == "slow reads":
                    time.sleep(0.1)
                elif situation != "training":
                    hang(fifo)
            return call()

    return ShardStore.open(Watched(PreadTransport(path)))


def in_a_worker(path: str, fifo: str, press: CtrlC) -> None:
    """PyTorch's `DataLoader` with a worker process."""
    from torch.utils.data import DataLoader

    from saev_store.torch import ShuffledConfig, ShuffledDataLoader

    batches = ShuffledDataLoader(ShuffledConfig(shards=path, layer=5, batch_size=8, batch_timeout_s=600))
    workers = iter(
        DataLoader(
            batches.as_iterable_dataset(), batch_size=None, num_workers=1, multiprocessing_context="spawn",
            worker_init_fn=partial(hang_worker, fifo),
        )
    )  # fmt: skip
    press.press_when(main_thread_waits)
    while True:
        next(workers)


def main(situation: str, path: str, fifo: str, *, any_thread: bool) -> None:
    press = CtrlC(fifo, any_thread=any_thread)
    if situation == "worker":
        in_a_worker(path, fifo, press)
    from saev_store import ShardStore
    from saev_store.loaders import OrderedLoader, ShuffledLoader

    with contextlib.ExitStack() as stack:
        engine = situation.rpartition(" ")[2]
        if engine in ("obstore", "fsspec"):
            n_whole = 1 if situation.startswith("fetched") else 0
            server = stack.enter_context(stuck_server(Path(path), partial(hang, fifo), n_whole=n_whole))
            store = ShardStore.open(server, engine=engine)
        else:
            store = local(path, situation, fifo)
        if situation.startswith("indexed"):
            press.press_when(lambda: True)
            store.sel(layer=5, tokens="content").rows(range(8))
        kind, more = (OrderedLoader, {}) if situation == "ordered" else (ShuffledLoader, {"window_blocks": 2})
        if situation.startswith("fetched"):
            more |= {"examples_per_block": 1, "n_partitions": 1}
        loader = kind(store.sel(layer=5, tokens="content"), batch_size=8, n_threads=4, batch_timeout_s=600, **more)
        if situation == "training":
            trains = threading.Event()
            press.press_when(trains.is_set)
            for _ in loader:
                while True:  # a step that takes its time
                    trains.set()
        press.press_when(main_thread_waits)
        while True:
            for _ in loader:
                pass


if __name__ == "__main__":
    main(*sys.argv[1:4], any_thread="any" in sys.argv[4:])
