"""Ranges fetched ahead, from a server that answers as told: right bytes, or word at once that they have to be read otherwise."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
from waiting import HANG_S, soon

from saev_store.transport import _http_fetcher, _http_spare
from saev_store.transport._http_fetcher import HttpFetcher
from saev_store.transport._http_range import Connection, Wanted
from saev_store.transport._http_spare import SpareConnections

TRUTH = np.random.default_rng(5).bytes(9_000_000)
ETAG = '"abc"'

#: Gives an answer to the n-th request of the server, for a range: pieces to send, None to end the connection.
Answers = Callable[[int, int, int], list[bytes | None]]


def head(start: int, end: int, *, status: str = "HTTP/1.1 206 Partial Content", **headers: str | None) -> bytes:
    """The head of a right answer, but for headers that are named; None leaves one out."""
    plain = {
        "Content-Length": str(end - start),
        "Content-Range": f"bytes {start}-{end - 1}/{len(TRUTH)}",
        "ETag": ETAG,
        "Date": "Sun, 22 Nov 2026 07:00:00 GMT",
    }
    for name, value in headers.items():
        plain[name.replace("_", "-")] = value
    lines = [status, *(f"{name}: {value}" for name, value in plain.items() if value is not None), "", ""]
    return "\r\n".join(lines).encode()


def right(n: int, start: int, end: int) -> list[bytes | None]:
    return [head(start, end) + TRUTH[start:end]]


class Server:
    """Answers ranges as it is told, each connection in a thread of its own."""

    def __init__(self, answers: Answers) -> None:
        self.answers, self.n_requests, self.n_connections = answers, 0, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock = self.listener.accept()[0]
            except OSError:
                return
            self.n_connections += 1
            self._open.append(sock)
            threading.Thread(target=self._talk, args=(sock,), daemon=True).start()

    def _talk(self, sock: socket.socket) -> None:
        buffer = b""
        while True:
            try:
                while b"\r\n\r\n" not in buffer:
                    more = sock.recv(65536)
                    if not more:
                        sock.close()
                        return
                    buffer += more
                asked, _, buffer = buffer.partition(b"\r\n\r\n")
                low, _, high = asked.rpartition(b"bytes=")[2].partition(b"-")
                with self._lock:
                    number, self.n_requests = self.n_requests, self.n_requests + 1
                for piece in self.answers(number, int(low), int(high) + 1):
                    if piece is None:
                        sock.close()
                        return
                    sock.sendall(piece)
            except OSError:
                return

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for sock in self._open:
            sock.close()


@contextmanager
def fetching(answers: Answers, **options: object) -> Iterator[tuple[Server, HttpFetcher]]:
    server, spare = Server(answers), SpareConnections()
    fetcher = open_fetcher(server, spare, **options)
    try:
        yield server, fetcher
    finally:
        fetcher.close()
        fetcher.join(time.monotonic() + HANG_S)
        assert not fetcher.is_alive
        server.close()
        while (sock := spare.take()) is not None:
            sock.close()


def open_fetcher(server: Server, spare: SpareConnections, **options: object) -> HttpFetcher:
    options = {"n_threads": 2, "n_connections": 8, "in_flight_bytes": 1 << 30, "timeout_s": HANG_S, **options}
    return HttpFetcher((socket.AF_INET, server.listener.getsockname()), spare, **options)


class Fetch:
    """One range that is asked for, and what came of it."""

    def __init__(self, fetcher: HttpFetcher, start: int, end: int, *, item_nbytes: int = 1) -> None:
        self.start, self.end, self.item_nbytes = start, end, item_nbytes
        self.got, self.told = bytearray(), SimpleQueue[bool]()
        request = b"GET / HTTP/1.1\r\nHost: x\r\nRange: bytes=%d-%d\r\n\r\n" % (start, end - 1)
        self.wanted = Wanted(request, start, end, ETAG, len(TRUTH), item_nbytes, self.take, self.told.put)
        self.is_asked = fetcher.fetch(self.wanted)

    def take(self, at: int, some: memoryview) -> None:
        assert at == len(self.got)
        assert some
        assert len(some) % self.item_nbytes == 0
        self.got += some

    def whole(self) -> bool:
        """Whether it came, once that is certain; bytes are right either way."""
        found = self.told.get(timeout=HANG_S)
        assert self.got == TRUTH[self.start : self.end][: None if found else len(self.got)]
        return found


class Unsent:
    """Instead of a fetcher, for ranges that are asked for later."""

    @staticmethod
    def fetch(wanted: Wanted) -> bool:
        return False


def test_many_ranges_over_few_connections():
    rng = np.random.default_rng(0)
    with fetching(right) as (server, fetcher):
        starts = rng.integers(0, 8_000_000, 300) // 12 * 12
        fetches = [Fetch(fetcher, s, s + 12 * n, item_nbytes=12) for s, n in zip(starts, rng.integers(1, 60_000, 300), strict=True)]  # fmt: skip
        assert all(fetch.is_asked and fetch.whole() for fetch in fetches)
        assert server.n_requests == 300
        assert server.n_connections <= 8
        assert all(fetch.told.empty() for fetch in fetches)


def test_no_more_bytes_are_under_way_than_allowed():
    """Or one range: who asks for more than that at once has to get it, too."""
    lock, now, most = threading.Lock(), 0, 0

    def answers(n: int, start: int, end: int) -> Iterator[bytes]:
        nonlocal now, most
        with lock:
            now += end - start
            most = max(most, now)
        time.sleep(0.002)
        with lock:
            now -= end - start
        yield from right(n, start, end)

    with fetching(answers, in_flight_bytes=3000) as (_, fetcher):
        sizes = [*[1000] * 30, 5000, *[1000] * 30]
        assert all(fetch.whole() for fetch in [Fetch(fetcher, n, n + size) for n, size in enumerate(sizes)])
    assert 2000 <= most <= 5000


def test_ranges_longer_than_what_is_received_at_once():
    with fetching(right) as (_, fetcher):
        assert all(Fetch(fetcher, n, 8_997_000 + n, item_nbytes=3000).whole() for n in (0, 7, 999))


def in_pieces(n: int, start: int, end: int) -> list[bytes | None]:
    """The head byte by byte, the body in pieces with pauses between them."""
    body = [TRUTH[at : min(at + 50_001, end)] for at in range(start, end, 50_001)]
    time.sleep(0.01)
    return [*(bytes([byte]) for byte in head(start, end)), *body]


@pytest.mark.parametrize("pause_s", [0, 0.004, 0.05])
def test_answers_that_trickle(pause_s: float):
    """Items are whole, wherever pieces end; slow connections do not hold up others."""

    def slowly(n: int, start: int, end: int) -> Iterator[bytes]:
        for piece in in_pieces(n, start, end):
            yield piece
            if len(piece) > 1:
                time.sleep(pause_s)

    with fetching(slowly) as (_, fetcher):
        fetches = [Fetch(fetcher, n, n + 400_000, item_nbytes=1000) for n in range(6)]
        assert all(fetch.whole() for fetch in fetches)
        assert all(Fetch(fetcher, n, n + 7000, item_nbytes=70).whole() for n in range(6))


WRONG: dict[str, Callable[[int, int], list[bytes | None]]] = {
    "another status": lambda a, b: [head(a, b, status="HTTP/1.1 200 OK") + TRUTH[a:b]],
    "an error": lambda a, b: [b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n"],
    "a redirection": lambda a, b: [b"HTTP/1.1 307 x\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n"],
    "another version of HTTP": lambda a, b: [head(a, b, status="HTTP/2 206 Partial Content") + TRUTH[a:b]],
    "another range": lambda a, b: [head(a, b, Content_Range=f"bytes {a + 1}-{b}/{len(TRUTH)}") + TRUTH[a + 1 : b + 1]],
    "an object of another size": lambda a, b: [head(a, b, Content_Range=f"bytes {a}-{b - 1}/7") + TRUTH[a:b]],
    "an object of unknown size": lambda a, b: [head(a, b, Content_Range=f"bytes {a}-{b - 1}/*") + TRUTH[a:b]],
    "no range": lambda a, b: [head(a, b, Content_Range=None) + TRUTH[a:b]],
    "a range in other units": lambda a, b: [head(a, b, Content_Range=f"rows {a}-{b - 1}/{len(TRUTH)}") + TRUTH[a:b]],
    "another object": lambda a, b: [head(a, b, ETag='"abd"') + TRUTH[a:b]],
    "no version": lambda a, b: [head(a, b, ETag=None) + TRUTH[a:b]],
    "no length": lambda a, b: [head(a, b, Content_Length=None) + TRUTH[a:b]],
    "a shorter length": lambda a, b: [head(a, b, Content_Length=str(b - a - 1)) + TRUTH[a : b - 1]],
    "a longer length": lambda a, b: [head(a, b, Content_Length=str(b - a + 1)) + TRUTH[a : b + 1]],
    "two lengths": lambda a, b: [head(a, b, content_length=str(b - a)) + TRUTH[a:b]],
    "a huge length": lambda a, b: [head(a, b, Content_Length="9" * 30) + TRUTH[a:b]],
    "chunks": lambda a, b: [head(a, b, Transfer_Encoding="chunked") + b"5\r\nabcde\r\n0\r\n\r\n"],
    "packed bytes": lambda a, b: [head(a, b, Content_Encoding="gzip") + TRUTH[a:b]],
    "a line that is no header": lambda a, b: [head(a, b).replace(b"Date: ", b"Date ").replace(b":00:00", b"") + TRUTH[a:b]],
    "a name that ends in a blank": lambda a, b: [head(a, b).replace(b"Date:", b"Transfer-Encoding :") + TRUTH[a:b]],
    "a name that goes on": lambda a, b: [head(a, b).replace(b"Date:", b" Date:") + TRUTH[a:b]],
    "a head without end": lambda a, b: [b"HTTP/1.1 206 x\r\n" + b"A: b\r\n" * 5000],
    "garbage": lambda a, b: [bytes(range(256)) * 100],
    "nothing": lambda a, b: [None],
    "half a head": lambda a, b: [head(a, b)[:50], None],
    "half a body": lambda a, b: [head(a, b) + TRUTH[a : (a + b) // 2], None],
    "all but a byte": lambda a, b: [head(a, b) + TRUTH[a : b - 1], None],
    "a short body and more": lambda a, b: [head(a, b) + TRUTH[a:b] + b"more"],
}  # fmt: skip


@pytest.mark.parametrize("nbytes", [600, 300_000])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_as_asked_for(wrong: str, nbytes: int):
    """Whoever asked is told, no wrong byte is shown, and the next answer is not mixed up with the rest of this one."""

    def answers(n: int, start: int, end: int) -> list[bytes | None]:
        return WRONG[wrong](start, end) if n == 0 else right(n, start, end)

    with fetching(answers, n_connections=1) as (server, fetcher):
        first, second, third = (Fetch(fetcher, n, n + nbytes) for n in (5, 700_000, 17))
        # What follows a whole answer is noticed at once if it came with it, or with the next one.
        assert first.whole() == (wrong == "a short body and more" and nbytes > 10_000)
        assert second.whole() == third.whole() or wrong == "a short body and more"
        assert Fetch(fetcher, 40, 40 + nbytes).whole()
        assert server.n_connections == 2


def test_answers_that_end_their_connection():
    answers = [
        lambda a, b: head(a, b, Connection="close"),
        lambda a, b: head(a, b, status="HTTP/1.0 206 Partial Content"),
    ]
    with fetching(lambda n, a, b: [answers[n % 2](a, b) + TRUTH[a:b], None], n_connections=2) as (server, fetcher):
        assert all(fetch.whole() for fetch in [Fetch(fetcher, n, n + 5000) for n in range(20)])
        assert server.n_connections == 20


def test_a_connection_that_ended_while_nobody_used_it_is_no_failure():
    with fetching(lambda n, a, b: [*right(n, a, b), None], n_connections=1) as (server, fetcher):
        for n in range(8):
            assert Fetch(fetcher, n, n + 5000).whole()
            time.sleep(0.02)
        assert server.n_connections == 8


def test_silence_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_http_fetcher, "_SWEEP_S", 0.05)
    ended = threading.Event()

    def silent(n: int, start: int, end: int) -> Iterator[bytes]:
        if n:
            yield head(start, end) + TRUTH[start : start + 1000]
        ended.wait(HANG_S)
        yield TRUTH[start + 1000 : end]

    with fetching(silent, timeout_s=0.3) as (_, fetcher):
        fetches = [Fetch(fetcher, n, n + 100_000) for n in range(2)]
        assert not any(fetch.whole() for fetch in fetches)
        ended.set()
        time.sleep(0.05)
        assert all(fetch.told.empty() for fetch in fetches)


class Clock:
    """Time that passes for a fetcher when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = float(int(time.monotonic()))  # whole seconds, of which differences are exact
        for name, value in (("time", SimpleNamespace(monotonic=lambda: self.now)), ("_SLICE_S", 0.005)):
            monkeypatch.setattr(_http_fetcher, name, value)
        monkeypatch.setattr(_http_spare, "time", _http_fetcher.time)

    def passes(self, seconds: float, fetcher: HttpFetcher) -> None:
        """It is later, and the fetcher has looked what has to be given up."""
        self.now += seconds
        assert soon(lambda: fetcher._swept == self.now)


