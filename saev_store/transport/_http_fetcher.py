"""Ranges of files that a server speaks of in plain HTTP/1.1: asked for ahead of time, received as they come by few threads.

A client that gives each answer to whoever asked for it needs a thread for each request under way, and memory for each answer.
Here requests are sent at once, the kernel keeps what arrives (RFC 9293, 3.8.6), and a thread a core copies from there what is
ready. Nothing is forgiven: an answer that is not exactly what was asked for ends its connection, and whoever asked is told to
read the range in another way, where there are retries and errors with names.
"""

from __future__ import annotations

import errno
import fcntl
import heapq
import itertools
import os
import select
import socket
import struct
import sys
import termios
import threading
import time
from collections import deque
from contextlib import suppress

from saev_store.transport._http_range import Connection, NotAsAskedError, Wanted, check_head
from saev_store.transport._http_spare import SpareConnections, is_fresh

#: A socket tells of its bytes when it has so many of them (the kernel may settle for less), or all that are missing.
_READY_BYTES = 1 << 22
_HEAD_BYTES, _MOST_HEAD_BYTES = 2048, 16 << 10
#: Threads look whether something has to be given up every so often; slower than this is as good as silent.
_SLICE_S, _SWEEP_S = 0.2, 1.0
_SLOWEST_BYTES_PER_S = 1 << 20
#: After so many failures in a row nothing is asked for a while: the server, or the way to it, is not as it should be.
_MOST_FAILURES, _PAUSE_S = 3, 10.0

#: How long a thread waits for a body that has begun, and how the kernel is told.
_MOMENT_S = 0.02
_MOMENT = struct.pack("ll", 0, int(_MOMENT_S * 1e6))

#: Whether this system can do it: it takes Linux's `epoll`.
IS_POSSIBLE = hasattr(select, "epoll") and hasattr(os, "eventfd")


def _queued(sock: socket.socket) -> int:
    """Bytes that the kernel has for us."""
    return int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder)


