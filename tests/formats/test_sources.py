"""One door to all formats: addresses, what is found there, descriptions that open it again, and files that appear when complete."""

from __future__ import annotations

import itertools
import json
import shutil
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
from api import MemoryTransport
from energon_tars import sample_files, tar_bytes
from photographs import write_folder
from servers import s3_bucket  # noqa: F401 (a fixture)
from token_files import DATA, llmbatch_bytes, mmididx_bytes
from transports import CountingTransport

from saev_store.errors import (
    AccessError,
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    SaevStoreError,
    SelectionError,
    StoreExistsError,
    TransportError,
    UnsafeContentError,
)
from saev_store.sources import ImageFolder, MapStyle, TextFile, open_source, reopen
from saev_store.sources._new_file import NewFile
from saev_store.sources.address import split_address
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.energon.prepare import prepare
from saev_store.sources.llmbatch import BatchFileReader
from saev_store.sources.mmididx import IndexedDataset, TokenSamples
from saev_store.transport import open_transport

TOKENS, BATCHES = DATA / "mmididx" / "core_seed_example_3_4_2_int32" / "data", DATA / "llmbatch" / "padding_small"
BATCH = llmbatch_bytes(np.arange(6, dtype=np.uint32).reshape(1, 2, 3))


def refusal(call, *arguments, **options) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call(*arguments, **options)
    return caught.value


# -- addresses -----------------------------------------------------------------------------------------------------------


def test_split_address_cuts_where_the_file_begins(tmp_path, monkeypatch):
    for url, folder, name in (
        ("/data/x.idx", "/data", "x.idx"), ("x.idx", ".", "x.idx"), ("/x.idx", "/", "x.idx"), ("a/b/", "a", "b"),
        ("s3://lab/a/x.batch", "s3://lab/a", "x.batch"), ("s3://lab/x.batch", "s3://lab", "x.batch"),
        ("file:///x.batch", "file:///", "x.batch"), ("memory://x.batch", "memory://", "x.batch"),
        ("https://host/a/x.idx?token=1", "https://host/a?token=1", "x.idx"),
        ("simplecache::s3://lab/a/x.idx", "simplecache::s3://lab/a", "x.idx"),
        ("zip://a/x.idx::s3://lab/all.zip", "zip://a::s3://lab/all.zip", "x.idx"),
        ("zip://x.idx::s3://lab/all.zip", "zip://::s3://lab/all.zip", "x.idx"),
        ("/data/a::b/x.idx", "/data/a::b", "x.idx"), ("/data/x::y.idx", "/data", "x::y.idx"),
        ("/data/what?/x.idx", "/data/what?", "x.idx"), ("really?.idx", ".", "really?.idx"),
    ):  # fmt: skip
        assert split_address(url) == (folder, name)
    for wrong in (
        "",
        "/",
        "a\0b",
        3,
        None,
        b"x",
        "s3://",
        "s3://lab/..",
        "s3://lab/.",
        "s3://lab/~",
    ):
        error = refusal(split_address, wrong)
        assert (type(error), error.where) == (ArgumentError, "url")
    (tmp_path / "b" / "c").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "b" / "c")
    monkeypatch.setenv("HOME", str(tmp_path / "b"))
    for url, name in ((".", "b/c"), ("..", "b"), ("a/..", "b/c"), ("./a/.", "b/c/a"), ("~", "b")):
        assert "/".join(split_address(url)) == str(tmp_path / name)


