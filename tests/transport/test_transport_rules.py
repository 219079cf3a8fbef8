"""What options, errors, answers and addresses mean to the clients of object stores: tables, and no server."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import aiohttp
import pytest

from saev_store.errors import (
    AccessError,
    ArgumentError,
    DeadlineError,
    NotFoundError,
    ReadOnlyError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
)
from saev_store.transport import MemoryTransport, MmapTransport, PreadTransport
from saev_store.transport._remote import Pins
from saev_store.transport.base import UnfinishedUpload
from saev_store.transport.credentials import StorageOptions
from saev_store.transport.fsspec import _client, _ranges
from saev_store.transport.fsspec._client import FsspecClient, safe_url
from saev_store.transport.fsspec._options import tuned
from saev_store.transport.fsspec._ranges import _http as get_of_http
from saev_store.transport.fsspec._ranges import _s3 as get_of_s3
from saev_store.transport.fsspec._ranges import cat_ranges, get_range
from saev_store.transport.fsspec._sink import list_uploads
from saev_store.transport.fsspec._transport import FsspecTransport
from saev_store.transport.fsspec._transport import _modified_s as modified_s
from saev_store.transport.obstore._options import finds_credentials, only_obstore_understands, place_of

SECRET = "hush-hush-hush-hush"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_"))]:
        monkeypatch.delenv(name)


# -- obstore ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://host/a", "obstore serves .*, not ftp"),
        ("host/a", "obstore serves .*, not host/a"),
        ("simplecache::s3://lab/a", "obstore serves"),
        ("s3://key@lab/a", "more than a host and a path"),
        ("https://host/a?b", "more than a host and a path"),
        ("https://host/a#b", "more than a host and a path"),
        ("s3:///a", "names no bucket"),
    ],
)
def test_addresses_that_obstore_has_no_store_for(url: str, why: str):
    with pytest.raises(ArgumentError, match=f"^url: .*{why}"):
        place_of(url, {})


def test_what_a_place_says_of_its_server():
    virtual = place_of("s3://lab", {"config_kwargs": {"s3": {"addressing_style": "virtual"}}})
    assert virtual.config == {"virtual_hosted_style_request": True}
    assert (virtual.endpoint, virtual.allow_http, virtual.bucket, virtual.prefix) == ("", False, "lab", "")
    google = place_of("gs://lab//a/b/", {"access": "read_only", "project": "p", "base_url": "http://here"})
    assert (google.config, google.headers) == ({"base_url": "http://here"}, {})
    assert (google.endpoint, google.allow_http, google.prefix) == ("http://here", True, "a/b")
    web = place_of("HTTPS://host:1/a", {})
    assert (web.bucket, web.endpoint, web.allow_http, web.prefix) == ("https://host:1", "https://host:1", False, "a")
    assert place_of("az://box", {"use_emulator": True}).allow_http


@pytest.mark.parametrize(
    ("variables", "options", "config"),
    [
        ({"AWS_ENDPOINT_URL_S3": "https://a", "AWS_ENDPOINT_URL": "https://b"}, {}, {"endpoint": "https://a", "region": "us-east-1"}),
        ({"AWS_ENDPOINT_URL": "https://b"}, {}, {"endpoint": "https://b", "region": "us-east-1"}),
        ({"AWS_ENDPOINT_URL": "https://b"}, {"endpoint_url": "https://c"}, {"endpoint": "https://c", "region": "us-east-1"}),
        ({"AWS_REGION": "r1", "AWS_DEFAULT_REGION": "r2"}, {}, {"region": "r1"}),
        ({"AWS_DEFAULT_REGION": "r2"}, {}, {"region": "r2"}),
        ({"AWS_REGION": "r1"}, {"config_kwargs": {"region_name": "r3"}}, {"region": "r3"}),
        ({}, {"use_ssl": True}, {}),
        ({}, {"use_ssl": False, "config_kwargs": {"signature_version": "v4"}}, {}),
        ({}, {"version_aware": False, "anon": False, "requester_pays": False}, {}),
        ({}, {"username": "k", "password": "s"}, {"access_key_id": "k", "secret_access_key": "s"}),
        ({}, {"key": "k", "client_kwargs": {"aws_secret_access_key": "s", "aws_session_token": "t"}}, {"access_key_id": "k", "secret_access_key": "s", "session_token": "t"}),
        ({}, {"key": None, "secret": None}, {}),
        ({}, {"config_kwargs": {"s3": {"addressing_style": "path"}}}, {}),
    ],
)  # fmt: skip
def test_where_an_option_of_s3_comes_from(
    variables: dict[str, str], options: dict[str, object], config: dict[str, object], monkeypatch: pytest.MonkeyPatch
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert dict(place_of("s3://b/x", options).config) == config


@pytest.mark.parametrize(
    ("url", "options", "variables", "finds"),
    [
        ("s3://b", {}, {}, False),
        ("s3://b", {"anon": True}, {}, True),
        ("s3://b", {"skip_signature": "yes"}, {}, True),
        ("s3://b", {"skip_signature": "no"}, {}, False),
        ("s3://b", {"key": "k"}, {}, True),
        ("s3://b", {}, {"AWS_ACCESS_KEY_ID": "k"}, False),
        ("s3://b", {}, {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}, True),
        ("s3://b", {}, {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_PROFILE": "lab"}, False),
        ("gs://b", {}, {}, False),
        ("gs://b", {"token": "anon"}, {}, True),
        ("gs://b", {"bearer_token": "t"}, {}, True),
        ("gs://b", {"service_account_key": "{}"}, {}, True),
        ("gs://b", {}, {"GOOGLE_APPLICATION_CREDENTIALS": "x.json"}, True),
        ("az://c", {"account_name": "a"}, {}, False),
        ("az://c", {"account_key": "k"}, {}, False),
        ("az://c", {"account_name": "a", "account_key": "k"}, {}, True),
        ("az://c", {"account_name": "a", "sas_token": "k"}, {}, True),
        ("az://c", {"account_name": "a", "client_secret": "k"}, {}, True),
        ("az://c", {"account_name": "a", "anon": True}, {}, True),
        ("https://h/x", {}, {}, True),
    ],
)  # fmt: skip
def test_which_credentials_obstore_finds(
    url: str, options: dict[str, object], variables: dict[str, str], finds: bool, monkeypatch: pytest.MonkeyPatch
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert finds_credentials(place_of(url, options)) == finds


@pytest.mark.parametrize(
    ("url", "options", "variable", "names"),
    [
        ("s3://b", {}, "AWS_ENDPOINT", ["AWS_ENDPOINT"]),
        ("s3://b", {"endpoint_url": "https://h"}, "AWS_ENDPOINT", []),
        ("s3://b", {"region": "r", "access_key_id": "k"}, "", ["access_key_id", "region"]),
        ("gs://b", {}, "GOOGLE_BASE_URL", ["GOOGLE_BASE_URL"]),
        ("gs://b", {"base_url": "https://h"}, "GOOGLE_BASE_URL", ["base_url"]),
        ("gs://b", {}, "AWS_ENDPOINT", []),
        ("az://c", {"account_name": "a"}, "AWS_ENDPOINT", ["account_name"]),
    ],
)
def test_what_only_obstore_understands(
    url: str, options: dict[str, object], variable: str, names: list[str], monkeypatch: pytest.MonkeyPatch
):
    if variable:
        monkeypatch.setenv(variable, "https://elsewhere")
    assert only_obstore_understands(place_of(url, options), options) == names


# -- fsspec ----------------------------------------------------------------------------------------------------------------


class HttpError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"the server answers {status}")
        self.status = status


@pytest.mark.parametrize(
    ("status", "kind", "transient"),
    [
        (400, TransportError, False),
        (401, AccessError, False),
        (403, AccessError, False),
        (404, NotFoundError, False),
        (408, TransportError, True),
        (409, TransportError, False),
        (416, TransportError, False),
        (429, TransportError, True),
        (499, TransportError, False),
        (500, TransportError, True),
        (503, TransportError, True),
    ],
)
def test_which_answers_pass_by_themselves(status: int, kind: type[SaevStoreError], transient: bool):
    client = FsspecClient("memory://x", StorageOptions({}), 5.0)
    with pytest.raises(kind) as caught, client.errors("read", "memory://x/a"):
        raise HttpError(status)
    assert type(caught.value) is kind
    assert getattr(caught.value, "transient", False) == transient
    assert caught.value.where == "memory://x/a"


def test_an_error_that_hangs_on_a_secret_shows_nothing_of_it():
    """Whether it was raised `from` another, or while another was handled: tracebacks show both."""
    client = FsspecClient("memory://x", StorageOptions({"secret": SECRET}), 5.0)
    for told, keeps_cause in ((SECRET, False), ("nothing", True)):
        for as_cause in (True, False):
            raised = TimeoutError("it took too long")
            other = ValueError(f"signed with {told}")
            if as_cause:
                raised.__cause__ = other
            else:
                raised.__context__ = other
            with pytest.raises(DeadlineError) as caught, client.errors("read", "memory://x/a"):
                raise raised
            assert (caught.value.__cause__ is raised) == keeps_cause
            assert SECRET not in str(caught.value)


@pytest.mark.parametrize("told", ["text", "arguments", "attribute"])
def test_an_error_that_holds_a_secret_anywhere_is_no_cause(told: str):
    """Tools that pickle errors, or show their variables, take all that hangs on them."""
    raised = TimeoutError("it took too long")
    if told == "text":
        raised = TimeoutError(f"it took too long for {SECRET}")
    elif told == "arguments":
        raised.__cause__ = ValueError("not signed", {"with": SECRET})
    else:
        raised.request = {"signed with": SECRET}  # pyright: ignore[reportAttributeAccessIssue]  # as aiohttp's have `request_info`
    client = FsspecClient("memory://x", StorageOptions({"secret": SECRET}), 5.0)
    with pytest.raises(DeadlineError) as caught, client.errors("read", "memory://x/a"):
        raise raised
    assert caught.value.__cause__ is None
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://h/x#token", "https://h/x"),
        ("https://h/x/?a=b#c", "https://h/x"),
        ("simplecache::https://h/x#token", "simplecache::https://h/x"),
        ("s3://key:secret@b/a#b", "s3://b/a"),
        ("/home/a#b?c", "/home/a#b?c"),
    ],
)
def test_urls_are_shown_without_what_follows_the_path(url: str, shown: str):
    assert safe_url(url) == shown


@pytest.mark.parametrize("protocol", ["s3", "s3a", "gs", "gcs", "http", "https", "abfs", "abfss", "az"])
def test_lists_are_asked_for_anew(protocol: str):
    """fsspec keeps those of object stores and web servers for ever."""
    assert tuned(protocol, {})["use_listings_cache"] is False
    assert tuned(protocol, {"use_listings_cache": True})["use_listings_cache"] is True


def test_what_the_caller_says_wins_over_our_tuning():
    found = tuned("s3", {"config_kwargs": {"read_timeout": 7}, "use_listings_cache": True, "anon": True})
    assert found["config_kwargs"]["read_timeout"] == 7
    assert (found["use_listings_cache"], found["anon"]) == (True, True)


class UploadPages:
    """A client whose server lists uploads one a page, as S3 does where there are more than a thousand."""

    def __init__(self, keys: list[str]) -> None:
        self.keys, self.asked = keys, []

    def ask(self, operation: str, call: str, **given: object) -> Mapping[str, object]:
        assert (operation, call) == ("call_s3", "list_multipart_uploads")
        self.asked.append(given)
        marker = given.get("KeyMarker"), given.get("UploadIdMarker")
        at = 0 if marker == (None, None) else 1 + self.keys.index(str(marker[0]))
        if at:
            assert marker == (self.keys[at - 1], f"id{at - 1}")
        return {
            "Uploads": [{"Key": self.keys[at], "UploadId": f"id{at}"}],
            "IsTruncated": at + 1 < len(self.keys),
            "NextKeyMarker": self.keys[at],
            "NextUploadIdMarker": f"id{at}",
        }


def test_uploads_of_all_pages_that_are_in_the_folder_or_are_it():
    client = UploadPages(["a/b", "a/b/x", "a/b/y/z", "a/bc", "a/bc/x"])
    found = list_uploads(client, "bucket", "a/b", folder="bucket/a/b")
    assert found == [
        UnfinishedUpload("", "id0", None),
        UnfinishedUpload("x", "id1", None),
        UnfinishedUpload("y/z", "id2", None),
    ]
    assert [each["Prefix"] for each in client.asked] == ["a/b"] * 5


def requested(get, start: int, end: int):
    """A range of a file system whose requests `get` answers."""
    return get_range(get, SimpleNamespace(), "a", start, end, where="x", arrived=lambda _: None)


@pytest.mark.parametrize(
    ("headers", "version"),
    [
        ({"etag": "e", "x-goog-generation": "7", "last-modified": "t"}, ("7", 100)),
        ({"etag": "e", "last-modified": "t"}, ("e", 100)),
        ({"last-modified": "t"}, ("t", 100)),
        ({}, (None, 100)),
    ],
)
def test_the_version_of_an_answer(headers: dict[str, str], version: tuple[str | None, int]):
    async def get(
        fs: object, path: str, start: int, end: int, arrived: Callable[[int], object]
    ) -> tuple[bytes, Mapping[str, str]]:
        return bytes(end - start), {"content-range": f"bytes {start}-{end - 1}/100", **headers}

    assert asyncio.run(requested(get, 7, 11)) == (bytes(4), version)


@pytest.mark.parametrize(
    ("said", "nbytes", "is_refused", "size"),
    [
        ("bytes 10-13/100", 4, False, 100),
        ("bytes 10-13/*", 4, False, None),
        ("bytes 11-14/100", 4, True, None),
        ("bytes 10-14/100", 4, True, None),
        ("Bytes 10-13/100", 4, False, 100),
        ("Bytes 11-14/100", 4, True, None),
        ("10-13", 4, True, None),
        ("bytes 10-12/13", 3, False, 13),  # the end of the object: who asked sees that it is short
        ("", 4, False, None),
    ],
)
def test_the_range_of_an_answer(said: str, nbytes: int, is_refused: bool, size: int | None):
    async def get(
        fs: object, path: str, start: int, end: int, arrived: Callable[[int], object]
    ) -> tuple[bytes, Mapping[str, str]]:
        return bytes(nbytes), {"content-range": said} if said else {}

    if is_refused:
        with pytest.raises(TransportError, match=r"bytes 10 to 14 were asked for") as caught:
            asyncio.run(requested(get, 10, 14))
        assert caught.value.transient
    else:
        assert asyncio.run(requested(get, 10, 14)) == (bytes(nbytes), (None, size))


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_a_file_that_gives_little_at_once_is_read_on(most: int) -> None:
    """As often as it needs, and no further than its end."""

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(most, size or 0))

    truth = bytes(range(20))
    for start, end in ((0, 20), (3, 10), (19, 20), (5, 5), (15, 30), (20, 25)):
        assert _ranges._read_range(Slow(truth), start, end) == truth[start:end]


def test_a_file_that_gives_many_parts_at_once_is_asked_for_them() -> None:
    """Files of SFTP: their `read` waits for an answer after each 32 KiB."""
    truth, asked = bytes(range(20)), list[tuple[int, int]]()

    class Pipelined(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise NotImplementedError

        def readv(self, chunks: list[tuple[int, int]]) -> Iterator[bytes]:
            asked.extend(chunks)
            yield from (truth[start : start + size] for start, size in chunks)

    fs = SimpleNamespace(open=lambda path, mode: Pipelined(truth))
    assert _ranges.read_ranges(fs, "a", [5, 0, 5], [9, 20, 9], by_range=False) == [truth[5:9], truth, truth[5:9]]
    assert asked == [(5, 4), (0, 20), (5, 4)]


@pytest.mark.parametrize("name", ["LastModified", "mtime", "updated", "last_modified"])
@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        (datetime(1970, 1, 1, 0, 1, 40, tzinfo=UTC), 100.0),
        ("1970-01-01T00:01:40+00:00", 100.0),
        ("1970-01-01T00:01:40.250Z", 100.25),
        (100, 100.0),
        (100.5, 100.5),
        ("yesterday", None),
        (None, None),
    ],
)
def test_when_a_file_was_written_as_each_file_system_tells_it(name: str, told: object, seconds: float | None) -> None:
    assert modified_s({"name": "a", name: told}) == seconds
    assert modified_s({"name": "a"}) is None


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("raised", "doing", "kind", "message", "transient"),
    [
        (FileNotFoundError("a"), "read", NotFoundError, "could not read: FileNotFoundError: a", None),
        (KeyError("no item a in the archive"), "read", NotFoundError, "in the archive", None),
        (KeyError("a"), "read", TransportError, "could not read: KeyError: 'a'", True),
        (PermissionError("a"), "read", AccessError, "could not read: PermissionError: a", None),
        (OSError("Forbidden: b/o"), "read", AccessError, "Forbidden", None),
        (type("NoCredentialsError", (Exception,), {})("a"), "read", AccessError, "NoCredentialsError", None),
        (FileExistsError("a"), "create", StoreExistsError, "could not create: FileExistsError: a", None),
        (FileExistsError("a"), "read", TransportError, "could not read", False),
        (FileExistsError("a"), "look at it", TransportError, "could not look at it", False),
        (FileExistsError("a"), "list", TransportError, "could not list", False),
        (RecursionError("deep"), "read", TransportError, "the server goes on answering that the bucket is elsewhere", False),
        (TimeoutError(), "read", DeadlineError, "could not read: TimeoutError", True),
        (type("ServerTimeoutError", (Exception,), {})("a"), "read", DeadlineError, "ServerTimeoutError", True),
        (NotImplementedError(), "create", ReadOnlyError, "this kind of file system cannot create", None),
        (OSError(errno.ENOSPC, "full"), "write", TransportError, "could not write: No space left on device", False),
        (OSError(errno.EIO, "broken"), "read", TransportError, "could not read: OSError: .*broken", True),
        (OSError(errno.EBUSY, "busy"), "read", TransportError, "could not read: OSError: .*busy", True),
        (ValueError("a"), "read", TransportError, "could not read: ValueError: a", False),
        (TypeError("a"), "read", TransportError, "could not read: TypeError: a", False),
        (_caused(FileNotFoundError("a"), HttpError(404)), "read", NotFoundError, "could not read", None),
        (_caused(FileNotFoundError("a"), HttpError(503)), "read", TransportError, "the server answers 503", True),
        (_caused(FileNotFoundError("a"), ConnectionRefusedError(errno.ECONNREFUSED, "no")), "read", TransportError, "refused", True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)  # fmt: skip
def test_errors_of_file_systems_become_ours(
    raised: Exception, doing: str, kind: type[SaevStoreError], message: str, transient: bool | None
):
    client = FsspecClient("memory://x", StorageOptions({}), 5.0)
    with pytest.raises(kind, match=message) as caught, client.errors(doing, "memory://x/a"):
        raise raised
    assert type(caught.value) is kind
    assert getattr(caught.value, "transient", None) == transient
    assert caught.value.where == "memory://x/a"
    assert (kind is not AccessError) or "credentials" in str(caught.value.remedy)


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_how_s3_is_spoken_to_where_nobody_says_otherwise(scheme: str, monkeypatch: pytest.MonkeyPatch):
    """As many connections as requests in flight, no wait without end, and one attempt more."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    assert tuned(scheme, {}) == {
        "use_listings_cache": False,
        "config_kwargs": {
            "max_pool_connections": 64, "connect_timeout": 5, "read_timeout": 10, "retries": {"max_attempts": 1, "mode": "standard"},
        },
    }  # fmt: skip


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_how_web_servers_are_spoken_to_where_nobody_says_otherwise(scheme: str, monkeypatch: pytest.MonkeyPatch):
    """aiohttp gives up after five minutes by default, also where bytes still come."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    client = tuned(scheme, {})["client_kwargs"]
    assert (client["timeout"].total, client["timeout"].sock_connect, client["read_bufsize"]) == (None, 5, 8 << 20)
    given = {"timeout": aiohttp.ClientTimeout(total=7), "read_bufsize": 1 << 16, "trust_env": True}
    assert tuned(scheme, {"client_kwargs": given})["client_kwargs"] == given


@pytest.mark.parametrize(
    ("url", "options", "headers"),
    [
        ("gs://b", {"requester_pays": "project"}, {"x-goog-user-project": "project"}),
        ("gs://b", {"requester_pays": False}, {}),
        ("https://h/x", {"headers": {"A": 1}, "client_kwargs": {"headers": {"A": 2, "B": 3}}}, {"A": "1", "B": "3"}),
    ],
)
def test_which_headers_obstore_sends(url: str, options: dict[str, object], headers: dict[str, str]):
    assert place_of(url, options).headers == headers


@pytest.mark.parametrize(
    ("url", "options", "config", "allows_http"),
    [
        ("az://c", {"anon": True}, {"skip_signature": True}, False),
        ("az://c", {"use_emulator": True}, {"use_emulator": True}, True),
        ("az://c", {"endpoint": "HTTP://h"}, {"endpoint": "HTTP://h"}, True),
        ("s3://b", {"requester_pays": True, "region": "r"}, {"request_payer": True, "region": "r"}, False),
        ("gs://b", {"base_url": "http://h"}, {"base_url": "http://h"}, True),
        ("gs://b", {"token": "google_default"}, {}, False),
        ("gs://b", {"token": __file__}, {"application_credentials": __file__}, False),
        ("http://h/x", {}, {}, True),
        ("https://h/x", {}, {}, False),
    ],
)
def test_what_obstore_is_told(url: str, options: dict[str, object], config: dict[str, object], allows_http: bool):
    place = place_of(url, options)
    assert place.config == config
    assert place.allow_http == allows_http


@pytest.mark.parametrize(
    ("url", "options", "named"),
    [
        ("gs://b", {"requester_pays": True}, "requester_pays"),
        ("gs://b", {"token": "/no/such/file"}, "token"),
        ("gs://b", {"token": {"a": 1}}, "token"),
        ("s3://b", {"config_kwargs": {"signature_version": "s3"}}, "config_kwargs.signature_version"),
        ("s3://b", {"config_kwargs": {"signature_version": []}}, "config_kwargs.signature_version"),
        ("http://h", {"anon": True}, "anon"),
        ("az://c", {"key": "k", "secret": "s"}, "key, secret"),
    ],
)
def test_what_obstore_cannot_be_told(url: str, options: dict[str, object], named: str):
    with pytest.raises(ArgumentError, match=rf"no equivalent for {re.escape(named)}\. ") as refused:
        place_of(url, options)
    assert refused.value.where == "storage_options"
    assert "fsspec" in str(refused.value.remedy)


def test_a_folder_that_is_listed_as_empty_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Archives of older releases of fsspec list what is not there so; the root may be empty."""
    transport = FsspecTransport("memory://an-empty-place")
    monkeypatch.setattr(transport.client, "ask", lambda operation, *given, **options: [])
    assert transport.list() == []
    with pytest.raises(NotFoundError, match="could not list"):
        transport.list("gone")


