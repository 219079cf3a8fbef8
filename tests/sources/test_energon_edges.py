"""Edges of Energon data sets: byte ranges that touch, names of every length, keys of other splits, forked children."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from energon_tars import FORMATS, tar_bytes

from saev_store.cli import main
from saev_store.errors import CorruptShardError, DocumentError, NotFoundError, SelectionError
from saev_store.sources.energon import EnergonDataset, _fetch, index_sqlite, joins, tar_scan
from saev_store.sources.energon.field_map import FieldPath, decode, resolve
from saev_store.sources.energon.filesystem import EnergonFileSystem
from saev_store.sources.energon.index_sqlite import SqliteIndex
from saev_store.sources.energon.keys import is_safe_path
from saev_store.sources.energon.prepare import find_tars, prepare
from saev_store.sources.energon.split import collapse, deal, expand, parse_ratio
from saev_store.sources.energon.tar_idx import parse_tar_idx, tar_idx_bytes
from saev_store.sources.energon.tar_scan import scan_shard
from saev_store.transport import MemoryTransport

DATA = Path(__file__).parents[1] / "data/energon"
TABLES = (
    "CREATE TABLE samples (tar_file_id INTEGER, sample_key TEXT, sample_index INTEGER, byte_offset INTEGER, byte_size INTEGER)",
    (
        "CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, content_byte_offset INTEGER,"
        " content_byte_size INTEGER)"
    ),
)  # fmt: skip


def index_of(path: Path, samples: list[tuple], parts: list[tuple]) -> SqliteIndex:
    """A database written by hand: (index, offset, nbytes) of samples, (index, offset, nbytes) of parts."""
    path.unlink(missing_ok=True)
    db = sqlite3.connect(path)
    for table in TABLES:
        db.execute(table)
    db.executemany("INSERT INTO samples VALUES (0, ?, ?, ?, ?)", [(f"s{row[0]}", *row) for row in samples])
    names = itertools.count()
    db.executemany(
        "INSERT INTO sample_parts VALUES (0, ?, ?, ?, ?)", [(row[0], f"p{next(names)}", *row[1:]) for row in parts]
    )
    db.commit()
    db.close()
    return SqliteIndex(str(path), where="index")


# -- the index ---------------------------------------------------------------------------------------------------------

GOOD_SAMPLES, GOOD_PARTS = [(0, 0, 2048), (1, 2048, 1024)], [(0, 512, 300), (0, 1536, 512), (1, 2560, 512)]


@pytest.mark.parametrize(
    ("samples", "parts", "match"),
    [
        (GOOD_SAMPLES, GOOD_PARTS, None),
        ([(0, 0, 2048), (1, 2048, 1536)], GOOD_PARTS, "outside the tar"),
        ([(0, 0, 2048), (1, 2560, 512)], [*GOOD_PARTS[:2], (1, 3072, 0)], "overlaps another"),
        ([(0, 0, 2048), (1, 1536, 1536)], GOOD_PARTS, "overlaps another"),
        ([(0, 0, 2048), (1, 2048, 0)], GOOD_PARTS, "no whole number"),
        ([(0, 0, 2048), (1, 2048, 1023)], GOOD_PARTS, "no whole number"),
        ([(0, 1, 2047), (1, 2048, 1024)], GOOD_PARTS, "no whole number"),
        (GOOD_SAMPLES, [(0, 0, 300), *GOOD_PARTS[1:]], "outside its sample"),
        (GOOD_SAMPLES, [(0, 513, 300), *GOOD_PARTS[1:]], "outside its sample"),
        (GOOD_SAMPLES, [(0, 512, 513), *GOOD_PARTS[1:]], "overlaps another"),
        (GOOD_SAMPLES, [(0, 512, 512), *GOOD_PARTS[1:]], None),
        (GOOD_SAMPLES, [*GOOD_PARTS[:2], (1, 2560, 513)], "outside its sample"),
        (GOOD_SAMPLES, [*GOOD_PARTS[:2], (1, 2048, 512)], "outside its sample"),
        (GOOD_SAMPLES, [(0, 512, 512), (0, 1024, 512), (1, 2560, 512)], "overlaps another"),
        (GOOD_SAMPLES, GOOD_PARTS[:2], "sample 1 of shard 0 has no parts"),
        (GOOD_SAMPLES, [*GOOD_PARTS, (2, 512, 1)], "1 parts of shard 0 belong to no sample"),
        (GOOD_SAMPLES[:1], GOOD_PARTS, "not there exactly once"),
        ([(0, 0, 2048), (0, 2048, 1024)], GOOD_PARTS, "not there exactly once"),
        ([*GOOD_SAMPLES, (2, 3072, 512)], GOOD_PARTS, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at_once", [1, 2])
def test_ranges_of_the_index_at_their_bounds(samples, parts, match, at_once: int, tmp_path: Path, monkeypatch):
    """Two samples in a tar of 3072 bytes: each in whole blocks, each part behind a header of its own, in its sample."""
    monkeypatch.setattr(index_sqlite, "_CHECKED_AT_ONCE", at_once)
    index = index_of(tmp_path / "index.sqlite", samples, parts)
    if match is None:
        assert index.check_shard(0, n_samples=2, tar_nbytes=3072).tolist() == [0, 2048, 3072]
    else:
        with pytest.raises(DocumentError, match=match):
            index.check_shard(0, n_samples=2, tar_nbytes=3072)


@pytest.mark.parametrize(("value", "is_right"), [(2**62 - 1, True), (2**62, False), (2**63 - 1, False)])
def test_numbers_of_the_index_have_a_limit(value: int, is_right: bool, tmp_path: Path):
    index = index_of(tmp_path / "index.sqlite", [(0, 0, value)], [(0, 512, 1)])
    if is_right:
        assert index.samples(0, 0, 1)[0][3] == value
    else:
        with pytest.raises(DocumentError, match="must be an integer"):
            index.samples(0, 0, 1)


def test_samples_of_one_key_are_found_in_the_order_of_the_shards(tmp_path: Path):
    index_of(tmp_path / "index.sqlite", [], []).close()
    db = sqlite3.connect(tmp_path / "index.sqlite")
    rows = [(2, "k", 0), (0, "k", 1), (1, "j", 0), (0, "k", 0)]
    db.executemany("INSERT INTO samples VALUES (?, ?, ?, 0, 512)", rows)
    db.commit()
    db.close()
    assert SqliteIndex(str(tmp_path / "index.sqlite"), where="index").find("k") == [(0, 0), (0, 1), (2, 0)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forked children here")
def test_a_forked_child_has_a_connection_of_its_own(tmp_path: Path):
    """SQLite forbids to use one in a child of the process that opened it."""
    index = index_of(tmp_path / "index.sqlite", GOOD_SAMPLES, GOOD_PARTS)
    assert len(index.samples(0, 0, 2)) == 2
    mine = index._db
    child = os.fork()
    if child == 0:
        found = len(index.samples(0, 0, 2)) == 2 and index._db is not mine
        os._exit(0 if found else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert index._db is mine


@pytest.mark.parametrize(
    ("offsets", "n_samples", "is_right"),
    [
        ([0, 512, 1024], 2, True), ([0, 512, 10240], 2, True), ([0, 512, 10752], 2, False), ([0, 512, 512], 2, False),
        ([0, 1024, 512], 2, False), ([0, 511, 1024], 2, False), ([512, 1024, 1536], 2, True), ([0], 0, True),
        ([0, 512], 2, False), ([0, 512, 1024, 1536], 2, False),
    ],
)  # fmt: skip
def test_offsets_of_a_tar_ascend_in_whole_blocks_to_its_end(offsets: list[int], n_samples: int, is_right: bool):
    raw = tar_idx_bytes(offsets)
    if is_right:
        assert parse_tar_idx(raw, where="x", n_samples=n_samples, tar_nbytes=10240).tolist() == offsets
    else:
        with pytest.raises(DocumentError):
            parse_tar_idx(raw, where="x", n_samples=n_samples, tar_nbytes=10240)


@pytest.mark.parametrize("missing", [1, 511, 512])
def test_offsets_behind_a_tar_that_was_cut_are_refused(missing: int):
    with pytest.raises(DocumentError, match="its last offset is 1,024"):
        parse_tar_idx(tar_idx_bytes([0, 1024]), where="x", n_samples=1, tar_nbytes=1024 - missing)


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("n", [95, 98, 99, 100, 101, 102, 155, 156, 255, 256, 257])
def test_names_of_every_length_are_read_and_compared(format: str, n: int, tmp_path: Path):
    """Of up to 100 bytes they are in the header itself, longer ones beside it."""
    key = "f/" + "k" * (n - 6)
    files = [(f"{key}.txt", b"one"), ("next.txt", b"two")]
    assert len(files[0][0]) == n
    try:
        data = tar_bytes(files, format=format)
    except ValueError:
        pytest.skip("USTAR has no room for such a name")
    (tmp_path / "a.tar").write_bytes(data)
    prepare(tmp_path, split="1,0,0", progress=False)
    dataset = EnergonDataset(tmp_path)
    assert (dataset.part(key, "txt"), dataset[0].key, dataset.part("next", "txt")) == (b"one", key, b"two")
    other = [(f"{key[:-1]}x.txt", b"one"), ("next.txt", b"two")]
    (tmp_path / "a.tar").write_bytes(tar_bytes(other, format=format))
    with pytest.raises(CorruptShardError, match="prepare the data set again"):
        EnergonDataset(tmp_path).part(key, "txt")


@pytest.mark.parametrize(
    ("name", "is_safe"),
    [
        ("a.tar", True), ("a/b.tar", True), ("./a.tar", False), ("a/./b.tar", False), ("a//b.tar", False), ("a/../b.tar", False),
        ("a/..", False), ("..a/b..tar", True), ("/a.tar", False), ("a/", False), ("a\n.tar", False), ("a::b", False),
        ("s3://a", False), ("", False),
    ],
)  # fmt: skip
def test_names_that_stay_below_the_folder(name: str, is_safe: bool):
    assert is_safe_path(name) == is_safe


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of three samples each: `a0.txt` to `a2.txt`, `b0.txt` to `b2.txt`; the second sample of each is left out."""
    folder = tmp_path_factory.mktemp("small")
    for shard in "ab":
        files = [(f"{shard}{i}.txt", f"text {shard}{i}".encode()) for i in range(3)]
        (folder / f"{shard}.tar").write_bytes(tar_bytes(files))
    prepare(folder, split_parts=["train:a", "val:b"], progress=False)
    split = folder / ".nv-meta/split.yaml"
    split.write_text(split.read_text().replace("exclude: []", "exclude: [a.tar/a1, b.tar/b1]"))
    return folder


