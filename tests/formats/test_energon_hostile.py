"""Energon data sets that are damaged, stale or hostile: refused with our errors, in bounded memory, and nothing is run."""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
import tarfile
import tempfile
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import fsspec
import pytest
from energon_tars import tar_bytes
from hypothesis import given
from hypothesis import strategies as st

from saev_store.errors import (
    CorruptShardError,
    DeadlineError,
    DocumentError,
    MissingShardError,
    SaevStoreError,
    TransportError,
    UnsafeContentError,
)
from saev_store.sources.energon import EnergonDataset, index_sqlite
from saev_store.sources.energon.filesystem import EnergonFileSystem
from saev_store.sources.energon.prepare import prepare

DATA = Path(__file__).parents[1] / "data/energon"
INDEX, INFO, SPLIT, DEFINITION = (
    f".nv-meta/{name}" for name in ("index.sqlite", ".info.json", "split.yaml", "dataset.yaml")
)


def refused(call) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call()
    return caught.value


def read_all(folder: Path) -> list[object]:
    with EnergonDataset(folder) as dataset:
        return [dataset.sample(key) for key in [sample.key for sample in dataset]]


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(DATA / "captioning_ratio_split/dataset", tmp_path / "d"))


def change(folder: Path, *statements: str) -> None:
    db = sqlite3.connect(folder / INDEX, isolation_level=None)
    for statement in statements:
        db.execute(statement)
    db.close()


# -- files of strangers ------------------------------------------------------------------------------------------------


def test_malformed_data_sets_are_refused_as_their_manifest_says():
    pytest.importorskip("PIL")
    cases = json.loads((DATA / "malformed/manifest.json").read_text())["cases"]
    assert len(cases) == 6
    for case in cases:
        folder = DATA / "malformed" / case["case"] / "dataset"
        if case["expect"] == "ok":
            assert len(read_all(folder)) == 4
        elif case["expect"].startswith("error when tar headers are read"):
            assert type(refused(lambda folder=folder: read_all(folder))) is CorruptShardError
            report = EnergonDataset(folder).validate(deep=True, progress=False)
            assert [(each.kind, each.lost) for each in report.errors] == [("corrupt_shard", ((0, 2),))]
            assert EnergonDataset(folder).raw("sample_0000").parts
        else:
            error = refused(lambda folder=folder: read_all(folder))
            expected = UnsafeContentError if case["case"] == "path_traversal_shard" else DocumentError
            assert (type(error), str(error.where).startswith(f"{folder}/.nv-meta/")) == (expected, True)


def test_index_of_another_schema_is_refused(folder):
    whole = (folder / INDEX).read_bytes()
    for kind, statements in (
        (DocumentError, ["DROP TABLE samples"]),
        (DocumentError, ["ALTER TABLE samples DROP COLUMN byte_size"]),
        (DocumentError, [f"CREATE TABLE t{i} (x)" for i in range(70)]),
        (UnsafeContentError, ["ALTER TABLE samples RENAME TO s", "CREATE VIEW samples AS SELECT * FROM s"]),
        (UnsafeContentError, ["CREATE VIEW more AS SELECT 1"]),
        (UnsafeContentError, ["CREATE TRIGGER t AFTER INSERT ON samples BEGIN SELECT 1; END"]),
        (UnsafeContentError, ["CREATE VIRTUAL TABLE v USING fts5(x)"]),
    ):
        (folder / INDEX).write_bytes(whole)
        change(folder, *statements)
        error = refused(lambda: read_all(folder))
        assert (type(error), error.where) == (kind, f"{folder}/{INDEX}"), statements