def test_what_comes_slowly_is_no_silence(monkeypatch: pytest.MonkeyPatch):
    """Bytes that come steadily, although the socket does not tell of so few; and then none any more."""
    monkeypatch.setattr(_http_fetcher, "_SLOWEST_BYTES_PER_S", 1)
    clock, go_on, sent = Clock(monkeypatch), SimpleQueue[bool](), SimpleQueue[bool]()

    def slowly(n: int, start: int, end: int) -> Iterator[bytes]:
        yield head(start, end) + TRUTH[start : start + 10]
        sent.put(True)
        for at in range(start + 10, end, 30_000):
            if not go_on.get(timeout=HANG_S):
                return
            yield TRUTH[at : min(at + 30_000, end)]
            sent.put(True)

    with fetching(slowly, timeout_s=10) as (_, fetcher):
        for n_pieces in (20, 7):
            fetch = Fetch(fetcher, 0, 600_010)
            for _ in range(n_pieces):
                assert sent.get(timeout=HANG_S)
                assert soon(lambda: all(some.is_armed for some in list(fetcher._connections.values())))
                clock.passes(2, fetcher)
                assert fetch.told.empty()
                go_on.put(True)
            assert sent.get(timeout=HANG_S)
            if n_pieces == 20:
                assert fetch.whole()
        while fetch.told.empty():
            clock.passes(4, fetcher)
        assert not fetch.whole()
        go_on.put(False)


