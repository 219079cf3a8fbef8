"""Which certificate authorities a client trusts, and the error when a server's certificate is refused."""

from __future__ import annotations

import functools
import os
import re
import ssl
from urllib.parse import urlsplit

from saev_store.errors import ArgumentError, TransportError, kind_of

#: Environment variables that name a file of authorities, per protocol, the first one that is set wins.
_VARIABLES = {"s3": ("AWS_CA_BUNDLE", "SSL_CERT_FILE"), "s3a": ("AWS_CA_BUNDLE", "SSL_CERT_FILE")}
_REASON = re.compile(
    r"InvalidCertificate\(\s*(\w+)|invalid peer certificate: ([\w ]+)|certificate verify failed: ([^()\]\\]+)"
)


def authorities(protocol: str, verify: object) -> str | bool:
    """What a client checks certificates with: a PEM file, the system's authorities (True), or nothing (False).

    Args:
        protocol: Of the address, such as `"s3"` or `"https"`.
        verify: The option `verify` as boto3 spells it; None if there is none.

    Raises:
        ArgumentError: `verify` is neither a bool nor the path of a file.

    >>> authorities("s3", False)
    False
    """
    if isinstance(verify, bool):
        return verify
    if verify is None:
        variables = _VARIABLES.get(protocol, ("SSL_CERT_FILE",))
        return next((os.environ[name] for name in variables if os.environ.get(name)), True)
    if not isinstance(verify, (str, os.PathLike)):
        raise ArgumentError(f"verify is {kind_of(verify)}, not a bool or a path", where="storage_options")
    return str(verify)  # pyright: ignore[reportUnknownArgumentType]  # a path of any kind of text


def read_authorities(path: str) -> str:
    """The text of a PEM file.

    Raises:
        ArgumentError: the file cannot be read, or holds no certificate.
    """
    try:
        with open(path, encoding="latin-1") as file:
            text = file.read()
    except OSError as error:
        reason = error.strerror
    else:
        if "-----BEGIN CERTIFICATE-----" in text:
            return text
        reason = "it holds no certificate in PEM format"
    raise ArgumentError(
        f"the certificate authorities could not be read from {path}: {reason}",
        where="storage_options",
        remedy="Correct the option verify, AWS_CA_BUNDLE or SSL_CERT_FILE.",
    )


@functools.cache
def context_of(authority: str | bool) -> ssl.SSLContext:
    """The context with which Python's own TLS checks certificates, always the same object for the same authorities."""
    if isinstance(authority, str):
        return ssl.create_default_context(cadata=read_authorities(authority))
    context = ssl.create_default_context()
    if not authority:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def refused_certificate(text: str, *, where: str, endpoint: str) -> TransportError | None:
    """The error for a refused certificate, if that is what a client's error says.

    >>> print(refused_certificate("InvalidCertificate(UnknownIssuer)", where="s3://lab", endpoint="https://minio:9000"))
    s3://lab: the certificate of minio:9000 is not trusted: UnknownIssuer. Name the file of the authority that signed it, ...
    """
    found = _REASON.search(text)
    if found is None:
        return None
    reason = next(part for part in found.groups() if part).strip()
    return TransportError(
        f"the certificate of {urlsplit(endpoint).netloc.rpartition('@')[2] or 'the server'} is not trusted: {reason}",
        where=where,
        remedy='Name the file of the authority that signed it, storage_options={"verify": "/path/to/ca.pem"}, or set '
        "SSL_CERT_FILE (for s3:// also AWS_CA_BUNDLE) in the environment; check the host name in the address.",
        transient=False,
    )