@pytest.mark.parametrize("by", ["key", "position"])
def test_slices_of_a_part(small: Path, by: str):
    dataset, text = EnergonDataset(small), b"text a1"
    sample = "a1" if by == "key" else 1
    bounds = (None, -100, -8, -7, -1, 0, 1, 6, 7, 8, 100)
    for start, end in itertools.product(bounds, bounds):
        assert dataset.part(sample, "txt", start=start, end=end) == text[start:end]


def test_samples_that_are_left_out_and_those_of_other_splits_are_not_there(small: Path):
    """By key as by position, whole and in part."""
    everything = EnergonDataset(small)
    assert [sample.key for sample in everything] == ["a0", "a1", "a2", "b0", "b1", "b2"]
    for name, keys in (("train", ["a0", "a2"]), ("val", ["b0", "b2"])):
        split = everything.split(name)
        assert [sample.key for sample in split] == keys
        for key in ("a0", "a1", "a2", "b0", "b1", "b2"):
            if key in keys:
                assert split.part(key, "txt") == split.raw(key)["txt"] == f"text {key}".encode()
                assert split.index_of(key) == keys.index(key)
            else:
                with pytest.raises(SelectionError, match=f"not in split '{name}', or left out"):
                    split.part(key, "txt")
                with pytest.raises(SelectionError, match=f"not in split '{name}', or left out"):
                    split.raw(key)