@pytest.mark.parametrize("is_in_time", [True, False])
def test_all_that_are_under_way_share_what_there_is(monkeypatch: pytest.MonkeyPatch, is_in_time: bool):
    """Eight ranges of a MiB may take the time that 8 MiB take, also the one that was asked first, but no longer."""
    clock, nbytes = Clock(monkeypatch), 1 << 20
    told, heads = [SimpleQueue[bytes]() for _ in range(8)], [head(n, n + nbytes) for n in range(8)]

    def together(n: int, start: int, end: int) -> Iterator[bytes]:
        while some := told[start].get(timeout=HANG_S):
            yield some

    with fetching(together, timeout_s=2.5) as (_, fetcher):
        fetches = [Fetch(fetcher, n, n + nbytes) for n in range(8)]
        for at in range(10):  # no silence: there is a byte for each of them every second
            for queue, its in zip(told, heads, strict=True):
                queue.put(its[at : at + 1])
            assert soon(lambda at=at: [len(some.head) for some in fetcher._connections.values()] == [at + 1] * 8)
            clock.passes(1, fetcher)
            assert all(fetch.told.empty() for fetch in fetches)
        if not is_in_time:
            clock.passes(1, fetcher)
        for n, queue in enumerate(told):
            queue.put(heads[n][10:] + TRUTH[n : n + nbytes])
            queue.put(b"")
        assert [fetch.whole() for fetch in fetches] == [is_in_time] * 8