def test_index_with_wrong_rows_gives_the_right_bytes_or_an_error(folder):
    """Every row is refused by `validate`, but for those of samples that do not exist."""
    one, jpg = "WHERE sample_key = 'sample_0001'", "WHERE part_name = 'jpg'"
    many = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 400)"  # their join has 160,000 rows
    rows = (
        *((True, f"UPDATE samples SET {what} {one}") for what in (
            "byte_offset = 'abc'", "byte_offset = -512", "byte_offset = 1.5", "byte_size = NULL", "byte_size = 9223372036854775807",
            "byte_size = 4611686018427387904", "sample_key = x'ff00'", "sample_index = 7", "sample_index = 0", "tar_file_id = 9",
            "byte_size = 3585", "byte_size = 7168", "byte_offset = 0", "byte_size = 0", "byte_offset = 3583", "byte_size = 3072",
            "byte_offset = 4096, byte_size = 3072",
        )),
        (True, "UPDATE samples SET byte_size = 4096 WHERE sample_key = 'sample_0000'"), (True, "UPDATE samples SET tar_file_id = 'x'"),
        (True, f"DELETE FROM samples {one}"), (True, "INSERT INTO samples VALUES (2, 'x', 2, 1024, 512)"),
        *((True, f"UPDATE sample_parts SET {what}") for what in (
            "content_byte_size = 4000 WHERE part_name = 'txt'", f"content_byte_offset = 0 {jpg}", f"part_name = 'txt' {jpg}", f"part_name = x'07' {jpg}",
        )),
        (True, "DELETE FROM sample_parts WHERE sample_index = 1"), (False, "INSERT INTO samples VALUES (7, 'x', 0, 0, 512)"),
        (True, f"UPDATE sample_parts SET content_byte_offset = content_byte_offset - 1 {jpg}"), (True, f"UPDATE sample_parts SET content_byte_size = 1212 {jpg}"),
        (True, f"{many} INSERT INTO samples SELECT 0, 'y' || x, 1, 0, 512 FROM n; {many} INSERT INTO sample_parts SELECT 0, 1, 'z', 512, 1 FROM n"),
        (False, "INSERT INTO sample_parts VALUES (0, 5, 'x', 512, 1)"), (False, "INSERT INTO sample_parts VALUES (0, -1, 'x', 512, 1)"),
    )  # fmt: skip
    whole, truth = (folder / INDEX).read_bytes(), {sample.key: dict(sample.parts) for sample in EnergonDataset(folder)}
    for is_refused, statement in rows:
        (folder / INDEX).write_bytes(whole)
        change(folder, *statement.split(";"))
        dataset = EnergonDataset(folder)
        for i, (key, parts) in enumerate(truth.items()):
            reads = [
                partial(dataset.raw, key),
                partial(dataset.__getitem__, i),
                *(partial(dataset.part, key, name) for name in parts),
            ]
            for read, expected in zip(reads, (parts, parts, *parts.values()), strict=True):
                try:
                    found = read()
                    assert (found if isinstance(found, bytes) else found.parts) == expected, statement
                except SaevStoreError as error:
                    assert isinstance(error, (DocumentError, CorruptShardError)) or error.where in {"key", "part"}, (
                        statement
                    )
        report = dataset.validate(deep=True, progress=False)
        assert report.ok != is_refused, statement
        assert {problem.kind for problem in report.errors} <= {"document", "corrupt_shard"}


def test_index_of_damaged_bytes_is_refused(folder, monkeypatch):
    whole = (folder / INDEX).read_bytes()
    for raw in (
        whole.replace(b"sample_0001", b"sample\xff\xff\xff\xff\xff"),
        *(whole.replace(name, b"\xff" + name[1:]) for name in (b"byte_offset", b"CREATE TABLE samples")),
        *(whole[:n] for n in (0, 15, 16, 100, 4096, 20_000)),
    ):
        (folder / INDEX).write_bytes(raw)
        error = refused(lambda: read_all(folder))
        assert (type(error), error.where) == (DocumentError, f"{folder}/{INDEX}")
    (folder / INDEX).write_bytes(whole[:100])
    monkeypatch.setattr(tempfile, "tempdir", str(folder))  # where a remote one is fetched to
    names = set(folder.iterdir())
    fsspec.filesystem("memory").put(str(folder), str(folder), recursive=True)
    error = refused(lambda: EnergonDataset(f"memory://{folder}"))
    assert (type(error), set(folder.iterdir())) == (DocumentError, names)
    assert str(error.where).endswith(f"{folder}/{INDEX}")
    (folder / INDEX).unlink()
    (folder / INDEX).mkdir()
    refused(lambda: EnergonDataset(folder).raw("sample_0000"))


