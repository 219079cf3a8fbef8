"""The checks by name and size: each kind of damage, with the examples it costs."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from plain_stores import Plain, plain_store, spans

from saev_store import ShardStore
from saev_store.documents import parse_metadata, parse_shards
from saev_store.errors import CorruptShardError, MissingShardError
from saev_store.problems import Problem
from saev_store.transport import Entry, open_transport
from saev_store.validation import Report, merge_ranges, problem_to_dict, quick_checks, validate

SAMPLES = Path(__file__).parents[1] / "data" / "saev"


def documents(path: Path):
    metadata = parse_metadata((path / "metadata.json").read_bytes(), where="metadata.json")
    return metadata, parse_shards((path / "shards.json").read_bytes(), metadata, where="shards.json")


def look(store: Plain, *, engine: str = "auto") -> Report:
    metadata, index = documents(store.path)
    return validate(open_transport(store.path, engine=engine), metadata, index, dirname=store.path.name)


def kinds(report: Report) -> list[str]:
    return [problem.kind for problem in report.problems]


@pytest.fixture
def store(tmp_path: Path) -> Plain:
    return plain_store(tmp_path, labels=True)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("trailer", [True, False])
def test_a_whole_store_has_no_problem(tmp_path, padded, trailer):
    store = plain_store(tmp_path, n=6 if trailer else 7, padded=padded, trailer=trailer, labels=True)
    report = look(store)
    assert report.ok
    assert report.problems == ()
    assert report.lost == ()
    report.raise_if_bad()


def test_padding_of_whole_examples_is_fine(store):
    os.truncate(store.shard(2), 2 * store.example_nbytes)  # one example of three, one of padding
    assert look(store).problems == ()


@pytest.mark.parametrize("shard_idx", [0, 1, 2])
def test_missing_shard(store, shard_idx):
    store.shard(shard_idx).unlink()
    report = look(store)
    assert kinds(report) == ["missing_shard"]
    assert report.problems[0].where == f"acts{shard_idx:06d}.bin"
    assert report.lost == spans(store.dull_lost()) == (store.span(shard_idx),)
    with pytest.raises(CorruptShardError, match="missing_shard") as caught:
        report.raise_if_bad()
    assert caught.value.problems == report.problems
    assert pickle.loads(pickle.dumps(caught.value)).problems == report.problems


def test_the_only_shard_of_a_store_is_missing_by_its_name(tmp_path):
    store = plain_store(tmp_path, n=2)
    assert store.n_shards == 1
    store.shard(0).unlink()
    report = look(store)
    assert [(problem.kind, problem.where, problem.lost) for problem in report.problems] == [
        ("missing_shard", "acts000000.bin", ((0, 2),))
    ]
    with pytest.raises(MissingShardError):
        ShardStore.open(store.path)


def test_all_shards_gone_is_one_finding(store):
    for shard_idx in range(3):
        store.shard(shard_idx).unlink()
    report = look(store)
    assert kinds(report) == ["all_shards_missing"]
    assert report.lost == ((0, 7),)
    assert report.n_lost == 7


@pytest.mark.parametrize("size", [0, 1, 479, 480, 481, 959, 960, 1439])
def test_short_shard(store, size):
    os.truncate(store.shard(1), size)
    report = look(store)
    assert kinds(report) == ["short_shard"]
    assert report.lost == spans(store.dull_lost())


def test_oversized_shard_is_an_error(store):
    with store.shard(0).open("ab") as file:
        file.write(bytes(store.example_nbytes))
    report = look(store)
    assert kinds(report) == ["oversized_shard"]
    assert report.lost == ((0, 3),)
    assert "capacity" in report.problems[0].message


@pytest.mark.parametrize("shard_idx", [0, 2])
@pytest.mark.parametrize("n_bytes", [1, 100, 479])
def test_trailing_bytes_that_are_no_row_are_a_warning(store, shard_idx, n_bytes):
    with store.shard(shard_idx).open("ab") as file:
        file.write(b"x" * n_bytes)
    report = look(store)
    assert kinds(report) == ["trailing_bytes"]
    assert report.problems[0].severity == "warning"
    assert str(n_bytes) in report.problems[0].message
    assert report.ok
    assert store.dull_lost() == []


def test_trailing_bytes_behind_a_cut_last_shard(tmp_path):
    store = plain_store(tmp_path, padded=False)
    with store.shard(2).open("ab") as file:
        file.write(b"xyz")
    assert kinds(look(store)) == ["trailing_bytes"]


def test_not_a_file_and_broken_links(store):
    store.shard(0).unlink()
    store.shard(0).mkdir()
    store.shard(1).unlink()
    store.shard(1).symlink_to("/nowhere/acts000001.bin")
    store.shard(2).unlink()
    os.mkfifo(store.shard(2))
    report = look(store)
    assert sorted(kinds(report)) == ["missing_shard", "not_a_file", "not_a_file", "symlinked_shard"]
    assert report.lost == ((0, 7),)
    assert "/nowhere/acts000001.bin" in next(p for p in report.problems if p.kind == "missing_shard").message


def test_a_link_is_followed_and_named(store, tmp_path):
    elsewhere = tmp_path / "safe.bin"
    shutil.move(store.shard(1), elsewhere)
    store.shard(1).symlink_to(elsewhere)
    report = look(store)
    assert [(p.kind, p.severity, p.where) for p in report.problems] == [("symlinked_shard", "info", "acts000001.bin")]
    assert str(elsewhere) in report.problems[0].message


def test_unreadable_shard(store, monkeypatch):
    # Permissions do not stop root, whom tests often run as: the system's answer is what is pretended.
    access = os.access
    store.shard(1).chmod(0)
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("1.bin") and access(path, mode))
    report = look(store)
    assert kinds(report) == ["unreadable_shard"]
    assert report.lost == ((3, 6),)


def test_a_folder_that_cannot_be_listed_is_still_checked(store, monkeypatch):
    store.shard(1).unlink()
    monkeypatch.setattr(os, "scandir", lambda path: (_ for _ in ()).throw(PermissionError(13, "no", path)))
    report = look(store)
    assert kinds(report) == ["missing_shard"]
    assert report.lost == ((3, 6),)


@pytest.mark.parametrize("size", [0, 27, 29, 35])
def test_labels_of_the_wrong_size(store, size):
    os.truncate(store.path / "labels.bin", size)
    report = look(store)
    assert kinds(report) == ["labels_size"]
    assert not report.ok
    assert report.lost == ()


def test_labels_that_are_no_file(store):
    (store.path / "labels.bin").unlink()
    assert look(store).ok
    (store.path / "labels.bin").mkdir()
    assert kinds(look(store)) == ["unreadable_labels"]


def test_hash_mismatch_names_the_recipes(store):
    renamed = store.path.with_name("my-store")
    store.path.rename(renamed)
    store.path = renamed
    report = look(store)
    assert [(p.kind, p.severity) for p in report.problems] == [("hash_mismatch", "warning")]
    for text in ("my-store", "sorted-ascii", "field-order-8"):
        assert text in report.problems[0].message
    metadata, index = documents(renamed)
    assert quick_checks(open_transport(renamed), metadata, index) == []


def test_files_that_nothing_reads(store):
    (store.path / "acts000003.bin").write_bytes(b"x")
    shutil.move(store.shard(1), store.path / "acts00001.bin")
    (store.path / "acts000000.bin.part").write_bytes(b"x")
    (store.path / ".saev_store").mkdir()
    (store.path / "README").write_text("fine")
    report = look(store)
    found = {(p.kind, p.where, p.severity) for p in report.problems}
    assert found == {
        ("missing_shard", "acts000001.bin", "error"),
        ("unlisted_shard", "acts000003.bin", "warning"),
        ("leftover_work_folder", ".saev_store", "info"),
    }


def test_the_empty_trailing_shard(tmp_path):
    store = plain_store(tmp_path, n=6, trailer=True)
    os.truncate(store.shard(2), 0)
    assert look(store).problems == ()
    store.shard(2).unlink()
    report = look(store)
    assert kinds(report) == ["missing_empty_shard"]
    assert report.ok
    assert report.lost == ()


def test_several_damages_at_once(tmp_path):
    store = plain_store(tmp_path, n=20, per_shard=4)
    store.shard(0).unlink()
    store.shard(1).unlink()
    os.truncate(store.shard(3), store.example_nbytes)
    report = look(store)
    assert kinds(report) == ["missing_shard", "missing_shard", "short_shard"]
    assert report.lost == spans(store.dull_lost()) == ((0, 8), (13, 16))
    assert report.n_lost == 11


def test_listing_refused_or_useless_falls_back_to_sizes(store):
    metadata, index = documents(store.path)
    files = {path.name: path.read_bytes() for path in store.path.iterdir()}

    class Useless(MemoryTransport):
        def list(self, path: str = "") -> list[Entry]:
            return []

    assert quick_checks(Useless(files), metadata, index) == []


def test_sizes_that_a_listing_does_not_tell_are_asked_for(store):
    metadata, index = documents(store.path)
    files = {path.name: path.read_bytes() for path in store.path.iterdir()}

    class Silent(MemoryTransport):
        def list(self, path: str = "") -> list[Entry]:
            return [entry._replace(size=None) for entry in super().list(path)]

    assert quick_checks(Silent(files), metadata, index) == []
    name = "acts000001.bin"
    files[name] = files[name][:-1]
    assert [(p.kind, p.where) for p in quick_checks(Silent(files), metadata, index)] == [("short_shard", name)]


@pytest.mark.parametrize(
    "sample",
    sorted(path.parent for path in SAMPLES.glob("v*/**/metadata.json")),
    ids=lambda path: path.relative_to(SAMPLES).parts[0],
)
def test_real_stores_are_whole(sample):
    store = ShardStore.open(sample)
    for deep in (False, True):
        report = store.validate(deep=deep, progress=False)
        assert report.ok, report
        assert report.lost == ()
        assert {p.kind for p in report.problems} <= {"layer_order", "digests_absent"}


def test_the_real_truncated_sample():
    (sample,) = (SAMPLES / "malformed" / "middle_shard_truncated" / "store").iterdir()
    report = ShardStore.open(sample, damaged_ok=True).validate()
    assert kinds(report) == ["short_shard"]
    assert report.lost == ((5, 6),)
    assert report.problems[0].where == "acts000001.bin"


# -- the report ----------------------------------------------------------------------------------------------------------


def test_report_shows_itself_without_io():
    problems = (
        Problem("odd", "looks <script>alert(1)</script>", where="a&b", severity="info"),
        Problem("short_shard", "cut", where="acts000001.bin", lost=((5, 6), (3, 5))),
    )
    report = Report("s3://lab/<b>", 7, 3, problems, deep=True, checked_bytes=12_345, elapsed_s=0.5)
    assert [p.kind for p in report.problems] == ["short_shard", "odd"]
    text, html = str(report), report._repr_html_()
    assert "NOT OK: 1 error, 1 remark" in text
    assert "3:5" in text
    assert "<script>" not in html
    assert "a&b" not in html
    assert "s3://lab/&lt;b&gt;" in html
    assert json.loads(json.dumps(report.to_dict()))["lost"] == [[3, 6]]
    assert pickle.loads(pickle.dumps(report)) == report
    assert re.search(r"12,345 bytes checked in 0\.50 s", text)


def test_long_reports_are_cut_where_they_are_shown_not_where_they_are_kept():
    problems = tuple(Problem("missing_shard", "gone", where=f"acts{i:06d}.bin", lost=((i, i + 1),)) for i in range(500))
    report = Report("x", 500, 500, problems)
    assert len(report.problems) == 500
    assert report.lost == ((0, 500),)
    with pytest.raises(CorruptShardError, match="and 480 more"):
        report.raise_if_bad()
    assert "480 more" in report._repr_html_()


def test_a_report_as_text_and_as_plain_data():
    problems = (
        Problem("odd", "one", severity="info"),
        Problem("strange", "two", where="a", severity="warning"),
        Problem("stranger", "three", severity="warning"),
        Problem("short_shard", "cut", where="acts000001.bin", lost=((5, 6), (3, 5), (900, 902))),
    )
    report = Report("/lab/s", 1200, 3, problems, elapsed_s=0.12345678)
    assert str(report).splitlines() == [
        "/lab/s: NOT OK: 1 error, 2 warnings, 1 remark",
        "  1,200 examples in 3 shards, names and sizes only; 5 lost",
        *(f"  {problems[i]}" for i in (3, 1, 2, 0)),
    ]
    assert report.to_dict() == {
        "url": "/lab/s", "ok": False, "deep": False, "n_examples": 1200, "n_shards": 3, "n_lost": 5,
        "lost": [[3, 6], [900, 902]], "checked_bytes": 0, "elapsed_s": 0.123457,
        "problems": [problem_to_dict(problems[i]) for i in (3, 1, 2, 0)],
    }  # fmt: skip
    with pytest.raises(CorruptShardError, match="1 error, 5 of 1,200 examples are lost:\n") as raised:
        report.raise_if_bad()
    assert raised.value.problems == report.problems
    assert "`repair`" in str(raised.value.remedy)
    unread = Report("/lab/s", 1200, 3, (Problem("missing_token_array", "gone", where="a.bin"),))
    with pytest.raises(CorruptShardError, match="1 error, 0 of 1,200 examples are lost") as raised:
        unread.raise_if_bad()
    assert "`repair`" not in str(raised.value.remedy)
    one = Report("/lab/s", 1200, 3, (Problem("short_shard", "cut", where="acts000001.bin", lost=((5, 6),)),))
    with pytest.raises(CorruptShardError, match="1 error, 1 of 1,200 examples are lost") as raised:
        one.raise_if_bad()
    assert "`repair`" in str(raised.value.remedy)
    warned = Report("/lab/s", 1, 1, problems[1:2])
    warned.raise_if_bad()
    assert str(warned).splitlines()[:2] == ["/lab/s: ok: 1 warning", "  1 example in 1 shard, names and sizes only"]
    assert str(Report("/lab/s", 1, 1, ())) == "/lab/s: ok\n  1 example in 1 shard, names and sizes only"


@pytest.mark.parametrize(
    ("n_lost", "end"), [(7, ", 12:13 are lost)"), (8, ", 14:15 are lost)"), (9, ", 14:15, … 1 more are lost)")]
)
def test_a_problem_names_the_first_eight_losses_and_counts_the_others(n_lost: int, end: str):
    problem = Problem("rot", "other bytes", where="a.bin", lost=tuple((2 * i, 2 * i + 1) for i in range(n_lost)))
    assert str(problem).startswith("error rot a.bin: other bytes (examples 0:1, 2:3, ")
    assert str(problem).endswith(end)


def test_a_report_as_a_page():
    """Twenty problems and eight ranges of each are shown, and said to be not all."""
    for n_problems, n_ranges in ((0, 0), (1, 8), (20, 9), (21, 1)):
        ranges = tuple((10 * i, 10 * i + 1) for i in range(n_ranges))
        page = Report("x", 500, 5, (Problem("k", "m", where="w", lost=ranges),) * n_problems)._repr_html_()
        assert page.count("<td><code>k</code></td><td>w</td>") == min(n_problems, 20)
        assert page.count("<td style='color:#c62828'>error</td>") == min(n_problems, 20)
        assert ("<table>" in page) == (n_problems > 0)
        assert ("70:71 …" in page) == (n_ranges == 9)
        assert ("80:81" in page) is False
        assert ("… and 1 more in <code>.problems</code>" in page) == (n_problems == 21)
        assert (" more in " in page) == (n_problems == 21)
        assert f"<b style='color:{'#c62828' if n_problems else '#2e7d32'}'>" in page


def test_problem_to_dict_is_json():
    found = problem_to_dict(Problem("k", "m", where="w", loc=("layers", 2), lost=((1, 2),)))
    assert json.loads(json.dumps(found)) == {
        "severity": "error", "kind": "k", "where": "w", "loc": ["layers", 2], "message": "m", "lost": [[1, 2]],
    }  # fmt: skip


def test_merge_ranges_against_a_set():
    ranges = [(3, 3), (10, 12), (0, 2), (1, 4), (12, 13), (20, 21)]
    assert merge_ranges(ranges) == spans(sorted({i for start, end in ranges for i in range(start, end)}))


class Answering:
    """A storage without lists, on which asking for a size gives one, or an error."""

    name, url, local_path = "answering", "x://store", None

    def __init__(self, sizes: dict[str, int | Exception]) -> None:
        self.sizes = sizes

    def size(self, path: str) -> int:
        found = self.sizes[path]
        if isinstance(found, Exception):
            raise found
        return found


def damaged(store: Plain, name: str, change: object) -> Problem:
    """The only problem of a store after a change of one of its files: an int is its new size."""
    path = store.path / name
    if isinstance(change, int):
        data = path.read_bytes()
        path.write_bytes(data[:change] + bytes(max(0, change - len(data))))
    else:
        path.unlink()
        if change is not None:
            change(path)
    (problem,) = look(store).problems
    assert problem.where == name
    return problem


@pytest.mark.parametrize(
    ("name", "change", "kind", "message"),
    [
        ("acts000001.bin", None, "missing_shard", "acts000001.bin cannot be read: it is not there; was it purged, or not copied?"),
        ("acts000001.bin", os.mkdir, "not_a_file", "acts000001.bin cannot be read: it is a folder"),
        ("acts000001.bin", os.mkfifo, "not_a_file", "acts000001.bin cannot be read: it is no regular file"),
        ("acts000001.bin", 479, "short_shard",
         "acts000001.bin has 479 bytes, but its 3 examples take 1,440; not one is whole"),
        ("acts000001.bin", 1439, "short_shard",
         "acts000001.bin has 1,439 bytes, but its 3 examples take 1,440; the first 2 are whole"),
        ("acts000002.bin", 100, "short_shard", "acts000002.bin has 100 bytes, but its 1 examples take 480; not one is whole"),
        ("acts000000.bin", 1920, "oversized_shard",
         ("acts000000.bin has 1,920 bytes, but a full shard is 1,440 (3 examples); it was written with another capacity than "
         "metadata.json implies, so its vectors may belong to other examples")),
        ("acts000002.bin", 1919, "trailing_bytes",
         ("acts000002.bin has 1,919 bytes: 479 of those after its 1 examples are no whole row of 480 bytes; all vectors are in "
         "place, but bytes were appended to the file, or cut from the zeros at its end")),
        ("labels.bin", os.mkdir, "unreadable_labels", "labels.bin cannot be read: it is a folder"),
        ("labels.bin", 29, "labels_size",
         ("labels.bin has 29 bytes; 7 examples of 4 content tokens take 28. Vectors are readable, labels are not. Copy the file "
         'again, or write it anew with store.repair().restore_array("labels", ...)')),
    ],
)  # fmt: skip
def test_a_damage_is_told_in_numbers(store: Plain, name: str, change: object, kind: str, message: str):
    found = damaged(store, name, change)
    assert (found.kind, found.message, found.severity) == (
        kind,
        message,
        "warning" if kind == "trailing_bytes" else "error",
    )


@pytest.mark.parametrize(
    ("name", "change", "kind", "message"),
    [
        ("mask.bin", None, "missing_token_array",
         ("mask.bin is missing. Vectors are readable, mask are not. Copy the file again, or write it anew with "
         'store.repair().restore_array("mask", ...)')),
        ("token_ids.bin", 111, "token_array_size",
         ("token_ids.bin has 111 bytes; 7 examples of 4 content tokens of int32 take 112. Vectors are readable, token_ids are not. "
         'Copy the file again, or write it anew with store.repair().restore_array("token_ids", ...)')),
        ("document_ids.bin", os.mkdir, "unreadable_token_array", "document_ids.bin cannot be read: it is a folder"),
    ],
)  # fmt: skip
def test_a_damage_of_a_declared_array_is_told_in_numbers(tmp_path: Path, name: str, change, kind: str, message: str):
    found = damaged(plain_store(tmp_path, protocol="3.0"), name, change)
    assert (found.kind, found.message, found.severity, found.lost) == (kind, message, "error", ())


def test_a_link_of_an_array_is_told_and_what_is_behind_it_is_judged(store: Plain, tmp_path: Path):
    elsewhere = tmp_path / "labels.elsewhere"
    shutil.move(store.path / "labels.bin", elsewhere)
    (store.path / "labels.bin").symlink_to(elsewhere)
    (problem,) = look(store).problems
    assert (problem.kind, problem.where, problem.severity) == ("symlinked_labels", "labels.bin", "info")
    assert problem.message == f"labels.bin is a symbolic link to {str(elsewhere)!r}"
    os.truncate(elsewhere, 3)
    assert kinds(look(store)) == ["labels_size", "symlinked_labels"]
    elsewhere.unlink()  # labels of such a store are optional, but a link says that there were some
    (problem,) = look(store).problems
    assert (problem.kind, problem.severity) == ("unreadable_labels", "error")
    assert (
        problem.message == f"labels.bin cannot be read: it is a symbolic link to {str(elsewhere)!r}, where nothing is"
    )


def test_links_are_told_where_the_folder_cannot_be_listed(
    store: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.move(store.shard(1), tmp_path / "safe.bin")
    store.shard(1).symlink_to(tmp_path / "safe.bin")
    store.shard(2).rename(store.path / "acts2.bin")
    monkeypatch.setattr(os, "scandir", lambda path: (_ for _ in ()).throw(PermissionError(13, "no", path)))
    found = [(problem.kind, problem.where) for problem in look(store).problems]
    # Names that nobody asked for are not seen.
    assert found == [("missing_shard", "acts000002.bin"), ("symlinked_shard", "acts000001.bin")]


@pytest.mark.parametrize(
    ("change", "kind", "severity"),
    [(None, "missing_empty_shard", "info"), (os.mkdir, "not_a_file", "warning"), (1920, "oversized_shard", "warning")],
)
def test_a_shard_without_examples_loses_nothing(tmp_path: Path, change: object, kind: str, severity: str):
    store = plain_store(tmp_path, n=6, trailer=True)
    found = damaged(store, "acts000002.bin", change)
    assert (found.kind, found.severity, found.lost) == (kind, severity, ())


def test_names_that_are_not_read_are_told_in_order(store: Plain):
    for name in (
        "acts3",
        "acts-1.bin",
        "acts 2.bin",
        "acts_2.bin",
        "actsx.bin",
        "acts",
        "xacts1.bin",
        "acts0000003.bin",
    ):
        (store.path / name).write_bytes(b"x")
    for name in ("acts000003.bin", "acts1000000.bin"):
        (store.path / name).write_bytes(b"x")
    found = [(problem.kind, problem.where) for problem in look(store).problems]
    assert found == [
        ("unlisted_shard", "acts000003.bin"), ("unlisted_shard", "acts1000000.bin"),
    ]  # fmt: skip


def test_problems_of_the_documents_come_first(tmp_path: Path):
    """Those of metadata.json, then those of shards.json, in a quick and in a deep report."""
    store = plain_store(tmp_path, layers=(5, 2, 11))
    text = (store.path / "shards.json").read_text()
    (store.path / "shards.json").write_text(text.replace('"n_ex"', '"n_imgs"'))
    store.shard(2).rename(store.path / "acts2.bin")
    metadata, index = documents(store.path)
    for deep in (False, True):
        report = validate(open_transport(store.path), metadata, index, deep=deep, progress=False)
        assert kinds(report)[:3] == ["missing_shard", "layer_order", "count_key"]
        assert [problem.where for problem in report.problems][:3] == ["acts000002.bin", "metadata.json", "shards.json"]


def test_a_link_to_a_folder_or_to_itself_is_told_as_both(store: Plain, tmp_path: Path):
    for shard_idx, target in ((0, tmp_path), (1, store.shard(1))):
        store.shard(shard_idx).unlink()
        store.shard(shard_idx).symlink_to(target)
    report = look(store)
    found = [(problem.kind, problem.where, problem.lost) for problem in report.problems]
    assert found == [
        ("not_a_file", "acts000000.bin", ((0, 3),)),
        ("unreadable_shard", "acts000001.bin", ((3, 6),)),
        ("symlinked_shard", "acts000000.bin", ()),
        ("symlinked_shard", "acts000001.bin", ()),
    ]
    why = os.strerror(errno.ELOOP)
    assert report.problems[1].message == f"acts000001.bin cannot be read: its status cannot be read ({why})"


def test_what_a_link_to_itself_has_hidden_is_repaired(store: Plain):
    store.shard(1).unlink()
    store.shard(1).symlink_to(store.shard(1))
    opened = ShardStore.open(store.path, damaged_ok=True)
    for deep in (False, True):
        assert opened.validate(deep=deep, progress=False).lost == ((3, 6),)
    with opened.repair() as writer:
        for some in writer.missing:
            writer.append(store.acts[some])
    assert np.array_equal(ShardStore.open(store.path)[...], store.acts)


def test_what_a_folder_of_somebody_else_hides_is_listed_and_repaired(store: Plain, monkeypatch: pytest.MonkeyPatch):
    """A shard that links there: its status cannot be read."""
    hidden, real = str(store.shard(1)), os.stat

    def stat(path: object, **options: object) -> os.stat_result:
        if os.fspath(path) == hidden:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), hidden)
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    opened = ShardStore.open(store.path, damaged_ok=True)
    for deep in (False, True):
        report = opened.validate(deep=deep, progress=False)
        assert (report.lost, report.problems[0].kind) == (((3, 6),), "unreadable_shard")
    with opened.repair() as writer:
        assert writer.missing == [range(3, 6)]
        writer.append(store.acts[3:6])
    monkeypatch.undo()
    assert np.array_equal(ShardStore.open(store.path)[...], store.acts)


@pytest.mark.parametrize("mine", [True, False])
def test_the_file_of_somebody_else_is_readable_if_the_system_says_so(
    store: Plain, monkeypatch: pytest.MonkeyPatch, mine: bool
):
    """Of a file that is ours its bits tell; of another one they may be for its owner alone."""
    if not mine:
        monkeypatch.setattr("saev_store.validation._quick._EUID", os.geteuid() + 1)
    assert look(store).problems == ()
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("1.bin"))
    assert kinds(look(store)) == ([] if mine else ["unreadable_shard"])


def test_a_folder_that_gives_an_error_is_asked_for_sizes(store: Plain, monkeypatch: pytest.MonkeyPatch):
    os.truncate(store.shard(1), 3)
    (store.path / "acts7.bin").write_bytes(b"x")
    monkeypatch.setattr(os, "scandir", lambda path: (_ for _ in ()).throw(OSError(errno.EIO, "no", path)))
    assert kinds(look(store)) == ["short_shard"]


def test_a_listing_counts_if_it_has_one_name_of_the_store(store: Plain):
    """A listing of other names is not believed; one that lacks a shard is, and shows what is there instead."""
    metadata, index = documents(store.path)
    files = {path.name: path.read_bytes() for path in store.path.iterdir()}

    class Elsewhere(MemoryTransport):
        def list(self, path: str = "") -> list[Entry]:
            return [Entry("acts9.bin", is_dir=False, size=5)]

    assert quick_checks(Elsewhere(files), metadata, index) == []
    files["acts9.bin"] = files.pop("acts000001.bin")
    found = quick_checks(MemoryTransport(files), metadata, index)
    assert [(problem.kind, problem.where) for problem in found] == [
        ("missing_shard", "acts000001.bin"),
    ]  # fmt: skip


def test_a_folder_in_a_listing_is_no_file(store: Plain):
    metadata, index = documents(store.path)
    files = {path.name: path.read_bytes() for path in store.path.iterdir()}

    class WithFolder(MemoryTransport):
        def list(self, path: str = "") -> list[Entry]:
            return [entry._replace(is_dir=entry.path == "acts000001.bin") for entry in super().list(path)]

    (problem,) = quick_checks(WithFolder(files), metadata, index)
    assert (problem.kind, problem.message) == ("not_a_file", "acts000001.bin cannot be read: it is a folder")


def test_ranges_that_lie_within_another_are_merged():
    assert merge_ranges([(2, 5), (0, 10), (10, 11), (12, 13), (3, 4)]) == ((0, 11), (12, 13))


def test_the_only_shard_and_an_empty_one_behind_it_are_told_apart(tmp_path: Path):
    store = plain_store(tmp_path, n=3, trailer=True)
    for shard_idx in (0, 1):
        store.shard(shard_idx).unlink()
    assert [(problem.kind, problem.where) for problem in look(store).problems] == [
        ("missing_shard", "acts000000.bin"), ("missing_empty_shard", "acts000001.bin"),
    ]  # fmt: skip


def test_the_name_of_the_folder_is_judged_by_quick_checks_where_it_is_given(store: Plain):
    metadata, index = documents(store.path)
    transport = open_transport(store.path)
    assert quick_checks(transport, metadata, index, dirname=store.path.name) == []
    (problem,) = quick_checks(transport, metadata, index, dirname="my-store")
    assert (problem.kind, problem.where) == ("hash_mismatch", "metadata.json")


def test_an_error_of_a_report_lists_twenty_and_says_where():
    for n_errors, more in ((20, ""), (21, "\n  … and 1 more")):
        gone = tuple(
            Problem("missing_shard", "gone", where=f"acts{i:06d}.bin", lost=((i, i + 1),)) for i in range(n_errors)
        )
        odd = Problem("odd", "strange", severity="warning")
        with pytest.raises(CorruptShardError) as caught:
            Report("/lab/s", 500, 500, (odd, *gone)).raise_if_bad()
        error = caught.value
        assert (error.where, error.problems) == ("/lab/s", (*gone, odd))
        assert error.message.endswith(f"\n  {gone[19]}{more}")
        assert error.message.splitlines()[0] == f"{n_errors} errors, {n_errors} of 500 examples are lost:"


def test_a_page_of_a_report_has_no_tags_of_others():
    tag = "<b>&"
    page = Report(tag, 1, 1, (Problem(tag, tag, where=tag),))._repr_html_()
    assert page.count("&lt;b&gt;&amp;") == 4
    assert tag not in page