def test_what_is_left_out_of_one_shard_stays_in_another(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Where two shards have a key in common, as releases before 7.1 allowed."""
    folder = Path(shutil.copytree(DATA / "old_7_0_0/dataset", tmp_path / "d"))
    for shard in ("shard_000", "shard_001"):
        (folder / f"shards/{shard}.tar").write_bytes((folder / "shards/shard_000.tar").read_bytes())
    db = sqlite3.connect(folder / ".nv-meta/index.sqlite", isolation_level=None)
    db.execute("UPDATE samples SET sample_key = 'sample_000' || sample_index WHERE tar_file_id < 2")
    db.execute(
        "UPDATE sample_parts SET content_byte_size = (SELECT content_byte_size FROM sample_parts AS s WHERE s.tar_file_id = 0"
        " AND s.sample_index = sample_parts.sample_index AND s.part_name = sample_parts.part_name) WHERE tar_file_id = 1"
    )
    db.close()
    with pytest.raises(SelectionError, match="2 samples have the key"):
        EnergonDataset(folder).part("sample_0000", "txt")
    assert main(["ls", f"{folder}/sample_0000"]) == 1
    assert "2 samples have the key 'sample_0000', in 'shards/shard_000.tar'" in capfd.readouterr().err
    files, first = EnergonFileSystem(dataset=EnergonDataset(folder)), EnergonDataset(folder).parts(0)[0].name
    for read in (files.info, files.cat_file):  # no name of a file tells which of the two is meant
        with pytest.raises(NotFoundError, match=f"there is no 'sample_0000.{first}'"):
            read(f"sample_0000.{first}")
    assert main(["ls", f"{folder}/sample_0009"]) == 1
    assert "there is no 'sample_0009'" in capfd.readouterr().err
    (folder / ".nv-meta/split.yaml").write_text(
        "split_parts:\n  train: ['shards/shard_{000..001}.tar']\nexclude: [shards/shard_001.tar/sample_0000]\n"
    )
    split = EnergonDataset(folder).split("train")
    kept = [(sample.shard, sample.sample_index) for sample in split]
    assert ("shards/shard_000.tar", 0) in kept
    assert ("shards/shard_001.tar", 0) not in kept
    assert ("shards/shard_001.tar", 1) in kept


def test_a_key_whose_sample_does_not_exist_is_refused(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One beyond the last sample of a shard, and in a shard beyond the last."""
    dataset = EnergonDataset(small)
    for wrong in ((0, 3), (2, 0)):
        monkeypatch.setattr(dataset.places.index, "find", lambda _, wrong=wrong: [wrong])
        with pytest.raises(CorruptShardError, match=f"in shard {wrong[0]}, sample {wrong[1]}, which does not exist"):
            dataset.places.find("a0")
    monkeypatch.setattr(dataset.places.index, "find", lambda _: [(0, 2)])
    assert dataset.places.find("a0") == [(0, 2)]


@pytest.mark.parametrize("numbers", [[0], [0, 1], [0, 2], [0, 1, 3, 4, 6], [5, 6, 7]])
def test_runs_have_no_number_too_many(numbers: list[int]):
    found = [list(range(*run)) for run in _fetch._runs(numbers)]
    assert [number for run in found for number in run] == numbers
    assert all(b[0] > a[-1] + 1 for a, b in itertools.pairwise(found))


# -- tars --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 511, 512, 513, 1023, 1024, 1025, 1535, 1536, 1537, 2047, 2048, 2049])
def test_a_tar_that_was_cut_is_never_read_as_a_shorter_one(cut: int):
    """Two members of a header and a block each, without an end marker."""
    data = tar_bytes([("a.txt", b"x" * 512), ("b.txt", b"y" * 512)], format="ustar", close=False)[:2048]
    transport = MemoryTransport({"a.tar": (data + bytes(1024))[:cut] if cut <= 2048 else data + b"z"})
    whole = {1024: 1, 2048: 2}
    if cut in whole:
        found = scan_shard(transport, "a.tar")
        assert (len(found.samples), found.end) == (whole[cut], cut)
        assert found.oddities
    else:
        with pytest.raises(CorruptShardError):
            scan_shard(transport, "a.tar")


def test_members_of_a_sample_follow_each_other(tmp_path: Path):
    """In any order of their keys; a key that comes again later is refused, not joined."""
    for keys in (["b", "a", "c"], ["a", "c", "b"], ["c", "b", "a"]):
        files = [(f"{key}.{part}", key.encode()) for key in keys for part in ("x", "y")]
        found = scan_shard(MemoryTransport({"a.tar": tar_bytes(files)}), "a.tar")
        assert [(row[0], [part[0] for part in row[3]]) for row in found.samples] == [(key, ["x", "y"]) for key in keys]
    twice = tar_bytes([("a.x", b"1"), ("a.y", b"2"), ("a.x", b"3")])
    with pytest.raises(CorruptShardError, match="the part 'x' twice"):
        scan_shard(MemoryTransport({"a.tar": twice}), "a.tar")


@pytest.mark.parametrize("format", ["ustar", "pax"])
def test_headers_are_counted_for_each_member(format: str, monkeypatch: pytest.MonkeyPatch):
    """All headers of a tar may be longer than those that a member may have."""
    names = [f"ä{i:02d}.txt" if format == "pax" else f"a{i:02d}.txt" for i in range(100)]
    data = tar_bytes([(name, b"x") for name in names], format=format)
    monkeypatch.setattr(tar_scan, "_MAX_HEADERS_NBYTES", 32 << 10)
    found = scan_shard(MemoryTransport({"a.tar": data}), "a.tar")
    assert [row[0] for row in found.samples] == [name.removesuffix(".txt") for name in names]


def test_hidden_folders_have_no_tars():
    data = tar_bytes([("a.txt", b"1")])
    memory = MemoryTransport(
        {"a.tar": data, ".hidden/b.tar": data, "c/.d/e.tar": data, "c/f.tar": data, ".g.tar": data}
    )
    tars, problems = find_tars(memory)
    assert [path for path, _ in tars] == ["a.tar", "c/f.tar"]
    assert problems == []


# -- splits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "shares", "sizes"),
    [
        (10, "1,1,1", [4, 3, 3]), (11, "1,1,1", [4, 4, 3]), (5, "8,1,1", [4, 1, 0]), (3, "8,1,1", [3, 0, 0]),
        (10, "0.75,0.25,0", [8, 2, 0]), (2, "1,2,1", [1, 1, 0]), (1, "1,1,2", [0, 0, 1]), (4, "1,1,2", [1, 1, 2]),
    ],
)  # fmt: skip
def test_what_is_left_goes_to_the_largest_remainders(n: int, shares: str, sizes: list[int]):
    assert [end - start for start, end in deal(n, parse_ratio(shares))] == sizes


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        (["s0", "s1", "s2"], ["s{0..2}"]), (["s2", "s1"], ["s2", "s1"]), (["s0", "s2"], ["s0", "s2"]), (["s1", "s1"], ["s1", "s1"]),
        (["s9", "s10"], ["s9", "s10"]), (["s09", "s10"], ["s{09..10}"]), (["s0a0", "s1a1"], ["s0a0", "s1a1"]),
        (["s0a0", "s1a0", "s1a1"], ["s{0..1}a0", "s1a1"]),
    ],
)  # fmt: skip
def test_only_numbers_that_count_up_are_collapsed(names: list[str], patterns: list[str]):
    assert collapse(names) == patterns
    assert [name for pattern in patterns for name in expand(pattern, where="x")] == names


