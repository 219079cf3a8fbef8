"""Running the application until Ctrl-C."""

from __future__ import annotations

import ipaddress
import socket
import warnings
from typing import TYPE_CHECKING

import uvicorn

from saev_store.errors import ArgumentError, SaevStoreWarning

if TYPE_CHECKING:
    from starlette.applications import Starlette

#: Transfers that are under way when it ends may take this much longer.
_GRACE_S = 2
_BACKLOG = 256


def listen(host: str = "127.0.0.1", port: int = 8000) -> tuple[socket.socket, str]:
    """A socket that listens, and the URL that leads to it.

    Args:
        host: An address or name of this machine; loopback is for this machine's own programs only.
        port: From 0 to 65535; 0 takes any that is free.

    Raises:
        ArgumentError: one cannot listen there: it is taken, not allowed, or not an address of this machine.
    """
    if not 0 <= port <= 65535:
        raise ArgumentError(f"{port} is not a port: 0 to 65535 are", where="port")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        # Inherited by connections. asyncio sets it on sockets that know their protocol, which these do not, and a small
        # answer would wait 40 ms for the client to acknowledge its headers.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise ArgumentError(
            f"nothing can listen on {host} port {port}: {error.strerror or error}",
            where="host, port",
            remedy="Take another port; 0 takes any that is free.",
        ) from error
    number, taken = listening.getsockname()[:2]
    if not ipaddress.ip_address(number.partition("%")[0]).is_loopback:
        warnings.warn(f"everybody who reaches {number} port {taken} can read the store", SaevStoreWarning, stacklevel=2)
    name = f"[{host}]" if ":" in host else host
    return listening, f"http://{name}:{taken}/"


def serve(app: Starlette, listening: socket.socket) -> None:
    """Answer requests until Ctrl-C or SIGTERM; closes the socket.

    Args:
        app: What `application` made.
        listening: What `listen` opened.
    """
    config = uvicorn.Config(
        app, lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_S
    )
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        pass  # this is how it is meant to end
    finally:
        listening.close()
