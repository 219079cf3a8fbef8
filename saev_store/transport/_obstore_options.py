"""The address, options and errors of one bucket, as obstore takes and has them.

Options are those of fsspec's file systems, or obstore's own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, cast
from urllib.parse import urlsplit

from saev_store.errors import ArgumentError, SaevStoreError
from saev_store.transport import base
from saev_store.transport._options import authorities, redacted
from saev_store.transport._remote import CONNECT_TIMEOUT_S, IN_FLIGHT, service_error

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_KINDS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az"}
#: Options inside these are known by their path, such as `client_kwargs.region_name`.
_NESTED = ("client_kwargs", "config_kwargs", "config_kwargs.s3")
#: fsspec's names of obstore's options; the last one wins.
_RENAMED: Mapping[str, Mapping[str, str]] = {
    "s3": {
        "anon": "skip_signature",
        "requester_pays": "request_payer",
        "key": "access_key_id",
        "secret": "secret_access_key",
        "token": "session_token",
        "endpoint_url": "endpoint",
        "client_kwargs.endpoint_url": "endpoint",
        "client_kwargs.region_name": "region",
    },
    "gs": {},
    "az": {"anon": "skip_signature", "sas_token": "sas_key"},
}
#: Options that only tune how fsspec's clients work.
_TUNING = {"block_size", "default_block_size", "skip_instance_cache", "use_listings_cache"}
#: Types of Google's credential files that obstore reads.
_GOOGLE_TYPES = {"service_account", "authorized_user"}
#: The status of an answer that an error stands for.
_STATUSES = {
    "AlreadyExistsError": 412, "FileNotFoundError": 404, "NotFoundError": 404, "PermissionDeniedError": 403,
    "PreconditionError": 412, "TimeoutError": 408, "UnauthenticatedError": 401,
}  # fmt: skip


class Place(NamedTuple):
    """An address and its options, as obstore takes them.

    Attributes:
        kind: Which of obstore's stores serves it.
        bucket: Bucket or container.
        prefix: Path inside the bucket, without slashes at its ends.
        config: Arguments of the store.
        verify: A PEM file of authorities that are trusted besides the system's, True for the system's alone, False to
            accept any certificate.
    """

    kind: str
    bucket: str
    prefix: str
    config: Mapping[str, object]
    verify: str | bool

    @property
    def has_region(self) -> bool:
        """True if no service has to be asked for the region of the bucket."""
        return self.kind != "s3" or "region" in self.config


def translated(error: Exception, options: Mapping[str, object], *, doing: str, where: str) -> SaevStoreError:
    """Our error for one of obstore's."""
    text, status = str(error), status_of(error)
    code = re.search(r"<Code>(\w{1,60})</Code>", text)
    first = text.partition("\n")[0]
    if (code and re.search("Expired|Invalid.*Token", code[1])) or (status is None and "redential" in first):
        status = 403
    elif "Received redirect without LOCATION" in text:
        status = 301
    elif re.search(r"\btimed? ?out\b", first, re.IGNORECASE):
        status = 408
    message = redacted(f"could not {doing}: {shown(text)}{f' ({code[1]})' if code else ''}", options)
    passes = not isinstance(error, (TypeError, ValueError))
    return service_error(status, message, text=text, doing=doing, where=where, passes=passes)


def status_of(error: Exception) -> int | None:
    """The HTTP status in an error of obstore, or that of such an answer."""
    if (known := _STATUSES.get(type(error).__name__)) is not None:
        return known
    found = re.search(r"(?:status code|status|error status|returned):? (\d{3})", str(error))
    return int(found[1]) if found else None


def shown(text: str) -> str:
    """The first line up to the server's answer, which may repeat what was signed."""
    head = text.partition("\n")[0].partition("<?xml")[0].partition("<Error")[0]
    return re.sub(r"\b(https?://)([^/\s?]*@)?([^\s?]*)(\?\S*)?", r"\1\3", head).strip(" :")[:300]


def place_of(url: str, options: Mapping[str, object]) -> Place:
    """An address with options, as obstore takes them.

    Raises:
        ArgumentError: obstore has no store for the address.

    >>> place_of("s3://lab/shards/", {"anon": True, "endpoint_url": "http://localhost:9000"}).config["skip_signature"]
    True
    """
    scheme, _, rest_of_url = url.partition("://")
    bucket = urlsplit(url).netloc
    if scheme not in _KINDS or not bucket or not {"?", "#", "@"}.isdisjoint(url) or "::" in url:
        raise ArgumentError(
            f"obstore serves {', '.join(_KINDS)}, a bucket and a path, without user, '?' and '#'",
            where="url",
            remedy='Correct it, or use engine="fsspec".',
        )
    kind, config = _KINDS[scheme], dict(options)
    for name in _NESTED:
        if isinstance(inner := config.get(name), Mapping):
            del config[name]
            config |= {f"{name}.{key}": item for key, item in cast("Mapping[str, object]", inner).items()}
    verify, inner = config.pop("verify", None), config.pop("client_kwargs.verify", None)
    for theirs, ours in _RENAMED[kind].items():
        if (value := config.pop(theirs, None)) is not None:
            config[ours] = value
    for name in _TUNING & config.keys():
        del config[name]
    if kind == "s3":
        _read_s3(config)
    elif kind == "gs":
        _read_gs(config)
    prefix = rest_of_url.partition("/")[2].strip("/")
    return Place(kind, bucket, prefix, config, authorities(scheme, inner if verify is None else verify))


