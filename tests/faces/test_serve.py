"""The view over HTTP: ranges as the standard has them, browsers, damage, and Zarr clients without this package."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from dense_stores import plain_store
from served import serving
from waiting import HANG_S

from saev_store import ShardStore, new_metadata
from saev_store.cli import main
from saev_store.core.layout import Layout
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    SaevStoreError,
    SaevStoreWarning,
    TransportError,
)

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from api import MemoryTransport
from starlette.applications import Starlette

from saev_store.serve import _application, application, listen
from saev_store.serve._application import UnsatisfiableError, parse_range
from saev_store.transport import ReadCost
from saev_store.zarr import ZarrView

LAYOUT = Layout(7, (2, 5, 11), 4, True, 8, 3)


@pytest.fixture(scope="module")
def plain():
    return plain_store(LAYOUT, tail="cut", labelled=True)


@pytest.fixture(scope="module")
def folder(plain, tmp_path_factory):
    return plain.write(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def url(folder):
    with serving(folder, "--chunks", "3,3,5,8") as (address, _):
        yield address


class Answer:
    def __init__(self, url: str, path: str, method: str = "GET", **headers: str):
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=HANG_S)
        connection.request(
            method, f"/{path}", headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        response = connection.getresponse()
        self.status, self.headers, self.body = response.status, response.headers, response.read()
        connection.close()


KEY = "activations/c/1/0/0/0"


# -- HTTP --------------------------------------------------------------------------------------------------------------


def test_a_whole_value(url, plain):
    answer = Answer(url, KEY)
    assert (answer.status, answer.body) == (200, plain.dense[3:6].tobytes())
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert answer.headers["Accept-Ranges"] == "bytes"
    assert answer.headers["Content-Length"] == str(3 * LAYOUT.example_nbytes)
    document = Answer(url, "activations/zarr.json")
    assert document.headers["Content-Type"] == "application/json"
    assert json.loads(document.body)["shape"] == [7, 3, 5, 8]
    padded = Answer(url, "activations/c/2/0/0/0").body
    assert padded == plain.dense[6:].tobytes() + bytes(2 * LAYOUT.example_nbytes)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-9", slice(0, 10)),
        ("bytes=100-", slice(100, None)),
        ("bytes=-12", slice(-12, None)),
        ("bytes=1430-99999", slice(1430, None)),
        ("bytes=-99999", slice(0, None)),
        ("Bytes=5-5", slice(5, 6)),
    ],
)
@pytest.mark.parametrize("key", [KEY, "activations/c/2/0/0/0", "zarr.json", "labels/c/0/0"])
def test_one_range(url, key, header, expected):
    whole = Answer(url, key).body
    answer = Answer(url, key, Range=header)
    if int(header.split("=")[1].split("-")[0] or 0) >= len(whole):
        assert answer.status == 416
        return
    assert (answer.status, answer.body) == (206, whole[expected])
    start, stop, _ = expected.indices(len(whole))
    assert answer.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(whole)}"


@pytest.mark.parametrize("header", ["bytes=1440-", "bytes=99999-100000", "bytes=-0"])
def test_a_range_beyond_the_end(url, header):
    answer = Answer(url, KEY, Range=header)
    assert (answer.status, answer.body) == (416, b"")
    assert answer.headers["Content-Range"] == "bytes */1440"


@pytest.mark.parametrize(
    "header",
    [
        "bytes=0-1,5-6",
        "bytes=9-3",
        "bytes=x",
        "items=0-1",
        "bytes=--1",
        "bytes=",
        "bytes=²-",
        "bytes=0-1 5",
        "bytes= 0-1",
        "bytes=0 -1",
    ],
)
def test_a_header_that_may_be_ignored(url, header):
    answer = Answer(url, KEY, Range=header.encode().decode("latin-1"))
    assert (answer.status, len(answer.body)) == (200, 1440)


def test_ranges_are_pure():
    assert parse_range(None, 10) is None
    assert parse_range("bytes=0-", 1) == (0, 1)
    for nbytes in (0, 3):
        with pytest.raises(UnsatisfiableError):
            parse_range("bytes=3-", nbytes)
    assert parse_range("bytes=" + "9" * 5000 + "-", 3) is None


def test_head_has_the_headers_and_no_body(url):
    """Of the whole value: a range has no meaning there, and is to be ignored (RFC 9110, section 14.2)."""
    for headers in ({}, {"Range": "bytes=3-9"}):
        get, head = Answer(url, KEY), Answer(url, KEY, "HEAD", **headers)
        assert (head.status, head.body) == (get.status, b"")
        for name in ("Content-Length", "Content-Type", "Accept-Ranges", "ETag"):
            assert head.headers[name] == get.headers[name]
        assert head.headers["Content-Range"] is None


def test_what_has_not_changed_is_not_sent_again(url):
    tag = Answer(url, KEY).headers["ETag"]
    again = Answer(url, KEY, If_None_Match=tag)
    assert (again.status, again.body) == (304, b"")
    assert Answer(url, KEY, If_None_Match='"other"').status == 200
    assert Answer(url, KEY, If_Range=tag, Range="bytes=0-3").status == 206
    assert Answer(url, KEY, If_Range='"other"', Range="bytes=0-3").status == 200


@pytest.mark.parametrize(
    "path",
    [
        "activations/c/3/0/0/0", "activations/c/1/0/0", "activations/c/01/0/0/0", "activations/c/-1/0/0/0", "nothing",
        "metadata.json", "acts000000.bin", "labels.bin", "../metadata.json", "..%2Fmetadata.json", "%2e%2e/metadata.json",
        "activations/../zarr.json", "/zarr.json", "/etc/passwd", "//etc/passwd", "%00", ".zarray", ".zmetadata", "zarr.json/",
        "activations/c/%C2%B2/0/0/0", "a" * 5000,
    ],
)  # fmt: skip
def test_everything_else_is_not_there(url, path):
    for method in ("GET", "HEAD"):
        answer = Answer(url, path, method)
        assert answer.status == 404
        assert b"root:" not in answer.body


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH"])
def test_nothing_can_be_written(url, method):
    answer = Answer(url, KEY, method)
    assert answer.status == 405
    assert "GET" in answer.headers["Allow"]


def test_the_front_page_says_what_this_is(url):
    answer = Answer(url, "")
    assert answer.status == 200
    assert b"Zarr v3" in answer.body
    assert b"layers [2, 5, 11]" in answer.body


def test_pages_of_other_origins_may_not_read_by_default(url):
    answer = Answer(url, KEY, Origin="http://viewer.example", Range="bytes=0-9")
    assert answer.headers["Access-Control-Allow-Origin"] is None


def test_browsers_may_read_if_they_are_allowed_to(folder):
    asked = {"Access_Control_Request_Method": "GET", "Access_Control_Request_Headers": "range"}
    with serving(folder, "--chunks", "3,3,5,8", "--origin", "*") as (url, _):
        answer = Answer(url, KEY, Origin="http://viewer.example", Range="bytes=0-9")
        preflight = Answer(url, KEY, "OPTIONS", Origin="http://viewer.example", **asked)
    assert answer.headers["Access-Control-Allow-Origin"] == "*"
    assert "Content-Range" in answer.headers["Access-Control-Expose-Headers"]
    assert preflight.status == 200
    assert "GET" in preflight.headers["Access-Control-Allow-Methods"]
    assert "range" in preflight.headers["Access-Control-Allow-Headers"].lower()


def test_only_some_pages_may_read(folder):
    with serving(folder, "--origin", "http://viewer.example") as (address, _):
        welcome = Answer(address, KEY, Origin="http://viewer.example")
        other = Answer(address, KEY, Origin="http://evil.example")
    assert welcome.headers["Access-Control-Allow-Origin"] == "http://viewer.example"
    assert other.headers["Access-Control-Allow-Origin"] is None


@pytest.mark.parametrize(
    "origin",
    ["foo", "viewer.example", "http://viewer.example/", "http://viewer.example/page", "http://", "http://a b", "HTTP://A",
     "http://me@viewer.example", "http://viewer.example:", "http://viewer.example:x", "", "//viewer.example", "http://a?b"],
)  # fmt: skip
def test_what_is_no_origin_is_refused(folder, origin, capsys):
    assert main(["serve", str(folder), "--port", "0", "--origin", "http://viewer.example", "--origin", origin]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"--origin: {origin!r} is no origin, which is scheme://host[:port]" in err


def test_origins_are_as_browsers_send_them(folder):
    origins = ["http://127.0.0.1:5173", "https://viewer.example", "http://[::1]:80", "null", "chrome-extension://ab"]
    with serving(folder, *(word for origin in origins for word in ("--origin", origin))) as (address, _):
        for origin in origins:
            assert Answer(address, KEY, Origin=origin).headers["Access-Control-Allow-Origin"] == origin


# -- damage ------------------------------------------------------------------------------------------------------------


def test_damage_is_an_error_and_never_zeros(plain, tmp_path: Path):
    folder = plain.write(tmp_path)
    os.truncate(folder / "acts000000.bin", 2 * LAYOUT.example_nbytes)
    (folder / "acts000001.bin").unlink()
    with serving(folder, "--chunks", "1,3,5,8") as (address, _):
        assert Answer(address, "activations/c/1/0/0/0").body == plain.dense[1].tobytes()
        assert Answer(address, "activations/c/6/0/0/0").body == plain.dense[6].tobytes()
        for example, file in ((2, "acts000000.bin"), (4, "acts000001.bin")):
            for headers in ({}, {"Range": "bytes=0-7"}):
                answer = Answer(address, f"activations/c/{example}/0/0/0", **headers)
                assert answer.status == 410  # permanent: clients do not try again
                assert Answer(address, f"activations/c/{example}/0/0/0", "HEAD", **headers).status == 410
                error = json.loads(answer.body)["error"]
                assert (error["type"], error["kind"], error["where"]) == ("CorruptShardError", "corrupt_shard", file)
                assert str(tmp_path) not in answer.body.decode()


def test_a_shard_that_shrinks_while_it_is_served(plain, tmp_path: Path):
    folder = plain.write(tmp_path)
    with serving(folder, "--chunks", "3,3,5,8") as (address, process):
        assert Answer(address, KEY).body == plain.dense[3:6].tobytes()
        os.truncate(folder / "acts000001.bin", 7)
        assert Answer(address, KEY).status == 410
        assert Answer(address, "activations/c/0/0/0/0").body == plain.dense[:3].tobytes()
        assert process.poll() is None


# -- who may ask -------------------------------------------------------------------------------------------------------


def test_other_host_names_are_refused(folder):
    """A web page whose name was rebound to the loopback address sends its own name."""
    with serving(folder, "--chunks", "3,3,5,8", "--allow-host", "Store.example") as (url, _):
        status = {
            host: Answer(url, KEY, Host=host).status
            for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[evil", "store.example:8000",
                         "localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]:80", "10.1.2.3")
        }  # fmt: skip
    refused = [host for host, code in status.items() if code == 421]
    assert refused == ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[evil"]
    assert {code for host, code in status.items() if host not in refused} == {200}


def test_no_answer_names_a_place_of_this_machine(tmp_path: Path):
    plain = plain_store(LAYOUT, labelled=True)
    folder = plain.write(tmp_path)
    with serving(folder, "--chunks", "3,3,5,8") as (url, _):
        for key in ("", "zarr.json", "activations/zarr.json"):
            body = Answer(url, key).body.decode()
            assert str(tmp_path) not in body
            assert "url" not in json.loads(body).get("attributes", {}) if key else True


def test_places_in_the_metadata_are_served_without_their_folders(tmp_path: Path):
    metadata = new_metadata(
        family="clip", ckpt="x", layers=[1], content_tokens_per_example=1, cls_token=False, d_model=2, n_examples=1,
        max_tokens_per_shard=1, dataset="/home/me/birds",
        data={"root": "s3://bucket/birds/", "names": ["a/b", "/x/y"], "n": 3},
    )  # fmt: skip
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(np.ones((1, 1, 1, 2), np.float32))
    with serving(tmp_path / metadata.hash) as (url, _):
        attributes = json.loads(Answer(url, "zarr.json").body)["attributes"]
    assert attributes["dataset"] == "birds"
    assert attributes["data"] == {"root": "birds", "names": ["a/b", "y"], "n": 3}


def test_a_replaced_file_has_another_tag(plain, tmp_path: Path):
    folder = plain.write(tmp_path)
    with serving(folder, "--chunks", "3,3,5,8") as (url, _):
        tag, other = Answer(url, KEY).headers["ETag"], Answer(url, "activations/c/0/0/0/0").headers["ETag"]
        (folder / "acts000001.bin").write_bytes(plain.files["acts000000.bin"])
        os.utime(folder / "acts000001.bin", ns=(1, 1))
        again = Answer(url, KEY, If_None_Match=tag)
        assert again.status == 200
        assert again.headers["ETag"] != tag
        assert Answer(url, "activations/c/0/0/0/0", If_None_Match=other).status == 304


# -- clients -----------------------------------------------------------------------------------------------------------

CLIENT = """
import sys, numpy as np
class Blocker:
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] == "saev_store":
            raise ImportError("saev_store is blocked")
