"""Validation finds each kind of damage and exactly the examples that it costs, against a dull recomputation."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_stores import Plain, plain_store, spans

from saev_store import Problem, ShardStore
from saev_store.documents import parse_metadata, parse_shards
from saev_store.errors import ArgumentError, CorruptShardError, TransportError
from saev_store.transport import Entry, ReadCost, Transport, open_transport
from saev_store.validation import Report, merge_ranges, quick_checks, validate

SAMPLES = Path(__file__).parents[1] / "data" / "saev"


def documents(path: Path):
    metadata = parse_metadata((path / "metadata.json").read_bytes(), where="metadata.json")
    return metadata, parse_shards((path / "shards.json").read_bytes(), metadata, where="shards.json")


def look(store: Plain, transport: Transport | None = None, *, deep: bool = False) -> Report:
    metadata, index = documents(store.path)
    place = transport or open_transport(store.path)
    return validate(place, metadata, index, dirname=store.path.name, deep=deep, progress=False)


def found(report: Report) -> list[tuple[str, str, str]]:
    """Kind, severity and place of each problem but the remark that there are no digests."""
    return [
        (p.kind, p.severity, p.where) for p in report.problems if p.kind != "digests_absent" or p.severity != "info"
    ]


def overwrite(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def files_of(store: Plain) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.path.iterdir()}


def resized(nbytes: int) -> Callable[[Path], None]:
    """Cut a file, or append bytes that are not zero."""

    def change(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[:nbytes] + b"x" * (nbytes - len(data)))

    return change


def in_place(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


# -- names and sizes ---------------------------------------------------------------------------------------------------


def test_validate_whole_stores_finds_nothing(tmp_path: Path) -> None:
    for number, (n, options) in enumerate(
        (n, {"padded": padded, "protocol": protocol, "trailer": n == 6})
        for n in (6, 7)
        for padded in (True, False)
        for protocol in ("2.0", "3.0")
    ):
        store = plain_store(tmp_path / str(number), n=n, labels=options["protocol"] == "2.0", **options)
        for block_bytes in (0, 64, 480, 1 << 20):
            if block_bytes:
                store.write_digests(block_bytes)
            for deep in (False, True):
                report = look(store, deep=deep)
                assert (report.ok, report.lost, found(report)) == (True, (), [])
            beside = 4 * n * (1 if store.labels is not None else 4 + 8 + 1)
            assert report.checked_bytes == n * store.example_nbytes + beside
        report.raise_if_bad()


def test_validate_real_stores_finds_only_their_known_doubts() -> None:
    for sample in sorted(path.parent for path in SAMPLES.glob("v*/**/metadata.json")):
        for deep in (False, True):
            report = ShardStore.open(sample).validate(deep=deep, progress=False)
            assert report.lost == (), sample
            assert {p.kind for p in report.problems} <= {"layer_order", "digests_absent"}, sample
    (cut,) = (SAMPLES / "malformed" / "middle_shard_truncated" / "store").iterdir()
    report = ShardStore.open(cut, damaged_ok=True).validate()
    assert (report.lost, found(report)) == (((5, 6),), [("short_shard", "error", "acts000001.bin")])


#: File, its change, the kind of the problem, and its severity.
DAMAGES: tuple[tuple[str, Callable[[Path], object], str, str], ...] = (
    ("acts000001.bin", os.unlink, "missing_shard", "error"),
    ("acts000000.bin", os.unlink, "missing_shard", "error"),
    ("acts000001.bin", in_place(lambda path: path.symlink_to("/nowhere/x")), "missing_shard", "error"),
    ("acts000001.bin", in_place(os.mkdir), "not_a_file", "error"),
    ("acts000001.bin", in_place(lambda path: path.symlink_to(path)), "unreadable_shard", "error"),
    *(("acts000001.bin", resized(n), "short_shard", "error") for n in (0, 1, 479, 480, 481, 959, 960, 1439)),
    ("acts000002.bin", resized(100), "short_shard", "error"),
    ("acts000000.bin", resized(1920), "oversized_shard", "error"),
    *(("acts000000.bin", resized(n), "trailing_bytes", "warning") for n in (1441, 1919)),
    ("acts000002.bin", resized(1919), "trailing_bytes", "warning"),
    ("labels.bin", in_place(os.mkdir), "unreadable_labels", "error"),
    *(("labels.bin", resized(n), "labels_size", "error") for n in (0, 27, 29)),
)


@pytest.mark.parametrize("deep", [False, True])
def test_validate_damage_of_one_file_names_it_and_what_is_lost(tmp_path: Path, deep: bool) -> None:
    for number, (name, change, kind, severity) in enumerate(DAMAGES):
        store = plain_store(tmp_path / str(number), labels=True)
        change(store.path / name)
        report = look(store, deep=deep)
        assert found(report) == [(kind, severity, name)], number
        assert found(ShardStore.open(store.path, damaged_ok=True).validate(deep=deep)) == found(report), number
        is_oversized = kind == "oversized_shard"  # of another capacity: not trusted, although the bytes are there
        assert report.lost == (((0, 3),) if is_oversized else spans(store.dull_lost())), number
        assert (report.ok, report.n_lost > 0) == (
            severity != "error",
            kind.endswith(("_shard", "_file")) and not report.ok,
        )
        if not report.ok:
            with pytest.raises(CorruptShardError) as caught:
                report.raise_if_bad()
            assert pickle.loads(pickle.dumps(caught.value)).problems == report.problems


def test_validate_damage_of_declared_token_arrays_loses_no_example(tmp_path: Path) -> None:
    for number, (name, change, kind) in enumerate((
        ("mask.bin", os.unlink, "missing_token_array"),
        ("token_ids.bin", resized(111), "token_array_size"),
        ("document_ids.bin", in_place(os.mkdir), "unreadable_token_array"),
    )):  # fmt: skip
        store = plain_store(tmp_path / str(number), protocol="3.0")
        change(store.path / name)
        for deep in (False, True):
            report = look(store, deep=deep)
            assert (found(report), report.lost) == ([(kind, "error", name)], ())


def test_validate_several_damages_lists_all_of_them(tmp_path: Path) -> None:
    store = plain_store(tmp_path, n=20, per_shard=4, layers=(5, 2, 11))
    for shard_idx in (0, 1):
        store.shard(shard_idx).unlink()
    os.truncate(store.shard(3), store.example_nbytes)
    shutil.move(store.shard(4), store.path / "acts00004.bin")
    text = (store.path / "shards.json").read_text()
    (store.path / "shards.json").write_text(text.replace('"n_ex"', '"n_imgs"'))
    report = look(store)
    assert report.lost == spans(store.dull_lost()) == ((0, 8), (13, 20))
    assert report.n_lost == 15
    kinds = ["missing_shard", "missing_shard", "short_shard", "missing_shard", "layer_order"]
    assert [kind for kind, _, _ in found(report)] == kinds


def test_validate_shard_without_examples_loses_nothing(tmp_path: Path) -> None:
    for number, (change, expected) in enumerate((
        (os.unlink, []), (resized(0), []), (in_place(os.mkdir), ["not_a_file"]), (resized(1920), ["oversized_shard"]),
    )):  # fmt: skip
        store = plain_store(tmp_path / str(number), n=6, trailer=True)
        change(store.path / "acts000002.bin")
        report = look(store)
        assert found(report) == [(kind, "warning", "acts000002.bin") for kind in expected]
        assert report.lost == ()


def test_validate_renamed_folder_warns(tmp_path: Path) -> None:
    store = plain_store(tmp_path)
    store.path = store.path.rename(tmp_path / "my-store")
    assert found(look(store)) == [("hash_mismatch", "warning", "metadata.json")]
    assert quick_checks(open_transport(store.path), *documents(store.path)) == []


def test_validate_file_that_may_not_be_looked_at_is_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions do not stop root, as whom tests often run: the answer of the system is replaced."""
    store, real = plain_store(tmp_path), os.stat

    def hidden(path: object, **options: object) -> os.stat_result:
        if os.fspath(path) == str(store.shard(0)):
            raise PermissionError(errno.EACCES, "no", path)
        return real(path, **options)

    monkeypatch.setattr(os, "stat", hidden)
    report = look(store)
    assert found(report) == [("unreadable_shard", "error", "acts000000.bin")]
    assert report.lost == ((0, 3),)