def test_long_key_of_many_parts_is_in_memory_once(folder):
    many = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 2000)"
    change(
        folder,
        "UPDATE samples SET sample_key = hex(zeroblob(30000)) WHERE sample_key = 'sample_0001'",
        f"{many} INSERT INTO sample_parts SELECT 0, 1, 'z' || x, 512 * x, 0 FROM n",
    )
    dataset = EnergonDataset(folder)
    tracemalloc.start()
    assert type(refused(lambda: dataset[1])) is DocumentError
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_index_is_neither_written_nor_searched_for_ever(folder, monkeypatch):
    before = (folder / INDEX).read_bytes()
    change(folder, "CREATE INDEX evil ON samples(hex(zeroblob(1000)))")  # a function of the schema, which does not run
    assert EnergonDataset(folder)[0].parts
    (folder / INDEX).write_bytes(before)
    change(
        folder,
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 300000) INSERT INTO sample_parts SELECT 0, 0, 'a' || x, x + 1, 0 FROM n",
    )
    dataset = EnergonDataset(folder)
    monkeypatch.setattr(index_sqlite, "TIMEOUT_S", 0.0)
    error = refused(lambda: dataset[0])
    assert (type(error), error.where) == (DeadlineError, f"{folder}/{INDEX}")
    names = {path.name for path in (folder / ".nv-meta").iterdir()}
    assert names == {".info.json", "dataset.yaml", "index.sqlite", "index.uuid", "split.yaml"}


def test_documents_that_break_a_rule_are_refused(folder):
    head = "split_parts:\n  train: [shards/shard_000.tar]\n"
    bomb = "a: &a [x, x]\n" + "".join(
        f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefghijklmnopqrstuvwx", "bcdefghijklmnopqrstuvwxy", strict=True)
    )
    ok = "sample_type: {__module__: megatron.energon, __class__: CaptioningSample}\n"
    rows = (
        *((INFO, text, DocumentError) for text in (
            "", "[]", "{}", "{", "[" * 100_000, '{"shard_counts": []}', '{"shard_counts": {"a.tar": -1}}', '{"shard_counts": {"a.tar": true}}',
            '{"shard_counts": {"a.tar": 1.5}}', '{"shard_counts": {"a.tar": "1"}}', '{"shard_counts": {"a.tar": 1099511627776}}',
            json.dumps({"shard_counts": {f"{i}.tar": 2**40 - 1 for i in range(2000)}}), '{"shard_counts": {"a": 1, "a": 2}}',
        )),
        *((INFO, json.dumps({"shard_counts": {name: 1}}), UnsafeContentError) for name in (
            "../a.tar", "/a.tar", "a/../b.tar", "a//b.tar", "./a.tar", "a\\b.tar", "s3://a", "a::b", "a\n.tar", "a/", "", "a\0",
        )),
        *((SPLIT, text, DocumentError) for text in (
            "", "[]", "split_parts: 5", "split_parts: {train: 5}", "split_parts: {train: [5]}", "split_parts: {5: [a]}", "a: b: c", "\0",
            "split_parts: {train: [nope.tar]}", f"{head}exclude: 5", f"{head}exclude: [5]", f"{head}? [a]\n: b\n", f"{head}? {{a: b}}\n: b\n",
            "split_parts: {train: ['{a,b}" + "{a,b}" * 30 + "']}", "split_parts: {train: ['{0..99999999999}']}", "split_parts: {train: ['{a']}",
            "split_parts: {train: ['{a,{b}']}", "split_parts: {train: ['a}']}", f"split_parts: {{train: ['{{0..9}}{{0..9}}{{0..9}}{{0..9}}{'x' * 60_000}']}}",
            "split_parts: {train: [" + "a" * 70_000 + "]}", f"{head}{bomb}", "a: &a [*a]", "a: *a", "a: 1" + ":1" * 500_000, "[" * 500_000, "- " * 500_000, f"{head}\xff: 1",
        )),
        (SPLIT, "split_parts: {train: ['../{a,b}.tar']}", UnsafeContentError), (SPLIT, f"{head}x: !!python/object/apply:os.system [x]", UnsafeContentError),
        (DEFINITION, f"{ok}x: !!python/name:os.system x", UnsafeContentError),
        *((DEFINITION, text, DocumentError) for text in (
            "[]", "5", f"{ok}field_map: 5", f"{ok}field_map: {{image: 5}}", f"{ok}field_map: {{image: 'a['}}", f"{ok}field_map: {{image: jpg}}",
            f"{ok}field_map: {{image: jpg, caption: txt, other: x}}", f"{ok}x: *x",
        )),
        (DEFINITION, "x" * (1 << 20) + "x", TransportError),
    )  # fmt: skip
    for name, text, kind in rows:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(text.encode("latin-1"))
        tracemalloc.start()
        error = refused(lambda: EnergonDataset(folder))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        (folder / name).write_bytes(whole)
        assert (type(error), error.where) == (kind, f"{folder}/{name}"), text[:80]
        assert peak < 64 << 20, text[:80]