sys.meta_path.insert(0, Blocker())
import fsspec, zarr, zarr.dtype
zarr.dtype.data_type_registry._lazy_load_list.clear()  # newer zarr would load the data type of what is blocked
url, truth = sys.argv[1], np.load(sys.argv[2])
store = zarr.storage.FsspecStore.from_url(url.rstrip("/"), read_only=True)
group = zarr.open_group(store, mode="r")
for name in truth:
    found = group[name][...]
    assert found.dtype == truth[name].dtype, name
    assert np.array_equal(found, truth[name], equal_nan=found.dtype.kind == "f"), name
acts = group["activations"]
assert np.array_equal(acts[4:6, 1, 2, 3:], truth["activations"][4:6, 1, 2, 3:], equal_nan=True)
import xarray as xr
found = xr.open_zarr(store, chunks=None).activations.sel(layer=11, token=-1)
assert np.array_equal(found.values, truth["activations"][:, 2, 0], equal_nan=True)
print("read", *sorted(group))
"""


def read_elsewhere(address: str, truth: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CLIENT, address, str(truth)]
    return subprocess.run(command, cwd=truth.parent, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("arguments", [(), ("--chunks", "3,3,5,8")], ids=["auto", "large"])
def test_zarr_python_over_http(arguments, plain, folder, tmp_path: Path):
    pytest.importorskip("aiohttp")
    layers, tokens = np.array(LAYOUT.layers), np.arange(-1, 4)
    np.savez(tmp_path / "truth.npz", activations=plain.dense, labels=plain.labels, layer=layers, token=tokens)
    with serving(folder, *arguments) as (address, _):
        ran = read_elsewhere(address, tmp_path / "truth.npz")
    assert (ran.returncode, ran.stdout) == (0, "read activations content_token labels layer token\n"), ran.stderr


def test_zarr_python_meets_damage_as_an_error(plain, tmp_path: Path):
    pytest.importorskip("aiohttp")
    folder = plain.write(tmp_path)
    (folder / "acts000001.bin").unlink()
    np.savez(tmp_path / "truth.npz", activations=plain.dense)
    with serving(folder) as (address, _):
        ran = read_elsewhere(address, tmp_path / "truth.npz")
    assert ran.returncode == 1
    assert "410" in ran.stderr
    assert "AssertionError" not in ran.stderr


def asked(app: Starlette, path: str, **headers: str) -> tuple[int, dict[str, str], list[bytes]]:
    """Status, headers and the parts of the body of one answer, without a server."""
    sent: list[dict] = []
    scope = {
        "type": "http", "method": "GET", "path": f"/{path}", "raw_path": b"", "query_string": b"", "root_path": "",
        "headers": [(b"host", b"127.0.0.1:80"), *((name.encode(), value.encode()) for name, value in headers.items())],
        "http_version": "1.1", "scheme": "http", "asgi": {"version": "3.0"},
    }  # fmt: skip

    async def receive() -> dict:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, [message["body"] for message in sent[1:] if message.get("body")]


@pytest.mark.parametrize("nbytes", [99, 100, 101, 200, 1000])
@pytest.mark.parametrize("start", [0, 7])
def test_large_values_come_in_pieces(start: int, nbytes: int, plain, folder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_application, "_PIECE_BYTES", 100)
    read: list[tuple[int, int]] = []
    original = ZarrView.get_sync

    def get_sync(view, key, **options):
        read.append((options["byte_range"].start, options["byte_range"].end))
        return original(view, key, **options)

    monkeypatch.setattr(ZarrView, "get_sync", get_sync)
    app = application(ShardStore.open(folder), chunks=(3, 3, 5, 8))
    status, headers, bodies = asked(app, KEY, range=f"bytes={start}-{start + nbytes - 1}")
    assert (status, headers["content-length"]) == (206, str(nbytes))
    assert len(bodies) == -(-nbytes // 100)
    assert max(end - start for start, end in read) <= 100
    assert b"".join(bodies) == plain.dense[3:6].tobytes()[start : start + nbytes]


@pytest.mark.parametrize("lost", ["first", "last"])
def test_damage_is_told_before_the_first_of_many_pieces(
    lost: str, plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """After the headers only a broken connection could tell."""
    monkeypatch.setattr(_application, "_PIECE_BYTES", 100)
    folder = plain.write(tmp_path)
    app = application(ShardStore.open(folder), chunks=(3, 3, 5, 8))
    size = 0 if lost == "first" else 3 * LAYOUT.example_nbytes - 1
    os.truncate(folder / "acts000001.bin", size)
    status, _, bodies = asked(app, KEY)
    assert status == 410
    assert json.loads(b"".join(bodies))["error"]["kind"] == "corrupt_shard"


@pytest.mark.parametrize("piece_bytes", [100, 1 << 20])
def test_one_answer_is_of_one_file(piece_bytes: int, plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A shard that is written anew in place while it is sent: the connection breaks, or the one piece is refused."""
    monkeypatch.setattr(_application, "_PIECE_BYTES", piece_bytes)
    folder = plain.write(tmp_path)
    app = application(ShardStore.open(folder), chunks=(3, 3, 5, 8))
    old = plain.dense[3:6].tobytes()
    assert b"".join(asked(app, KEY)[2]) == old
    shard, reads = folder / "acts000001.bin", itertools.count()
    original, status = ZarrView.get_sync, shard.stat()
    new = bytes(reversed(old))

    def get_sync(view, key, **options):
        if next(reads) == (4 if piece_bytes == 100 else 0):
            with shard.open("r+b") as file:
                file.write(new)
            os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        return original(view, key, **options)

    monkeypatch.setattr(ZarrView, "get_sync", get_sync)
    if piece_bytes == 100:
        with pytest.raises(TransportError, match="the file was changed while it was sent"):
            asked(app, KEY)
    else:
        assert asked(app, KEY)[0] == 503
    assert b"".join(asked(app, KEY)[2]) == new


