"""Which error of ours an error of fsspec is, and of the clients of services below it."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable, Mapping
from typing import cast

from saev_store.errors import (
    AccessError,
    DeadlineError,
    NotFoundError,
    ReadOnlyError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
)
from saev_store.transport._obstore_client import may_pass
from saev_store.transport._options import CONDITIONAL_CREATE, refused_certificate
from saev_store.transport.checks import from_os_error

_PRECONDITION = re.compile(r"PreconditionFailed|pre-?condition|\b412\b|already exists", re.IGNORECASE)
#: What is done where nothing is made.
_READS = {"read", "look at it", "list"}


def translated(error: Exception, *, redact: Callable[[str], str], doing: str, where: str) -> SaevStoreError:
    """Our error for one of fsspec's; ours stay as they are.

    Args:
        error: Raised by fsspec, or by the client of a service below it.
        redact: Takes secrets out of its text.
        doing: The operation in the infinitive, such as `"read"`.
        where: The file, shown first.
    """
    if isinstance(error, SaevStoreError):
        return error
    reason = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(reason, Exception) and not _is_absence(reason):
        error = reason  # fsspec's web client calls every failure so, refused connections included
    texts = " ".join(str(link) for link in chain(error))
    if (refused := refused_certificate(texts, where=where)) is not None:
        return refused
    text = redact(str(error)).strip()
    message = f"could not {doing}: {type(error).__name__}{f': {text}' if text else ''}"
    status = status_of(error)
    kind = type(error).__name__
    missing_member = isinstance(error, KeyError) and "in the archive" in text  # of `zipfile`, through older fsspec
    if isinstance(error, FileNotFoundError) or status == 404 or missing_member:
        return NotFoundError(message, where=where)
    is_forbidden = isinstance(error, OSError) and error.errno is None and text.startswith("Forbidden:")  # of gcsfs
    if isinstance(error, PermissionError) or status in {401, 403} or "Credentials" in kind or is_forbidden:
        return AccessError(message, where=where, remedy="Check the credentials in storage_options or the environment.")
    if isinstance(error, FileExistsError):  # or what gcsfs makes of 412, whatever was asked
        return (TransportError if doing in _READS else StoreExistsError)(message, where=where)
    if status == 501 and doing == "create":
        remedy = f"The service has no conditional requests. Pass storage_options={{{CONDITIONAL_CREATE!r}: False}}."
        return TransportError(message, where=where, remedy=remedy)
    if isinstance(error, TimeoutError) or "Timeout" in kind:
        return DeadlineError(message, where=where, transient=True)
    if isinstance(error, NotImplementedError):
        return ReadOnlyError(f"this kind of file system cannot {doing}", where=where)
    is_unknown_host = any(isinstance(getattr(link, "os_error", link), socket.gaierror) for link in chain(error))
    has_answer = is_unknown_host or status is not None
    if isinstance(error, OSError) and error.errno not in {None, errno.EIO, errno.EBUSY} and not has_answer:
        return from_os_error(OSError(error.errno, text), where=where, doing=doing)
    transient = not isinstance(error, (TypeError, ValueError)) and (status is None or may_pass(status))
    remedy = "Check the host's name in the address." if is_unknown_host else None
    return TransportError(message, where=where, remedy=remedy, transient=transient)


def chain(error: BaseException) -> list[BaseException]:
    """An error and all that it came from."""
    found, todo = list[BaseException](), [error]
    while todo:
        link = todo.pop()
        if not any(link is known for known in found):
            found.append(link)
            todo += [other for other in (link.__cause__, link.__context__) if other is not None]
    return found


def means_exists(error: Exception) -> bool:
    """Return True if an exclusive creation failed because the name is taken."""
    if isinstance(error, FileExistsError) or status_of(error) == 412:
        return True
    return bool(_PRECONDITION.search(str(error)))


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error of aiohttp, gcsfs, botocore or azure, or its cause, carries."""
    if (
        type(error).__name__ == "ClientPayloadError"
    ):  # a body that broke off; its cause has a code, but no server sent it
        return None
    for attribute in ("status", "code", "status_code"):
        value = getattr(error, attribute, None)
        if isinstance(value, int) and 100 <= value < 600:
            return value
    response: object = getattr(error, "response", None)
    if isinstance(response, Mapping):
        about = cast("Mapping[str, Mapping[str, object]]", response).get("ResponseMetadata", {})
        value = about.get("HTTPStatusCode")
        if isinstance(value, int):
            return value
    return status_of(error.__cause__) if error.__cause__ is not None and error.__cause__ is not error else None


def _is_absence(error: Exception) -> bool:
    if isinstance(error, (FileNotFoundError, KeyError)) or status_of(error) == 404:
        return True
    return not (isinstance(error, OSError) or status_of(error) or type(error).__module__.startswith("aiohttp"))