def test_code_that_dataset_yaml_names_is_not_run(folder):
    (folder / "sample_loader.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    for text, found in (
        ("__module__: os\n__class__: system\n", None),
        ("__module__: megatron.energonx\n__class__: TextSample\n", None),
        ("__module__: megatron.energon\n__class__: CrudeWebdataset\n", "CrudeWebdataset"),
        ("__module__: megatron.energon\n__class__: CaptioningWebdataset\n", "CaptioningSample"),
        ("sample_type: {__module__: 3, __class__: [x]}\n", None),
        *(
            (f"sample_type: {{__module__: megatron.energon.flavors.x, __class__: TextSample}}\nfield_map: {{text: txt}}\n{name}: sample_loader.py:f\n",
             None if name == "sample_loader" else "TextSample")
            for name in ("sample_loader", "part_filter", "decoder")
        ),
    ):  # fmt: skip
        (folder / DEFINITION).write_text(text)
        dataset = EnergonDataset(folder)
        assert dataset.sample_type == found
        assert dataset.sample(0).__key__ == "sample_0000"
    assert not (folder / "ran").exists()


# -- damage ------------------------------------------------------------------------------------------------------------


def test_tars_that_do_not_fit_their_index_are_refused(folder):
    path, whole = folder / "shards/shard_001.tar", (folder / "shards/shard_001.tar").read_bytes()
    for raw, kind, where in (
        (None, MissingShardError, path), (whole[:5000], DocumentError, folder / INDEX), (b"", DocumentError, folder / INDEX),
        (whole[:7168] + whole[:7168] + bytes(1024), CorruptShardError, path),
    ):  # fmt: skip
        path.unlink(missing_ok=True)
        if raw is not None:
            path.write_bytes(raw)
        damaged = EnergonDataset(folder)
        assert damaged.raw("sample_0000").parts
        for deep in (False, True):
            (problem,) = damaged.validate(deep=deep, progress=False).errors
            assert (problem.kind, problem.where, problem.lost) == (kind.kind, str(where), ((2, 4),))
        assert damaged.split("val").validate(progress=False).lost == ((0, 2),)
        assert damaged.split("train").validate(deep=True, progress=False).ok
    path.write_bytes(whole)
    for content in (
        None, b"", bytes(16), b"x" * 24,
        *(b"".join(n.to_bytes(8, "little") for n in row) for row in ((0, 4096, 7168), (0, 512, 2**63), (0, 100, 7168))),
    ):  # fmt: skip
        Path(f"{path}.idx").unlink(missing_ok=True)
        if content is not None:
            Path(f"{path}.idx").write_bytes(content)
        assert EnergonDataset(folder).validate(deep=True, progress=False).lost == ((2, 4),)
    (folder / INFO).write_text((folder / INFO).read_text().replace('shard_001.tar": 2', 'shard_001.tar": 3'))
    (problem,) = EnergonDataset(folder).validate(progress=False).errors
    assert (problem.kind, problem.where, problem.lost) == ("document", f"{folder}/{INDEX}", ((2, 5),))
    error = refused(lambda: read_all(folder))
    assert (type(error), error.where) == (DocumentError, f"{folder}/{INDEX}")