class Far(MemoryTransport):
    """Memory that is read like a bucket, which may fail."""

    is_local = False
    cost = ReadCost(0, 1 << 20)
    error: SaevStoreError | None = None

    def get_ranges(self, path, *, starts, ends):
        if self.error is not None and path.startswith("acts"):
            raise self.error
        return super().get_ranges(path, starts=starts, ends=ends)


def test_tags_are_of_one_run_where_versions_are_not_told(plain):
    """A store far away may be replaced while no server runs: what clients have kept is asked for anew."""
    with pytest.warns(SaevStoreWarning):
        store = ShardStore.open(Far(plain.files))
    one, two = (application(store, chunks=(3, 3, 5, 8)) for _ in range(2))
    tags = [asked(app, KEY)[1]["etag"] for app in (one, one, two)]
    assert tags[0] == tags[1] != tags[2]
    assert asked(one, KEY, **{"if-none-match": tags[0]})[0] == 304
    assert asked(two, KEY, **{"if-none-match": tags[0]})[0] == 200


def test_a_client_that_has_the_value_among_others_gets_none(folder):
    """Several tags, and weak ones, as caches between send them."""
    app, key = application(ShardStore.open(folder), chunks=(3, 3, 5, 8)), "activations/c/0/0/0/0"
    tag = asked(app, key)[1]["etag"]
    for header, status in (
        (tag, 304), (f'"other", {tag}', 304), (f'{tag}, "other"', 304), (f"W/{tag}", 304), ('"other"', 200), ("", 200), (tag[:-3], 200),
        ("*", 304), (" * ", 304), ('"*"', 200),
    ):  # fmt: skip
        assert asked(app, key, **{"if-none-match": header})[0] == status