def test_open_source_by_any_address_reads_the_same(tmp_path, s3_bucket):
    odd = Path(shutil.copytree(TOKENS.parent, tmp_path / "a::b"))
    archive = shutil.make_archive(str(tmp_path / "all"), "zip", TOKENS.parent)
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        for path in sorted(TOKENS.parent.glob("data.*")):
            tar.add(path, arcname=path.name)
    addresses = [f"{TOKENS}{ending}" for ending in ("", ".idx", ".bin")]
    addresses += [f"{chain}{TOKENS}.idx" for chain in ("file://", "simplecache::file://")]
    addresses += [odd / "data.idx", f"zip://data.idx::file://{archive}"]
    places = [(address, None) for address in [*addresses, f"tar://data.idx::file://{tmp_path}/all.tar"]]
    for url, options in (("memory://sources", None), (s3_bucket.url, s3_bucket.options)):
        files = fsspec.filesystem(url.partition(":")[0], **(options or {}))
        for ending in ("idx", "bin"):
            files.pipe_file(f"{url}/deep/x.{ending}", Path(f"{TOKENS}.{ending}").read_bytes())
        places += [(f"{url}/deep{ending}", options) for ending in ("/x", "/x.idx")]
    for url, options in places:
        source = open_source(url, options)
        assert (source.format, [tokens.tolist() for tokens in source][1]) == ("mmididx", [100, 101, 102, 103])
        assert len(open_source(source.url, options)) == 3
    fsspec.filesystem("memory").rm("/sources", recursive=True)
    assert type(refusal(open_source, "../x.idx", transport=MemoryTransport())) is UnsafeContentError
    for url in ("", 3):
        assert type(refusal(IndexedDataset, url, transport=MemoryTransport())) is ArgumentError


# -- what is found -------------------------------------------------------------------------------------------------------


def test_open_source_looks_at_the_content_and_then_at_the_ending():
    idx, bin_ = mmididx_bytes([np.arange(3, dtype=np.int32)])
    memory = MemoryTransport({
        "a.batch": BATCH, "a.idx": idx, "a.bin": bin_, "b.batch": b"", "c.idx": b"xx", "d": b"MMIDIDX\0", "odd.dat": BATCH,
        "f.tar.idx": bytes(16), "h/x": b"", "t.txt": b"hello",
    })  # fmt: skip
    for name, url in (
        ("a", "a.idx"), ("a.bin", "a.idx"), ("a.batch", "a.batch"), ("odd.dat", "odd.dat"),
    ):  # fmt: skip
        assert open_source(name, transport=memory).url == f"memory://{url}"
    for name, kind, where in (
        ("b", SaevStoreError, "b.batch"), ("b.batch", SaevStoreError, "b.batch"), ("c", SaevStoreError, "c.idx"),
        ("c.bin", SaevStoreError, "c.idx"), ("d", DocumentError, "d"), ("none", NotFoundError, "none"), ("h", NotFoundError, "h"),
        ("f.tar.idx", DocumentError, "f.tar.idx"), ("t.txt", DocumentError, "t.txt"),
    ):  # fmt: skip
        error = refusal(open_source, name, transport=memory)
        assert isinstance(error, kind)
        assert error.where == f"memory://{where}"


def test_open_source_never_takes_a_failure_for_absence():
    class Failing(MemoryTransport):
        error: SaevStoreError

        def stat(self, path):
            if path == "x.idx":
                raise self.error
            return super().stat(path)

    transport = Failing({"x": b"a"})
    for transport.error in (AccessError("no", where="x"), TransportError("busy", where="x", transient=True)):
        assert refusal(open_source, "x.idx", transport=transport) is transport.error
    for transport.error in (TransportError("a folder", where="x"), NotFoundError("no", where="x")):
        assert type(refusal(open_source, "x.idx", transport=transport)) is NotFoundError


# -- the protocol --------------------------------------------------------------------------------------------------------


def sources(folder: Path) -> list:
    (folder / "t").mkdir()
    (folder / "t/a.tar").write_bytes(tar_bytes(sample_files(0, 3)))
    prepare(folder / "t", split="1,0,0", progress=False)
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in "abc")
    write_folder(folder, {"i/a.png": b"x", "i/b/c.JPG": b"yz", "l.jsonl": lines})
    documents = IndexedDataset(TOKENS)
    return [
        documents, BatchFileReader(BATCHES / "data.batch"), TokenSamples(documents, 2), EnergonDataset(folder / "t"),
        TextFile(folder / "l.jsonl"), MapStyle([3, 4, 5]), ImageFolder(folder / "i"),
    ]  # fmt: skip


