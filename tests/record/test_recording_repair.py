"""`repair` gives a recording its lost bytes back: those and no others, by the same forward passes; also of stores of 9b30f8f."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from kill_children import content, ended, in_child, killed
from tiny_models import VOCABULARY, tiny_language, tiny_vision

from saev_store import ShardStore
from saev_store.errors import (
    ArgumentError,
    IncompleteStoreError,
    NotFoundError,
    ResumeError,
    SaevStoreError,
    WriterConflictError,
)
from saev_store.record import Images, Texts, record, repair

torch = pytest.importorskip("torch")

IDS = [np.random.default_rng(i).integers(3, VOCABULARY, n) for i, n in enumerate((7, 1, 12, 5, 3, 9, 5, 11, 2, 6, 8))]
PIXELS = np.random.default_rng(1).standard_normal((23, 3, 32, 32), dtype=np.float32)
LABELS = np.arange(23 * 16, dtype=np.uint8).reshape(-1, 16)
KINDS = ("images", "window", "stream")
ARRAYS = ("token_ids.bin", "document_ids.bin", "positions.bin", "mask.bin")
#: Every recording has seven or eight shards.
BUDGETS = {"images": 3 * 17 * 2, "window": 3 * 6 * 2, "stream": 2 * 5 * 2}


def source_of(kind: str, **changes: object) -> object:
    if kind == "images":
        return Images(PIXELS, **({"batch_size": 4, "labels": LABELS} | changes))
    return Texts(IDS, **({"context": 5, "layout": kind, "bos": 1, "batch_size": 4} | changes))


def model_of(kind: str, plus: float = 0.0) -> torch.nn.Module:
    """A model that notes in `ran` how many rows it runs; with `plus` of other vectors under the same weights, as another machine's."""
    model = tiny_vision("Dinov2Model") if kind == "images" else tiny_language("GPT2Model")
    model.ran = []

    def note(_model: object, args: tuple, kwargs: dict) -> None:
        (given,) = args or (kwargs["pixel_values" if kind == "images" else "input_ids"],)
        model.ran.append(len(given))

    model.register_forward_pre_hook(note, with_kwargs=True)
    if plus:
        block = model.layers[0] if kind == "images" else model.h[0]
        block.register_forward_pre_hook(lambda _block, args: (args[0] + plus, *args[1:]))
    return model


def dump(root: Path, kind: str, **options: object) -> Path:
    """The folder of a store; texts are of protocol 3.0 and bfloat16, images of 2.0."""
    defaults = {"layers": (2, 0), "ckpt": "tiny", "progress": False, "max_tokens_per_shard": BUDGETS[kind]}
    defaults |= {} if kind == "images" else {"dtype": "bfloat16"}
    model = options.pop("model", None) or model_of(kind)
    found = record(model, source_of(kind), root, **(defaults | options))
    return Path(found.url)


def mended(path: Path, kind: str, model: torch.nn.Module | None = None, **options: object) -> list[str]:
    """The files that were repaired."""
    source = options.pop("source", None) or source_of(kind)
    done = repair(model_of(kind) if model is None else model, source, path, **({"progress": False} | options))
    assert done.store.validate(deep=True, progress=False).ok
    assert done.to_dict()["url"] == done.store.url
    return [file.name for file in done.files]


def stats(path: Path) -> dict[str, tuple[int, ...]]:
    """Which file has each name, and when it was written."""
    found = {file.name: file.stat() for file in path.rglob("*") if file.is_file()}
    return {name: (one.st_ino, one.st_mtime_ns, one.st_size) for name, one in found.items()}


