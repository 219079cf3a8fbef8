"""Preparing folders of tars: complete and as Energon writes it, all or nothing, and its commands."""

from __future__ import annotations

import itertools
import json
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from energon_tars import FORMATS, odd_files, sample_files, tar_bytes, write_dataset, write_definition
from hypothesis import given
from hypothesis import strategies as st

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
    UnsafeContentError,
    WriterConflictError,
)
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.energon.documents import collapse, deal, expand, shares_of
from saev_store.sources.energon.prepare import prepare
from saev_store.transport import open_transport

DATA = Path(__file__).parents[1] / "data/energon"
FILES = {".info.json", "dataset.yaml", "index.sqlite", "index.uuid", "split.yaml"}


def refused(call) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call()
    return caught.value


def content(folder: Path) -> dict[str, bytes]:
    """Every file but those of the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != ".saev_store")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def check(dataset: EnergonDataset, truth: dict[str, dict[str, bytes]]) -> None:
    found = {sample.key: dict(sample.parts) for batch in dataset.batches(3) for sample in batch}
    assert (len(dataset), found) == (len(truth), truth)
    assert all(dataset.part(key, part) == data for key, parts in truth.items() for part, data in parts.items())
    report = dataset.validate(deep=True, progress=False)
    assert report.ok, report


def tars(folder: Path, *names: str) -> Path:
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(tar_bytes(sample_files(i * 10, 2)))
    return folder


# -- what is written ---------------------------------------------------------------------------------------------------


def test_prepare_writes_what_energon_writes(tmp_path):
    """Byte for byte, and row for row in the index."""
    for case, options in (
        ("captioning_ratio_split", {"split": "1,1,1"}),
        ("crude_varying_parts", {"split": "1,1,0"}),
    ):
        truth = json.loads((DATA / case / "expected.json").read_text())
        theirs = content(DATA / case / "dataset")
        folder = tmp_path / case
        for name, raw in theirs.items():
            if name.endswith(".tar") or (name == ".nv-meta/dataset.yaml" and case == "captioning_ratio_split"):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(raw)
        prepare(folder, progress=False, **options)
        ours = content(folder)
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - {".nv-meta/index.sqlite", ".nv-meta/index.uuid"}:
            assert ours[name] == theirs[name], name
        db = sqlite3.connect(folder / ".nv-meta/index.sqlite")
        for table, order in (("samples", "1, 3"), ("sample_parts", "1, 2, 4")):
            rows = [list(row) for row in db.execute(f"SELECT * FROM {table} ORDER BY {order}")]
            assert rows == sorted(
                truth["sqlite"][table]["rows"],
                key=lambda row: row[:1] + row[2:3] if table == "samples" else row[:2] + row[3:4],
            )
        db.close()


def test_prepared_tars_of_every_format_are_read_back(tmp_path):
    for place in ("", "memory://"):
        folder = tmp_path / f"x{place[:3]}"
        truth = write_dataset(folder, n_shards=6)
        if place:
            fsspec.filesystem("memory").put(str(folder), str(folder), recursive=True)
        made = prepare(f"{place}{folder}", split="1,1,1", progress=False)
        assert len(made) == len(truth)
        assert {name: len(shards) for name, shards in made.documents.splits.items()} == {
            "train": 2,
            "val": 2,
            "test": 2,
        }
        dataset = EnergonDataset(f"{place}{folder}")
        check(dataset, truth)
        assert (dataset.sample_type, sum(len(dataset.split(name)) for name in dataset.splits)) == (
            "CrudeWebdataset",
            len(truth),
        )
        if not place:
            assert {path.name for path in (folder / ".nv-meta").iterdir()} == FILES
    uuids = {(tmp_path / "x/.nv-meta/index.uuid").read_text()}
    for format, engine in itertools.product(FORMATS, ("auto", "fsspec")):
        files = sample_files(0, 3) if format == "ustar" else odd_files()
        folder = tmp_path / f"{format}{engine}"
        folder.mkdir()
        (folder / "a.tar").write_bytes(tar_bytes(files, format=format))
        there = open_transport(folder, engine=engine)
        prepare("", transport=there, split="1,0,0", progress=False)
        dataset = EnergonDataset("", transport=there)
        names = [f"{dataset.key(i)}.{part.name}" for i in range(len(dataset)) for part in dataset.parts(i)]
        assert names == [name for name, _ in files if name not in {"__meta__/notes.json", "no_dot", ".hidden"}]
        assert (folder / ".nv-meta/index.uuid").read_text() not in uuids


def test_prepare_takes_tars_in_the_order_of_folders(tmp_path):
    tars(tmp_path, "b.tar", "a-b/0.tar", "a/1.tar", "a/0.tar", ".old/0.tar", "a/.trash/0.tar", "a/.x.tar")
    (tmp_path / "a/c.tgz").write_bytes(b"")
    made = prepare(tmp_path, split="1,0,0", progress=False)
    assert list(made.shards) == ["a/0.tar", "a/1.tar", "a-b/0.tar", "b.tar"]
    (tmp_path / "a/1.tar").write_bytes(tar_bytes([]))
    made = prepare(tmp_path, split="1,0,0", overwrite=True, progress=False)
    assert dict(made.documents.splits) == {"train": ("a/0.tar", "a-b/0.tar", "b.tar"), "val": (), "test": ()}
    assert len(made) == 6


def test_preparing_again_keeps_what_is_not_given_and_replaces_what_is(tmp_path):
    tars(tmp_path, "0.tar", "1.tar")
    meta = tmp_path / ".nv-meta"
    write_definition(tmp_path, "TextSample", {"text": "txt"})
    prepare(tmp_path, split="1,1,0", progress=False)
    (meta / "split.yaml").write_text((meta / "split.yaml").read_text() + "# edited\n")
    before = content(meta)
    again = prepare(tmp_path, overwrite=True, progress=False)
    assert content(meta) == before
    assert dict(again.documents.splits) == {"train": ("0.tar",), "val": ("1.tar",), "test": ()}
    (meta / "split.json").write_text('{"split_parts": {"old": ["0.tar"]}}')  # of an older Energon
    (meta / ".info.yaml").write_text("shard_counts: {gone.tar: 9}")
    (meta / ".saev_store.tmp-1-2").write_bytes(b"of a preparation that was killed")
    prepare(tmp_path, split="0,1,1", overwrite=True, progress=False)
    assert {path.name for path in meta.iterdir()} == FILES
    assert (EnergonDataset(tmp_path).splits, EnergonDataset(tmp_path).sample_type) == (
        ("train", "val", "test"),
        "TextSample",
    )
    error = refused(lambda: prepare(tmp_path, split="1,0,0"))
    assert (type(error), error.where) == (StoreExistsError, str(tmp_path))
    (tmp_path / "0.tar").unlink()
    before = content(tmp_path)
    assert (
        type(refused(lambda: prepare(tmp_path, overwrite=True, progress=False))) is DocumentError
    )  # split.yaml names 0.tar
    assert content(tmp_path) == before


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_arguments_that_fit_nothing_are_refused(tmp_path):
    tars(tmp_path, "a.tar")
    before = content(tmp_path)
    for options, where in (
        ({"split": None}, "split"), ({"split": "1,2"}, "split"),
        *(({"split": text}, "split") for text in ("", ",", "1,,2", "-1,2,3", "nan,1,1", "inf,1,1", "1e9,1,1", "0,0,0", "x", "1" * 300, 5, "1,2,3,4")),
    ):  # fmt: skip
        error = refused(lambda options=options: prepare(tmp_path, progress=False, **{"split": "1,0,0", **options}))
        assert error.where == where, options
        assert isinstance(error, (ArgumentError, DocumentError))
        assert content(tmp_path) == before
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/x.tgz").write_bytes(b"")
    assert type(refused(lambda: prepare(tmp_path / "empty", split="1,0,0"))) is NotFoundError
    (tmp_path / "a\\b.tar").write_bytes(b"")
    assert type(refused(lambda: prepare(tmp_path, split="1,0,0", progress=False))) is UnsafeContentError


def test_damaged_tars_and_repeated_keys_change_nothing(tmp_path):
    truth = write_dataset(tmp_path, n_shards=4, odd=False)
    prepare(tmp_path, split="1,0,0", progress=False)
    shards = [tmp_path / f"shards/shard_{i:03d}.tar" for i in range(4)]
    before = content(tmp_path)
    for i, raw, kind, where in (
        (2, before["shards/shard_002.tar"][:700], CorruptShardError, shards[2]), (1, b"", CorruptShardError, shards[1]),
        (3, before["shards/shard_000.tar"], DocumentError, tmp_path),
        (0, tar_bytes([("k.a", b""), ("j.a", b""), ("k.b", b"")]), DocumentError, tmp_path),
    ):  # fmt: skip
        shards[i].write_bytes(raw)
        error = refused(lambda: prepare(tmp_path, split="0,1,0", overwrite=True, progress=False))
        assert (type(error), error.where) == (kind, str(where))
        shards[i].write_bytes(before[f"shards/shard_{i:03d}.tar"])
        assert content(tmp_path) == before
    check(EnergonDataset(tmp_path), truth)


def test_index_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    tars(tmp_path, "a.tar")
    real = sqlite3.connect

    def connect(path, **options):
        db = real(path, **options)
        db.execute("PRAGMA max_page_count = 1")
        return db

    monkeypatch.setattr(sqlite3, "connect", connect)
    assert type(refused(lambda: prepare(tmp_path, split="1,0,0", progress=False))) is TransportError
    assert not (tmp_path / ".nv-meta/.info.json").exists()


# -- kills -------------------------------------------------------------------------------------------------------------


def test_prepare_that_is_killed_leaves_a_whole_dataset_or_none(tmp_path):
    truth = write_dataset(tmp_path, n_shards=6, odd=False)
    program = (
        "import os, sys; from saev_store.sources.energon.prepare import prepare; n = [0]\n"
        "def count(event, arguments):\n"
        "    if event in ('open', 'os.rename', 'os.remove', 'os.link', 'os.mkdir', 'os.rmdir') and sys.argv[1] in str(arguments):\n"
        "        n[0] += 1\n"
        "        if n[0] == int(sys.argv[2]): os.kill(os.getpid(), 9)\n"
        "sys.addaudithook(count)\n"
        "prepare(sys.argv[1], split='0,1,0', overwrite=True, progress=False)\n"
    )
    states = set()
    for at in range(1, 200, 13):
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path), str(at)], stderr=subprocess.PIPE, check=False
        )
        if (tmp_path / ".nv-meta/.info.json").exists():
            check(EnergonDataset(tmp_path), truth)
        states.add((done.returncode, (tmp_path / ".nv-meta/.info.json").exists()))
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert {(-signal.SIGKILL, False), (0, True)} <= states
    assert {path.name for path in (tmp_path / ".nv-meta").iterdir()} == FILES
    with open_transport(str(tmp_path)).lock(".nv-meta/.saev_store/lock"):
        options = {"split": "1,0,0", "overwrite": True, "progress": False}
        assert type(refused(lambda: prepare(tmp_path, **options))) is WriterConflictError


# -- splits ------------------------------------------------------------------------------------------------------------


def test_shards_of_a_split_are_written_in_braces_and_a_split_of_ones_own_is_kept(tmp_path):
    tars(tmp_path, "train/00.tar", "train/01.tar", "val/ä.tar")
    prepare(tmp_path, split="2,1,0", progress=False)
    split = tmp_path / ".nv-meta/split.yaml"
    assert split.read_text() == (
        "split_parts:\n  train:\n  - train/{00..01}.tar\n  val:\n  - val/ä.tar\n  test: []\nexclude: []\n"
    )
    split.write_text("split_parts: {mine: ['train/0{0,1}.tar'], none: []}\n")
    made = prepare(tmp_path, overwrite=True, progress=False)
    assert dict(made.documents.splits) == {"mine": ("train/00.tar", "train/01.tar"), "none": ()}


def test_braces_mean_what_a_shell_means():
    for pattern, names in (
        ("{1..3}", "1 2 3"), ("{03..1}", "03 02 01"), ("{1..7..3}", "1 4 7"), ("{-1..1}", "-1 0 1"), ("{a,b}{1,2}", "a1 a2 b1 b2"), ("{x}", "{x}"),
        (r"\{a,b\}", "{a,b}"), ("{,x}y", "y xy"), ("x{1..2}y{a,b}", "x1ya x1yb x2ya x2yb"), ("{08..10}", "08 09 10"), ("{1..1}", "1"), ("a\\", "a\\"),
        ("{0..1..0}", "0 1"), ("{-01..1}", "-01 000 001"),
    ):  # fmt: skip
        assert expand(pattern, where="x") == names.split()


@given(st.text("a{},.\\1", max_size=14), st.integers(0, 999), st.integers(2, 60), st.integers(1, 6))
def test_collapsed_names_expand_to_themselves(text, first, n, width):
    names = [f"s/{i:0{width}d}-of.tar" for i in range(first, first + n)]
    if width > 2 and first + n <= 10**width:
        assert len(collapse(names)) == 1
    names += [
        text,
        *(f"{text}{i}" for i in (8, 9, 10)),
        "00.tar",
        "1.tar",
        "0.tar",
        "0.tar",
        *("9" * k for k in (17, 18, 19)),
        "1" + "0" * 18,
    ]
    assert [name for pattern in collapse(names) for name in expand(pattern, where="x")] == names
    try:
        assert expand(text, where="x")
    except DocumentError as error:
        assert error.where == "x"


@given(st.integers(0, 200), st.lists(st.decimals(0, 100, places=3), min_size=3, max_size=3).filter(any))
def test_every_shard_is_dealt_as_close_to_its_share_as_possible(n_shards, shares):
    ratio, shards = shares_of(",".join(map(str, shares))), [f"{i}.tar" for i in range(n_shards)]
    dealt = deal(shards, ratio)
    assert [shard for each in dealt.values() for shard in each] == shards
    for each, share in zip(dealt.values(), ratio, strict=True):
        assert abs(len(each) - n_shards * share / sum(ratio)) < 1
        assert share or not each
    for n, text, counts in (
        (10, "7,2,1", [7, 2, 1]), (1, "0.8,0.1,0.1", [1, 0, 0]), (2, "1,1,0", [1, 1, 0]), (10, "0.7,0.2,0.1", [7, 2, 1]),
    ):  # fmt: skip
        assert [len(each) for each in deal([""] * n, shares_of(text)).values()] == counts