def test_sources_are_sequences_with_keys(tmp_path):
    for source in sources(tmp_path):
        n = len(source)
        keys = [source.key(i) for i in range(n)]
        assert (len(set(keys)), source.key(-1), source.key(np.int64(0))) == (n, keys[-1], keys[0])
        for call, wrong in itertools.product(
            (source.__getitem__, source.key), (n, -n - 1, 1.0, "0", None, True, 10**30)
        ):
            assert type(refusal(call, wrong)) is SelectionError
        for wrong in (
            [n],
            [0, -n - 1],
            [[0]],
            [0.5],
            ["a"],
            [True],
            0,
            slice("a"),
            slice(None, None, 0),
            [[0], [1, 2]],
        ):
            assert type(refusal(lambda wrong=wrong, source=source: list(source.rows(wrong)))) is SelectionError
        assert source.split("all") is source if source.splits == ("all",) else source.split("train")
        assert type(refusal(source.split, "none")) is SelectionError
        assert source.url in repr(source)
        if not isinstance(source, ImageFolder):  # whose files here are not images
            assert source.validate(progress=False).ok
            samples = [str(sample) for sample in source]
            for size in (1, 2, 100):
                found = [[str(sample) for sample in batch] for batch in source.batches(size)]
                assert found == [samples[i : i + size] for i in range(0, n, size)]
            assert [str(sample) for sample in source.rows([-1, 0, 0])] == [samples[-1], samples[0], samples[0]]
        for wrong in (0, 1.5):
            assert type(refusal(next, source.batches(wrong))) is ArgumentError
        assert type(refusal(source.validate, deep="no")) is ArgumentError


def test_reopen_gives_the_described_source_or_an_error(tmp_path):
    for source in sources(tmp_path):
        if isinstance(source, MapStyle):
            continue
        for scope in ("sampled", "full"):
            described = json.loads(json.dumps(source.describe(digest=scope)))
            with reopen(described) as again:
                assert (type(again), len(again)) == (type(source), len(source))
            for change, kind in (
                ({"n_samples": 9}, CorruptShardError), ({"format": "x"}, SaevStoreError), ({"digest": {"scope": "x"}}, DocumentError),
                ({"digest": {**described["digest"], "value": "0"}}, CorruptShardError), ({"url": 3}, DocumentError),
            ):  # fmt: skip
                assert isinstance(refusal(reopen, {**described, **change}), kind)
        if not isinstance(source, TextFile):  # whose digest is always of all bytes
            assert type(refusal(source.describe, digest="all")) is ArgumentError
    for description in ({}, {"url": "x", "digest": 3}, {"url": str(TOKENS), "digest": {"scope": "full"}, "samples": 3}):
        error = refusal(reopen, description)
        assert (type(error), error.where) == (DocumentError, "description")
    described = open_source(TOKENS).describe()
    moved = Path(shutil.copytree(TOKENS.parent, tmp_path / "moved"))
    assert reopen(described, url=moved / "data").url == f"{moved}/data.idx"
    raw = bytearray((moved / "data.bin").read_bytes())
    raw[7] ^= 1
    (moved / "data.bin").unlink()
    (moved / "data.bin").write_bytes(raw)
    assert type(refusal(reopen, described, url=moved / "data")) is CorruptShardError


def test_a_digest_covers_every_byte_or_even_pieces_of_a_large_file(tmp_path):
    content = np.zeros(4 << 20, np.uint32)
    idx, bin_ = mmididx_bytes([content])

    def digests(where: int | None) -> list[str]:
        other = bytearray(bin_)
        if where is not None:
            other[where] ^= 1
        source = open_source("x", transport=MemoryTransport({"x.idx": idx, "x.bin": bytes(other)}))
        return [source.describe(digest=scope)["digest"]["value"] for scope in ("sampled", "full")]

    (tmp_path / "x.idx").write_bytes(idx)
    (tmp_path / "x.bin").write_bytes(bin_)
    transport = CountingTransport(open_transport(tmp_path, engine="pread"))
    source = open_source("x", transport=transport)
    before = transport.counters.bytes_read
    source.describe()
    assert transport.counters.bytes_read - before < 1_200_000
    sampled, full = digests(None)
    for where, is_seen in ((0, True), (len(bin_) - 1, True), (40_000, False)):
        found = digests(where)
        assert (found[0] != sampled, found[1] != full) == (is_seen, True)


