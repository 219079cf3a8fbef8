"""A program that read through obstore ends with its own exit status, whatever obstore's threads do at that moment."""

from __future__ import annotations

import contextlib
import http.server
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
from test_transport_contract import RangeHandler
from waiting import HANG_S

pytest.importorskip("obstore")

# The interpreter takes half a second to shut down: a thread that then wants the GIL is ended by Python.
SLOW_SHUTDOWN = """
import time
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)
slow = Slow()
"""

READ = """
import sys
from saev_store.transport import open_transport
transport = open_transport(sys.argv[1], engine="obstore")
assert bytes(transport.get_ranges("a.bin", starts=[3], ends=[7])[0]) == b"3456"
"""

# A thread of obstore has handed over its answer, and is held up on its way back. (In a namespace of its own: the thread's
# function would keep `slow` alive.)
LATE_THREAD = """
exec('''
import asyncio.selector_events, threading, time
loops = asyncio.selector_events.BaseSelectorEventLoop
wake = loops._write_to_self
def wake_and_sleep(self):
    wake(self)
    if threading.get_ident() not in {thread.ident for thread in threading.enumerate()}:
        time.sleep(0.2)
loops._write_to_self = wake_and_sleep
''', {})
"""

# The program ends while a request is under way; it is answered while other exit handlers run.
IN_BACKGROUND = """
import atexit, threading
atexit.register(time.sleep, 0.3)
import sys
from saev_store.transport import open_transport
transport = open_transport(sys.argv[1], engine="obstore")
threading.Thread(target=transport.read, args=("slow.bin",), daemon=True).start()
time.sleep(0.2)
"""


class SlowHandler(RangeHandler):
    """Answers requests for `slow.bin` after 0.4 s."""

    def do_GET(self) -> None:  # noqa: N802 - the name of http.server
        if "slow" in self.path:
            time.sleep(0.4)
        with contextlib.suppress(BrokenPipeError):  # the reader is gone
            super().do_GET()


@pytest.fixture
def url(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"0123456789")
    (tmp_path / "slow.bin").write_bytes(b"0123")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(SlowHandler, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def run(script: str, url: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", script, url], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_thread_that_is_still_handing_over_its_answer(url):
    run(SLOW_SHUTDOWN + LATE_THREAD + READ, url)


def test_a_request_under_way(url):
    run(SLOW_SHUTDOWN + LATE_THREAD + IN_BACKGROUND, url)