def shard(number: int) -> str:
    return f"acts{number:06d}.bin"


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a store of each kind; nobody changes it."""
    return {kind: dump(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture
def copied(recorded, tmp_path: Path):
    """A fresh copy of such a store, which may be damaged."""
    made = iter(range(100))

    def of(kind: str) -> Path:
        return Path(shutil.copytree(recorded[kind], tmp_path / str(next(made)) / recorded[kind].name))

    return of


def test_repair_writes_lost_files_and_touches_no_other(recorded, copied) -> None:
    for kind in KINDS:
        n_shards = len(list(recorded[kind].glob("acts*")))
        arrays = ["labels.bin"] if kind == "images" else [*ARRAYS]
        cases = [
            ([], [], []),
            ([shard(3)], [], []),
            (arrays, [], []),
            ([shard(0), shard(n_shards - 1), arrays[0]], [shard(4), *arrays[1:2]], [shard(2)]),
            ([file.name for file in recorded[kind].glob("*.bin")], [], []),
        ]
        for missing, flipped, short in cases:
            path, model = copied(kind), model_of(kind)
            for name in missing:
                (path / name).unlink()
            for name in flipped:
                flip(path / name, 3)
            for name in short:
                (path / name).write_bytes((path / name).read_bytes()[:-7])
            lost = {*missing, *flipped, *short}
            before = stats(path)
            assert {*mended(path, kind, model)} == lost
            assert content(path) == content(recorded[kind])
            after = stats(path)
            assert {name for name in after if before.get(name) != after[name]} == lost
            if not lost & {file.name for file in path.glob("acts*")}:
                assert model.ran == []
            elif lost == {shard(3)} and kind == "images":
                assert model.ran == [4]  # images 9 to 11 and the one before them are of one batch


def test_repair_of_a_recording_without_digests_or_of_parts(recorded, tmp_path: Path, copied) -> None:
    path = copied("images")
    for name in ("digests.json", "labels.bin", shard(1)):
        (path / name).unlink()
    assert mended(path, "images") == ["labels.bin", shard(1)]
    expected = content(recorded["images"])
    del expected["digests.json"]
    assert content(path) == expected
    defaults = {"layers": (2, 0), "ckpt": "tiny", "progress": False, "dtype": "bfloat16"}
    for rank in (1, 0, 2):
        store = record(
            model_of("stream"), source_of("stream"), tmp_path / "parts", part=(rank, 3), max_tokens_per_shard=20, **defaults
        )  # fmt: skip
    path = Path(store.url)
    for name in (shard(1), shard(5), "mask.bin"):
        (path / name).unlink()
    assert mended(path, "stream") == ["mask.bin", shard(1), shard(5)]
    assert content(path) == content(recorded["stream"])


def test_repair_of_a_store_of_9b30f8f_compares_weights_configuration_and_source(tmp_path: Path, recorded) -> None:
    """Its identity has more keys, and digests that no longer exist; other releases of packages do not matter."""
    store = ShardStore.open(recorded["window"])
    data = json.loads(store.metadata.raw)["data"]
    old = data["recording"]
    old["model"] |= {"modules": "0" * 64, "hooks": {"h.0": ["forward_hook f 12ab"]}}
    old |= {"call": {"keywords": True, "batch_axis": 0}, "packages": {"torch": "2.1"}}
    old["computation"] |= {"autocast": {}}
    old["source"] |= {"images": {"digest": {"scope": "full", "value": "0"}}, "masks": {"digest": {"scope": "full"}}}
    with ShardStore.create(tmp_path, store.metadata.replace(data=data), progress=False) as writer:
        writer.append(store.read(slice(None), dtype="stored").copy(), **dict(store.token_arrays))
    path = tmp_path / writer.metadata.hash
    expected = content(path)
    (path / shard(2)).unlink()
    assert mended(path, "window") == [shard(2)]
    assert content(path) == expected
    (path / shard(2)).unlink()
    changed = model_of("window")
    with torch.no_grad():
        changed.wpe.weight += 1
    for options in ({"model": changed}, {"source": source_of("window", batch_size=5)}):
        with pytest.raises(ResumeError):
            mended(path, "window", **options)


def test_repair_by_another_model_source_or_shape_is_refused(copied, tmp_path: Path) -> None:
    path = copied("window")
    (path / shard(2)).unlink()
    before, other = stats(path), model_of("window")
    with torch.no_grad():
        other.wte.weight += 1
    cases: list[dict[str, object]] = [
        {"source": source_of("window", batch_size=5)}, {"source": source_of("window", bos=2)},
        {"source": Texts(IDS[:-1], context=5, bos=1, batch_size=4)}, {"model": other},
    ]  # fmt: skip
    for options in cases:
        with pytest.raises(ResumeError) as refused:
            mended(path, "window", **options)
        assert refused.value.where == str(path)
        assert stats(path) == before
    assert other.ran == []
    path = copied("images")
    (path / "labels.bin").unlink()
    for labels in (None, LABELS + 1):
        with pytest.raises(ResumeError):
            mended(path, "images", source=source_of("images", labels=labels))
    with pytest.raises(ArgumentError):
        mended(path, "images", recheck="maybe")
    with pytest.raises(NotFoundError):
        mended(tmp_path / "nothing", "window")
    part = record(model_of("window"), source_of("window"), tmp_path, layers=(2,), ckpt="t", part=(0, 2), max_tokens_per_shard=18, progress=False)  # fmt: skip
    with pytest.raises(IncompleteStoreError):
        mended(part.url, "window")
    plain = ShardStore.from_array(
        np.ones((4, 1, 5, 8), np.float32), tmp_path, family="gpt2", ckpt="tiny", layers=[1], cls_token=True, progress=False
    )  # fmt: skip
    with pytest.raises(ResumeError):
        mended(Path(plain.url), "window")


def test_repair_compares_vectors_before_anything_is_replaced(copied) -> None:
    for lost in ((4, 6), (0, 5), range(6)):
        path = copied("window")
        for number in lost:
            (path / shard(number)).unlink()
        before = stats(path)
        with pytest.raises(ResumeError):
            mended(path, "window", model_of("window", 1e-2))
        assert stats(path) == before
    path = copied("stream")
    for file in path.glob("acts*.bin"):  # no example is left to compare; the digests are
        file.unlink()
    before = stats(path)
    with pytest.raises(ResumeError):
        mended(path, "stream", model_of("stream", 1e-2))
    assert stats(path) == before
    path = copied("window")
    (path / shard(4)).unlink()
    before = stats(path)
    done = repair(model_of("window", 1e-4), source_of("window"), path, recheck="close", progress=False)
    assert [(file.name, file.examples, file.identical) for file in done.files] == [(shard(4), ((12, 15),), False)]
    assert done.store.validate(deep=True, progress=False).ok
    after = stats(path)
    assert {name for name in after if before.get(name) != after[name]} == {shard(4), "digests.json"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
def test_repairs_that_are_killed_end_with_the_same_bytes(recorded, copied) -> None:
    path, expected = copied("stream"), content(recorded["stream"])

    def damage() -> None:
        for name in (shard(1), shard(4), shard(6), "document_ids.bin"):
            (path / name).unlink(missing_ok=True)

    def work() -> None:
        torch.set_num_threads(1)  # torch's pool does not survive a fork
        mended(path, "stream", recheck="close")

    damage()
    began_s = time.monotonic()
    assert ended(in_child(work)) == 0
    whole_s, rng = time.monotonic() - began_s, np.random.default_rng(3)
    n_kills = 0
    for _ in range(int(os.environ.get("SAEV_STORE_KILLS", "6"))):
        if content(path) == expected:
            damage()
        child = in_child(work)
        time.sleep(whole_s * rng.uniform(0.2, 0.9))
        n_kills += killed(child) == -9
        for file in path.glob("*.bin"):  # the old one or the new one
            assert file.read_bytes() == expected[file.name]
    assert n_kills
    assert ended(in_child(work)) == 0
    assert content(path) == expected


def test_readers_and_other_repairs_meet_right_vectors_or_an_error(recorded, copied) -> None:
    path, expected = copied("window"), ShardStore.open(recorded["window"])[:]
    opened = [ShardStore.open(path, engine=engine) for engine in ("mmap", "pread")]
    (path / shard(4)).unlink()
    opened += [ShardStore.open(path, damaged_ok=True, engine=engine) for engine in ("mmap", "pread")]
    looks: list[int] = []

    class Looked(Texts):
        """While this source is read, others look, and another process repairs the same store."""

        def batches(self, start: int, end: int):
            for batch in super().batches(start, end):
                looks.append(start)
                for store in (*opened, ShardStore.open(path, damaged_ok=True)):
                    for example in (0, 12, 13, 14, 18):
                        try:
                            found = store[example]
                        except SaevStoreError:
                            continue
                        assert np.array_equal(found, expected[example])
                with pytest.raises(WriterConflictError):
                    mended(path, "window")
                yield batch

    mended(path, "window", source=Looked(IDS, context=5, bos=1, batch_size=4))
    assert looks
    assert np.array_equal(ShardStore.open(path)[:], expected)