def test_map_style_reads_any_numbered_data(tmp_path):
    class Failing(list):
        _fingerprint, split = "one", "train"

        def __getitem__(self, index):
            raise self.error

    data = Failing([1, 2])
    source = MapStyle(data)
    assert source.describe() == {
        "format": "map_style", "class": "Failing", "n_samples": 2, "split": "train", "fingerprint": "one"
    }  # fmt: skip
    for data.error, kind in (
        (OSError("cannot identify image file"), DocumentError), (OSError(5, "no"), DocumentError), (KeyError("x"), DocumentError),
        (NotFoundError("no", where="x"), NotFoundError), (MemoryError(), MemoryError), (RuntimeError("x"), DocumentError),
    ):  # fmt: skip
        with pytest.raises(kind) as caught:
            source[1]
        assert type(caught.value) is kind
    for wrong in (3, None, iter([1]), np.array(5)):
        assert refusal(MapStyle, wrong).where == "data"


# -- new files -----------------------------------------------------------------------------------------------------------


def test_new_file_appears_when_it_is_complete(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    for engine in ("mmap", "fsspec", "memory"):
        folder = tmp_path / engine
        for each in (folder, tmp_path / "t"):
            each.mkdir(exist_ok=True)
        transport = MemoryTransport() if engine == "memory" else open_transport(folder, engine=engine)
        for overwrite, content in ((False, b"first"), (True, b"and then")):
            with NewFile(transport, "f/x", overwrite=overwrite) as file:
                file.write(content[:2])
                file.write(content[2:])
                if not overwrite:
                    assert type(refusal(transport.read, "f/x")) is NotFoundError
                file.commit()
            assert transport.read("f/x") == content
        assert type(refusal(NewFile, transport, "f/x")) is StoreExistsError
        with pytest.raises(RuntimeError), NewFile(transport, "f/y") as file:
            file.write(b"a")
            raise RuntimeError
        with NewFile(transport, "f/y") as first, NewFile(transport, "f/y") as second:
            first.commit()
            assert type(refusal(second.commit)) is StoreExistsError
        assert [entry.path for entry in transport.list("f")] == ["f/x", "f/y"]
        for path in ("../x", "/x", "a/../../x", ""):
            assert isinstance(refusal(NewFile, transport, path), SaevStoreError)
        assert list((tmp_path / "t").iterdir()) == []


def test_new_file_without_hard_links_is_still_exclusive(tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(38, "no")

    monkeypatch.setattr("os.link", no_links)
    with NewFile(open_transport(tmp_path), "x") as first, NewFile(open_transport(tmp_path), "x") as second:
        first.write(b"a")
        first.commit()
        assert type(refusal(second.commit)) is StoreExistsError
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x", b"a")]


def test_new_file_whose_upload_fails_leaves_nothing(monkeypatch):
    memory, ended = MemoryTransport(), []
    sink = memory.open_sink("y", used_nbytes=3, file_nbytes=3)
    monkeypatch.setattr(memory, "open_sink", lambda *_, **__: sink)
    monkeypatch.setattr(sink, "_append", lambda _: (_ for _ in ()).throw(TransportError("the line is cut", where="x")))
    monkeypatch.setattr(sink, "_release", lambda: ended.append(1))
    with NewFile(memory, "x") as file:
        file.write(b"abc")
        assert type(refusal(file.commit)) is TransportError
    assert (ended, memory.files) == ([1], {})
