"""Options and addresses, as obstore takes them; those that it does not know are refused by it."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, cast
from urllib.parse import urlsplit

from saev_store.errors import ArgumentError
from saev_store.transport import base

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_KINDS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
#: obstore's names of s3fs's options; the last one wins.
_RENAMED = {
    "anon": "skip_signature",
    "requester_pays": "request_payer",
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "endpoint_url": "endpoint",
    "client_kwargs.endpoint_url": "endpoint",
    "client_kwargs.region_name": "region",
}
#: Options that give the credentials.
_GIVEN = {"access_key_id", "credential_provider", "application_credentials"}


class Place(NamedTuple):
    """An address, its path without slashes at its ends, and options of obstore."""

    kind: str
    bucket: str
    prefix: str
    config: Mapping[str, object]


def place_of(url: str, options: Mapping[str, object]) -> Place:
    """An address with options, as obstore takes them; `ArgumentError` if it has no store for the address."""
    scheme, _, rest = url.partition("://")
    bucket, kind = urlsplit(url).netloc, _KINDS.get(scheme)
    if kind is None or not bucket or not {"?", "#", "@"}.isdisjoint(url) or "::" in url:
        raise ArgumentError(
            f"obstore serves {', '.join(_KINDS)}, a bucket and a path, without user, '?' and '#'",
            where="url",
        )
    config = dict(options)
    if isinstance(client := config.get("client_kwargs"), Mapping):
        del config["client_kwargs"]
        config |= {f"client_kwargs.{name}": item for name, item in cast("Mapping[str, object]", client).items()}
    if kind == "s3":
        _read_s3(config)
    elif (token := config.pop("token", None)) == "anon":
        config["skip_signature"] = True
    elif token is not None:  # a file
        config["application_credentials"] = token
    return Place(kind, bucket, rest.partition("/")[2].strip("/"), config)


def _read_s3(config: dict[str, object]) -> None:
    for theirs, ours in _RENAMED.items():
        if (value := config.pop(theirs, None)) is not None:
            config[ours] = value
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if "endpoint" in config or endpoint:
        # obstore reads the environment too, and the second key of it would win over every option.
        config["endpoint"] = config["aws_endpoint_url_s3"] = config.get("endpoint", endpoint)
    if bundle := os.environ.get("AWS_CA_BUNDLE"):
        config.setdefault("client_kwargs.verify", bundle)
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


def resolves_alike(place: Place) -> bool:
    """Return True if obstore finds what fsspec's file systems find, which also read files, profiles and the machine's identity."""
    given, environment = place.config, os.environ
    is_known = given.get("skip_signature") is True or bool(_GIVEN & given.keys())
    if place.kind == "gs":  # emulators speak the other one of Google's two interfaces
        is_known |= "GOOGLE_APPLICATION_CREDENTIALS" in environment
        return is_known and "STORAGE_EMULATOR_HOST" not in environment
    has_keys = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= environment.keys()
    is_known |= has_keys and "AWS_PROFILE" not in environment
    configured = "AWS_ENDPOINT" in environment or os.path.exists(
        os.path.expanduser(environment.get("AWS_CONFIG_FILE", "~/.aws/config"))
    )
    is_found = "endpoint" in given or ("region" in given and not configured)
    return is_known and is_found


def open_store(place: Place, *, connect_timeout_s: float, connections: int) -> ObjectStore:
    """The client of a bucket; any exception if obstore refuses an option."""
    from obstore import store as stores

    config = dict(place.config)
    verify = config.pop("client_kwargs.verify", None)
    client_options: dict[str, object] = {
        "allow_http": any(str(value).lower().startswith("http://") for value in config.values()),
        "connect_timeout": timedelta(seconds=connect_timeout_s),
        "read_timeout": timedelta(seconds=base.READ_TIMEOUT_S),
        # For the whole request, body included: the deadline of `RemoteTransport.run` is what counts.
        "timeout": timedelta(hours=1),
        # A request that begins before the last connection is back opens another one.
        "pool_max_idle_per_host": str(2 * connections),
    }
    if isinstance(verify, str):
        with open(verify, encoding="latin-1") as file:
            client_options["root_certificate"] = file.read()
    elif verify is False:
        client_options["allow_invalid_certificates"] = True
    given = {name: config.pop(name) for name in ("credential_provider",) if name in config}
    retry: dict[str, object] = {
        # The waits are random: only their sum is limited.
        "max_retries": 1000,
        "retry_timeout": timedelta(seconds=base.RETRY_S),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=3), "base": 3},
    }
    make = stores.S3Store if place.kind == "s3" else stores.GCSStore
    return make(place.bucket, config=config, client_options=client_options, retry_config=retry, **given)  # pyright: ignore[reportArgumentType]  # typed dictionaries
