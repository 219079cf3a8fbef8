"""The ASGI application of the page: addresses, access, and answers as JSON. Only GET, only from the page itself."""

from __future__ import annotations

import hmac
import json
import logging
from importlib.resources import files
from typing import cast

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    LayerNotFoundError,
    NotFoundError,
    SaevStoreError,
    SelectionError,
)
from saev_store.serve import is_known_host
from saev_store.view._answers import Answer, error_answer
from saev_store.view._pages import Pages, Query, integer

_LOG = logging.getLogger("saev_store.view")
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "LICENSE": "text/plain; charset=utf-8",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors {}"
)
#: Pages that may hold the page in a frame: none, or those of notebook servers on this machine.
_NO_FRAME, _NOTEBOOK_FRAME = (
    "'none'",
    "'self' http://localhost:* http://127.0.0.1:* https://localhost:* vscode-webview:",
)


def application(pages: Pages, *, token: str, in_notebook: bool = False) -> Starlette:
    """An ASGI application of the page.

    Args:
        pages: The stores, and what is answered about them.
        token: All addresses begin with it; whoever does not know it gets 404.
        in_notebook: Whether pages of a notebook server on this machine may hold the page in a frame.
    """
    answers = _Application(pages, token, _POLICY.format(_NOTEBOOK_FRAME if in_notebook else _NO_FRAME))
    every = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"]
    return Starlette(routes=[Route("/{path:path}", answers.answer, methods=every)])


class _Application:
    """Answers requests."""

    def __init__(self, pages: Pages, token: str, policy: str) -> None:
        self._pages, self._token = pages, token
        self._static = _static_files()
        self._headers = {
            "Content-Security-Policy": policy,
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }

    async def answer(self, request: Request) -> Response:
        """The response to one request."""
        response = self._refusal(request) or await self._found(request)
        response.headers.update(self._headers)
        return response

    def _refusal(self, request: Request) -> Response | None:
        """Why a request is refused; None if it is not."""
        headers = request.headers
        host = headers.get("host", "")
        if not is_known_host(host):
            return PlainTextResponse("this server does not answer for this host name\n", status_code=421)
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return PlainTextResponse("pages of other origins are not answered\n", status_code=403)
        # A link from elsewhere that knows the token may open the page, but no foreign page may read or embed parts of it.
        is_foreign = headers.get("sec-fetch-site", "none") in {"cross-site", "same-site"}
        if is_foreign and headers.get("sec-fetch-mode") != "navigate":
            return PlainTextResponse("pages of other origins are not answered\n", status_code=403)
        if request.method != "GET":
            return PlainTextResponse("only GET\n", status_code=405, headers={"Allow": "GET"})
        return None

    async def _found(self, request: Request) -> Response:
        token, slash, path = cast("str", request.path_params["path"]).partition("/")
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return PlainTextResponse("there is nothing here\n", status_code=404)
        if not slash:
            return RedirectResponse(f"/{self._token}/", status_code=307)
        static = self._static.get(path or "index.html")
        if static is not None:
            body, content_type = static
            return Response(body, media_type=content_type)
        try:
            if path.startswith("image/"):
                example = integer(path.removeprefix("image/"), "example")
                return Response(await run_in_threadpool(self._pages.image, example), media_type="image/png")
            call = self._pages.views.get(path.removeprefix("api/")) if path.startswith("api/") else None
            if call is None:
                return PlainTextResponse("there is nothing here\n", status_code=404)
            return _json(await run_in_threadpool(call, Query(request.query_params)))
        except SaevStoreError as error:
            return JSONResponse(error_answer(error, self._pages.places), status_code=_status(error))
        except Exception as error:  # a defect of this package: the terminal gets the traceback, the page its name
            _LOG.exception("a view failed")
            message = f"this view failed: {type(error).__name__}; the terminal of the server has more"
            return JSONResponse({"error": {"kind": "defect", "message": message}}, status_code=500)


def _json(document: Answer) -> Response:
    body = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(body.encode("utf-8", "replace"), media_type="application/json")


def _status(error: SaevStoreError) -> int:
    if isinstance(error, (ArgumentError, SelectionError, LayerNotFoundError)):
        return 400
    if isinstance(error, NotFoundError):
        return 404
    return 410 if isinstance(error, CorruptShardError) else 502


def _static_files() -> dict[str, tuple[bytes, str]]:
    """The files of the page by their addresses, with their types."""
    folder = files("saev_store.view") / "static"
    found: dict[str, tuple[bytes, str]] = {}
    for prefix, entries in (("", folder.iterdir()), ("vendor/", (folder / "vendor").iterdir())):
        for entry in entries:
            content_type = _TYPES.get(entry.name.rpartition(".")[2])
            if entry.is_file() and content_type is not None:
                found[f"{prefix}{entry.name}"] = (entry.read_bytes(), content_type)
    return found
