"""Addresses, engines and options: what is given wins, credentials are found as fsspec finds them, and none is shown."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cloud_servers import Fault, Proxy, gcs_json_bucket  # noqa: F401 (a fixture)
from range_server import serving
from retries import few_tries  # noqa: F401 (a fixture)
from servers import Bucket, s3_bucket  # noqa: F401 (one is a fixture)
from tls import Certificates, TlsFront, certificates, no_authorities  # noqa: F401 (two are fixtures)
from waiting import HANG_S

from saev_store.errors import (
    AccessError,
    ArgumentError,
    MissingDependencyError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
)
from saev_store.transport import LocalTransport, Transport, open_transport

pytest.importorskip("obstore")
s3fs = pytest.importorskip("s3fs")
pytest.importorskip("gcsfs")
engines = pytest.mark.parametrize("engine", ["obstore", "fsspec"])


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing names credentials or servers."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "STORAGE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    s3fs.S3FileSystem.clear_instance_cache()  # what it has read of an environment


class Seen:
    """Remembers who asked a server: the key, region and token of each request."""

    def __init__(self) -> None:
        self.keys, self.regions, self.tokens = set[str](), set[str](), set[str]()

    def __call__(self, path: str, names: dict[str, str]) -> str:
        if found := re.search(r"Credential=([^/]+)/\d+/([^/]+)/", names.get("authorization", "")):
            self.keys.add(found[1])
            self.regions.add(found[2])
        self.tokens.add(names.get("x-amz-security-token", ""))
        return path


@pytest.fixture
def proxy(s3_bucket: Bucket) -> Iterator[Proxy]:
    with Proxy(s3_bucket.options["endpoint_url"], change=Seen()) as found:
        yield found


def use(transport: Transport) -> None:
    """Write and read in each way."""
    transport.put("a.bin", b"0123456789")
    with suppress(StoreExistsError):
        transport.create("b.bin", b"0123456789")
    sink = transport.open_sink(f"c{os.urandom(4).hex()}.bin", used_nbytes=9 << 20, file_nbytes=9 << 20)
    sink.write([memoryview(bytes(9 << 20))])
    sink.commit()
    assert bytes(transport.get_ranges("a.bin", starts=[3], ends=[7])[0]) == b"3456"
    assert transport.read("a.bin") == b"0123456789" and transport.size("b.bin") == 10
    assert "a.bin" in {entry.path for entry in transport.list()}


# Addresses and engines


def test_addresses_of_folders_of_this_machine(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "with space").mkdir()
    for url, path in (
        (tmp_path, tmp_path),
        (str(tmp_path) + "/", tmp_path),
        ("~/x", tmp_path / "x"),
        ("x", tmp_path / "x"),
        (f"file://{tmp_path}/with%20space", tmp_path / "with space"),
        (f"file://localhost{tmp_path}/x", tmp_path / "x"),
    ):
        for engine, name in (("auto", "mmap"), ("mmap", "mmap"), ("pread", "pread")):
            transport = open_transport(url, engine=engine)
            assert (transport.name, transport.local_path, transport.url) == (name, str(path), str(path))


def test_what_is_no_address_engine_or_option_is_refused(tmp_path) -> None:
    for url, options, engine, where in (
        ("", None, "auto", "url"),
        (3, None, "auto", "url"),
        (b"/x", None, "auto", "url"),
        ("a\0b", None, "auto", "url"),
        (tmp_path, None, "magic", "engine"),
        (tmp_path, None, 3, "engine"),
        (tmp_path, None, "memory", "engine"),
        (tmp_path, None, "obstore", "url"),
        ("s3://b/x", None, "mmap", "url"),
        ("http://h/x", None, "pread", "url"),
        (tmp_path, {"anon": True}, "auto", "storage_options"),
        (tmp_path, ["anon"], "auto", "storage_options"),
        ("s3://b/x", {"endpoint_url": "localhost:9000"}, "obstore", "storage_options"),
        ("s3://b/x", {"config_kwargs": 3}, "auto", "storage_options"),
        ("s3://b/x", {"conditional_create": "no"}, "auto", "conditional_create"),
        ("https://h/x", {"client_kwargs": ["x"]}, "auto", "storage_options"),
        ("simplecache::https://h/x", {"https": "abc"}, "auto", "storage_options"),
    ):
        with pytest.raises(ArgumentError) as refused:
            open_transport(url, options, engine=engine)
        assert refused.value.where == where, (url, options, engine)
    for url in ("s3://b/x?y", "s3:///x", "http://h/x"):
        with pytest.raises(ArgumentError):
            open_transport(url, S3, engine="obstore")
    for root in ("", "a\0b", 3):
        with pytest.raises(ArgumentError):
            LocalTransport(root)
    with pytest.raises(MissingDependencyError):
        open_transport("nowhere://x/y")


def test_addresses_are_shown_without_secrets() -> None:
    for url in ("http://me:pass-word@127.0.0.1:9/x?sig=pass-word", "simplecache::http://me:pass-word@127.0.0.1:9/x"):
        transport = open_transport(url)
        assert "pass-word" not in transport.url + repr(transport)


# What is given wins


@engines
def test_options_win_over_the_environment(s3_bucket: Bucket, proxy: Proxy, engine: str, monkeypatch) -> None:
    with Proxy(s3_bucket.options["endpoint_url"]) as other:
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
            monkeypatch.setenv(name, other.url)
        for name, value in {
            "AWS_ACCESS_KEY_ID": "OTHERKEY",
            "AWS_SECRET_ACCESS_KEY": "other-secret",
            "AWS_SESSION_TOKEN": "other-token",
            "AWS_REGION": "other-region-1",
            "AWS_DEFAULT_REGION": "other-region-1",
        }.items():
            monkeypatch.setenv(name, value)
        region = {"client_kwargs": {"region_name": "eu-west-3"}}
        given = {"key": "GIVENKEY", "secret": "given-secret", "endpoint_url": proxy.url, **region}
        for n, (options, token) in enumerate((
            (given, ""),  # the token of the environment belongs to its key
            ({**given, "token": "given-token"}, "given-token"),
            ({**region, "client_kwargs": {**region["client_kwargs"], "endpoint_url": proxy.url}, "key": "GIVENKEY", "secret": "s"}, ""),
        )):  # fmt: skip
            proxy.change = seen = Seen()
            use(open_transport(f"{s3_bucket.url}/{n}", options, engine=engine))
            assert (seen.keys, seen.regions, seen.tokens) == ({"GIVENKEY"}, {"eu-west-3"}, {token})
        assert not other.log


@engines
def test_the_environment_counts_where_nothing_is_given(
    s3_bucket: Bucket, proxy: Proxy, engine: str, monkeypatch
) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ENDPOINT_URL_S3": proxy.url,
        "AWS_ACCESS_KEY_ID": "OTHERKEY",
        "AWS_SECRET_ACCESS_KEY": "other-secret",
        "AWS_SESSION_TOKEN": "other-token",
        "AWS_DEFAULT_REGION": "eu-west-3",
    }.items():
        monkeypatch.setenv(name, value)
    use(open_transport(s3_bucket.url, engine=engine))
    seen = proxy.change
    assert (seen.keys, seen.regions, seen.tokens) == ({"OTHERKEY"}, {"eu-west-3"}, {"other-token"})


KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
HERE = {"AWS_REGION": "eu-west-3"}
S3 = {"key": "AKID", "secret": "hush-hush"}
LAB = {**S3, "endpoint_url": "http://127.0.0.1:9"}
#: Address, options, environment, content of ~/.aws/config -> the engine that `auto` takes.
CHOICES = [
    ("s3://b/x", LAB, {}, "", "obstore"),
    ("s3://b/x", LAB, {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:8"}, "[default]", "obstore"),
    ("s3://b/x", {**S3, "client_kwargs": {"region_name": "eu-west-3"}}, {}, "", "obstore"),
    ("s3://b/x", {"anon": True}, HERE, "", "obstore"),
    ("s3://b/x", {"anon": True}, {}, "", "fsspec"),  # the region is not known
    ("s3://b/x", S3, HERE, "", "obstore"),
    ("s3://b/x", S3, HERE, "[default]", "fsspec"),
    ("s3://b/x", S3, {**HERE, "AWS_ENDPOINT": "http://127.0.0.1:9"}, "", "fsspec"),
    ("s3://b/x", {}, {**KEYS, **HERE}, "", "obstore"),
    ("s3://b/x", {}, {**KEYS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "[default]", "obstore"),
    ("s3://b/x", {}, {**KEYS, **HERE, "AWS_PROFILE": "p"}, "", "fsspec"),
    ("s3://b/x", {}, HERE, "", "fsspec"),  # a role, or what else s3fs finds
    ("s3://b/x", {**LAB, "s3_additional_kwargs": {}}, {}, "", "fsspec"),
    ("simplecache::s3://b/x", {"s3": LAB}, {}, "", "fsspec"),
    ("gs://b/x", {"token": "anon"}, {}, "", "obstore"),
    ("gs://b/x", {"token": "key.json"}, {}, "", "obstore"),
    ("gs://b/x", {}, {"GOOGLE_APPLICATION_CREDENTIALS": "key.json"}, "", "obstore"),
    ("gs://b/x", {"token": "anon"}, {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:9"}, "", "fsspec"),
    ("gs://b/x", {"token": "anon", "endpoint_url": "http://127.0.0.1:9"}, {}, "", "fsspec"),
    ("http://127.0.0.1:9/x", {}, {}, "", "fsspec"),
]  # fmt: skip


@pytest.mark.parametrize(("url", "options", "environment", "config", "engine"), CHOICES)
def test_auto_takes_obstore_where_it_finds_what_fsspec_would(
    url: str, options: dict, environment: dict, config: str, engine: str, monkeypatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    key = {"client_id": "a", "client_secret": "b", "refresh_token": "c"}
    Path("key.json").write_text(json.dumps({"type": "authorized_user", **key}))
    if config:
        Path("config").write_text(config)
    monkeypatch.setenv("AWS_CONFIG_FILE", "config")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert open_transport(url, options).name.partition(":")[0] == engine


def test_auto_takes_gcsfs_for_federated_credentials(monkeypatch, tmp_path) -> None:
    subject = tmp_path / "subject"
    subject.write_text("token")
    path = tmp_path / "credentials.json"
    path.write_text(json.dumps({
        "type": "external_account",
        "audience": "//iam.googleapis.com/locations/global/workforcePools/p/providers/q",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": "http://127.0.0.1:9/token",
        "credential_source": {"file": str(subject)},
    }))  # fmt: skip
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "p")
    assert open_transport("gs://b/x").name.startswith("fsspec")


@pytest.mark.parametrize("chosen", ["auto", "obstore"])
def test_a_provider_of_credentials_is_asked_again_when_they_expire(
    s3_bucket: Bucket, proxy: Proxy, chosen: str
) -> None:
    asked: list[int] = []

    def provide() -> dict[str, object]:
        asked.append(len(asked))
        return {
            "access_key_id": f"KEY{len(asked)}",
            "secret_access_key": "hush-hush",
            "token": "given-token",
            "expires_at": datetime.now(UTC),
        }

    options = {"endpoint_url": proxy.url, "credential_provider": provide}
    transport = open_transport(s3_bucket.url, options, engine=chosen)
    assert transport.name.startswith("obstore")
    use(transport)
    seen = proxy.change
    assert len(seen.keys) > 1 and all(key.startswith("KEY") for key in seen.keys)
    assert seen.tokens == {"given-token"}
    with pytest.raises(ArgumentError):
        open_transport(s3_bucket.url, options, engine="fsspec").read("a.bin")


def test_gcsfs_asks_the_end_point_that_is_given(gcs_json_bucket: Bucket, monkeypatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    with Proxy(gcs_json_bucket.options["endpoint_url"]) as proxy:
        options = {**gcs_json_bucket.options, "endpoint_url": proxy.url}
        use(open_transport(gcs_json_bucket.url, options, engine="fsspec"))
        assert proxy.log


# Services without conditional creation


@engines
@pytest.mark.usefixtures("few_tries")
def test_a_service_without_conditional_creation_needs_an_option(s3_bucket: Bucket, proxy: Proxy, engine: str) -> None:
    proxy.faults.append(Fault(header="if-none-match", status=501, code="NotImplemented", times=-1))
    options = {**s3_bucket.options, "endpoint_url": proxy.url}
    with pytest.raises(TransportError) as refused:
        open_transport(s3_bucket.url, options, engine=engine).create("a.bin", b"one")
    assert "conditional_create" in str(refused.value.remedy)
    assert not refused.value.transient
    transport = open_transport(s3_bucket.url, {**options, "conditional_create": False}, engine=engine)
    transport.create("a.bin", b"one")
    with pytest.raises(StoreExistsError):
        transport.create("a.bin", b"other")
    assert transport.read("a.bin") == b"one"
    use(transport.at("x"))


# Credentials stay where they are


SECRETS = ("very-secret-key", "AKIDTESTKEY", "given-token", "hush-in-a-header")


@engines
def test_no_message_shows_credentials(s3_bucket: Bucket, proxy: Proxy, engine: str, caplog, capfd) -> None:
    """Even of a server that sends back what it got."""
    caplog.set_level(logging.DEBUG, "saev_store")
    options = {**s3_bucket.options, "endpoint_url": proxy.url, "token": "given-token"}
    transport = open_transport(s3_bucket.url, options, engine=engine)
    shown = [repr(transport), transport.url, repr(transport.at("x"))]
    for fault in (
        Fault(status=403, code="SignatureDoesNotMatch", echo=True, times=-1),
        Fault(status=400, code="AuthorizationHeaderMalformed", echo=True, times=-1),
        Fault(status=404, code="NoSuchKey", echo=True, times=-1),
    ):
        proxy.faults[:] = [fault]
        for call in (
            lambda: transport.read("a.bin"),
            lambda: transport.get_ranges("a.bin", starts=[0], ends=[1]),
            lambda: transport.create("a.bin", b"x"),
        ):
            with pytest.raises(SaevStoreError) as refused:
                call()
            error = refused.value
            shown += [str(error), repr(error), *traceback.format_exception(error), repr(pickle.dumps(error))]
            shown += [str(error.__cause__), repr(vars(error))]
    shown += [caplog.text, *capfd.readouterr()]
    for text in shown:
        assert not [secret for secret in SECRETS if secret in text], text


@engines
def test_options_that_are_refused_are_named_without_their_values(s3_bucket: Bucket, engine: str) -> None:
    with pytest.raises(SaevStoreError) as refused:
        open_transport(s3_bucket.url, {"nonsense": "hush-hush"}, engine=engine).read("a.bin")
    assert "nonsense" in str(refused.value) and "hush" not in str(refused.value)


def test_what_is_no_secret_travels_in_a_pickle(tmp_path) -> None:
    (tmp_path / "a.bin").write_bytes(b"0123456789")
    with serving(tmp_path) as (url, _):
        data = pickle.dumps(open_transport(url, {"block_size": 1 << 20}))
        script = "import pickle, sys; print(pickle.load(sys.stdin.buffer).read('a.bin').decode())"
        done = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, timeout=HANG_S)
    assert done.stdout.decode().strip() == "0123456789", done.stderr


# Certificates


@engines
@pytest.mark.usefixtures("no_authorities", "few_tries")
def test_a_private_authority_is_trusted_where_it_is_named(
    s3_bucket: Bucket, certificates: Certificates, engine: str, tmp_path: Path
) -> None:
    with TlsFront(s3_bucket.options["endpoint_url"], certificates) as front:
        options = {**s3_bucket.options, "endpoint_url": front.url}
        with pytest.raises(TransportError) as refused:
            open_transport(s3_bucket.url, options, engine=engine).read("metadata.json")
        assert "verify" in str(refused.value.remedy)
        assert not refused.value.transient
        for verify in (certificates.authority, False):
            use(
                open_transport(
                    f"{s3_bucket.url}/{bool(verify)}", {**options, "client_kwargs": {"verify": verify}}, engine=engine
                )
            )


def test_a_bucket_that_lets_nobody_in_is_an_access_error(s3_bucket: Bucket, proxy: Proxy) -> None:
    for engine, status, code in (
        ("obstore", 403, "InvalidAccessKeyId"), ("obstore", 400, "ExpiredToken"), ("fsspec", 403, "InvalidAccessKeyId"),
    ):  # fmt: skip
        proxy.faults[:] = [Fault(status=status, code=code, times=-1)]
        transport = open_transport(s3_bucket.url, {**s3_bucket.options, "endpoint_url": proxy.url}, engine=engine)
        calls = [transport.read, lambda path, to=transport: to.put(path, b""), transport.list, transport.size]
        for call in calls[: 4 if status == 403 else 3]:  # the answer to HEAD has no code
            with pytest.raises(AccessError):
                call("a.bin")


def test_a_bucket_in_another_region_is_an_error_that_names_the_option(s3_bucket: Bucket, proxy: Proxy) -> None:
    proxy.faults.append(Fault(status=301, code="PermanentRedirect", times=-1))
    transport = open_transport(s3_bucket.url, {**s3_bucket.options, "endpoint_url": proxy.url}, engine="obstore")
    with pytest.raises(TransportError) as refused:
        transport.get_ranges("a.bin", starts=[0], ends=[1])
    assert "region_name" in str(refused.value.remedy) and not refused.value.transient
