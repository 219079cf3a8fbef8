"""What `storage_options` mean to obstore: the names that fsspec's file systems use, and obstore's own.

Pure: nothing is opened, and no server is contacted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, cast
from urllib.parse import urlsplit

from saev_store.errors import ArgumentError
from saev_store.transport._tls import authorities

Kind = Literal["s3", "gs", "az", "http"]

_KINDS: dict[str, Kind] = {
    "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "http": "http", "https": "http",
}  # fmt: skip

#: StorageOptions that only tune how fsspec's clients work; we tune ours.
_TUNING = {
    "asynchronous", "batch_size", "block_size", "cache_regions", "cache_timeout", "cache_type", "consistency",
    "default_block_size", "default_cache_type", "default_fill_cache", "dircache", "fixed_upload_size",
    "listings_expiry_time", "max_concurrency", "max_paths", "skip_instance_cache", "use_listings_cache",
}  # fmt: skip

#: Names of obstore's own that pass through as they are.
_OWN: dict[Kind, frozenset[str]] = {
    "s3": frozenset({
        "access_key_id", "checksum_algorithm", "conditional_put", "endpoint", "region", "request_payer",
        "secret_access_key", "server_side_encryption", "session_token", "skip_signature", "sse_bucket_key_enabled",
        "sse_kms_key_id", "unsigned_payload", "virtual_hosted_style_request",
    }),
    "gs": frozenset({
        "application_credentials", "base_url", "bearer_token", "service_account", "service_account_key",
        "skip_signature",
    }),
    "az": frozenset({
        "account_key", "account_name", "client_id", "client_secret", "endpoint", "sas_key", "skip_signature",
        "tenant_id", "use_azure_cli", "use_emulator",
    }),
    "http": frozenset(),
}  # fmt: skip


#: Environment variables by which obstore alone finds a server, and the options that win over them.
_OWN_ENDPOINTS: dict[Kind, tuple[str, str]] = {
    "s3": ("AWS_ENDPOINT", "endpoint"),
    "gs": ("GOOGLE_BASE_URL", "base_url"),
}


@dataclass(frozen=True, slots=True)
class Place:
    """An address and its options, as obstore wants them.

    Attributes:
        kind: Which of obstore's stores serves it.
        bucket: Bucket or container; the base URL for `"http"`.
        prefix: Path inside the bucket, without slashes at its ends.
        config: Arguments of the store.
        allow_http: Connections without TLS are allowed.
        headers: Sent with every request.
        verify: A PEM file of authorities that are trusted besides the system's, True for the system's alone, False to
            accept any certificate.
    """

    kind: Kind
    bucket: str
    prefix: str
    config: Mapping[str, object] = field(repr=False)
    allow_http: bool
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    verify: str | bool = True

    @property
    def endpoint(self) -> str:
        """The server's address where the options name one, else ""."""
        if self.kind == "http":
            return self.bucket
        return str(self.config.get("endpoint") or self.config.get("base_url") or "")


def place_of(url: str, options: Mapping[str, object]) -> Place:
    """What an address with options means.

    Raises:
        ArgumentError: obstore has no store for the address, or no equivalent for an option (named; values are not).

    >>> place_of("s3://lab/shards/", {"anon": True, "endpoint_url": "http://localhost:9000"}).config["skip_signature"]
    True
    """
    scheme = url.partition("://")[0].lower()
    if scheme not in _KINDS or "::" in re.sub(r"\[[^\]]*\]", "", url):  # in brackets they are an address of IPv6
        raise ArgumentError(
            f"obstore serves {', '.join(sorted(_KINDS))}, not {scheme}", where="url", remedy='Use engine="fsspec".'
        )
    kind = _KINDS[scheme]
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ArgumentError(
            "this address carries more than a host and a path", where="url", remedy='Use engine="fsspec".'
        )
    if not parts.netloc:
        raise ArgumentError("this address names no bucket", where="url")
    rest = dict(options)
    verify = authorities(scheme, _verify(rest))
    config, allow_http, headers = _READ[kind](rest)
    prefix = url.partition("://")[2].partition("/")[2].strip("/")
    if kind == "http":
        return Place(
            kind,
            f"{scheme}://{parts.netloc}",
            prefix,
            config,
            allow_http=scheme == "http",
            headers=headers,
            verify=verify,
        )
    return Place(kind, parts.netloc, prefix, config, allow_http=allow_http, headers=headers, verify=verify)