def test_tags_of_local_files_outlive_the_server_but_not_another_cut(folder):
    """The same key has other bytes where chunks are others."""
    one, same, other = (application(ShardStore.open(folder), chunks=(n, 3, 5, 8)) for n in (3, 3, 1))
    key = "activations/c/0/0/0/0"
    tags = [asked(app, key)[1]["etag"] for app in (one, same, other)]
    assert tags[0] == tags[1] != tags[2]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TransportError("the server is busy", where="s3://secret/acts", transient=True), 503),
        (TransportError("the server refuses", where="s3://secret/acts"), 502),
        (CorruptShardError("it is cut", where="s3://secret/acts"), 410),
        (DocumentError("its size is wrong", where="s3://secret/acts"), 410),
    ],
)
def test_failures_of_the_storage_tell_clients_whether_to_try_again(plain, error, status):
    with pytest.warns(SaevStoreWarning):
        store = ShardStore.open(far := Far(plain.files))
    app = application(store, chunks=(1, 1, 5, 8))
    far.error = error
    found, headers, bodies = asked(app, KEY)
    assert (found, headers["cache-control"]) == (status, "no-store")
    assert json.loads(b"".join(bodies))["error"]["where"] == "acts"
    assert "secret" not in b"".join(bodies).decode()


# -- the command -------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_it_cleanly(folder):
    with serving(folder) as (address, process):
        assert address.startswith("http://127.0.0.1:")
        assert Answer(address, "zarr.json").status == 200
        parts = urlsplit(address)
        kept_alive = socket.create_connection((parts.hostname, parts.port))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANG_S)
        kept_alive.close()
    assert (process.returncode, out, err) == (0, "", "")


