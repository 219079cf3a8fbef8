"""Runs the application until Ctrl-C."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import uvicorn

from saev_store.errors import ArgumentError, SaevStoreError, SaevStoreWarning, brief

if TYPE_CHECKING:
    from starlette.applications import Starlette

#: Seconds that transfers may still take after Ctrl-C.
_GRACE_S = 2
_BACKLOG = 256
_ADDRESSES = "Name an address of this machine, such as 127.0.0.1 or 0.0.0.0."


def listen(host: str = "127.0.0.1", port: int = 8000) -> tuple[socket.socket, str]:
    """Open a listening socket; returns it and its URL.

    Args:
        host: An address or name of this machine; only programs of this machine reach a loopback address.
        port: From 0 to 65535; 0 takes any free one.

    Raises:
        ArgumentError: the port is taken or not allowed, or the host is not an address of this machine.

    Warns:
        SaevStoreWarning: the address is not loopback, so other machines can read the store.
    """
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"port is {brief(port)}; it must be from 0 to 65535", where="port")
    if not isinstance(host, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"host is {brief(host)}; it must be an address or a name", where="host")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        # Inherited by connections. Without it a small body waits up to 40 ms for the acknowledgement of its headers; asyncio
        # sets it only on sockets that know their protocol.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (socket.gaierror, UnicodeError) as error:
        raise ArgumentError(
            f"cannot listen on {host!r}: {getattr(error, 'strerror', None) or error}",
            where="host",
            remedy=_ADDRESSES,
        ) from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ArgumentError(f"{host} is no address of this machine", where="host", remedy=_ADDRESSES) from error
        raise ArgumentError(
            f"cannot listen on {host} port {port}: {error.strerror or error}",
            where="host, port",
            remedy="Choose another port; 0 takes any free one.",
        ) from error
    number, taken = listening.getsockname()[:2]
    if not ipaddress.ip_address(number.partition("%")[0]).is_loopback:
        try:
            warnings.warn(
                f"all machines that reach {number} port {taken} can read the store", SaevStoreWarning, stacklevel=2
            )
        except SaevStoreWarning:  # it is an error to the caller
            listening.close()
            raise
    name = f"[{host}]" if ":" in host else host
    return listening, f"http://{name}:{taken}/"


def serve(app: Starlette, listening: socket.socket) -> None:
    """Answer requests until Ctrl-C or SIGTERM; closes the socket.

    Args:
        app: From `application`.
        listening: From `listen`.
    """
    server = _server_of(app)
    # Transfers that Ctrl-C cuts are expected: uvicorn would log each with a traceback.
    log = logging.getLogger("uvicorn.error")

    def is_serving(record: logging.LogRecord) -> bool:
        _shorten(record)
        return not server.should_exit

    log.addFilter(is_serving)
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        pass  # the normal end
    finally:
        log.removeFilter(is_serving)
        listening.close()


def _server_of(app: Starlette) -> uvicorn.Server:
    """A server that answers requests when it is run."""
    return uvicorn.Server(
        uvicorn.Config(app, lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_S)
    )


def _shorten(record: logging.LogRecord) -> None:
    """Make one line of an answer that a store has broken off, such as by a shard that was cut meanwhile."""
    error = record.exc_info[1] if record.exc_info else None
    while isinstance(error, BaseExceptionGroup):  # of the task of a response
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    if isinstance(error, SaevStoreError):
        record.msg, record.args, record.exc_info = f"an answer was broken off: {error}", (), None


def serve_in_thread(app: Starlette, listening: socket.socket) -> Callable[[], None]:
    """Answer requests in a thread of this process, until the returned function is called; that closes the socket.

    Args:
        app: An ASGI application.
        listening: From `listen`.

    Raises:
        TransportError: the system gives no more threads. The socket is closed.
    """
    server = _server_of(app)

    has_begun, ended = False, threading.Event()

    def run() -> None:
        nonlocal has_begun
        has_begun = True
        try:
            if not server.should_exit:
                server.run(sockets=[listening])
        finally:
            ended.set()

    thread = threading.Thread(target=run, name="saev-store-server", daemon=True)

    def stop() -> None:
        server.should_exit = True
        # What has not begun ends at once. Not by `Thread.join`: a thread counts as ended when an interrupt ends that.
        if has_begun:
            ended.wait(2 * _GRACE_S)
        listening.close()

    try:
        thread.start()
    except BaseException:  # Ctrl-C too: nobody gets what would stop it
        stop()
        raise
    return stop