def finds_credentials(place: Place) -> bool:
    """Whether obstore would find the credentials that fsspec's file systems find: it reads no profiles, theirs do."""
    given = place.config
    if is_true(given.get("skip_signature")) or {"access_key_id", "bearer_token", "service_account"} & set(given):
        return True
    if place.kind == "gs":
        return "service_account_key" in given or "GOOGLE_APPLICATION_CREDENTIALS" in os.environ
    if place.kind == "s3":
        return {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= set(os.environ) and "AWS_PROFILE" not in os.environ
    if place.kind == "az":
        return bool({"account_key", "sas_key", "client_secret"} & set(given)) and "account_name" in given
    return True


Read = tuple[dict[str, object], bool, dict[str, str]]


def _s3(options: dict[str, object]) -> Read:
    config: dict[str, object] = {}
    client = _mapping(options.pop("client_kwargs", None), "client_kwargs")
    tuning = _mapping(options.pop("config_kwargs", None), "config_kwargs")
    renamed = {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token"}
    of_client = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
        "region_name": "region",
        "endpoint_url": "endpoint",
    }
    for theirs, ours in (*renamed.items(), ("endpoint_url", "endpoint"), ("username", "access_key_id")):
        _take(options, theirs, config, ours)
    _take(options, "password", config, "secret_access_key")
    for theirs, ours in of_client.items():
        _take(client, theirs, config, ours)
    _take(tuning, "region_name", config, "region")
    style = _mapping(tuning.pop("s3", None), "config_kwargs.s3")
    if style.pop("addressing_style", "path") == "virtual":
        config["virtual_hosted_style_request"] = True
    if tuning.pop("signature_version", "s3v4") not in {"s3v4", "v4"}:
        raise _unknown("config_kwargs.signature_version")
    for name in ("max_pool_connections", "connect_timeout", "read_timeout", "retries"):
        tuning.pop(name, None)
    if options.pop("anon", False):
        config["skip_signature"] = True
    if options.pop("requester_pays", False):
        config["request_payer"] = True
    if options.pop("version_aware", False):
        raise _unknown("version_aware")
    options.pop("use_ssl", None)  # says the same as the end point's scheme
    _rest("s3", options, config, client_kwargs=client, config_kwargs=tuning, **{"config_kwargs.s3": style})
    if "endpoint" not in config:
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint:
            config["endpoint"] = endpoint
    if "region" not in config:
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if region or "endpoint" in config:  # only AWS itself minds
            config["region"] = region or "us-east-1"
    return config, _is_plain(config.get("endpoint")), {}


def _gs(options: dict[str, object]) -> Read:
    config: dict[str, object] = {}
    headers: dict[str, str] = {}
    token = options.pop("token", None)
    if token == "anon":  # noqa: S105 - a word, not a token
        config["skip_signature"] = True
    elif isinstance(token, str) and os.path.exists(token):
        config["application_credentials"] = token
    elif token not in {None, "google_default"}:
        raise _unknown("token")
    payer = options.pop("requester_pays", None)
    if isinstance(payer, str):
        headers["x-goog-user-project"] = payer
    elif payer:
        raise _unknown("requester_pays")
    options.pop("project", None)
    options.pop("access", None)
    _rest("gs", options, config)
    return config, _is_plain(config.get("base_url")), headers


def _az(options: dict[str, object]) -> Read:
    config: dict[str, object] = {}
    _take(options, "sas_token", config, "sas_key")
    if options.pop("anon", False):
        config["skip_signature"] = True
    _rest("az", options, config)
    return config, _is_plain(config.get("endpoint")) or bool(config.get("use_emulator")), {}


def _http(options: dict[str, object]) -> Read:
    client = _mapping(options.pop("client_kwargs", None), "client_kwargs")
    headers: dict[str, str] = {}
    for given in (client.pop("headers", None), options.pop("headers", None)):
        headers |= {str(name): str(value) for name, value in _mapping(given, "headers").items()}
    _rest("http", options, {}, client_kwargs=client)
    return {}, True, headers


_READ: dict[Kind, Callable[[dict[str, object]], Read]] = {"s3": _s3, "gs": _gs, "az": _az, "http": _http}


def _verify(options: dict[str, object]) -> object:
    """Take `verify` out of the options, or out of `client_kwargs`, where s3fs has it."""
    found = options.pop("verify", None)
    client = options.get("client_kwargs")
    if isinstance(client, Mapping) and "verify" in client:
        rest = _mapping(cast("object", client), "client_kwargs")
        inner = rest.pop("verify")
        options["client_kwargs"] = rest
        return inner if found is None else found
    return found


def _take(source: dict[str, object], theirs: str, config: dict[str, object], ours: str) -> None:
    value = source.pop(theirs, None)
    if value is not None:
        config[ours] = value


def _rest(kind: Kind, options: dict[str, object], config: dict[str, object], **nested: dict[str, object]) -> None:
    for name in list(options):
        if name in _OWN[kind]:
            config[name] = options.pop(name)
        elif name in _TUNING:
            del options[name]
    unknown = [*options, *(f"{outer}.{name}" for outer, inner in nested.items() for name in inner)]
    if unknown:
        raise _unknown(*unknown)


def is_true(value: object) -> bool:
    """Whether an option of obstore's that may be text is switched on."""
    return value.strip().lower() in {"1", "true", "on", "yes", "y"} if isinstance(value, str) else bool(value)


def only_obstore_understands(place: Place, options: Mapping[str, object]) -> list[str]:
    """Options and environment variables with which fsspec would read as another user or from another server."""
    names = sorted(_OWN[place.kind].intersection(options))
    variable, option = _OWN_ENDPOINTS.get(place.kind, ("", ""))
    return [*names, variable] if variable in os.environ and option not in place.config else names


def _mapping(value: object, name: str) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ArgumentError(f"is a {type(value).__name__}, no mapping", where=f"storage_options[{name!r}]")
    return {str(key): item for key, item in cast("Mapping[object, object]", value).items()}


def _is_plain(endpoint: object) -> bool:
    return isinstance(endpoint, str) and endpoint.lower().startswith("http://")


def _unknown(*names: str) -> ArgumentError:
    return ArgumentError(
        f"the engine obstore has no equivalent for {', '.join(sorted(names))}",
        where="storage_options",
        remedy='Leave it out, or use engine="fsspec".',
    )