@pytest.mark.parametrize("error", [FileNotFoundError("gone"), PermissionError("no"), TimeoutError()])
def test_an_error_among_ranges_is_raised_and_not_handed_out(error: OSError) -> None:
    """Older releases of fsspec return it in the place of its range, whatever they were asked for."""

    class FileSystem:
        async def _cat_ranges(
            self, paths: list[str], starts: list[int], ends: list[int], on_error: str
        ) -> list[object]:
            assert (paths, starts, ends, on_error) == (["a"] * 3, [0, 5, 9], [1, 6, 10], "raise")
            return [b"x", error, b"y"]

    with pytest.raises(type(error)) as caught:
        asyncio.run(cat_ranges(FileSystem(), "a", (0, 5, 9), (1, 6, 10)))
    assert caught.value is error


def test_the_links_of_a_chain_are_tuned_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def url_to_fs(url: str, **options: object) -> None:
        seen.update(options, url=url)
        raise ValueError("enough")

    monkeypatch.setattr("fsspec.core.url_to_fs", url_to_fs)
    given = {"s3": {"anon": True}, "simplecache": {"cache_storage": "/tmp/x"}}
    with pytest.raises(ArgumentError, match="enough"):
        FsspecClient("simplecache::s3://lab/x", StorageOptions(given), 60).fs()
    assert seen.pop("url") == "simplecache::s3://lab/x"
    assert seen == {"s3": tuned("s3", {"anon": True}), "simplecache": {"cache_storage": "/tmp/x"}}
    assert seen["s3"]["use_listings_cache"] is False


