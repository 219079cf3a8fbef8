"""What each answer of the server carries, which parts of the metadata it hides, and how a server in a thread ends."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import socket
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dense_stores import PlainStore, plain_store

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import uvicorn
from starlette.applications import Starlette
from waiting import HANG_S

from saev_store import ShardStore, new_metadata
from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError, CorruptShardError, SaevStoreWarning, TransportError
from saev_store.serve import _application, _server, application, listen, serve, serve_in_thread
from saev_store.serve._application import UnsatisfiableError, _basenames, parse_range

LAYOUT = Layout(7, (2, 5, 11), 4, True, 8, 3)
KEY = "activations/c/1/0/0/0"


@pytest.fixture(scope="module")
def plain() -> PlainStore:
    return plain_store(LAYOUT, tail="cut", labelled=True)


@pytest.fixture(scope="module")
def app(plain: PlainStore, tmp_path_factory: pytest.TempPathFactory) -> Starlette:
    folder = plain.write(tmp_path_factory.mktemp("rules"))
    return application(ShardStore.open(folder), chunks=(3, 3, 5, 8), hosts=["GPU1"], origins=["https://a.example"])


def asked(app: Starlette, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """One answer without a server."""
    sent: list[dict[str, Any]] = []
    given = {"host": "127.0.0.1:80", **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {
        "type": "http", "method": method, "path": f"/{path}", "raw_path": b"", "query_string": b"", "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "http_version": "1.1", "scheme": "http", "asgi": {"version": "3.0"},
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:])


# -- headers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    ("key", "kind", "nbytes"),
    [("zarr.json", "json", None), ("labels/zarr.json", "json", None), (KEY, "octet-stream", 1440), ("layer/c/0", "octet-stream", 24)],
)  # fmt: skip
def test_headers_of_every_value(app: Starlette, method: str, key: str, kind: str, nbytes: int | None):
    status, headers, body = asked(app, key, method=method)
    assert status == 200
    assert headers["content-type"].startswith(f"application/{kind}")
    assert (headers["accept-ranges"], headers["cache-control"]) == ("bytes", "no-cache")
    assert headers["etag"][0] == headers["etag"][-1] == '"'
    assert "content-range" not in headers
    if nbytes is not None:
        assert headers["content-length"] == str(nbytes)
    assert len(body) == (0 if method == "HEAD" else int(headers["content-length"]))


def test_answers_without_a_body_carry_the_tag(app: Starlette):
    tag = asked(app, KEY)[1]["etag"]
    status, headers, body = asked(app, KEY, if_none_match=tag)
    assert (status, body, headers["etag"], headers["cache-control"]) == (304, b"", tag, "no-cache")
    status, headers, body = asked(app, KEY, range="bytes=1440-")
    assert (status, body, headers["content-range"], headers["etag"]) == (416, b"", "bytes */1440", tag)
    for key in ("zarr.json", "layer/c/0"):
        tag = asked(app, key)[1]["etag"]
        assert asked(app, key, if_none_match=tag)[0] == 304
        assert asked(app, key, if_range=tag, range="bytes=0-3")[0] == 206
        # A weak tag does not promise the same bytes, and a list is none.
        for other in ('"x"', f"W/{tag}", f'"x", {tag}', tag[:-1], ""):
            assert asked(app, key, if_range=other, range="bytes=0-3")[0] == 200


def test_no_two_values_have_one_tag(app: Starlette):
    keys = ["zarr.json", "labels/zarr.json", "layer/c/0", "token/c/0", "activations/c/0/0/0/0", KEY, "labels/c/0/0"]
    tags = [asked(app, key)[1]["etag"] for key in keys]
    assert len(set(tags)) == len(keys)
    assert tags == [asked(app, key)[1]["etag"] for key in keys]


def test_hosts_and_pages_that_may_ask(app: Starlette):
    for host, status in (("gpu1:80", 200), ("GPU1", 200), ("gpu2", 421), ("[::1]", 200), ("localhost", 200)):
        assert asked(app, KEY, host=host)[0] == status
    status, headers, body = asked(app, "", host="gpu2")
    assert (status, body) == (421, b"this server does not answer for this host name\n")
    for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
        headers = asked(app, KEY, origin=origin)[1]
        assert headers.get("access-control-allow-origin") == allowed
        asked_for = {
            "access_control_request_method": "GET",
            "access_control_request_headers": "if-range, if-none-match, cache-control, range",
        }
        status, headers, _ = asked(app, KEY, method="OPTIONS", origin=origin, **asked_for)
        assert status == (200 if allowed else 400)
    told = asked(app, KEY, origin="https://a.example")[1]["access-control-expose-headers"]
    assert set(told.split(", ")) == {"Accept-Ranges", "Content-Length", "Content-Range", "ETag"}
    with pytest.raises(ArgumentError) as caught:
        application(
            ShardStore.open(Path(__file__).parents[1] / "data/saev/v2_1_head_labels_cls/store/saev/shards/941cc259"),
            origins=["x"],
        )
    assert caught.value.remedy == "Write for example https://viewer.example, or * for all pages."


@pytest.mark.parametrize(
    ("header", "nbytes", "expected"),
    [
        ("bytes=0-0", 1, (0, 1)), ("bytes=0-1", 1, (0, 1)), ("bytes=9-9", 10, (9, 10)), ("bytes=8-9", 10, (8, 10)), ("bytes=8-10", 10, (8, 10)),
        ("bytes=3-2", 10, None), ("bytes=3-3", 10, (3, 4)), ("bytes=-1", 10, (9, 10)), ("bytes=-10", 10, (0, 10)), ("bytes=-11", 10, (0, 10)),
        ("bytes=9-", 10, (9, 10)), ("\tbytes=1-2 ", 10, (1, 3)), ("BYTES=1-2", 10, (1, 3)), ("bytes=12-3", 10, None), ("", 10, None),
        ("bytes=-" + "9" * 20, 10, (0, 10)), ("bytes=4-" + "9" * 20, 10, (4, 10)), ("bytes=" + "1" * 1000 + "-", 10, None), ("bytes=1-2,", 10, None), ("byte=1-2", 10, None),
    ],
)  # fmt: skip
def test_ranges_at_their_bounds(header: str, nbytes: int, expected: tuple[int, int] | None):
    assert parse_range(header, nbytes) == expected


@pytest.mark.parametrize(
    ("header", "nbytes"),
    [
        ("bytes=10-", 10),
        ("bytes=" + "9" * 20 + "-", 10),
        ("bytes=10-12", 10),
        ("bytes=-0", 10),
        ("bytes=-1", 0),
        ("bytes=0-", 0),
    ],
)
def test_ranges_of_no_byte(header: str, nbytes: int):
    with pytest.raises(UnsatisfiableError):
        parse_range(header, nbytes)


def test_the_padding_of_a_cut_shard_is_served(app: Starlette, plain: PlainStore):
    """The last chunk ends behind its file: only bytes that the file has are looked for."""
    key, nbytes = "activations/c/2/0/0/0", LAYOUT.example_nbytes
    whole = plain.dense[6:].tobytes() + bytes(2 * nbytes)
    for start, end in ((0, 3 * nbytes), (nbytes - 1, nbytes + 1), (nbytes, nbytes + 5), (3 * nbytes - 1, 3 * nbytes)):
        status, headers, body = asked(app, key, range=f"bytes={start}-{end - 1}")
        assert (status, headers["content-length"], body) == (206, str(end - start), whole[start:end])


def test_a_cut_shard_that_is_cut_further_is_damage(plain: PlainStore, tmp_path: Path):
    """Its last byte is missed, which is not that of the chunk."""
    folder, key = plain.write(tmp_path), "activations/c/2/0/0/0"
    cut = application(ShardStore.open(folder), chunks=(3, 3, 5, 8))
    assert asked(cut, key, method="HEAD")[0] == 200
    os.truncate(folder / "acts000002.bin", LAYOUT.example_nbytes - 1)
    assert asked(cut, key, method="HEAD")[0] == 410
    assert asked(cut, key, method="HEAD", range="bytes=0-3")[0] == 410
    assert asked(cut, key, range="bytes=0-3")[0] == 206


# -- failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CorruptShardError("it is cut", where="/secret/acts000001.bin"), 410), (TransportError("busy", where="s3://secret/x/acts", transient=True), 503),
        (TransportError("gone", where="acts"), 502), (ArgumentError("odd"), 502),
    ],
)  # fmt: skip
def test_errors_are_told_without_the_place(app: Starlette, error: Any, status: int, monkeypatch: pytest.MonkeyPatch):
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("saev_store.zarr.ZarrView.get_sync", failing)
    found, headers, body = asked(app, KEY)
    assert (found, headers["cache-control"]) == (status, "no-store")
    where = (error.where or "").rpartition("/")[2]
    assert json.loads(body) == {
        "error": {"kind": error.kind, "type": type(error).__name__, "message": error.message, "where": where}
    }


def test_a_value_that_has_disappeared_is_damage(app: Starlette, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("saev_store.zarr.ZarrView.get_sync", lambda *_, **__: None)
    status, _, body = asked(app, KEY)
    assert (status, json.loads(body)["error"]["message"]) == (410, "the value has disappeared")


def test_places_are_hidden_at_any_depth(tmp_path: Path):
    data = {
        "deep": [{"path": "/home/me/a", "n": 1.5, "more": ["s3://lab/b/", "c/d", None, True]}],
        "file": "file:///x/y",
    }
    metadata = new_metadata(
        family="clip", ckpt="org/model", layers=[1], content_tokens_per_example=1, cls_token=False, d_model=2, n_examples=1, data=data,
    )  # fmt: skip
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(np.ones((1, 1, 1, 2), np.float32))
    app = application(ShardStore.open(tmp_path / metadata.hash))
    attributes = json.loads(asked(app, "zarr.json")[2])["attributes"]
    assert attributes["data"] == {"deep": [{"path": "a", "n": 1.5, "more": ["b", "c/d", None, True]}], "file": "y"}
    assert attributes["ckpt"] == "org/model"
    assert "url" not in attributes


@pytest.mark.parametrize("text", ["[" * 100_000, "{x", "[1, 2", "{}{"], ids=["deep", "open", "cut", "two"])
def test_text_that_only_begins_like_json_is_served_as_it_is(text: str):
    assert _basenames({"note": text}) == {"note": text}


@pytest.mark.parametrize("protocol", ["2.0", "2.1"])
def test_places_are_hidden_in_every_protocol(protocol: str, tmp_path: Path):
    """Protocol 2.1 has the description of the data as text; recordings elsewhere have other paths."""
    data = {"root": "/home/me/birds", "was": r"C:\Users\me\cats", "n": {"/home/me/a.txt": 3}, "split": "train/a"}
    metadata = new_metadata(
        family="clip", ckpt="org/model", layers=[1], content_tokens_per_example=1, cls_token=False, d_model=2, n_examples=1, data=data,
        protocol=protocol,
    )  # fmt: skip
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(np.ones((1, 1, 1, 2), np.float32))
    body = asked(application(ShardStore.open(tmp_path / metadata.hash)), "zarr.json")[2]
    found = json.loads(body)["attributes"]["data"]
    hidden = {"root": "birds", "was": "cats", "n": {"a.txt": 3}, "split": "train/a"}
    assert (json.loads(found) if protocol == "2.1" else found) == hidden
    assert isinstance(found, str) == (protocol == "2.1")
    assert b"/home" not in body
    assert b"Users" not in body


# -- servers -------------------------------------------------------------------------------------------------------------


def test_files_that_are_served_are_not_mapped(plain: PlainStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A mapped file that is cut while a client reads it ends the process."""
    stores, answers = [], _application._Answers

    def noted(view: Any, store: ShardStore, hosts: frozenset[str]) -> Any:
        stores.append(store)
        return answers(view, store, hosts)

    monkeypatch.setattr(_application, "_Answers", noted)
    store = ShardStore.open(plain.write(tmp_path), engine="mmap")
    application(store)
    assert (store.transport.name, stores[0].transport.name) == ("mmap", "pread")