def test_ctrl_c_in_transfers_is_quiet(tmp_path: Path):
    plain = plain_store(Layout(4, (2,), 1024, False, 4096, 4))
    with serving(plain.write(tmp_path), "--chunks", "4,1,1024,4096") as (address, process):
        parts = urlsplit(address)
        clients = [socket.create_connection((parts.hostname, parts.port)) for _ in range(2)]
        for client in clients:
            client.sendall(b"GET /activations/c/0/0/0/0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(100)  # the transfer has begun, and 64 MiB do not fit into buffers
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANG_S)
        for client in clients:
            client.close()
    assert (process.returncode, out, err) == (0, "", "")


def test_a_shard_that_is_cut_in_a_transfer_is_one_line(tmp_path: Path):
    plain = plain_store(Layout(4, (2,), 1024, False, 4096, 4))
    store = plain.write(tmp_path)
    with serving(store, "--chunks", "4,1,1024,4096") as (address, process):
        parts = urlsplit(address)
        client = socket.create_connection((parts.hostname, parts.port))
        client.sendall(b"GET /activations/c/0/0/0/0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(100)
        os.truncate(store / "acts000000.bin", 1 << 20)
        while client.recv(1 << 20):  # until the server breaks off
            pass
        client.close()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, out) == (0, "")
    why = "the file has 1,048,576 bytes but .*|the file was changed while it was sent"  # where a piece was just read
    assert re.fullmatch(rf"ERROR: +an answer was broken off: \S+/acts000000\.bin: ({why})\n", err), err


def test_json_is_one_line(folder):
    with serving(folder, "--json") as (line, _):
        assert list(json.loads(line)) == ["url"]


def test_a_port_that_is_taken(folder, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(folder), "--port", str(port)]) == 2
        assert f"port {port}" in capsys.readouterr().err
    for host, port in (("127.0.0.1", 70000), ("no-such-host.invalid", 0), ("192.0.2.1", 0)):
        with pytest.raises(ArgumentError, match=r"port|listen|no address of this machine"):
            listen(host, port)


@pytest.mark.parametrize("port", [-1, 65_536])
def test_there_is_no_such_port(port: int):
    with pytest.raises(ArgumentError, match=f"port is {port}; it must be from 0 to 65535"):
        listen("127.0.0.1", port)


def test_listening_on_all_addresses_gives_a_warning():
    with pytest.warns(SaevStoreWarning, match="all machines"):
        listening, address = listen("0.0.0.0", 0)
    # Or every small answer would wait for an acknowledgement.
    assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    listening.close()
    assert address.startswith("http://0.0.0.0:")


def test_illegal_chunks(folder, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", str(folder), "--port", "0", "--chunks", "2,3,5,8"]) == 2
    assert "nearest shapes" in capsys.readouterr().err