# -- versions ----------------------------------------------------------------------------------------------------------------


def test_what_was_changed_here_is_unpinned_with_all_that_is_below() -> None:
    pins = Pins()
    for path in ("a", "a/b", "a/b/c", "ab", "b/a"):
        pins.check(path, ("1", 5), where=path)
    pins.forget("a")
    assert set(pins) == {"ab", "b/a"}
    pins.check("a/b", ("2", 6), where="a/b")
    for version in (("2", 5), ("1", 6), (None, 5)):
        with pytest.raises(TransportError, match="was replaced while it was being read"):
            pins.check("ab", version, where="ab")


@pytest.mark.parametrize("sizes", [(None, 5, 5), (5, None, 5), (None, None, 5)])
def test_a_size_that_is_not_told_is_no_other_version(sizes: tuple[int | None, ...]) -> None:
    """Web servers answer a range of all bytes with the whole file, without telling its size."""
    pins = Pins()
    for size in sizes:
        pins.check("a", ("1", size), where="a")
    assert pins["a"] == ("1", 5)
    for version in (("1", 6), ("2", None), (None, None)):
        with pytest.raises(TransportError, match="was replaced while it was being read"):
            pins.check("a", version, where="a")
    pins.check("b", (None, None), where="b")
    with pytest.raises(TransportError, match="was replaced while it was being read"):
        pins.check("b", (None, 5), where="b")