def test_validate_far_store_believes_a_listing_only_if_it_has_the_store(tmp_path: Path) -> None:
    store = plain_store(tmp_path)

    class Listing(MemoryTransport):
        change = staticmethod(lambda entries: entries)

        def list(self, path: str = "") -> list[Entry]:
            return self.change(super().list(path))

    def refused(_: object) -> list[Entry]:
        raise TransportError("no list", where="x")

    for change in (
        lambda entries: entries,
        lambda _: [],
        lambda _: [Entry("acts9.bin", is_dir=False, size=5)],
        lambda entries: [entry._replace(size=None) for entry in entries],
        refused,
    ):
        files = files_of(store)
        transport = Listing(files)
        transport.change = change
        assert found(look(store, transport)) == []
        transport = Listing({**files, "acts000001.bin": files["acts000001.bin"][:-1]})
        transport.change = change
        assert found(look(store, transport)) == [("short_shard", "error", "acts000001.bin")]
        del files["acts000000.bin"]
        transport = Listing(files)
        transport.change = change
        assert found(look(store, transport)) == [("missing_shard", "error", "acts000000.bin")]
    transport = Listing(files_of(store))
    transport.change = lambda entries: [entry._replace(is_dir=entry.path == "acts000001.bin") for entry in entries]
    assert found(look(store, transport)) == [("not_a_file", "error", "acts000001.bin")]
    transport.change = refused
    transport.size = refused
    assert {kind for kind, _, _ in found(look(store, transport))} == {"unreadable_shard", "unreadable_labels"}