def test_a_server_in_a_thread_ends_with_its_socket(app: Starlette):
    listening, address = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    assert address == f"http://127.0.0.1:{port}/"
    before = threading.active_count()
    stop = serve_in_thread(app, listening)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
    connection.request("GET", "/zarr.json")
    assert connection.getresponse().status == 200
    connection.close()
    stop()
    assert listening.fileno() == -1
    assert threading.active_count() == before
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=HANG_S)


def test_where_a_warning_is_an_error_no_socket_is_left(monkeypatch: pytest.MonkeyPatch):
    made, create = [], socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *args, **named: made.append(create(*args, **named)) or made[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", SaevStoreWarning)
        with pytest.raises(SaevStoreWarning, match="all machines"):
            listen("0.0.0.0", 0)
    assert [listening.fileno() for listening in made] == [-1]


@pytest.mark.parametrize("end", [None, KeyboardInterrupt(), OSError("no more files")])
def test_a_server_leaves_the_log_and_no_socket_behind(
    app: Starlette, monkeypatch: pytest.MonkeyPatch, end: BaseException | None
):
    """While it runs, the log of uvicorn passes everything on until the server is told to end."""
    log = logging.getLogger("uvicorn.error")
    before, passed = list(log.filters), []
    record = logging.LogRecord(log.name, logging.ERROR, "", 0, "cut", (), None)

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        assert sockets == [listening]
        for server.should_exit in (False, True):
            passed.append(bool(log.filter(record)))
        if end is not None:
            raise end

    monkeypatch.setattr(uvicorn.Server, "run", run)
    listening, _ = listen("127.0.0.1", 0)
    with pytest.raises(OSError, match="no more files") if isinstance(end, OSError) else contextlib.nullcontext():
        serve(app, listening)
    assert passed == [True, False]
    assert (log.filters, listening.fileno()) == (before, -1)


@pytest.mark.parametrize("port", [0, 65_535])
def test_ports_at_their_bounds(port: int):
    try:
        listening, _ = listen("127.0.0.1", port)
    except ArgumentError as error:  # another program has it
        assert error.where == "host, port"
        assert error.remedy == "Choose another port; 0 takes any free one."
        return
    assert listening.getsockname()[1] == port or port == 0
    assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    listening.close()


def test_errors_of_listening():
    with pytest.raises(ArgumentError) as caught:
        listen("no-such-host.invalid", 0)
    assert caught.value.where == "host"
    assert caught.value.remedy == "Name an address of this machine, such as 127.0.0.1 or 0.0.0.0."
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ArgumentError) as caught:
        listen("127.0.0.1", taken.getsockname()[1])
    assert caught.value.where == "host, port"
    with pytest.warns(
        SaevStoreWarning, match=r"all machines that reach 0\.0\.0\.0 port \d+ can read the store"
    ) as warned:
        listen("0.0.0.0", 0)[0].close()
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    ("number", "is_reached"),
    [
        ("127.0.0.1", False), ("127.8.8.8", False), ("::1", False), ("0.0.0.0", True), ("::", True),
        ("192.168.1.20", True), ("10.0.0.2", True), ("8.8.8.8", True), ("fe80::1%eth0", True), ("fd00::2", True),
    ],
)  # fmt: skip
def test_other_machines_reach_every_address_that_is_not_loopback(
    monkeypatch: pytest.MonkeyPatch, number: str, is_reached: bool
):
    """Not only one that stands for all: a name of this machine may be its address in a network."""

    class Listening:
        def setsockopt(self, *_: object) -> None: ...

        def getsockname(self) -> tuple[str, int]:
            return number, 8123

    monkeypatch.setattr(socket, "create_server", lambda *_, **__: Listening())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, address = listen("localhost", 8123)
    said = [f"all machines that reach {number} port 8123 can read the store"] if is_reached else []
    assert [str(warning.message) for warning in caught] == said
    assert address == "http://localhost:8123/"


@pytest.mark.skipif(not socket.has_ipv6, reason="there is no IPv6 here")
def test_an_address_of_ipv6_is_in_brackets():
    try:
        listening, address = listen("::1", 0)
    except ArgumentError:
        pytest.skip("there is no IPv6 here")
    assert address == f"http://[::1]:{listening.getsockname()[1]}/"
    listening.close()


@pytest.mark.parametrize("n_groups", [0, 1, 2])
def test_an_answer_that_a_store_breaks_off_is_one_line_in_how_many_tasks_ever(n_groups: int) -> None:
    error: BaseException = CorruptShardError("it was cut", where="acts000000.bin")
    for _ in range(n_groups):
        error = BaseExceptionGroup("of a task", [error])
    record = logging.makeLogRecord(
        {"msg": "Exception in %s", "args": ("ASGI",), "exc_info": (type(error), error, None)}
    )
    _server._shorten(record)
    assert record.getMessage() == "an answer was broken off: acts000000.bin: it was cut"
    assert record.exc_info is None