# -- ranges ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [-1, -2, -(2**40)])
def test_a_place_before_a_file_is_none(start: int, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"0123456789")
    for transport in (MmapTransport(tmp_path), PreadTransport(tmp_path), MemoryTransport({"a.bin": b"0123456789"})):
        for starts in ([start], [3, start], [start, start + 2]):
            memory = [bytearray(2) for _ in starts]
            with pytest.raises(ArgumentError, match="negative or backwards"):
                transport.readinto("a.bin", starts=starts, buffers=[memoryview(piece) for piece in memory])
            with pytest.raises(ArgumentError, match="negative or backwards"):
                transport.get_ranges("a.bin", starts=starts, ends=[at + 2 for at in starts])
            assert memory == [bytearray(2) for _ in starts]


@pytest.mark.parametrize(("version", "chosen"), [(None, {}), ("v1", {"VersionId": "v1"})])
@pytest.mark.parametrize("breaks_off", [False, True])
def test_the_body_of_an_answer_of_s3_is_counted_and_closed(
    version: str | None, chosen: dict[str, str], breaks_off: bool
):
    parts, closed, asked, arrived = [b"234", b"56"], [], [], list[int]()

    class Body:
        async def read(self, n: int) -> bytes:
            assert n > 0
            if breaks_off and len(parts) == 1:
                raise ConnectionResetError
            return parts.pop(0) if parts else b""

        def close(self) -> None:
            closed.append(True)

    class FileSystem:
        def split_path(self, path: str) -> tuple[str, str, str | None]:
            assert path == "lab/a.bin"
            return "lab", "a.bin", version

        async def _call_s3(self, operation: str, **given: object) -> dict[str, object]:
            asked.append((operation, given))
            return {"Body": Body(), "ResponseMetadata": {"HTTPHeaders": {"etag": "e"}}}

    call = get_of_s3(FileSystem(), "lab/a.bin", 2, 7, arrived.append)
    if breaks_off:
        with pytest.raises(ConnectionResetError):
            asyncio.run(call)
    else:
        assert asyncio.run(call) == (b"23456", {"etag": "e"})
    assert asked == [("get_object", {"Bucket": "lab", "Key": "a.bin", "Range": "bytes=2-6", **chosen})]
    assert (closed, arrived) == ([True], [3] if breaks_off else [3, 2])