def test_a_trickle_is_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch):
    """Bytes that come one by one are no silence, but no answer either."""
    monkeypatch.setattr(_http_fetcher, "_SWEEP_S", 0.05)

    def trickle(n: int, start: int, end: int) -> Iterator[bytes]:
        while True:
            yield b"H"
            time.sleep(0.02)

    with fetching(trickle, timeout_s=0.5) as (_, fetcher):
        assert not Fetch(fetcher, 0, 1000).whole()


def test_after_failures_nothing_is_asked_for_a_while(monkeypatch: pytest.MonkeyPatch):
    with fetching(lambda n, a, b: [None] if n < 3 else right(n, a, b), n_connections=1) as (server, fetcher):
        fetches = [Fetch(fetcher, n, n + 100) for n in range(40)]
        # Those that waited are told, too: the way they are read in is tried and reliable.
        assert not any(fetch.whole() for fetch in fetches if fetch.is_asked)
        assert server.n_requests == 3
        assert not Fetch(fetcher, 0, 10).is_asked
        now = time.monotonic()
        monkeypatch.setattr(_http_fetcher.time, "monotonic", lambda: now + 11)
        assert Fetch(fetcher, 0, 10).whole()


def test_nobody_listens():
    with fetching(right) as (server, fetcher):
        server.close()
        fetches = [Fetch(fetcher, n, n + 100) for n in range(20)]
        assert not any(fetch.whole() for fetch in fetches if fetch.is_asked)
        assert not Fetch(fetcher, 0, 10).is_asked
        server.listener = socket.create_server(("127.0.0.1", 0))  # for the end to close


