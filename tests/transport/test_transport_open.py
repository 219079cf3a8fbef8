"""From addresses to transports, and the transport in memory."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from saev_store.errors import ArgumentError, NotFoundError, TransportError, UnsafeContentError
from saev_store.transport import MemoryTransport, open_transport
from saev_store.transport.open import _obstore_fits


@pytest.mark.parametrize(
    ("url", "name", "shown"),
    [
        ("/data/x", "mmap", "/data/x"),
        ("/data/x/", "mmap", "/data/x"),
        ("/data/../data/x", "mmap", "/data/x"),
        (Path("/data/x"), "mmap", "/data/x"),
        ("file:///data/x", "mmap", "/data/x"),
        ("FILE:///data/x", "mmap", "/data/x"),
        ("local:///data/x", "mmap", "/data/x"),
        ("file://localhost/data/x", "mmap", "/data/x"),
        ("file:///with%20space", "mmap", "/with space"),
        ("/odd::name", "mmap", "/odd::name"),
        ("/", "mmap", "/"),
        ("memory://a/b/", "fsspec:memory", "memory://a/b"),
        ("simplecache::memory://a/b", "fsspec:simplecache::memory", "simplecache::memory://a/b"),
        ("http://me:pw@127.0.0.1:1/x/?q=1", "fsspec:http", "http://127.0.0.1:1/x"),
    ],
)
def test_addresses(url, name, shown):
    if name == "fsspec:http":
        pytest.importorskip("aiohttp")
    transport = open_transport(url)
    assert (transport.name, transport.url) == (name, shown)


def test_homes_and_relative_paths(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert open_transport("~/shards").url == f"{tmp_path}/shards"
    assert open_transport("shards").url == f"{tmp_path}/shards"
    assert open_transport(".").url == str(tmp_path)


def test_a_relative_path_in_a_deleted_working_directory(monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for engine in ("auto", "pread", "fsspec"):
        with pytest.raises(NotFoundError, match="working directory was deleted"):
            open_transport("shards", engine=engine)
    assert open_transport(tmp_path).url == str(tmp_path)


def test_engines(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    for engine, name in {"auto": "mmap", "mmap": "mmap", "pread": "pread", "fsspec": "fsspec:file"}.items():
        for url in (tmp_path, f"file://{tmp_path}"):
            transport = open_transport(url, engine=engine)
            assert transport.name == name
            assert transport.read("a") == b"1"
    memory = open_transport("memory://label", engine="memory")
    assert (memory.name, memory.url) == ("memory", "memory://label")


@pytest.mark.parametrize("url", ["", None, 5, b"/data", ["/data"], "a\0b", os.fsencode("/x"), 1.5])
def test_nonsense_addresses(url):
    with pytest.raises(ArgumentError, match="is not an address|pass a path"):
        open_transport(url)


@pytest.mark.parametrize("engine", ["MMAP", "", None, "s3fs", 3, ["mmap"]])
def test_unknown_engines(engine):
    with pytest.raises(
        ArgumentError, match="is not an engine: choose one of auto, mmap, pread, fsspec, memory, obstore"
    ):
        open_transport("/data", engine=engine)


def test_local_engines_for_remote_addresses():
    for engine in ("mmap", "pread"):
        with pytest.raises(ArgumentError, match="local files only"):
            open_transport("memory://x", engine=engine)


@pytest.mark.parametrize("options", [{"anon": True}, [("a", 1)], "anon"])
def test_options_that_no_client_reads(options, tmp_path):
    with pytest.raises(ArgumentError, match=r"take no options, but got anon|not a mapping"):
        open_transport(tmp_path, options)
    assert open_transport(tmp_path, {}).name == "mmap"


def test_folders_are_roots():
    transport = MemoryTransport({"a/b/c": b"1"})
    assert transport.at("a/b").read("c") == b"1"
    with pytest.raises(UnsafeContentError):
        transport.at("../a")


# In memory


def test_memory_copies_what_could_change():
    data = bytearray(b"123")
    transport = MemoryTransport({"a": data})
    transport.put("b", memoryview(data))
    data[:] = b"456"
    assert transport.files == {"a": b"123", "b": b"123"}


def test_memory_refuses_unsafe_names():
    with pytest.raises(UnsafeContentError):
        MemoryTransport({"../a": b""})


def test_memory_shares_what_is_written_below():
    transport = MemoryTransport()
    transport.at("a").put("b", b"1")
    assert transport.files == {"a/b": b"1"}
    assert transport.at("a").files == {"b": b"1"}
    again = pickle.loads(pickle.dumps(transport.at("a")))
    again.put("c", b"2")
    assert again.files == {"b": b"1", "c": b"2"}
    assert transport.files == {"a/b": b"1"}


def test_memory_sinks_appear_when_committed():
    transport = MemoryTransport()
    sink = transport.open_sink("a", used_nbytes=1, file_nbytes=1)
    with pytest.raises(NotFoundError):
        transport.read("a")
    again = transport.open_sink("a", used_nbytes=1, file_nbytes=1, resume=True)
    with pytest.raises(TransportError, match="resumed meanwhile"):
        sink.write(0, [memoryview(b"1")])
    again.write(0, [memoryview(b"2")])
    again.commit()
    assert transport.read("a") == b"2"


def test_what_only_fsspec_understands_leaves_the_choice_to_it():
    """Options of any type: credentials of Google may be a dictionary."""
    for options in ({"token": {"type": "service_account"}}, {"token": ["a"]}, {"requester_pays": True}):
        assert not _obstore_fits("gs://bucket/x", options)


@pytest.mark.parametrize("url", ["memory://a/b", "memory:///a/b/", "a/b", "/a/b/"])
def test_a_transport_in_memory_shows_its_label(url: str):
    transport = open_transport(url, engine="memory")
    assert (transport.url, transport.at("c").url, transport.list()) == ("memory://a/b", "memory://a/b/c", [])


@pytest.mark.parametrize("url", ["MEMORY://lab/x", "Memory://lab/x", "HTTP://127.0.0.1:9/x"])
def test_schemes_may_be_spelled_in_capitals(url):
    """As in addresses of any browser."""
    assert open_transport(url).url == url.partition("://")[0].lower() + "://" + url.partition("://")[2]