def _read_s3(config: dict[str, object]) -> None:
    """Complete the options for S3."""
    if config.pop("config_kwargs.s3.addressing_style", "path") == "virtual":
        config["virtual_hosted_style_request"] = True
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if "endpoint" not in config and endpoint:
        config["endpoint"] = endpoint
    if "endpoint" in config:
        # obstore reads the environment too, and this key of it would win over every option.
        config["aws_endpoint_url_s3"] = config["endpoint"]
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if "region" not in config and (region or "endpoint" in config):  # only AWS itself minds
        config["region"] = region or "us-east-1"
    if {"access_key_id", "secret_access_key"} <= config.keys():
        config.setdefault("skip_signature", False)
        # The token of the environment belongs to other keys, and only a provider leaves it out.
        if "session_token" not in config:
            key, secret = config.pop("access_key_id"), config.pop("secret_access_key")
            config["credential_provider"] = functools.partial(_credential, key, secret)


def _credential(key: object, secret: object) -> dict[str, object]:
    return {"access_key_id": key, "secret_access_key": secret, "token": None, "expires_at": None}


def _read_gs(config: dict[str, object]) -> None:
    """Read the option `token` for Google; one that is neither a word nor a file is left, and refused by obstore."""
    token = config.get("token")
    if token == "anon":  # noqa: S105 - a word, not a token
        config["skip_signature"] = True
    elif isinstance(token, str) and os.path.exists(token):
        config["application_credentials"] = token
    elif token not in (None, "google_default"):
        return
    config.pop("token", None)


def resolves_alike(place: Place) -> bool:
    """Return True if obstore finds the end point and the credentials that fsspec's file systems find.

    These read configuration files, profiles and federated identities, which obstore does not know. Options of one's own decide
    for both.
    """
    given, environment = place.config, os.environ
    is_given = given.get("skip_signature") is True or bool({"credential_provider", "bearer_token"} & given.keys())
    if place.kind == "s3":
        is_given |= {"access_key_id", "secret_access_key"} <= given.keys()
        has_keys = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= environment.keys()
        is_given |= has_keys and "AWS_PROFILE" not in environment
        return is_given and ("endpoint" in given or not ("AWS_ENDPOINT" in environment or _configures_endpoint()))
    if place.kind == "gs":
        path = given.get("application_credentials") or environment.get("GOOGLE_APPLICATION_CREDENTIALS")
        is_given |= bool({"service_account", "service_account_key"} & given.keys())
        return is_given or (isinstance(path, str) and _google_type(path) in _GOOGLE_TYPES)
    return is_given or (bool({"account_key", "sas_key", "client_secret"} & given.keys()) and "account_name" in given)


def _configures_endpoint() -> bool:
    """Return True if the configuration file of AWS names an end point, for whatever profile."""
    with (
        contextlib.suppress(OSError),
        open(os.path.expanduser(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")), "rb") as file,
    ):
        return b"endpoint_url" in file.read(1 << 20)
    return False


def _google_type(path: str) -> object:
    """The type of a file of Google's credentials; None if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError), open(path, "rb") as file:
        found: object = json.loads(file.read(1 << 20))
        return cast("dict[str, object]", found).get("type") if isinstance(found, dict) else None


def open_store(place: Place) -> ObjectStore:
    """The client of a bucket.

    Raises:
        Exception: obstore refuses an option.
    """
    from obstore import store as stores

    config = dict(place.config)
    endpoint = str(config.get("endpoint") or config.get("base_url") or "")
    client_options: dict[str, object] = {
        "allow_http": endpoint.lower().startswith("http://") or bool(config.get("use_emulator")),
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "read_timeout": timedelta(seconds=base.READ_TIMEOUT_S),
        # For the whole request, body included: the deadline of `RemoteTransport.run` is what counts.
        "timeout": timedelta(hours=1),
        # A request that begins before the last connection is back opens another one.
        "pool_max_idle_per_host": str(2 * IN_FLIGHT),
    }
    if isinstance(place.verify, str):
        with open(place.verify, encoding="latin-1") as file:
            client_options["root_certificate"] = file.read()
    elif not place.verify:
        client_options["allow_invalid_certificates"] = True
    given = {name: config.pop(name) for name in ("credential_provider",) if name in config}
    retry: dict[str, object] = {
        # The waits are random: only their sum is limited.
        "max_retries": 1000,
        "retry_timeout": timedelta(seconds=base.RETRY_S),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=3), "base": 3},
    }
    make = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[place.kind]
    return make(place.bucket, config=config, client_options=client_options, retry_config=retry, **given)  # pyright: ignore[reportArgumentType]  # typed dictionaries


def bucket_region(bucket: str, *, endpoint: str = "https://s3.amazonaws.com") -> str | None:
    """The region of a bucket, which AWS returns without credentials; None without an answer."""
    request = urllib.request.Request(f"{endpoint}/{bucket}", method="HEAD")  # noqa: S310 - the scheme is ours
    with contextlib.suppress(OSError):
        try:
            with urllib.request.urlopen(request, timeout=CONNECT_TIMEOUT_S) as answer:  # noqa: S310  # the scheme is ours
                return answer.headers.get("x-amz-bucket-region")
        except urllib.error.HTTPError as error:  # 301, 403 and 404 have it too
            return error.headers.get("x-amz-bucket-region")
    return None
