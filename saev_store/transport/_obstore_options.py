"""Storage options of fsspec's file systems, and obstore's own, as arguments of obstore's stores.

Pure, apart from the environment and the configuration files that it looks at: no server is contacted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, cast
from urllib.parse import urlsplit

from saev_store.errors import ArgumentError, kind_of
from saev_store.transport._options import authorities

Kind = Literal["s3", "gs", "az", "http"]

_KINDS: dict[str, Kind] = {
    "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "http": "http", "https": "http",
}  # fmt: skip

#: Options inside these are known by their path, such as `client_kwargs.region_name`.
_NESTED = ("client_kwargs", "config_kwargs", "config_kwargs.s3")
#: fsspec's names of obstore's options; the last one wins.
_RENAMED: dict[Kind, dict[str, str]] = {
    "s3": {
        "key": "access_key_id",
        "username": "access_key_id",
        "client_kwargs.aws_access_key_id": "access_key_id",
        "secret": "secret_access_key",
        "password": "secret_access_key",
        "client_kwargs.aws_secret_access_key": "secret_access_key",
        "token": "session_token",
        "client_kwargs.aws_session_token": "session_token",
        "endpoint_url": "endpoint",
        "client_kwargs.endpoint_url": "endpoint",
        "client_kwargs.region_name": "region",
        "config_kwargs.region_name": "region",
    },
    "gs": {},
    "az": {"sas_token": "sas_key"},
    "http": {},
}
#: Options that only tune how fsspec's clients work; we tune ours.
_TUNING = {
    "asynchronous", "batch_size", "block_size", "cache_regions", "cache_timeout", "cache_type", "consistency",
    "default_block_size", "default_cache_type", "default_fill_cache", "dircache", "fixed_upload_size",
    "listings_expiry_time", "max_concurrency", "max_paths", "skip_instance_cache", "use_listings_cache",
    "config_kwargs.max_pool_connections", "config_kwargs.connect_timeout", "config_kwargs.read_timeout",
    "config_kwargs.retries",
}  # fmt: skip

#: Names of obstore's own that pass through as they are.
_OWN: dict[Kind, frozenset[str]] = {
    "s3": frozenset({
        "access_key_id", "checksum_algorithm", "credential_provider", "endpoint", "region", "request_payer",
        "secret_access_key", "server_side_encryption", "session_token", "skip_signature", "sse_bucket_key_enabled",
        "sse_kms_key_id", "unsigned_payload", "virtual_hosted_style_request",
    }),
    "gs": frozenset({
        "application_credentials", "base_url", "bearer_token", "credential_provider", "service_account",
        "service_account_key", "skip_signature",
    }),
    "az": frozenset({
        "account_key", "account_name", "client_id", "client_secret", "credential_provider", "endpoint", "sas_key",
        "skip_signature", "tenant_id", "use_azure_cli", "use_emulator",
    }),
    "http": frozenset(),
}  # fmt: skip
#: Types of Google's credential files that obstore reads.
_GOOGLE_TYPES = {"service_account", "authorized_user"}


@dataclass(frozen=True, slots=True)
class Place:
    """An address and its options, as obstore takes them.

    Attributes:
        kind: Which of obstore's stores serves it.
        bucket: Bucket or container; the base URL for `"http"`.
        prefix: Path inside the bucket, without slashes at its ends.
        config: Arguments of the store.
        headers: Sent with every request.
        verify: A PEM file of authorities that are trusted besides the system's, True for the system's alone, False to
            accept any certificate.
    """

    kind: Kind
    bucket: str
    prefix: str
    config: Mapping[str, object] = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    verify: str | bool

    @property
    def endpoint(self) -> str:
        """The server's address if the options or the environment name one, else ""."""
        if self.kind == "http":
            return self.bucket
        return str(self.config.get("endpoint") or self.config.get("base_url") or "")

    @property
    def allow_http(self) -> bool:
        """True if connections without TLS are allowed."""
        return self.endpoint.lower().startswith("http://") or bool(self.config.get("use_emulator"))


def place_of(url: str, options: Mapping[str, object]) -> Place:
    """An address with options, as obstore takes them.

    Raises:
        ArgumentError: obstore has no store for the address, or no equivalent for an option (named; values are not).

    >>> place_of("s3://lab/shards/", {"anon": True, "endpoint_url": "http://localhost:9000"}).config["skip_signature"]
    True
    """
    scheme, _, rest_of_url = url.partition("://")
    if scheme not in _KINDS or "::" in url:
        raise ArgumentError(
            f"obstore serves {', '.join(sorted(_KINDS))}, not {url.partition('://')[0]}",
            where="url",
            remedy='Use engine="fsspec".',
        )
    kind, parts = _KINDS[scheme], urlsplit(url)
    if not parts.netloc or "@" in parts.netloc or parts.query or parts.fragment:
        raise ArgumentError(
            "the address must name a bucket and a path, without user, '?' and '#'",
            where="url",
            remedy='Correct it, or use engine="fsspec".',
        )
    rest = dict(options)
    for name in _NESTED:
        rest |= {f"{name}.{key}": item for key, item in _mapping(rest, name).items()}
    verify, inner = rest.pop("verify", None), rest.pop("client_kwargs.verify", None)
    renamed = {ours: rest.pop(theirs, None) for theirs, ours in _RENAMED[kind].items() if rest.get(theirs) is not None}
    own = {name: rest.pop(name) for name in _OWN[kind] & rest.keys()}
    config, headers = renamed | own, dict[str, str]()
    if kind == "s3":
        _read_s3(rest, config)
    elif kind == "gs":
        _read_gs(rest, config, headers)
    elif kind == "az" and rest.pop("anon", False):
        config["skip_signature"] = True
    elif kind == "http":
        headers |= {key: str(value) for key, value in _mapping(rest, "client_kwargs.headers").items()}
        headers |= {key: str(value) for key, value in _mapping(rest, "headers").items()}
    if unknown := [name for name in rest if name not in _TUNING and name not in _RENAMED[kind]]:
        raise _unknown(*unknown)
    return Place(
        kind,
        f"{scheme}://{parts.netloc}" if kind == "http" else parts.netloc,
        rest_of_url.partition("/")[2].strip("/"),
        config,
        headers,
        authorities(scheme, inner if verify is None else verify),
    )