class WebAnswer:
    """An answer of a web server, part by part; after the parts comes `ends`."""

    status, content_length, headers = 206, 6, {"etag": "e"}

    def __init__(self, parts: list[bytes], ends: Exception | None = None) -> None:
        self.content, self._parts, self._ends = self, parts, ends

    def get(self, url: str, **options: object) -> WebAnswer:
        headers = {"A": "1", "Accept-Encoding": "identity", "Range": "bytes=2-7"}
        assert (url, options["headers"]) == ("http://h/a", headers)
        return self

    async def __aenter__(self) -> Self:
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def readany(self) -> bytes:
        await asyncio.sleep(0)
        if not self._parts and self._ends is not None:
            raise self._ends
        return self._parts.pop(0) if self._parts else b""


def answered(
    answer: WebAnswer,
    arrived: list[int],
    run: Callable[[Coroutine[object, object, Any]], Any] = asyncio.run,
    **client: object,
) -> bytes:
    async def session() -> WebAnswer:
        return answer

    fs = SimpleNamespace(
        kwargs={"headers": {"A": "1"}}, set_session=session, encode_url=str, _raise_not_found_for_status=lambda *_: None,
        client_kwargs=client,
    )  # fmt: skip
    data, _ = run(get_range(get_of_http, fs, "http://h/a", 2, 8, where="h/a", arrived=arrived.append))
    return data