# -- contents ----------------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=60)
def test_validate_deep_finds_exactly_the_zero_and_cut_examples(tmp_path_factory, data: st.DataObject) -> None:
    """Stores of any shape and dtype, some of whose examples are zero, and shards cut or gone; with digests or without.

    Blocks and pieces end within vectors.
    """
    tmp_path = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saev_store.validation.deep._DEFAULT_BLOCK_BYTES", data.draw(st.sampled_from([4, 52, 8 << 20])))
        patch.setattr("saev_store.validation.deep._LOCAL_PIECE_BYTES", data.draw(st.sampled_from([4, 36, 1 << 20])))
        n = data.draw(st.integers(1, 12), label="n")
        store = plain_store(
            tmp_path, n=n, layers=tuple(range(data.draw(st.integers(1, 3)))), tokens=data.draw(st.integers(1, 3)),
            cls=data.draw(st.booleans()), d_model=data.draw(st.integers(1, 9)), per_shard=data.draw(st.integers(1, 5)),
            padded=data.draw(st.booleans()), protocol=data.draw(st.sampled_from(["2.0", "3.0"])),
        )  # fmt: skip
        size = store.example_nbytes
        if data.draw(st.booleans(), label="digests"):
            store.write_digests(size)  # a block for each example
        for example in data.draw(st.sets(st.integers(0, n - 1)), label="zero"):
            overwrite(store.shard(example // store.per_shard), example % store.per_shard * size, bytes(size))
        for shard_idx in data.draw(st.sets(st.integers(0, store.n_shards - 1), max_size=2), label="cut"):
            first, last = store.span(shard_idx)
            os.truncate(store.shard(shard_idx), data.draw(st.integers(0, (last - first) * size)))
        for shard_idx in data.draw(st.sets(st.integers(0, store.n_shards - 1), max_size=1), label="gone"):
            store.shard(shard_idx).unlink()
        report = look(store, deep=True)
        assert report.lost == spans(store.dull_lost()), str(report)
        assert report.ok == (not report.lost)


def test_validate_deep_zeros_that_digests_confirm_are_a_warning(tmp_path: Path) -> None:
    store = plain_store(tmp_path, n=8)
    for shard_idx, examples in ((0, [1, 2]), (1, [3]), (2, [7])):
        store.acts[examples] = 0
        overwrite(store.shard(shard_idx), 0, store.truth(shard_idx).tobytes())
    store.write_digests(480)
    report = look(store, deep=True)
    assert found(report) == [("zero_rows", "warning", f"acts00000{i}.bin") for i in range(3)]
    assert report.lost == ()
    os.truncate(store.shard(0), 960)  # digests of the part that is left do not confirm the rest
    assert found(look(store, deep=True))[:2] == [
        ("short_shard", "error", "acts000000.bin"), ("zero_rows", "error", "acts000000.bin"),
    ]  # fmt: skip
    store.write_digests(4096)  # what is left of a block that is cut cannot be checked
    assert look(store, deep=True).lost == ((0, 3),)
    (store.path / "digests.json").unlink()
    report = look(store, deep=True)
    assert report.lost == ((1, 4), (7, 8))
    assert not report.ok


def test_validate_deep_oddities_lose_nothing(tmp_path: Path) -> None:
    for number, (protocol, odd) in enumerate((
        ("2.0", np.float32([np.nan, np.inf, 1, -np.inf])),
        ("3.0", np.array([0x7F80, 0xFFC1, 0x7C00, 0xFF80], "<u2")),
    )):  # fmt: skip
        store = plain_store(tmp_path / str(number), protocol=protocol)
        overwrite(store.shard(2), 0, odd.tobytes())
        row = 8 * odd.itemsize
        overwrite(store.shard(0), 5 * row, bytes(5 * row))  # a layer of example 0
        overwrite(
            store.shard(1), 15 * row, np.full(15 * 8, 0x8000 if number else -0.0, odd.dtype).tobytes()
        )  # not unwritten
        report = look(store, deep=True)
        assert found(report) == [("non_finite", "warning", "acts000002.bin")]
        assert report.lost == ()


def test_validate_deep_changed_bytes_lose_the_examples_of_their_blocks(tmp_path: Path) -> None:
    """480 bytes an example and 256 a block: blocks and examples do not line up."""
    store = plain_store(tmp_path, labels=True)
    store.write_digests(256)
    for position in (0, 255, 256, 479, 480, 700, 1439):
        right = store.shard(1).read_bytes()
        overwrite(store.shard(1), position, bytes([right[position] ^ 1]))
        report = look(store, deep=True)
        block = range(position // 256 * 256, min(position // 256 * 256 + 256, 1440))
        assert found(report) == [("digest_mismatch", "error", "acts000001.bin")]
        assert report.lost == ((3 + block[0] // 480, 4 + block[-1] // 480),)
        store.shard(1).write_bytes(right)
    for shard_idx, other in ((0, 1), (1, 0)):  # swapped
        store.shard(shard_idx).write_bytes(store.truth(other).tobytes())
    report = look(store, deep=True)
    assert found(report) == [("digest_mismatch", "error", f"acts00000{i}.bin") for i in (0, 1)]
    assert report.lost == spans(store.dull_lost()) == ((0, 6),)
    os.truncate(store.shard(1), 1000)  # compared as far as it goes
    assert [kind for kind, _, _ in found(look(store, deep=True))] == [
        "short_shard",
        "digest_mismatch",
        "digest_mismatch",
    ]
    store.shard(1).write_bytes(store.truth(1)[:2].tobytes())
    report = look(store, deep=True)  # 960 bytes are left, of which the block at 768 cannot be checked
    assert {problem.kind: problem.lost for problem in report.problems if problem.where == "acts000001.bin"} == {
        "short_shard": ((5, 6),), "digest_mismatch": ((4, 5),),
    }  # fmt: skip


def test_validate_deep_changed_token_arrays_are_named(tmp_path: Path) -> None:
    store = plain_store(tmp_path / "a", protocol="3.0")
    store.write_digests(16)
    overwrite(store.path / "document_ids.bin", 8 * 27, b"\x55" * 8)
    overwrite(store.path / "mask.bin", 20, b"\2")
    names = ("document_ids.bin", "mask.bin")
    assert found(look(store, deep=True)) == [("token_array_digest_mismatch", "error", name) for name in names]
    store = plain_store(tmp_path / "b", protocol="3.0")
    for position in (0, 15, 16, 27):
        values = bytearray(store.arrays["mask"].tobytes())
        values[position] = 2
        (store.path / "mask.bin").write_bytes(values)
        store.arrays["mask"] = np.frombuffer(bytes(values), np.uint8)
        store.write_digests(16)  # digests of bytes that are not bools do not make them some
        assert found(look(store, deep=True)) == [("token_array_values", "error", "mask.bin")]
    store = plain_store(tmp_path / "c", labels=True)
    store.write_digests(256)
    overwrite(store.path / "labels.bin", 3, bytes([255 - int(store.labels.reshape(-1)[3])]))
    assert found(look(store, deep=True)) == [("labels_digest_mismatch", "error", "labels.bin")]
    (store.path / "labels.bin").unlink()
    assert found(look(store, deep=True)) == [("missing_labels", "error", "labels.bin")]


def test_validate_deep_unusable_digests_are_an_error(tmp_path: Path) -> None:
    """What could not be compared is not called right."""
    store = plain_store(tmp_path, labels=True)
    store.write_digests(256)
    right = json.loads((store.path / "digests.json").read_text())
    head = '{"version": 1, "algorithm": "xxh3_128", "block_bytes": '
    for text in (
        "",
        "{",
        "[]",
        "[" * 10_000,
        '{"version": 2}',
        f'{head}-1, "files": {{}}}}',
        f'{head}3, "files": {{}}}}',
    ):
        (store.path / "digests.json").write_text(text)
        assert found(look(store, deep=True)) == [("digests_document", "error", "digests.json")], text
    for change, severity, kind in (
        (lambda files: files.pop("acts000001.bin"), "error", "digests_document"),
        (lambda files: files.update({"labels.bin": {"nbytes": 0, "digests": []}}), "error", "digests_document"),
        (lambda files: files.pop("labels.bin"), "info", "digests_absent"),  # others may have written them afterwards
    ):
        document = json.loads(json.dumps(right))
        change(document["files"])
        (store.path / "digests.json").write_text(json.dumps(document))
        report = look(store, deep=True)
        assert [(p.kind, p.severity, p.where) for p in report.problems] == [(kind, severity, "digests.json")]
    (store.path / "digests.json").unlink()
    assert [(p.kind, p.severity) for p in look(store, deep=True).problems] == [("digests_absent", "info")]
    (store.path / "digests.json").mkdir()
    assert found(look(store, deep=True)) == [("unreadable_digests", "error", "digests.json")]


def test_validate_deep_bytes_that_cannot_be_read_are_lost(tmp_path: Path) -> None:
    store = plain_store(tmp_path, labels=True)
    store.write_digests(480)

    class Failing(MemoryTransport):
        def readinto(self, path: str, *, starts, buffers) -> None:
            if (path, starts[0]) in {("acts000001.bin", 480), ("labels.bin", 0)}:
                raise TransportError("EIO", where=path)
            super().readinto(path, starts=starts, buffers=buffers)

    report = look(store, Failing(files_of(store)), deep=True)
    assert found(report) == [
        ("unreadable_shard", "error", "acts000001.bin"),
        ("unreadable_labels", "error", "labels.bin"),
    ]
    assert report.lost == ((4, 5),)


def test_validate_deep_far_blocks_are_one_request_and_near_ones_pieces(tmp_path: Path) -> None:
    """Memory stays bounded by the pieces, and threads end with the call."""
    store = plain_store(tmp_path, n=4, tokens=64, d_model=4096, per_shard=2)
    store.write_digests(3 << 20)
    read: list[int] = []

    class Counted(MemoryTransport):
        def readinto(self, path: str, *, starts, buffers) -> None:
            read.append(len(buffers[0]))
            super().readinto(path, starts=starts, buffers=buffers)

    for is_local, gap, most in ((True, 1000, 1 << 20), (False, float("inf"), 1 << 20), (False, 1000, 3 << 20)):
        read.clear()
        transport = Counted(files_of(store))
        transport.is_local, transport.cost = is_local, ReadCost(gap, 1 << 20)
        assert found(look(store, transport, deep=True)) == []
        assert (max(read), sum(read)) == (most, 4 * store.example_nbytes)
    n_threads = threading.active_count()
    tracemalloc.start()
    look(store, deep=True)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert threading.active_count() <= n_threads + 4


def test_validate_options_that_are_not_options_are_refused(tmp_path: Path) -> None:
    store = ShardStore.open(plain_store(tmp_path).path)
    for options, where in (({"deep": 1}, "deep"), ({"progress": "x"}, "progress"), ({"client": "tcp://h:1"}, "client")):
        with pytest.raises(ArgumentError) as refused:
            store.validate(**options)
        assert refused.value.where == where


def test_repair_of_a_deep_report_makes_the_store_whole(tmp_path: Path) -> None:
    store = plain_store(tmp_path)
    store.write_digests(480)
    overwrite(store.shard(0), 480, bytes(480))
    store.shard(2).unlink()
    opened = ShardStore.open(store.path, damaged_ok=True)
    report = opened.validate(deep=True, progress=False)
    assert report.lost == ((1, 2), (6, 7))
    with opened.repair(report) as writer:
        for some in writer.missing:
            writer.append(store.acts[some])
    assert np.array_equal(ShardStore.open(store.path)[...], store.acts)


# -- the report --------------------------------------------------------------------------------------------------------


def test_report_prints_counts_and_keeps_all_problems() -> None:
    gone = [Problem("gone", "g", where=f"acts{i:06d}.bin", lost=((i, i + 1),)) for i in range(500)]
    odd = Problem("odd", "looks", where="a&b", severity="info", loc=("layers", 2))
    report = Report("s3://lab/b", 500, 500, (odd, *gone), deep=True, checked_bytes=12_345, elapsed_s=0.5)
    assert (report.problems, report.lost, report.n_lost) == ((*gone, odd), ((0, 500),), 500)
    assert (report.errors, report.warnings, report.ok) == (tuple(gone), (), False)
    assert len(str(report).splitlines()) == 502
    found = json.loads(json.dumps(report.to_dict()))
    assert (found["ok"], found["deep"], found["lost"], found["checked_bytes"]) == (False, True, [[0, 500]], 12_345)
    assert found["problems"][-1]["loc"] == ["layers", 2]
    assert set(found["problems"][0]) == {"kind", "message", "where", "loc", "severity", "lost"}
    assert pickle.loads(pickle.dumps(report)) == report
    with pytest.raises(CorruptShardError) as caught:
        report.raise_if_bad()
    assert (caught.value.where, caught.value.problems) == ("s3://lab/b", report.problems)
    Report("/lab/s", 1, 1, (Problem("w", "m", severity="warning"),)).raise_if_bad()


def test_merge_ranges_equals_a_set_of_numbers() -> None:
    for ranges in ([(3, 3), (10, 12), (0, 2), (1, 4), (12, 13), (20, 21)], [(2, 5), (0, 10), (10, 11), (12, 13)], []):
        assert merge_ranges(ranges) == spans(sorted({i for start, end in ranges for i in range(start, end)}))