def _read_s3(options: dict[str, object], config: dict[str, object]) -> None:
    """Take what needs more than another name out of the options for S3."""
    if options.pop("anon", False):
        config["skip_signature"] = True
    if options.pop("requester_pays", False):
        config["request_payer"] = True
    if options.pop("config_kwargs.s3.addressing_style", "path") == "virtual":
        config["virtual_hosted_style_request"] = True
    if options.pop("config_kwargs.signature_version", "s3v4") not in ("s3v4", "v4"):
        raise _unknown("config_kwargs.signature_version")
    if options.pop("version_aware", False):
        raise _unknown("version_aware")
    options.pop("use_ssl", None)  # the same as the end point's scheme
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
        if (
            "session_token" not in config
        ):  # that of the environment belongs to other keys, and only a provider leaves it out
            key, secret = config.pop("access_key_id"), config.pop("secret_access_key")
            config["credential_provider"] = partial(_credential, key, secret)


def _credential(key: object, secret: object) -> dict[str, object]:
    return {"access_key_id": key, "secret_access_key": secret, "token": None, "expires_at": None}


def _read_gs(options: dict[str, object], config: dict[str, object], headers: dict[str, str]) -> None:
    """Take what needs more than another name out of the options for Google."""
    token = options.pop("token", None)
    if token == "anon":  # noqa: S105 - a word, not a token
        config["skip_signature"] = True
    elif isinstance(token, str) and os.path.exists(token):
        config["application_credentials"] = token
    elif token is not None and token != "google_default":  # noqa: S105 - a word, not a token
        raise _unknown("token")
    payer = options.pop("requester_pays", None)
    if isinstance(payer, str):
        headers["x-goog-user-project"] = payer
    elif payer:
        raise _unknown("requester_pays")
    options.pop("project", None)
    options.pop("access", None)


def resolves_alike(place: Place) -> bool:
    """Return True if obstore finds the end point and the credentials that fsspec's file systems find.

    These read configuration files, profiles and federated identities, which obstore does not know. Options of one's own decide
    for both.
    """
    given = place.config
    is_given = bool({"credential_provider", "bearer_token"} & given.keys())
    is_unsigned = str(given.get("skip_signature", "")).strip().lower() in {"1", "true", "on", "yes", "y"}
    if place.kind == "s3":
        has_keys = is_given or is_unsigned or {"access_key_id", "secret_access_key"} <= given.keys()
        has_keys |= {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= set(
            os.environ
        ) and "AWS_PROFILE" not in os.environ
        has_endpoint = "endpoint" in given or not ("AWS_ENDPOINT" in os.environ or _configures_endpoint())
        return has_keys and has_endpoint
    if place.kind == "gs":
        if "GOOGLE_BASE_URL" in os.environ and "base_url" not in given:
            return False
        if is_given or is_unsigned or {"service_account", "service_account_key"} & given.keys():
            return True
        path = given.get("application_credentials") or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        return isinstance(path, str) and _google_type(path) in _GOOGLE_TYPES
    if place.kind == "az":
        return is_unsigned or (
            bool({"account_key", "sas_key", "client_secret"} & given.keys()) and "account_name" in given
        )
    return True


def _configures_endpoint() -> bool:
    """Return True if the configuration file of AWS names an end point, for whatever profile."""
    try:
        with open(os.path.expanduser(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")), "rb") as file:
            return b"endpoint_url" in file.read(1 << 20)
    except OSError:
        return False


def _google_type(path: str) -> object:
    """The type of a file of Google's credentials; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            found: object = json.loads(file.read(1 << 20))
    except (OSError, ValueError, RecursionError):
        return None
    return cast("dict[str, object]", found).get("type") if isinstance(found, dict) else None


def _mapping(options: dict[str, object], name: str) -> dict[str, object]:
    """Take an option that is a mapping out of the others."""
    value = options.pop(name, None)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ArgumentError(f"must be a mapping, got {kind_of(value)}", where=f"storage_options[{name!r}]")
    return {str(key): item for key, item in cast("Mapping[object, object]", value).items()}


def _unknown(*names: str) -> ArgumentError:
    return ArgumentError(
        f"the engine obstore has no equivalent for {', '.join(sorted(names))}",
        where="storage_options",
        remedy='Leave it out, or use engine="fsspec".',
    )