class _Scratch:
    """Memory of one thread, which grows as needed."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())

    def room(self, nbytes: int) -> memoryview:
        """At least so many bytes, whose content nobody knows."""
        if len(self._memory) < nbytes:
            self._memory = memoryview(bytearray(nbytes))
        return self._memory


class HttpFetcher:
    """Connections to one server, and threads that receive; `close` ends both.

    Args:
        address: Of the server: family and socket address.
        n_threads: Threads.
        n_connections: Ranges under way at most; more of them wait.
        in_flight_bytes: Bytes under way at most, or one range: so much the kernel may have to keep.
        timeout_s: A connection on which nothing happens for so long is given up.
        spare: Connections to begin with, and where to leave them.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(
        self, address: tuple[int, tuple[object, ...]], spare: SpareConnections, *, n_threads: int, n_connections: int,
        in_flight_bytes: int, timeout_s: float,
    ) -> None:  # fmt: skip
        (self._family, self._address), self._spare = address, spare
        self._n_connections, self._in_flight_bytes, self._timeout_s = n_connections, in_flight_bytes, timeout_s
        self._lock = threading.Lock()
        self._waiting: deque[Wanted] = deque()
        self._n_under_way = self._bytes_under_way = 0
        self._connections: dict[int, Connection] = {}
        self._idle: list[Connection] = []
        self._n_failures, self._pause_until = 0, 0.0
        self._is_closed = False
        self._swept = time.monotonic()
        self._polling = threading.Lock()
        self._ready: list[tuple[int, int, Connection]] = []
        self._numbers = itertools.count(1)
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._n_running = n_threads
        self._threads = [
            threading.Thread(target=self._work, name=f"saev_store-fetch-{number}", daemon=True)
            for number in range(n_threads)
        ]
        for number, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError:  # there can be no more: those that run are enough
                with self._lock:
                    self._n_running -= n_threads - number
                del self._threads[number:]
                if not self._threads:
                    self._epoll.close()
                    os.close(self._wake)
                    raise
                break

    # -- asking --------------------------------------------------------------------------------------------------------

    def fetch(self, wanted: Wanted) -> bool:
        """Ask for a range, without waiting; False, and nothing done, where it had better be read in another way."""
        with self._lock:
            if self._is_closed or time.monotonic() < self._pause_until:
                return False
            self._waiting.append(wanted)
            admitted = self._admit()
            connections = [self._unused() for _ in admitted]
        for some, connection in zip(admitted, connections, strict=True):
            self._send(some, connection)
        return True

    def _admit(self) -> list[Wanted]:
        """Those that have waited longest and may be under way now; under the lock."""
        found: list[Wanted] = []
        while self._waiting and self._n_under_way < self._n_connections:
            nbytes = self._waiting[0].end - self._waiting[0].start
            if self._n_under_way and self._bytes_under_way + nbytes > self._in_flight_bytes:
                break
            self._n_under_way += 1
            self._bytes_under_way += nbytes
            found.append(self._waiting.popleft())
        return found

    def _ended(self, wanted: Wanted) -> list[Wanted]:
        """Count a range as no longer under way; who takes its place. Under the lock."""
        self._n_under_way -= 1
        self._bytes_under_way -= wanted.end - wanted.start
        return [] if self._is_closed else self._admit()

    def _unused(self) -> Connection | None:
        """A connection that nobody uses. Under the lock."""
        while self._idle:
            # Something on the way may have forgotten those that nobody used for long, without a word.
            if is_fresh((connection := self._idle.pop()).since):
                return connection
            self._drop(connection)
        return None

    def _send(self, wanted: Wanted, connection: Connection | None) -> None:
        """Send a request on a connection that nobody else uses, or on a new one."""
        if connection is None and not wanted.is_again and (spare := self._spare.take()) is not None:
            connection = Connection(spare, n_answers=1)
        if connection is None:
            try:
                connection = Connection(socket.socket(self._family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            except OSError:  # no descriptor is left
                self._give_up(wanted)
                return
        connection.wanted, connection.asked = wanted, time.monotonic()
        connection.since, connection.until = connection.asked, connection.asked + self._longest_s
        connection.number = wanted.number = wanted.number or next(self._numbers)
        try:
            if connection.is_open:
                self._ask(connection, wanted)
                return
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if connection.sock.connect_ex(self._address) not in (0, errno.EINPROGRESS):
                raise NotAsAskedError
            self._arm(connection, select.EPOLLOUT)
        except (OSError, NotAsAskedError):
            self._fail(connection)

    @property
    def _longest_s(self) -> float:
        """How long an answer may take: all that are under way share what the server, or the way to it, can give."""
        return self._timeout_s + self._bytes_under_way / _SLOWEST_BYTES_PER_S

    def _ask(self, connection: Connection, wanted: Wanted) -> None:
        connection.head, connection.got, connection.rest, connection.in_body = b"", 0, b"", False
        if connection.sock.send(wanted.head) != len(wanted.head):
            raise NotAsAskedError
        self._arm(connection, select.EPOLLIN)

    def _arm(self, connection: Connection, events: int) -> None:
        """Give a connection to whoever sees next that something happened on it."""
        with self._lock:
            if self._is_closed:
                raise NotAsAskedError
            connection.is_armed = True
            if connection.is_known:
                self._epoll.modify(connection.sock, events | select.EPOLLONESHOT)
            else:
                self._epoll.register(connection.sock, events | select.EPOLLONESHOT)
                self._connections[connection.sock.fileno()] = connection
                connection.is_known = True

    # -- receiving -----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        scratch = _Scratch()
        try:
            while not self._is_closed:
                if (connection := self._oldest_ready()) is not None:
                    self._progress(connection, scratch)
                self._sweep()
        finally:
            with self._lock:
                self._n_running -= 1
                is_last = self._n_running == 0
            if is_last:
                self._end()

    def _oldest_ready(self) -> Connection | None:
        """Of all connections on which something happened, that of the oldest request, which its caller waits for first."""
        with self._polling:
            ready = self._ready
            for fd, _ in self._epoll.poll(0 if ready else _SLICE_S):
                if (connection := self._mine(fd)) is not None:
                    heapq.heappush(ready, (connection.number, fd, connection))
            return heapq.heappop(ready)[2] if ready and not self._is_closed else None

    def _mine(self, fd: int) -> Connection | None:
        with self._lock:
            connection = self._connections.get(fd)
            if connection is None or not connection.is_armed:
                return None
            connection.is_armed = False
            return connection

    def _progress(self, connection: Connection, scratch: _Scratch) -> None:
        """Take what came on a connection that this thread owns."""
        connection.since, connection.queued, wanted = time.monotonic(), 0, connection.wanted
        if wanted is None:  # pragma: no cover - idle connections are not armed
            return
        try:
            if not connection.is_open:
                self._opened(connection)
                self._ask(connection, wanted)
                return
            if not (connection.in_body or self._head(connection, wanted)) or not self._body(
                connection, wanted, scratch
            ):
                self._arm(connection, select.EPOLLIN)
                return
        except Exception:  # what `take` refuses it refuses again, and is heard, where the range is read in another way
            self._fail(connection)
            return
        self._succeed(connection, wanted)

    def _opened(self, connection: Connection) -> None:
        """A connection has come about, or not. From now on receiving waits, but only for a moment."""
        sock = connection.sock
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise NotAsAskedError
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _MOMENT)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _MOMENT)
        connection.is_open = True

    def _head(self, connection: Connection, wanted: Wanted) -> bool:
        """Receive the head of an answer; True once it is there and as it has to be."""
        try:
            data = connection.sock.recv(_HEAD_BYTES)
        except BlockingIOError:
            return False
        connection.head += data
        end = connection.head.find(b"\r\n\r\n")
        if not data or (end < 0 and len(connection.head) > _MOST_HEAD_BYTES):
            raise NotAsAskedError
        if end < 0:
            return False
        connection.closes = check_head(connection.head[: end + 2], wanted)
        connection.in_body, connection.began, connection.rest = True, connection.since, connection.head[end + 4 :]
        connection.got = len(connection.rest)
        if connection.got > wanted.end - wanted.start:
            raise NotAsAskedError
        return True

    def _body(self, connection: Connection, wanted: Wanted, scratch: _Scratch) -> bool:
        """Receive what there is of a body, and show it; True once it is all there."""
        sock, nbytes, item = connection.sock, wanted.end - wanted.start, wanted.item_nbytes
        memory = scratch.room(_READY_BYTES + item)
        # What streams in is received in one go; a connection that has disappointed us has to have it ready.
        flags = socket.MSG_DONTWAIT if connection.is_slow else socket.MSG_WAITALL
        while (missing := nbytes - connection.got) > 0:
            have = len(connection.rest)
            n = min(missing, len(memory) - have)
            try:
                got = sock.recv_into(memory[have:], n, flags)
            except BlockingIOError:
                break
            if got == 0:
                raise NotAsAskedError
            memory[:have] = connection.rest
            have, connection.got = have + got, connection.got + got
            whole = have // item * item
            connection.rest = bytes(memory[whole:have])
            if whole:
                wanted.take(connection.got - have, memory[:whole])
            if got < n:
                break
        if (missing := nbytes - connection.got) > 0:
            connection.is_slow = True
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(missing, _READY_BYTES))
            return False
        if connection.rest:  # all of it came with the head
            wanted.take(nbytes - len(connection.rest), memoryview(connection.rest))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        connection.is_slow = time.monotonic() - connection.began > _MOMENT_S
        return True

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _succeed(self, connection: Connection, wanted: Wanted) -> None:
        connection.n_answers += 1
        with self._lock:
            self._n_failures = 0
            connection.wanted, following = None, self._ended(wanted)
            if connection.closes:
                self._drop(connection)
            else:
                connection.since = time.monotonic()
                self._idle.append(connection)
            connections = [self._unused() for _ in following]
        for some, its in zip(following, connections, strict=True):
            self._send(some, its)
        _tell(wanted, whole=True)

    def _fail(self, connection: Connection) -> None:
        """Give up a connection; its range is sent anew if nobody can have answered, or wanted in another way."""
        with self._lock:
            wanted, connection.wanted = connection.wanted, None
            self._drop(connection)
        # Servers end connections that nobody used for a while: that is no failure.
        is_stale = connection.n_answers > 0 and not connection.head
        if wanted is not None and is_stale and not wanted.is_again and not self._is_closed:
            wanted.is_again = True
            self._send(wanted, None)
        elif wanted is not None:
            self._give_up(wanted)

    def _give_up(self, wanted: Wanted) -> None:
        """A range, and after too many of them those that wait, have to be read in another way."""
        given_up = [wanted]
        with self._lock:
            self._n_failures += 1
            if self._n_failures >= _MOST_FAILURES:
                self._pause_until = time.monotonic() + _PAUSE_S
                given_up += self._waiting
                self._waiting.clear()
            following = self._ended(wanted)
        for some in given_up:
            _tell(some, whole=False)
        for some in following:
            self._send(some, None)

    def _drop(self, connection: Connection) -> None:
        """Close a connection; under the lock."""
        if self._connections.get(connection.sock.fileno()) is connection:
            del self._connections[connection.sock.fileno()]
            # A forked child may hold it open: then closing it alone would not end its events.
            with suppress(OSError):
                self._epoll.unregister(connection.sock)
        connection.sock.close()

    def _sweep(self) -> None:
        """Give up connections on which nothing happened for too long, or not enough."""
        now = time.monotonic()
        with self._lock:
            if now - self._swept < _SWEEP_S:
                return
            self._swept = now
            armed = [connection for connection in self._connections.values() if connection.is_armed]
            for connection in armed:
                # It is told of only when there is much of it: what has come meanwhile is no silence either.
                if connection.in_body and (queued := _queued(connection.sock)) != connection.queued:
                    connection.queued, connection.since = queued, now
                # More may be under way than when it was asked.
                connection.until = max(connection.until, connection.asked + self._longest_s)
            late = [some for some in armed if now - some.since > self._timeout_s or now > some.until]
            for connection in late:
                connection.is_armed = False
                connection.n_answers = 0  # silence is no stale connection
        for connection in late:
            self._fail(connection)

    def close(self) -> None:
        """Ask for nothing more, and end the threads; `join` waits for them."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.eventfd_write(self._wake, 1)

    def join(self, deadline: float) -> None:
        """Wait for the threads until `time.monotonic()` is `deadline`."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def is_alive(self) -> bool:
        """Whether a thread may still call `take`."""
        return any(thread.is_alive() for thread in self._threads)

    def _end(self) -> None:
        """What the last thread does."""
        with self._lock:
            self._is_closed = True
            unanswered = [*self._waiting]
            # Others were taken by `fetch` in this moment: it finds that all is over, and closes them.
            nobodys = [some for some in self._connections.values() if some.is_armed] + [
                some for *_, some in self._ready
            ]
            for connection in nobodys:
                if connection.wanted is not None:
                    unanswered.append(connection.wanted)
                    connection.wanted = None
                self._drop(connection)
            spare: list[socket.socket] = []
            while (connection := self._unused()) is not None:
                spare.append(connection.sock)
            self._spare.give(spare[::-1])
            self._connections.clear()
            self._waiting.clear()
            self._ready.clear()
            self._epoll.close()
            os.close(self._wake)
        for wanted in unanswered:
            _tell(wanted, whole=False)


def _tell(wanted: Wanted, *, whole: bool) -> None:
    """Say what became of a range; what its owner makes of that is no concern of the others, who wait for this thread."""
    with suppress(Exception):
        wanted.done(whole)