def test_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch):
    with fetching(right, n_connections=2) as (_, fetcher):
        assert Fetch(fetcher, 0, 10).whole()
        with monkeypatch.context() as changed:

            def refuse(*_: object) -> None:
                raise OSError(24, "Too many open files")

            changed.setattr(_http_fetcher.socket, "socket", refuse)
            fetches = [Fetch(fetcher, n, n + 100_000) for n in range(8)]
            found = [fetch.whole() for fetch in fetches if fetch.is_asked]
        assert True in found  # there is one connection
        assert all(fetch.told.empty() for fetch in fetches)


def test_what_take_refuses_is_not_taken():
    with fetching(right) as (_, fetcher):
        fetch = Fetch.__new__(Fetch)
        fetch.take = lambda at, some: 1 // 0
        fetch.__init__(fetcher, 0, 50_000)
        assert not fetch.whole()
        assert Fetch(fetcher, 0, 50_000).whole()


def test_closing_tells_everybody_and_nothing_is_taken_after_it():
    """Whoever lent memory may use it for something else as soon as the threads have ended."""
    held = threading.Event()

    def slow(n: int, start: int, end: int) -> Iterator[bytes]:
        yield head(start, end) + TRUTH[start : start + 100_000]
        held.wait(HANG_S)
        yield TRUTH[start + 100_000 : end]

    with fetching(slow, n_connections=4) as (_, fetcher):
        fetches = [Fetch(fetcher, n, n + 200_000) for n in range(12)]
        while sum(len(fetch.got) > 0 for fetch in fetches) < 2:
            time.sleep(0.01)
        fetcher.close()
        fetcher.join(time.monotonic() + HANG_S)
        assert not fetcher.is_alive
        taken = [len(fetch.got) for fetch in fetches]
        assert not any(fetch.told.get_nowait() for fetch in fetches)
        held.set()
        time.sleep(0.05)
        assert taken == [len(fetch.got) for fetch in fetches]
        assert not Fetch(fetcher, 0, 10).is_asked
        assert all(fetch.told.empty() for fetch in fetches)


def test_the_next_fetcher_goes_on_with_connections_that_are_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_http_spare, "_SPARE_S", HANG_S)
    server, spare = Server(right), SpareConnections()
    # A fetcher that is answered at once needs one of them only: the other one is there for the next all the same.
    for n_at_once in (9, 1, 9, 9):
        fetcher = open_fetcher(server, spare, n_connections=2)
        for first in range(0, 9, n_at_once):
            assert all(
                fetch.whole() for fetch in [Fetch(fetcher, n, n + 300_000) for n in range(first, first + n_at_once)]
            )
        fetcher.close()
        fetcher.join(time.monotonic() + HANG_S)
    assert server.n_connections <= 2
    # Nobody knows what became of them after a while, and a forked child has none of its own.
    for name, value in (("time.monotonic", time.monotonic() + HANG_S + 60), ("os.getpid", -1)):
        spare.give([socket.socket()])
        with monkeypatch.context() as changed:
            changed.setattr(f"saev_store.transport._http_spare.{name}", lambda value=value: value)
            assert spare.take() is None
    server.close()


