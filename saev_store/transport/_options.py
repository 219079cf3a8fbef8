"""Storage options that both clients share: secrets, certificate authorities, and creation without conditional requests."""

from __future__ import annotations

import functools
import os
import re
import ssl
from collections.abc import Mapping
from typing import cast

from saev_store.errors import ArgumentError, kind_of

#: Option: False for services that answer 501 to a conditional request. `create` then looks first, and two processes that
#: create the same file at the same time may both succeed.
CONDITIONAL_CREATE = "conditional_create"
#: Names of options whose values may be secrets.
_SECRET = re.compile("key|secret|token|pass|sas|cred|auth|header|account", re.IGNORECASE)
#: Environment variables that name a file of authorities, by protocol; the first one that is set wins.
_VARIABLES = {"s3": ("AWS_CA_BUNDLE", "SSL_CERT_FILE"), "s3a": ("AWS_CA_BUNDLE", "SSL_CERT_FILE")}


def redacted(text: str, options: Mapping[str, object]) -> str:
    """`text` without the values of options that may be secrets.

    >>> redacted("AKID may not read", {"key": "AKID", "anon": False})
    '*** may not read'
    """
    for secret in sorted(_secrets(options), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _secrets(options: Mapping[str, object], *, inside: bool = False) -> set[str]:
    found: set[str] = set()
    for name, value in options.items():
        is_secret = inside or _SECRET.search(str(name)) is not None
        if isinstance(value, Mapping):
            found |= _secrets(cast("Mapping[str, object]", value), inside=is_secret)
        elif is_secret and isinstance(value, str) and len(value) >= 4 and "://" not in value:
            found.add(value)
    return found


def authorities(protocol: str, verify: object) -> str | bool:
    """Source of trusted authorities: a PEM file, the system's authorities (True), or nothing (False).

    Args:
        protocol: Of the address, such as `"s3"` or `"https"`.
        verify: The option `verify` as boto3 spells it; None if there is none.

    Raises:
        ArgumentError: `verify` is neither a bool nor the path of a file.

    >>> authorities("s3", False)
    False
    """
    if verify is None:
        names = _VARIABLES.get(protocol, ("SSL_CERT_FILE",))
        return next((os.environ[name] for name in names if os.environ.get(name)), True)
    if not isinstance(verify, (bool, str, os.PathLike)):
        raise ArgumentError(f"verify is {kind_of(verify)}, not a bool or a path", where="storage_options")
    return verify if isinstance(verify, bool) else os.fspath(cast("str", verify))


@functools.cache
def tls_context(authority: str | bool) -> ssl.SSLContext:
    """The context with which Python's own TLS checks certificates, always the same object for the same authorities.

    Raises:
        ArgumentError: the file cannot be read, or has no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=authority if isinstance(authority, str) else None)
    except OSError as error:  # also those of `ssl`
        raise ArgumentError(
            f"the certificate authorities could not be read from {authority}: {error}",
            where="storage_options",
            remedy="Correct the option verify, AWS_CA_BUNDLE or SSL_CERT_FILE.",
        ) from error
    if authority is False:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