@pytest.mark.parametrize("n", [9, 10, 11])
def test_a_pattern_stands_for_so_many_names_and_no_more(n: int):
    pattern = f"{{01..{n:02d}}}"
    most = 10 * (len(pattern) + 64)
    if n <= 10:
        assert len(expand(pattern, where="x", max_characters=most)) == n
    else:
        with pytest.raises(DocumentError, match="stands for 11 names; at most 10"):
            expand(pattern, where="x", max_characters=most)


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "found"), [("json[0]", "a"), ("json[1]", "b"), ("json[2],txt", "t"), ("json[x],txt", "t")]
)
def test_a_place_in_a_list_that_is_not_there_is_none(path: str, found: str):
    parts = {"json": b'["a", "b"]', "txt": b"t"}
    assert resolve(FieldPath.parse(path, where="x"), parts, where="x") == found


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_an_array_has_as_many_bytes_as_it_says(more: int, tmp_path: Path):
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    np.save(tmp_path / "a.npy", array)
    raw = (tmp_path / "a.npy").read_bytes()
    raw = raw[:more] if more < 0 else raw + bytes(more)
    if more == 0:
        assert np.array_equal(decode("npy", raw, where="x"), array)
    else:
        with pytest.raises(DocumentError, match="bytes follow"):
            decode("npy", raw, where="x")