def test_of_too_many_connections_the_oldest_are_closed():
    spare, socks = SpareConnections(), [socket.socket() for _ in range(130)]
    spare.give(socks[:100])
    spare.give(socks[100:])
    assert [sock.fileno() < 0 for sock in socks] == [True] * 2 + [False] * 128
    assert [spare.take() for _ in range(129)] == [*reversed(socks[2:]), None]
    for sock in socks:
        sock.close()


def test_connections_that_nobody_used_for_long_are_closed(monkeypatch: pytest.MonkeyPatch):
    """What is between may have forgotten them, and would let whoever uses them wait."""
    clock = Clock(monkeypatch)
    server, spare = Server(right), SpareConnections()
    fetcher = open_fetcher(server, spare, n_connections=1)
    for n_connections, seconds in ((1, 4.0), (1, 4.0), (2, 6.0), (2, 0.0)):
        clock.passes(seconds, fetcher)
        assert Fetch(fetcher, 0, 1000).whole()
        assert server.n_connections == n_connections
    assert len(fetcher._connections) == 1
    clock.passes(6, fetcher)
    fetcher.close()
    fetcher.join(time.monotonic() + HANG_S)
    assert spare.take() is None
    server.close()


def test_a_connection_that_was_just_taken_is_left_to_who_took_it(monkeypatch: pytest.MonkeyPatch):
    """Its descriptor could be another socket's by the time that the request is sent."""
    with fetching(right, n_connections=2) as (_, fetcher):
        assert all(fetch.whole() for fetch in [Fetch(fetcher, n, n + 1000) for n in range(2)])
        plainly, socks = fetcher._send, []

        def send(wanted: Wanted, connection: Connection | None) -> None:
            fetcher.close()
            fetcher.join(time.monotonic() + HANG_S)
            assert connection is not None
            assert connection.sock.fileno() >= 0
            socks.append(connection.sock)
            plainly(wanted, connection)

        monkeypatch.setattr(fetcher, "_send", send)
        fetch = Fetch(fetcher, 0, 1000)
        assert fetch.is_asked
        assert not fetch.whole()
        assert fetch.told.empty()
        assert [sock.fileno() for sock in socks] == [-1]


@pytest.mark.parametrize("comes", [True, False])
def test_who_is_told_and_fails_does_not_end_what_others_wait_for(comes: bool):
    def answers(n: int, start: int, end: int) -> list[bytes | None]:
        return right(n, start, end) if n or comes else [None]

    with fetching(answers, n_connections=1, n_threads=1) as (server, fetcher):
        first, *others = (Fetch(Unsent, n, n + 300_000) for n in range(4))
        first.wanted.done = lambda whole: 1 // 0
        assert all(fetcher.fetch(fetch.wanted) for fetch in (first, *others))
        assert all(fetch.whole() for fetch in others)
        assert server.n_connections == 2 - comes


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fetcher_whose_threads_have_died_takes_nothing_more(monkeypatch: pytest.MonkeyPatch):
    with fetching(right) as (_, fetcher):
        monkeypatch.setattr(fetcher, "_sweep", lambda: 1 // 0)
        fetcher.join(time.monotonic() + HANG_S)
        assert not Fetch(fetcher, 0, 1000).is_asked


@pytest.mark.parametrize("n_started", [0, 1, 2])
def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, n_started: int):
    """Those that run are enough, and end as ever; where there are none, nothing is left behind."""
    plainly, numbers = threading.Thread.start, itertools.count()

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("saev_store-fetch") and next(numbers) >= n_started:
            raise RuntimeError("can't start new thread")
        plainly(thread)

    def ours() -> list[str]:
        found = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]  # fmt: skip
        return sorted(name for name in found if name.startswith("anon_inode:[event"))

    before = ours()
    monkeypatch.setattr(threading.Thread, "start", start)
    if n_started == 0:
        with pytest.raises(RuntimeError), fetching(right, n_threads=3):
            pass
    else:
        with fetching(right, n_threads=3) as (_, fetcher):
            assert all(fetch.whole() for fetch in [Fetch(fetcher, n, n + 1000) for n in range(20)])
    assert ours() == before
