"""What validation compares of an Energon data set: every single difference between documents, index and tars is named."""

from __future__ import annotations

import sqlite3
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from energon_tars import sample_files, tar_bytes

from saev_store.errors import CorruptShardError, DocumentError, SaevStoreError
from saev_store.problems import Problem
from saev_store.sources.energon import EnergonDataset, check
from saev_store.sources.energon._fetch import PartPlace
from saev_store.sources.energon._view import View
from saev_store.sources.energon.prepare import prepare
from saev_store.sources.energon.tar_header import disagreement, headers_nbytes
from saev_store.sources.energon.tar_scan import scan_shard
from saev_store.transport import MemoryTransport

Files = list[tuple[str, bytes]]


def files(first: int, n: int) -> Files:
    """Samples of one part each, of 1024 bytes in the tar."""
    return [(f"s{i}.txt", b"%04d" % i) for i in range(first, first + n)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tars of 2, 3 and 1 samples."""
    for name, some in (("a", files(0, 2)), ("b", files(2, 3)), ("c", files(5, 1))):
        (tmp_path / f"{name}.tar").write_bytes(tar_bytes(some, format="ustar"))
    prepare(tmp_path, split_parts=["train:[ab]", "val:c"], progress=False)
    return tmp_path


def change(folder: Path, *statements: str) -> None:
    db = sqlite3.connect(folder / ".nv-meta/index.sqlite", isolation_level=None)
    for statement in statements:
        db.execute(statement)
    db.close()


def problems(folder: Path, *, deep: bool = True) -> list[Problem]:
    with EnergonDataset(folder, damaged_ok=True) as dataset:
        return list(dataset.validate(deep=deep, progress=False).problems)


def test_a_whole_data_set_has_no_problem(folder: Path):
    assert problems(folder) == []
    with EnergonDataset(folder) as dataset:
        deep, quick = dataset.validate(deep=True, progress=False), dataset.split("val").validate(progress=False)
    nbytes = sum((folder / f"{name}.tar").stat().st_size for name in "abc")
    assert (deep.n_examples, deep.n_shards, deep.checked_bytes, deep.deep) == (6, 3, nbytes, True)
    assert (quick.n_examples, quick.n_shards, quick.checked_bytes, quick.deep) == (1, 1, 0, False)


@pytest.mark.parametrize(
    ("some", "message"),
    [
        (files(2, 2), "the tar has 2 samples, the index 3"),
        (files(2, 1), "the tar has 1 samples, the index 3"),
        ([*files(2, 2), ("s9.txt", b"0004")], "sample 2 ('s9') is not what the index says"),
        ([*files(2, 2), ("s4.json", b"0004")], "sample 2 ('s4') is not what the index says"),
        ([*files(2, 2), ("s4.txt", b"00004")], "sample 2 ('s4') is not what the index says"),
        ([("s2.txt", b"0002"), ("s2.a", b""), *files(3, 2)], "sample 0 ('s2') is not what the index says"),
    ],
)
def test_tars_that_are_not_those_of_the_index(some: Files, message: str, folder: Path):
    """As long as the tar was, or longer: only its headers tell."""
    whole = (folder / "b.tar").read_bytes()
    (folder / "b.tar").write_bytes(tar_bytes(some, format="ustar").ljust(len(whole), b"\0"))
    found = [problem for problem in problems(folder) if problem.kind == "corrupt_shard"]
    assert [(problem.message, problem.where, problem.lost) for problem in found] == [
        (message, f"{folder}/b.tar", ((2, 5),))
    ]


def test_a_tar_with_one_sample_more(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "c.tar").write_bytes(tar_bytes(files(5, 2), format="ustar"))
    kinds = {problem.kind: problem for problem in problems(folder)}
    message = "the index ends at 1,024, but the tar goes on: files were added after it was indexed"
    assert (kinds["stale_index"].message, kinds["stale_index"].lost) == (message, ((5, 6),))
    assert kinds["corrupt_shard"].message == "the tar has more than the 1 samples of the index"


@pytest.mark.parametrize("name", ["README", ".DS_Store", "__MACOSX__/x.txt", None])
def test_a_tar_of_members_that_belong_to_no_sample(tmp_path: Path, name: str | None):
    (tmp_path / "a.tar").write_bytes(tar_bytes(files(0, 2), format="ustar"))
    (tmp_path / "b.tar").write_bytes(tar_bytes([] if name is None else [(name, b"abc")], format="ustar"))
    for overwrite in (False, True):
        prepare(tmp_path, split="1,0,0", progress=False, overwrite=overwrite)
        assert problems(tmp_path) == []
        with EnergonDataset(tmp_path) as dataset:
            assert [sample.parts for sample in dataset] == [{"txt": b"0000"}, {"txt": b"0001"}]


def test_a_tar_without_samples_that_has_some_by_now(tmp_path: Path):
    (tmp_path / "a.tar").write_bytes(tar_bytes(files(0, 2), format="ustar"))
    (tmp_path / "b.tar").write_bytes(tar_bytes([("README", b"abc")], format="ustar"))
    prepare(tmp_path, split="1,0,0", progress=False)
    (tmp_path / "b.tar").write_bytes(tar_bytes([("README", b"abc"), *files(2, 3)], format="ustar"))
    with pytest.raises(SaevStoreError, match="files were added after it was indexed"):
        EnergonDataset(tmp_path)
    assert "stale_index" in [problem.kind for problem in problems(tmp_path, deep=False)]


@pytest.mark.parametrize("some", [[], [("no_part", b"")]])
def test_a_tar_of_one_sample_that_holds_none(some: Files, folder: Path):
    whole = (folder / "c.tar").read_bytes()
    (folder / "c.tar").write_bytes(tar_bytes(some, format="ustar").ljust(len(whole), b"\0"))
    found = [problem for problem in problems(folder) if problem.severity == "error"]
    assert [(problem.message, problem.lost) for problem in found] == [("the tar has 0 samples, the index 1", ((5, 6),))]


def test_a_tar_that_is_odd_is_told(folder: Path):
    path = folder / "c.tar"
    path.write_bytes(path.read_bytes()[:1024])
    (problem,) = problems(folder)
    assert (problem.kind, problem.severity, problem.where) == ("odd_tar", "warning", f"{folder}/c.tar")
    assert problem.message == "it has no end marker: it may have been cut between two files"


@pytest.mark.parametrize("name", ["b.tar", "b.tar.idx"])
def test_files_that_are_gone(name: str, folder: Path):
    (folder / name).unlink()
    (problem,) = problems(folder)
    assert (problem.kind, problem.where, problem.lost) == ("missing_shard", f"{folder}/b.tar", ((2, 5),))
    assert problem.message == ("the shard is missing" if name == "b.tar" else "b.tar.idx is missing")
    with EnergonDataset(folder, damaged_ok=True) as dataset:
        assert dataset.split("val").validate(progress=False).ok  # that of another split


@pytest.mark.parametrize(
    ("statement", "kind", "message"),
    [
        (
            "INSERT INTO samples VALUES (7, 'x', 0, 0, 512)",
            DocumentError,
            "it has samples of shard 7, but there are 3 shards",
        ),
        (
            "DELETE FROM samples WHERE sample_key = 's4'",
            DocumentError,
            "it has 2 samples of 'b.tar', .info.json says 3",
        ),
        (
            "INSERT INTO samples VALUES (2, 'x', 1, 1024, 512)",
            DocumentError,
            "it has 2 samples of 'c.tar', .info.json says 1",
        ),
    ],
)
def test_counts_that_differ(statement: str, kind: type[SaevStoreError], message: str, folder: Path):
    change(folder, statement)
    with pytest.raises(SaevStoreError) as caught:
        EnergonDataset(folder)
    assert type(caught.value) is kind
    assert (caught.value.message, caught.value.remedy) == (message, "Prepare the data set again, or restore its tars.")
    assert str(caught.value.where).endswith(".nv-meta/index.sqlite")
    for found in (caught.value.problems, EnergonDataset(folder, damaged_ok=True).problems):
        assert [problem.message for problem in found] == [message]  # rows of a wrong index are not judged one by one


def test_what_a_tar_that_was_cut_has_lost(folder: Path):
    with (folder / "b.tar").open("r+b") as file:
        file.truncate(2048)
    for found in (problems(folder, deep=False), EnergonDataset(folder, damaged_ok=True).problems):
        (problem, *_) = found
        assert (problem.kind, problem.lost) == ("index_sqlite", ((2, 5),))
        assert problem.where == f"{folder}/.nv-meta/index.sqlite"


def test_a_shard_that_a_split_lists_twice_is_checked_once(folder: Path):
    (folder / ".nv-meta/split.yaml").write_text("split_parts:\n  train: [a.tar, b.tar, a.tar]\n")
    (folder / "a.tar").write_bytes((folder / "a.tar").read_bytes()[:2048])  # without its end marker
    with EnergonDataset(folder) as dataset:
        report = dataset.split("train").validate(deep=True, progress=False)
    nbytes = 2048 + (folder / "b.tar").stat().st_size
    assert (report.n_examples, report.n_shards, report.checked_bytes) == (7, 2, nbytes)
    assert [problem.kind for problem in report.problems] == ["repeated_shard", "odd_tar"]


def test_documents_that_are_not_there_are_told_by_validation(folder: Path):
    (folder / ".nv-meta/split.yaml").unlink()
    (folder / ".nv-meta/dataset.yaml").unlink()
    assert [problem.kind for problem in problems(folder)] == ["no_splits", "no_definition"]


def test_a_tar_that_is_missing_is_no_document(folder: Path):
    (folder / "a.tar").unlink()
    (folder / "b.tar").unlink()
    with pytest.raises(CorruptShardError) as caught:
        EnergonDataset(folder)
    assert (caught.value.message, caught.value.where) == ("the shard is missing", f"{folder}/a.tar")
    with EnergonDataset(folder, damaged_ok=True) as dataset:
        assert [problem.where for problem in dataset.problems] == [f"{folder}/a.tar", f"{folder}/b.tar"]
        assert dataset[5].key == "s5"


@pytest.mark.parametrize(("rows", "is_checked"), [(12, True), (11, False)])
def test_which_index_is_checked_on_opening(rows: int, is_checked: bool, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Six samples of one part each have twelve rows."""
    monkeypatch.setattr(check, "EAGER_ROWS", rows)
    change(folder, "UPDATE sample_parts SET content_byte_offset = 0 WHERE tar_file_id = 1 AND sample_index = 0")
    with EnergonDataset(folder, damaged_ok=True) as dataset:
        assert bool(dataset.problems) == is_checked
        for read in (lambda: dataset.raw("s2"), lambda: dataset.part("s2", "txt"), lambda: dataset.part(2, "txt")):
            with pytest.raises(CorruptShardError, match="part 'txt' begins inside its header"):
                read()


@pytest.mark.parametrize(("offset", "is_told"), [(0, True), (511, True), (512, False)])
def test_a_part_has_its_header_in_front_of_it(offset: int, is_told: bool, folder: Path):
    with EnergonDataset(folder) as dataset:

        def read() -> bytes:
            return dataset.places.content(0, "s0", PartPlace("txt", offset, 4))

        if is_told:
            with pytest.raises(CorruptShardError) as caught:
                read()
            assert (caught.value.message, caught.value.where) == (
                "part 'txt' begins inside its header",
                f"{folder}/a.tar",
            )
        else:
            assert read() == b"0000"


def test_shards_beyond_a_limit_are_not_looked_at_on_opening(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check, "EAGER_ROWS", 0)
    (folder / "b.tar").unlink()
    for limit, is_told in ((3, True), (2, False)):
        monkeypatch.setattr(check, "_EAGER_SHARDS", limit)
        with EnergonDataset(folder, damaged_ok=True) as dataset:
            assert bool(dataset.problems) == is_told


# -- positions -----------------------------------------------------------------------------------------------------------


def test_samples_behind_the_last_one_of_a_shard_are_in_no_view():
    view = View([4, 2, 7], [3, 2, 1], [(2, 0)])
    assert [view.position(4, index) for index in range(5)] == [0, 1, 2, None, None]
    assert [view.position(2, index) for index in range(4)] == [None, 3, None, None]
    assert [view.position(7, index) for index in range(3)] == [4, None, None]
    assert [view.span(shard) for shard in (4, 2, 7, 9)] == [(0, 3), (3, 4), (4, 5), (0, 0)]
    assert len(View([], [])) == 0
    assert View([], []).places([]) == []
    twice = View([1, 1], [2, 2], [(1, 0)])
    assert (len(twice), twice.places([0, 1])) == (2, [(1, 1), (1, 1)])


@pytest.mark.parametrize("n_files", [49, 50, 51])
def test_so_many_names_of_parts_are_told(n_files: int):
    parts = [(f"a.p{i:03d}", b"") for i in range(n_files - 1)]
    memory = MemoryTransport({"a.tar": tar_bytes(parts), "b.tar": tar_bytes([("b.z1", b""), ("b.z2", b"")])})
    made = prepare("", transport=memory, split="1,0,0", progress=False)
    assert made.n_parts == n_files + 1
    assert len(made.part_names) == (n_files - 1 if n_files == 51 else n_files + 1)


def test_an_empty_tar_is_told_and_in_no_split():
    memory = MemoryTransport({"a.tar": tar_bytes([]), "b.tar": tar_bytes(sample_files(0, 1))})
    made = prepare("", transport=memory, split="1,0,0", progress=False)
    assert dict(made.splits) == {"train": ("b.tar",), "val": (), "test": ()}
    (problem,) = made.problems
    assert (problem.kind, problem.message, problem.where) == (
        "empty_shard",
        "it has no samples, so it is in no split",
        "a.tar",
    )
    dataset = EnergonDataset("", transport=memory)
    assert dataset.validate(deep=True, progress=False).ok
    calls: list[Callable[[], object]] = [lambda: dataset.places.run(0, 0, 1)]
    for call in calls:
        with pytest.raises(DocumentError, match="samples 0 to 0 of shard 0 are not there exactly once"):
            call()


# -- headers -------------------------------------------------------------------------------------------------------------


def header(name: str, nbytes: int, kind: bytes = tarfile.REGTYPE, *, format: int = tarfile.USTAR_FORMAT) -> bytes:
    """The headers of one member, with those of extensions before them."""
    info = tarfile.TarInfo(name)
    info.size, info.type = nbytes, kind
    return info.tobuf(format)


LONG = "d/" + "n" * 120 + ".txt"
PLAIN, GNU, PAX = (
    header("a.txt", 3),
    header(LONG, 3, format=tarfile.GNU_FORMAT),
    header("ä.txt", 3, format=tarfile.PAX_FORMAT),
)


@pytest.mark.parametrize(
    ("headers", "name", "nbytes", "told"),
    [
        (PLAIN, "a.txt", 3, None), (b"x" * 512 + PLAIN, "a.txt", 3, None), (bytes(1024) + PLAIN, "a.txt", 3, None),
        (header("a.txt", 3, tarfile.AREGTYPE), "a.txt", 3, None), (header("a.txt", 3, tarfile.CONTTYPE), "a.txt", 3, None),
        (GNU, LONG, 3, None), (PAX, "ä.txt", 3, None), (header("b", 1) + b"b".ljust(512) + GNU, LONG, 3, None),
        (header("b", 1) + b"b".ljust(512) + PAX, "ä.txt", 3, None),
        (PLAIN, "b/a.txt", 3, "the tar has 'a.txt' there"), (header("b/a.txt", 3), "a.txt", 3, "the tar has 'b/a.txt' there"),
        (header("b/a.txt", 3), "c/a.txt", 3, "the tar has 'b/a.txt' there"), (header("b/a.txt", 3), "b/a.txt", 3, None),
        (PLAIN, "a.tx", 3, "the tar has 'a.txt' there"), (PLAIN, "a.txt", 2, "the tar has a file of 3 bytes there, the index says 2"),
        (PLAIN, "a.txt", 4, "the tar has a file of 3 bytes there, the index says 4"), (PAX, "a.txt", 3, "the tar has 'ä.txt' there"),
        (GNU, LONG[:100], 3, f"the tar has {LONG!r} there"),
        (header("a.txt", 3, tarfile.DIRTYPE), "a.txt", 3, "the tar has no plain file there"),
        (header("a.txt", 3, tarfile.SYMTYPE), "a.txt", 3, "the tar has no plain file there"),
        (header("a.txt", 3, tarfile.LNKTYPE), "a.txt", 3, "the tar has no plain file there"),
        (header("a.txt", 3, tarfile.FIFOTYPE), "a.txt", 3, "the tar has no plain file there"),
        (PLAIN[:-1] + b"x", "a.txt", 3, "the tar has no header with a valid checksum there"),
        (bytes(512), "a.txt", 3, "the tar has no header with a valid checksum there"),
        (PLAIN + bytes(512), "a.txt", 3, "the tar has no header with a valid checksum there"),
        # Extensions of another file, behind which the one of the index is a plain one.
        (PAX + b"x".ljust(512) + PLAIN, "a.txt", 3, None), (GNU + b"x".ljust(512) + PLAIN, "a.txt", 3, None),
        (GNU + b"x".ljust(512) + PLAIN, LONG, 3, "the tar has 'a.txt' there"),
    ],
)  # fmt: skip
def test_headers_are_compared_with_the_index(headers: bytes, name: str, nbytes: int, told: str | None):
    assert disagreement(headers, name=name, nbytes=nbytes) == told


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", ["a.txt", "n" * 96 + ".txt", "d" * 60 + "/" + "n" * 60 + ".txt", "ä.txt", "a?.txt"])
@pytest.mark.parametrize("nbytes", [0, 8**11 - 1, 8**11])
def test_as_many_headers_are_read_as_there_may_be(format: int, name: str, nbytes: int):
    try:
        raw = header(name, nbytes, format=format)
    except ValueError:
        return  # this format has no room for it
    n = headers_nbytes(name, nbytes)
    assert n % 512 == 0
    assert len(raw) <= n
    assert disagreement(raw.rjust(n, b"\0"), name=name, nbytes=nbytes) is None


@pytest.mark.parametrize("missing", [1, 511, 512, 513])
def test_a_tar_that_was_cut_in_its_last_part_says_how_much_is_missing(missing: int):
    raw = tar_bytes([("a.txt", b"x" * 600), ("b.txt", b"y" * 600)], format="ustar", close=False)
    with pytest.raises(CorruptShardError) as caught:
        scan_shard(MemoryTransport({"a.tar": raw[:-missing]}), "a.tar")
    assert caught.value.message == f"it was cut: 'b.txt' needs 3,072 bytes, but there are {3072 - missing:,}"
    assert caught.value.where == "memory://a.tar"
