"""Our errors for those of the clients of services."""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Mapping
from typing import Any, cast

from saev_store.errors import (
    AccessError,
    DeadlineError,
    NotFoundError,
    ReadOnlyError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
)
from saev_store.transport.checks import from_os_error

#: Option: False for services that answer 501 to a conditional request. `create` then looks first, and two processes that
#: create the same file at the same time may both succeed.
CONDITIONAL_CREATE = "conditional_create"
#: The status of an answer that an error stands for, by its class or a parent of it.
_STATUSES = {
    "AlreadyExistsError": 412, "FileExistsError": 412, "FileNotFoundError": 404, "KeyError": 404, "NotFoundError": 404,
    "PermissionDeniedError": 403, "PermissionError": 403, "PreconditionError": 412, "UnauthenticatedError": 401,
}  # fmt: skip
#: The status that errors without one, or with a vague one, have in their text.
_TEXTS = {
    r"<Code>(Expired|Invalid\w*Token)|[Cc]redential|^\w+: Forbidden:": 403,
    "redirect without LOCATION": 301,
    r"[Tt]imed? ?out": 408,
}
_CERTIFICATE = re.compile(r"InvalidCertificate|invalid peer certificate|certificate verify failed")
_TAKEN = re.compile(r"PreconditionFailed|pre-?condition|\b412\b|already exists", re.IGNORECASE)


def redacted(text: str, options: Mapping[str, object]) -> str:
    """`text` without the values of options, any of which may be a secret."""
    for value in options.values():
        if isinstance(value, Mapping):
            text = redacted(text, cast("Mapping[str, object]", value))
        elif isinstance(value, str) and len(value) >= 4 and "://" not in value:
            text = text.replace(value, "***")
    return text


def shown(error: Exception, options: Mapping[str, object]) -> str:
    """The first line of an error and the code of the server's answer, which may repeat what was signed."""
    head = re.split(r"\n|<\?xml|<Error", str(error), maxsplit=1)[0]
    code = re.search(r"<Code>\w{1,60}</Code>", str(error))
    head = re.sub(r"\b(https?://)([^/\s?]*@)?([^\s?]*)(\?\S*)?", r"\1\3", head).strip(" :")[:300]
    return f"{type(error).__name__}: {redacted(head, options)} {code[0] if code else ''}".rstrip()


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error of a client, or its cause, carries or stands for."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    if kinds[0] == "ClientPayloadError":  # a broken body; its cause has a code, but no server sent it
        return None
    for kind in kinds:
        if kind in _STATUSES:
            return _STATUSES[kind]
    for name in ("status", "status_code", "code"):
        if isinstance(value := getattr(error, name, None), int) and 100 <= value < 600:
            return value
    response: Any = getattr(error, "response", None)  # of botocore
    if isinstance(response, Mapping) and (about := cast("Any", response).get("ResponseMetadata")):
        return about.get("HTTPStatusCode")
    if found := re.search(r"(?:status code|status|error status|returned):? (\d{3})", str(error)):  # of obstore
        return int(found[1])
    return None if error.__cause__ is None else status_of(error.__cause__)


def translated(error: Exception, options: Mapping[str, object], *, doing: str, where: str) -> SaevStoreError:
    """Our error for one of a client's, while `doing` (an infinitive)."""
    if isinstance(error, SaevStoreError):
        return error
    if isinstance(error, NotImplementedError):
        return ReadOnlyError(f"this kind of file system cannot {doing}", where=where)
    cause = error.__cause__
    is_of_web = isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp")
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and is_of_web and status_of(cause) != 404:
        error = cause  # fsspec's web client calls every failure so, refused connections included
    text, status = shown(error, options), status_of(error)
    if doing == "create" and _TAKEN.search(text):  # of gcsfs, whatever was asked
        status = 412
    elif status in {None, 400}:
        status = next((code for pattern, code in _TEXTS.items() if re.search(pattern, text)), status)
    code = error.errno if isinstance(error, OSError) else None
    if status is None and code in errno.errorcode and code not in {errno.EIO, errno.EBUSY}:
        return from_os_error(OSError(code, text), where=where, doing=doing)
    message, remedy = f"could not {doing}: {text}", None
    if _CERTIFICATE.search("".join(traceback.format_exception(error))):  # also in what it came from
        remedy = 'Set SSL_CERT_FILE, or on S3 storage_options={"client_kwargs": {"verify": "/path/to/ca.pem"}}.'
        return TransportError(f"the server's certificate is not trusted: {message}", where=where, remedy=remedy)
    if status == 404:
        return NotFoundError(message, where=where)
    if status in {401, 403}:
        remedy = "Check the credentials in storage_options or the environment, and the clock."
        return AccessError(message, where=where, remedy=remedy)
    if status == 412 and doing == "create":
        return StoreExistsError("the file already exists", where=where)
    if status == 408:
        return DeadlineError(message, where=where, transient=True)
    if status == 501 and doing == "create":
        remedy = f"The service has no conditional requests. Pass storage_options={{{CONDITIONAL_CREATE!r}: False}}."
    elif status in {301, 307, 308, 400}:
        remedy = 'On S3, check the region: storage_options={"client_kwargs": {"region_name": …}}.'
    is_final = type(error).__name__ in {"TooManyRedirects", "ClientConnectorDNSError"}
    passes = not (is_final or isinstance(error, (TypeError, ValueError)))
    if status is not None:
        passes = status in {409, 429} or (status >= 500 and status not in {501, 505})
    return TransportError(message, where=where, remedy=remedy, transient=passes)