def test_deep_validation_compares_every_header_with_the_index(tmp_path):
    def files(first, n):
        return [(f"s{i}.txt", b"%04d" % i) for i in range(first, first + n)]

    for name, parts in (("a.tar", files(0, 2)), ("b.tar", files(2, 3)), ("c.tar", [])):
        (tmp_path / name).write_bytes(tar_bytes(parts, format="ustar"))
    prepare(tmp_path, split="1,0,0", progress=False)
    whole = (tmp_path / "b.tar").read_bytes()
    for parts in (
        files(2, 2), files(2, 4), [*files(2, 2), ("s9.txt", b"0004")], [*files(2, 2), ("s4.json", b"0004")], [*files(2, 2), ("s4.txt", b"00004")],
        [("s2.txt", b"0002"), ("s2.a", b""), *files(3, 2)], [], [("README", b"")],
    ):  # fmt: skip
        (tmp_path / "b.tar").write_bytes(tar_bytes(parts, format="ustar").ljust(len(whole), b"\0"))
        found = EnergonDataset(tmp_path).validate(deep=True, progress=False).errors
        last = found[-1]
        assert (last.where, last.lost) == (f"{tmp_path}/b.tar", ((2, 5),)), parts
        assert last.kind == "corrupt_shard"
    (tmp_path / "b.tar").write_bytes(whole)
    (tmp_path / "c.tar").write_bytes(tar_bytes([("README", b"abc")], format="ustar"))
    prepare(tmp_path, split="1,0,0", overwrite=True, progress=False)  # members of no sample are no stale index
    assert EnergonDataset(tmp_path).validate(deep=True, progress=False).ok
    (tmp_path / "c.tar").write_bytes(tar_bytes([("README", b"abc"), *files(9, 1)], format="ustar"))
    assert not EnergonDataset(tmp_path).validate(deep=True, progress=False).ok


def reads(dataset: EnergonDataset, key: str, name: str) -> list[Callable[[], object]]:
    """Every way to read the part `txt` of the first sample."""
    files = EnergonFileSystem(dataset.url)
    return [
        lambda: dataset.part(key, "txt"), lambda: dataset.part(0, "txt"),
        lambda: dataset.raw(key), lambda: dataset[0], lambda: dataset.rows([0, 1]),
        lambda: files.cat_file(name), lambda: files.cat_file(name, 0, 1),
    ]  # fmt: skip


def test_stale_index_never_gives_the_bytes_of_another_member(tmp_path):
    names = (
        ("cat.txt", "dog.txt"), ("kätze.txt", "hünde.txt"), ("c?t.txt", "cät.txt"), ("x" * 95 + "/cat.txt", "x" * 95 + "/dog.txt"),
        ("deep/" * 40 + "cat.txt", "deep/" * 40 + "dog.txt"), *((f"f/{'k' * (n - 7)}a.txt", f"f/{'k' * (n - 7)}b.txt") for n in (99, 100, 101, 155, 156, 256)),
    )  # fmt: skip
    for (cat, dog), format in ((pair, format) for pair in names for format in ("pax", "gnu", "ustar")):
        try:
            data = tar_bytes([(cat, b"cat"), (dog, b"dog")], format=format)
        except ValueError:  # USTAR has no room for such a name
            continue
        (tmp_path / "a.tar").write_bytes(data)
        prepare(tmp_path, split="1,0,0", overwrite=True, progress=False)
        key = cat.rpartition(".")[0]
        assert EnergonDataset(tmp_path).part(key, "txt") == b"cat"
        (tmp_path / "a.tar").write_bytes(tar_bytes([(dog, b"dog"), (cat, b"cat")], format=format))
        for read in reads(EnergonDataset(tmp_path), key, cat):
            error = refused(read)
            assert (type(error), error.where) == (CorruptShardError, f"{tmp_path}/a.tar")


def header(name: str, nbytes: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = nbytes, kind
    return info.tobuf(tarfile.USTAR_FORMAT)


def signed(header: bytearray) -> bytes:
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def test_members_between_the_parts_of_a_sample_are_passed_over(tmp_path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "global"}) as tar:
        for name, data, kind in (
            ("k.a", b"1", tarfile.REGTYPE), ("k.d", b"", tarfile.DIRTYPE), (".DS_Store", b"x" * 6000, tarfile.REGTYPE),
            ("k.link", b"", tarfile.SYMTYPE), ("k.ä", b"2", tarfile.REGTYPE), ("k.c", b"3", tarfile.CONTTYPE),
        ):  # fmt: skip
            info = tarfile.TarInfo(name)
            info.size, info.type = len(data), kind
            if name == "k.ä":
                info.pax_headers = {"SCHILY.xattr.user.note": "y" * 6000}
            tar.addfile(info, io.BytesIO(data))
    (tmp_path / "a.tar").write_bytes(buffer.getvalue())
    prepare(tmp_path, split="1,0,0", progress=False)
    dataset = EnergonDataset(tmp_path)
    assert dataset[0].parts == {"a": b"1", "ä": b"2", "c": b"3"} == {name: dataset.part("k", name) for name in "aäc"}
    assert dataset.validate(deep=True, progress=False).ok