@pytest.mark.parametrize(
    ("size", "is_right"), [((4, 4), True), ((16, 1), True), ((1, 16), True), ((17, 1), False), ((6, 3), False)]
)
def test_an_image_has_at_most_so_many_pixels(size: tuple[int, int], is_right: bool, monkeypatch: pytest.MonkeyPatch):
    import io

    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr("saev_store.sources.pixels.MAX_PIXELS", 16)
    buffer = io.BytesIO()
    image.new("RGB", size).save(buffer, "PNG")
    if is_right:
        assert decode("png", buffer.getvalue(), where="x").shape == (size[1], size[0], 3)
    else:
        with pytest.raises(DocumentError, match="pixels"):
            decode("png", buffer.getvalue(), where="x")


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_a_sample_names_at_most_so_many_files(n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(joins, "MAX_NAMES", 2)
    names = [f"{i}.jpg" for i in range(n)]
    (tmp_path / "a.tar").write_bytes(tar_bytes([("a.json", json.dumps({"files": names}).encode())]))
    prepare(tmp_path, split="1,0,0", progress=False)
    media = joins.FolderFiles("", transport=MemoryTransport({name: name.encode() for name in names}))
    joined = joins.JoinedDataset(EnergonDataset(tmp_path), {"images": media}, names={"images": "json[files]"})
    if n <= 2:
        assert joined[0].media == {"images": {name: name.encode() for name in names}}
    else:
        with pytest.raises(DocumentError, match="no list of up to 2"):
            joined[0]


def test_blanks_around_the_options_of_a_field_mean_nothing():
    path = FieldPath.parse(" jpg , json[a b] ", where="x")
    assert path.options == (("jpg", ()), ("json", ("a b",)))
