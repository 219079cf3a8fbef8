"""Work on an event loop in another thread."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from saev_store.errors import ForkError, TransportError

T = TypeVar("T")

#: Seconds that a loop may take to notice that work is cancelled.
_STUCK_S = 10.0
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_pid = -1


def own_loop() -> asyncio.AbstractEventLoop:
    """The event loop that all clients of obstore share, in a thread of its own; `ForkError` if a parent process has used it."""
    global _loop, _pid  # one per process, like the client's own threads
    with _lock:
        if _loop is None:
            _loop, _pid = asyncio.new_event_loop(), os.getpid()
            thread = threading.Thread(target=_loop.run_forever, name="saev_store-loop", daemon=True)
            thread.start()
            atexit.register(_stop, _loop, thread, _pid)
    check_fork(_pid, where="engine")
    return _loop


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    """End the loop at exit, and wait until the client's threads have left Python.

    Before 3.14, Python ends a thread that wants the GIL while the interpreter shuts down; inside Rust that aborts the process.
    """
    if pid != os.getpid():
        return
    loop.call_soon_threadsafe(loop.stop)
    thread.join(1.0)
    ends_s = time.monotonic() + 1.0
    while time.monotonic() < ends_s:
        running = sys._current_frames()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]  # documented, in spite of its name
        if not running.keys() - {known.ident for known in threading.enumerate()}:
            return
        time.sleep(0.001)


def check_fork(pid: int, *, where: str) -> None:
    """Refuse to use in a forked child what process `pid` has opened."""
    if pid != os.getpid():
        raise ForkError(
            "a bucket or server was read before this process was forked; its client does not work in the child",
            where=where,
            remedy='Start workers with multiprocessing_context="spawn" (or "forkserver").',
        )


def run(work: Callable[[], Awaitable[T]], loop: asyncio.AbstractEventLoop, *, limit_s: float) -> T:
    """The result of `work()` on a loop that runs in another thread.

    When this ends in any way, the work has ended too: after Ctrl-C, or a `TimeoutError` after `limit_s`, it is cancelled and waited
    for. On the thread of the loop, which would wait for itself, it is a `TransportError`.
    """
    with contextlib.suppress(RuntimeError):
        if asyncio.get_running_loop() is loop:
            raise TransportError("a blocking call on the event loop that has to answer it", where="loop")
    ended, begun = threading.Event(), list[asyncio.Task[T]]()

    def begin() -> None:
        begun.append(loop.create_task(within(work, limit_s)))
        begun[0].add_done_callback(lambda _: ended.set())

    def cancel() -> None:
        if begun:
            begun[0].cancel()
        else:
            ended.set()

    try:
        loop.call_soon_threadsafe(begin)  # inside: Ctrl-C may come before the waiting begins
        if not ended.wait(limit_s + _STUCK_S):
            raise TimeoutError
    except BaseException:
        loop.call_soon_threadsafe(cancel)
        ended.wait(_STUCK_S)
        raise
    return begun[0].result()


async def within(work: Callable[[], Awaitable[T]], limit_s: float) -> T:
    """The result of `work()`; it is cancelled, with a `TimeoutError`, if it takes longer."""
    async with asyncio.timeout(limit_s):
        return await work()