@pytest.mark.parametrize(("tell_s", "told"), [(0.0, [3, 1, 2, 0]), (60.0, [6])])
def test_what_has_come_of_a_web_answer_is_told_now_and_then_and_at_its_end(
    tell_s: float, told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaders do not give up while it comes; to tell of each part takes longer than the rest of what we do for a request."""
    monkeypatch.setattr(_ranges, "_TELL_S", tell_s)
    arrived = list[int]()
    assert answered(WebAnswer([b"234", b"5", b"67"]), arrived) == b"234567"
    assert arrived == told


def test_what_came_of_a_web_answer_that_breaks_off_is_told() -> None:
    arrived = list[int]()
    with pytest.raises(ConnectionResetError):
        answered(WebAnswer([b"234", b"5"], ConnectionResetError()), arrived)
    assert arrived == [4]


class Clock(asyncio.SelectorEventLoop):
    """A loop with a clock that is set by hand."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


@pytest.mark.parametrize(("wait_s", "is_stalled"), [(9.0, False), (11.0, True)])
def test_each_part_of_a_web_answer_may_take_ten_seconds(wait_s: float, is_stalled: bool) -> None:
    class Slow(WebAnswer):
        async def readany(self) -> bytes:
            cast("Clock", asyncio.get_running_loop()).now_s += wait_s
            await asyncio.sleep(0)
            return await super().readany()

    with asyncio.Runner(loop_factory=Clock) as runner:
        longer = {"timeout": aiohttp.ClientTimeout(sock_read=60.0)}  # of the caller
        assert answered(Slow([b"2", b"3", b"4", b"567"]), [], runner.run, **longer) == b"234567"
        if is_stalled:
            with pytest.raises(TimeoutError):
                answered(Slow([b"2", b"3", b"4", b"567"]), [], runner.run)
        else:
            assert answered(Slow([b"2", b"3", b"4", b"567"]), [], runner.run) == b"234567"


@pytest.mark.parametrize(
    "says",
    [
        {"status": 200},
        {"status": 200, "content_length": None},
        {"headers": {"Content-Type": "multipart/byteranges; boundary=THIS"}},
        {"headers": {"Content-Type": "Multipart/ByteRanges"}},
    ],
    ids=str,
)
def test_an_answer_that_is_no_range_is_refused_though_it_is_as_long(says: dict[str, object]) -> None:
    """The whole of a file that is as long as the range, from another place on."""
    answer = WebAnswer([b"234567"])
    vars(answer).update(says)
    with pytest.raises(
        TransportError, match="sends the whole file, or several parts, where bytes 2 to 8 were asked for"
    ):
        answered(answer, [])


def test_an_answer_without_an_end_is_not_read_on() -> None:
    answer = WebAnswer([b"23456"] * 1000)
    assert answered(answer, []) == b"23456" * 2  # whose length says that it is not the range
    assert len(answer._parts) == 998


@pytest.mark.parametrize("content_length", [6, None])
def test_a_server_may_send_a_file_whole_that_was_asked_for_whole(content_length: int | None) -> None:
    async def session() -> WebAnswer:
        return answer

    answer = WebAnswer([b"23", b"4567"])
    vars(answer).update(status=200, content_length=content_length, get=lambda *_, **__: answer)
    fs = SimpleNamespace(
        kwargs={}, set_session=session, encode_url=str, _raise_not_found_for_status=lambda *_: None, client_kwargs={}
    )
    assert asyncio.run(get_of_http(fs, "http://h/a", 0, 6, [].append))[0] == b"234567"


@pytest.mark.parametrize(("head_s", "part_s", "is_stalled"), [(9.0, 9.0, False), (0.0, 11.0, True), (11.0, 0.0, True)])
def test_the_head_and_the_first_part_of_a_web_answer_may_take_ten_seconds_each(
    head_s: float, part_s: float, is_stalled: bool
) -> None:
    async def take(time_s: float) -> None:
        cast("Clock", asyncio.get_running_loop()).now_s += time_s
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    class Late(WebAnswer):
        async def __aenter__(self) -> Self:
            await take(head_s)
            return self

        async def readany(self) -> bytes:
            await take(part_s if self._parts else 0.0)
            return await super().readany()

    with asyncio.Runner(loop_factory=Clock) as runner:
        if is_stalled:
            with pytest.raises(TimeoutError):
                answered(Late([b"234567"]), [], runner.run)
        else:
            assert answered(Late([b"234567"]), [], runner.run) == b"234567"


def test_all_that_is_under_way_in_a_loop_is_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ranges, "IN_FLIGHT", 3)
    under_way, most = 0, 0

    async def get(
        fs: object, path: str, start: int, end: int, arrived: Callable[[int], object]
    ) -> tuple[bytes, Mapping[str, str]]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return bytes(end - start), {}

    async def all_at_once() -> None:
        await asyncio.gather(*(requested(get, at, at + 1) for at in range(20)))

    asyncio.run(all_at_once())
    assert most == 3


