"""The ASGI application of the page: its addresses, the hosts that it answers for, and answers as JSON."""

from __future__ import annotations

import json
import mimetypes
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    LayerNotFoundError,
    NotFoundError,
    SaevStoreError,
    SelectionError,
    brief,
)
from saev_store.view._answers import Answer, store_answer
from saev_store.view._compare import compare_answer
from saev_store.view._examples import example_answer, token_answer
from saev_store.view._layers import layers_answer
from saev_store.view._pictures import picture_bytes
from saev_store.view._viewed import Viewed

#: Nothing from other hosts. Notebook servers on this machine may show the page in a frame.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; "
        "frame-ancestors 'self' http://localhost:* http://127.0.0.1:* https://localhost:* vscode-webview:"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
#: A web page of another host could name itself as an address of this machine (DNS rebinding).
_HOSTS = ["127.0.0.1", "localhost"]
#: The status of an answer by the class of an error; the first that matches.
_STATUS = (
    ((ArgumentError, SelectionError, LayerNotFoundError), 400),
    (CorruptShardError, 410),
    (NotFoundError, 404),
    (SaevStoreError, 502),
)

mimetypes.add_type("text/javascript", ".js")  # the registry of Windows may name another one


def application(viewed: Viewed, other: Viewed | None, *, token: str) -> Starlette:
    """An ASGI application of the page of a store.

    Args:
        viewed: The store.
        other: A second store, to compare the first one with.
        token: The first part of all addresses; other addresses are not found.
    """
    views = _views(viewed, other)

    def answer(request: Request) -> Response:
        view = views.get(request.path_params["view"])
        if view is None:
            raise NotFoundError(f"there is no view {brief(request.path_params['view'])}", where="view")
        return _json(view(request.query_params))

    def image(request: Request) -> Response:
        return Response(picture_bytes(viewed, request.path_params["example"]), media_type="image/png")

    routes = [
        Route("/api/{view}", answer, methods=["GET"]),
        Route("/image/{example:int}", image, methods=["GET"]),
        Mount("/", StaticFiles(packages=[("saev_store.view", "static")], html=True)),
    ]
    return Starlette(
        routes=[Mount(f"/{token}", routes=routes)],
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=_with_headers),
            Middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS, www_redirect=False),
        ],
        exception_handlers={SaevStoreError: _failure},
    )


def _views(viewed: Viewed, other: Viewed | None) -> Mapping[str, Callable[[Mapping[str, str]], Answer]]:
    """The functions that answer, by the names of the views."""

    def compare(query: Mapping[str, str]) -> Answer:
        if other is None:
            raise ArgumentError("there is no second store to compare with", where="compare")
        return compare_answer(viewed, other, _integer(query, "example"), query.get("layer"), query.get("layer_b"))

    return {
        "store": lambda _: {**store_answer(viewed), "other": None if other is None else other.store.name},
        "layers": lambda query: layers_answer(viewed, query.get("layer")),
        "example": lambda query: example_answer(
            viewed,
            _integer(query, "example"),
            query.get("layer"),
            first=_integer(query, "first") if "first" in query else None,
            token=_integer(query, "token") if "token" in query else 0,
        ),
        "token": lambda query: token_answer(
            viewed, _integer(query, "example"), _integer(query, "token"), query.get("layer")
        ),
        "compare": compare,
    }


def _integer(query: Mapping[str, str], name: str) -> int:
    try:
        return int(query.get(name, ""))
    except ValueError:
        raise ArgumentError(f"{name} must be an integer, got {brief(query.get(name))}", where=name) from None


def _json(answer: Answer, status_code: int = 200) -> Response:
    return Response(json.dumps(answer, allow_nan=False), status_code, media_type="application/json")


def _failure(_: Request, error: Exception) -> Response:
    refused = cast("SaevStoreError", error)
    status = next(status for classes, status in _STATUS if isinstance(error, classes))
    found = {"kind": refused.kind, "message": refused.message, "where": refused.where, "remedy": refused.remedy}
    return _json({"error": found}, status)


async def _with_headers(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await answer(request)
    response.headers.update(_HEADERS)
    return response