def test_tars_that_are_damaged_or_hostile_are_refused(tmp_path):
    whole = tar_bytes([("a.txt", b"x" * 512), ("b.txt", b"y" * 512)], format="ustar", close=False)[:2048]
    negative = bytearray(tarfile.TarInfo("b.txt").tobuf(tarfile.GNU_FORMAT))
    sparse = bytearray(tarfile.TarInfo("a.txt").tobuf(tarfile.GNU_FORMAT))
    entry = b"00000000001\0" * 2
    sparse[156:157], sparse[386:482], sparse[482] = tarfile.GNUTYPE_SPARSE, entry * 4, 1
    pax = bytearray(header("x", 7 << 30, tarfile.XHDTYPE))

    def sized(header: bytearray, size: int) -> bytes:
        header[124:136] = (size % 2**96 | 2**95).to_bytes(12, "big")
        return signed(header)

    rows = {
        **{f"cut {n}": whole[:n] for n in (0, 1, 511, 512, 513, 1023, 1024, 1025, 1535, 1536, 1537, 2047, 2048)},
        "no header": whole + b"z", "text": b"no tar" * 1000, "gzip": b"\x1f\x8b" + bytes(2000), "one bit": bytes([whole[0] ^ 1]) + whole[1:],
        "a header of zeros": whole[:1024] + bytes(512) + whole[1536:] + bytes(1024), "two in one": whole + bytes(8192) + whole + bytes(1024),
        "second header": whole[:1024] + bytes([whole[1024] ^ 1]) + whole[1025:] + bytes(1024),
        **{f"size {size}": whole + sized(negative, size) + whole + bytes(1024) for size in (-1, -511, -512, -10_000, 2**80, 1 << 40)},
        "7 GiB of names": sized(pax, 7 << 30) + whole, "2 MiB of names": sized(pax, 2 << 20) + b"1" * (2 << 20) + whole,
        "a run of digits": sized(pax, 1 << 19) + b"1" * (1 << 19) + whole,
        "longer name": sized(bytearray(header("././@LongLink", 0, tarfile.GNUTYPE_LONGNAME)), 1 << 40) + whole,
        "holes": signed(sparse) + (entry * 21 + b"\1" + bytes(7)) * 16_384 + bytes(1024), "one hole": signed(sparse) + bytes(512) * 4,
        "a part twice": tar_bytes([("a.txt", b"1"), ("a.txt", b"2")]),
        "no UTF-8": tar_bytes([("a.txt", b"")], format="ustar").replace(b"a.txt", b"\xe4.txt"),
    }  # fmt: skip
    rows["no UTF-8"] = signed(bytearray(rows["no UTF-8"][:512])) + rows["no UTF-8"][512:]
    for name, raw in rows.items():
        (tmp_path / "a.tar").write_bytes(raw)
        tracemalloc.start()
        with pytest.raises(SaevStoreError) as caught:
            pytest.fail(f"{prepare(tmp_path, split='1,0,0', progress=False)} {name}")
        error = caught.value
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert type(error) is CorruptShardError, name
        assert error.where == f"{tmp_path}/a.tar"
        assert peak < 32 << 20, name
        assert [path.name for path in tmp_path.iterdir() if path.name != ".nv-meta"] == ["a.tar"]


@given(st.data())
def test_bytes_changed_anywhere_give_our_errors_or_samples(tmp_path_factory, data):
    """Every file of a data set, with both names of the document of shards."""
    folder = tmp_path_factory.mktemp("fuzz") / "d"
    shutil.copytree(DATA / "captioning_ratio_split/dataset", folder)
    if data.draw(st.booleans()):
        counts = json.loads((folder / INFO).read_text())["shard_counts"]
        (folder / ".nv-meta/.info.yaml").write_text(
            "shard_counts:\n" + "".join(f"  {k}: {n}\n" for k, n in counts.items())
        )
        (folder / INFO).unlink()
    names = sorted(path for path in folder.rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(names))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    start = data.draw(st.integers(0, len(raw)))
    path.write_bytes(bytes(raw[:start]) + data.draw(st.binary(max_size=9)) + bytes(raw[start:]))
    try:
        with EnergonDataset(folder) as dataset:
            for name in dataset.splits:
                list(dataset.split(name))
            dataset.validate(deep=True, progress=False)
    except SaevStoreError as error:
        assert error.where or path.suffix == ".tar"
    shutil.rmtree(folder)