def test_what_comes_of_google_is_counted() -> None:
    async def call(method: str, url: str, *, headers: Mapping[str, str]) -> tuple[Mapping[str, str], bytes]:
        assert (method, url, headers) == ("GET", "at/b/a", {"Range": "bytes=2-6"})
        return {"x-goog-generation": "7"}, b"23456"

    arrived = list[int]()
    fs = SimpleNamespace(_call=call, url="at/{}".format)
    assert asyncio.run(_ranges._gs(fs, "b/a", 2, 7, arrived.append)) == (b"23456", {"x-goog-generation": "7"})
    assert arrived == [5]


def test_how_google_is_spoken_to_where_nobody_says_otherwise() -> None:
    pytest.importorskip("gcsfs")
    timeout = tuned("gs", {})["requests_timeout"]
    assert (timeout.total, timeout.sock_connect, timeout.sock_read) == (None, 5, 10)
    assert tuned("gs", {"requests_timeout": 7})["requests_timeout"] == 7


@pytest.mark.parametrize("way", ["run", "awaited", "awaited here"])
def test_the_time_for_an_answer_grows_with_its_bytes(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte each second is slow enough to be as good as stalled."""
    client = FsspecClient("http://h/x" if way == "awaited here" else "memory://x", StorageOptions({}), 60.0)
    limits = list[float]()

    async def nothing(*_: object) -> int:
        return 3

    def ended(work: object, loop: object, *, limit_s: float) -> int:
        limits.append(limit_s)
        return 3

    async def ended_later(work: object, loop: object, *, limit_s: float) -> int:
        return ended(work, loop, limit_s=limit_s)

    timeout = asyncio.timeout
    monkeypatch.setattr(_client, "run_in_loop", ended)
    monkeypatch.setattr(_client, "awaited_in_loop", ended_later)
    monkeypatch.setattr(client, "fs", lambda: SimpleNamespace(loop=None))
    if way == "run":
        assert client.run(nothing, nbytes=30 << 20) == 3
    elif way == "awaited":
        assert asyncio.run(client.awaited(nothing, nbytes=30 << 20)) == 3
    else:

        async def here() -> int:
            async def kept(loop: object) -> AsyncGenerator[object]:
                yield None

            monkeypatch.setattr(client, "_kept", kept)
            monkeypatch.setattr(asyncio, "timeout", lambda limit_s: limits.append(limit_s) or timeout(limit_s))
            return await client.awaited(nothing, nbytes=30 << 20)

        assert asyncio.run(here()) == 3
    assert limits == [90.0]


@pytest.mark.parametrize("url", ["s3://lab/a?b", "s3://lab/a#b", "gs://lab/a?b"])
def test_an_address_that_its_own_text_would_cut_is_refused(url: str) -> None:
    """What is written there could not be opened again."""
    pytest.importorskip("s3fs" if url.startswith("s3") else "gcsfs")
    with pytest.raises(ArgumentError, match="end the path of an address"):
        FsspecTransport(url, {"anon": True} if url.startswith("s3") else {"token": "anon"})


def test_in_memory_and_on_disks_names_may_hold_what_begins_a_query(tmp_path: Path) -> None:
    for url in ("memory://a?b", f"file://{tmp_path}/a?b"):
        transport = FsspecTransport(url)
        transport.put("x/y", b"1")
        assert FsspecTransport(url).read("x/y") == b"1"
        assert [entry.path for entry in transport.list("x")] == ["x/y"]
