"""Data sets that Energon itself wrote, against what Energon itself read from them; and damaged ones."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from pathlib import Path

import pytest

from saev_store.errors import SaevStoreError, SelectionError
from saev_store.sources.energon import CrudeSample, EnergonDataset
from saev_store.transport import MemoryTransport

DATA = Path(__file__).parents[1] / "data/energon"
CASES = ["captioning_ratio_split", "crude_varying_parts", "old_7_0_0"]
MALFORMED = json.loads((DATA / "malformed/manifest.json").read_text())["cases"]


def truth(case: str) -> dict:
    return json.loads((DATA / case / "expected.json").read_text())


def digests(parts) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in parts.items()}


def in_memory(folder: Path) -> MemoryTransport:
    return MemoryTransport(
        {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    )


def opened(folder: Path, engine: str, tmp_path: Path | None = None) -> EnergonDataset:
    if engine == "memory":
        return EnergonDataset("", transport=in_memory(folder))
    return EnergonDataset(folder, engine=engine)


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec", "memory"])
@pytest.mark.parametrize("case", CASES)
class TestTruth:
    def test_parts_by_key(self, case, engine):
        dataset = opened(DATA / case / "dataset", engine)
        for entry in truth(case)["random_access"]:
            assert hashlib.sha256(dataset.part(entry["key"], entry["part"])).hexdigest() == entry["sha256"]
            assert dataset.file(f"{entry['key']}.{entry['part']}") == dataset.part(entry["key"], entry["part"])
            place = next(each for each in dataset.parts(entry["key"]) if each.name == entry["part"])
            assert (place.offset, place.nbytes) == (entry["offset"], entry["size"])

    def test_samples_by_key_and_position(self, case, engine):
        dataset = opened(DATA / case / "dataset", engine)
        rows = truth(case)["sqlite"]["samples"]["rows"]
        assert len(dataset) == len(rows)
        by_key = truth(case)["real_reader"]["__by_key__"]
        for position, (_, key, *_) in enumerate(rows):
            assert dataset.key(position) == key
            assert dataset.index_of(key) == position
            assert digests(dataset[position].parts) == by_key[key] == digests(dataset.raw(key).parts)
        backwards = dataset.rows(list(range(len(rows)))[::-1])
        assert [each.key for each in backwards] == [row[1] for row in rows][::-1]

    def test_splits(self, case, engine):
        dataset = opened(DATA / case / "dataset", engine)
        for name, expected in truth(case)["real_reader"].items():
            if name == "__by_key__":
                continue
            part = dataset.split(name)
            if isinstance(expected, str):  # the peer refuses a split without shards; ours has no samples
                assert len(part) == 0
                continue
            assert list(part.shards) == expected["shards"]
            assert len(part) == expected["len"]
            found = [sample for batch in part.batches(2) for sample in batch]
            assert [(each.key, each.shard, digests(each.parts)) for each in found] == [
                (each["key"], each["shard"], each["parts"]) for each in expected["samples"]
            ]

    def test_nothing_is_wrong(self, case, engine):
        report = opened(DATA / case / "dataset", engine).validate(deep=True, progress=False)
        assert report.ok, report


def test_captions_are_decoded():
    pytest.importorskip("PIL")
    dataset = EnergonDataset(DATA / "captioning_ratio_split/dataset")
    for i in range(6):
        sample = dataset.sample(i)
        assert type(sample).__name__ == "CaptioningSample"
        assert sample.caption == dataset.part(i, "txt").decode() == f"caption number {i}\n"
        assert sample.image.dtype == "uint8"
        assert sample.image.ndim == 3
        assert sample.image.shape[2] == 3
        assert sample.__key__ == f"sample_{i:04d}"
        assert sample.__restore_key__ == (dataset.url, f"shards/shard_{i // 2:03d}.tar", i % 2)
    light = EnergonDataset(DATA / "captioning_ratio_split/dataset", images="torchrgb").sample(0)
    assert light.image.dtype == "float32"
    assert light.image.shape[0] == 3
    assert 0 <= light.image.min() <= light.image.max() <= 1


def test_crude_samples_are_bytes():
    sample = EnergonDataset(DATA / "crude_varying_parts/dataset").sample("doc/003")
    assert isinstance(sample, CrudeSample)
    assert sample.parts["tar.gz.note.txt"].decode() == "ünïcode"


def test_it_travels():
    """Pickles open it again: in another process the database is another connection."""
    dataset = EnergonDataset(DATA / "crude_varying_parts/dataset").split("val")
    again = pickle.loads(pickle.dumps(dataset))
    assert [again.key(i) for i in range(len(again))] == ["doc/003", "doc/004"]
    assert again.describe() == dataset.describe()
    with pytest.raises(SelectionError, match="not in split"):
        again.index_of("doc/000")


@pytest.mark.parametrize("case", [case["case"] for case in MALFORMED])
@pytest.mark.parametrize("engine", ["mmap", "memory"])
def test_malformed_ones_are_refused_as_their_manifest_says(case, engine):
    expect = next(each["expect"] for each in MALFORMED if each["case"] == case)
    folder = DATA / "malformed" / case / "dataset"

    def read_all():
        dataset = opened(folder, engine)
        return [sample.parts for sample in dataset.rows(range(len(dataset)))]

    if expect == "ok":
        assert len(read_all()) == 4
        return
    with pytest.raises(SaevStoreError) as caught:
        read_all()
    assert caught.value.where
    if expect.startswith("error when tar headers are read"):
        dataset = opened(folder, engine)
        assert dataset.raw("sample_0000").parts
        report = dataset.validate(deep=True, progress=False)
        assert [problem.kind for problem in report.errors] == ["corrupt_shard"]
        assert report.lost == ((0, 2),)


class TestDamage:
    """Faults that the samples do not have: each is an error that says where."""

    @pytest.fixture
    def folder(self, tmp_path) -> Path:
        return Path(shutil.copytree(DATA / "captioning_ratio_split/dataset", tmp_path / "d"))

    def refused(self, folder, match):
        with pytest.raises(SaevStoreError, match=match):
            dataset = EnergonDataset(folder)
            dataset.rows(range(len(dataset)))
        damaged = EnergonDataset(folder, damaged_ok=True)
        assert any(problem.severity == "error" for problem in damaged.problems)
        assert not damaged.validate(progress=False).ok

    def test_missing_tar(self, folder):
        (folder / "shards/shard_001.tar").unlink()
        self.refused(folder, "shard_001.tar: the shard is missing")
        assert "shard_001.tar: the shard is missing" in repr(EnergonDataset(folder, damaged_ok=True))

    def test_cut_tar(self, folder):
        data = (folder / "shards/shard_001.tar").read_bytes()
        (folder / "shards/shard_001.tar").write_bytes(data[:5000])
        self.refused(folder, "outside the tar of 5,000 bytes")

    def test_tar_that_grew(self, folder):
        data = (folder / "shards/shard_001.tar").read_bytes()
        (folder / "shards/shard_001.tar").write_bytes(data[:7168] + data[:7168] + bytes(1024))
        self.refused(folder, "files were added after it was indexed")

    def test_swapped_tars(self, folder):
        a, b = folder / "shards/shard_001.tar", folder / "shards/shard_002.tar"
        data = a.read_bytes()
        a.write_bytes(b.read_bytes())
        b.write_bytes(data)
        with pytest.raises(
            SaevStoreError, match="the index has 'sample_0002.detail.json' at 512, but the tar has 'sample_0004"
        ):
            EnergonDataset(folder).raw("sample_0002")
        assert len(EnergonDataset(folder).validate(deep=True, progress=False).errors) == 2

    def test_counts_of_another_index(self, folder):
        info = folder / ".nv-meta/.info.json"
        info.write_text(info.read_text().replace('shard_001.tar": 2', 'shard_001.tar": 3'))
        self.refused(folder, "it has 2 samples of 'shards/shard_001.tar', .info.json says 3")

    def test_stale_tar_idx_is_reported(self, folder):
        (folder / "shards/shard_001.tar.idx").write_bytes(b"".join(n.to_bytes(8, "little") for n in (0, 4096, 7168)))
        report = EnergonDataset(folder).validate(progress=False)
        assert [problem.message for problem in report.errors] == [
            "it has other offsets than index.sqlite: one of them is stale"
        ]

    @pytest.mark.parametrize("n", [0, 15, 16, 100, 4096, 20_000])
    def test_cut_database(self, folder, n):
        index = folder / ".nv-meta/index.sqlite"
        index.write_bytes(index.read_bytes()[:n])
        with pytest.raises(SaevStoreError, match="index.sqlite"):
            dataset = EnergonDataset(folder)
            dataset.validate(progress=False).raise_if_bad()
