"""`repair` gives a recording its lost bytes back: those and no others, by the same forward passes."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

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
    TransportError,
    WriterConflictError,
)
from saev_store.record import ImageBatches, Images, Texts, _identity, record, repair

torch = pytest.importorskip("torch")

IDS = [np.random.default_rng(i).integers(3, VOCABULARY, n) for i, n in enumerate((7, 1, 12, 5, 3, 9, 5, 11, 2, 6, 8))]
PIXELS = np.random.default_rng(1).standard_normal((23, 3, 32, 32), dtype=np.float32)
LABELS = np.arange(23 * 16, dtype=np.uint8).reshape(-1, 16)
TEXTS, KINDS = ("window", "stream"), ("images", "batches", "window", "stream")
ARRAYS = ("token_ids.bin", "document_ids.bin", "positions.bin", "mask.bin")
#: Examples in a shard; every recording has seven or eight shards.
IN_SHARD = {"images": 3, "batches": 3, "window": 3, "stream": 2}


def source_of(kind: str, **changes: object) -> object:
    if kind == "images":
        return Images(PIXELS, **({"batch_size": 4, "labels": LABELS} | changes))
    if kind == "batches":
        return ImageBatches([PIXELS[first : first + 5] for first in range(0, 23, 5)], 23, **changes)
    return Texts(IDS, **({"context": 5, "layout": kind, "bos": 1, "batch_size": 4} | changes))


def model_of(kind: str) -> torch.nn.Module:
    """A model that notes in `ran` how many rows it runs."""
    model = tiny_language("GPT2Model") if kind in TEXTS else tiny_vision("Dinov2Model")
    model.ran = []

    def note(_model: object, args: tuple, kwargs: dict) -> None:
        (given,) = args or (kwargs["input_ids" if kind in TEXTS else "pixel_values"],)
        model.ran.append(len(given))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return model


def dump(root: object, kind: str, **options: object) -> object:
    """Texts are of protocol 3.0 and bfloat16, images of 2.0; those with batches of 4 have labels."""
    tokens = {"window": 6, "stream": 5}.get(kind, 17)
    dtype = {"dtype": "bfloat16"} if kind in TEXTS else {}
    options = {"layers": (2, 0), "ckpt": "tiny", "progress": False} | dtype | options
    options |= {"max_tokens_per_shard": IN_SHARD[kind] * tokens * 2}
    return record(options.pop("model", None) or model_of(kind), source_of(kind), root, **options)


def mended(path: object, kind: str, model: torch.nn.Module | None = None, **options: object) -> list[str]:
    """The files that were repaired."""
    options = {"progress": False} | options
    done = repair(model_of(kind) if model is None else model, options.pop("source", source_of(kind)), path, **options)
    assert done.store.validate(deep=True, progress=False).ok
    return [file.name for file in done.files]


def stats(path: Path) -> dict[str, tuple[int, ...]]:
    """Which file has each name, and when it was written."""
    found = {file.name: file.stat() for file in path.rglob("*")}
    return {name: (one.st_ino, one.st_mtime_ns, one.st_size) for name, one in found.items()}


def shard(number: int) -> str:
    return f"acts{number:06d}.bin"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory):
    """The folder of a store of each kind, recorded once; nobody changes it."""
    found: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in found:
            found[kind] = Path(dump(tmp_path_factory.mktemp(kind), kind).url)
        return found[kind]

    return of


@pytest.fixture
def copied(recorded, tmp_path: Path):
    """A copy of such a store, which may be damaged."""

    def of(kind: str) -> Path:
        whole = recorded(kind)
        return Path(shutil.copytree(whole, tmp_path / "shards" / whole.name))

    return of


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


# -- what is repaired --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("padding_is_known")
@pytest.mark.parametrize("kind", KINDS)
def test_a_deleted_shard_comes_back_and_no_other_file_is_touched(recorded, copied, kind: str) -> None:
    path, model = copied(kind), model_of(kind)
    before = stats(path)
    (path / shard(3)).unlink()
    assert mended(path, kind, model) == [shard(3)]
    assert content(path) == content(recorded(kind))
    after = stats(path)
    assert {name for name in before if before[name] != after[name]} == {shard(3)}
    # Images and windows 8 to 11, in batches of 4; images 5 to 14 in batches of 5; tokens 25 to 39 are in the rows 7 to 10.
    assert model.ran == {"images": [4], "batches": [5, 5], "window": [4], "stream": [4, 4]}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_can_be_lost_at_once(recorded, copied, kind: str) -> None:
    path = copied(kind)
    n_shards = len(list(path.glob("acts*")))
    (path / shard(0)).unlink()
    (path / shard(2)).write_bytes((path / shard(2)).read_bytes()[:-7])
    flip(path / shard(4), 3)
    (path / shard(n_shards - 1)).unlink()
    lost = [shard(0), shard(2), shard(4), shard(n_shards - 1)]
    if kind in TEXTS:
        (path / "token_ids.bin").unlink()
        flip(path / "positions.bin", 8)
        lost = ["token_ids.bin", "positions.bin", *lost]
    elif kind == "images":
        (path / "labels.bin").unlink()
        lost = ["labels.bin", *lost]
    before = stats(path)
    assert sorted(mended(path, kind)) == sorted(lost)
    assert content(path) == content(recorded(kind))
    after = stats(path)
    assert {name for name in after if before.get(name) != after[name]} == set(lost)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_of_which_only_documents_are_left(recorded, copied, kind: str) -> None:
    path = copied(kind)
    for file in path.glob("*.bin"):
        file.unlink()
    mended(path, kind)
    assert content(path) == content(recorded(kind))


@pytest.mark.parametrize("kind", ["images", *TEXTS])
def test_token_arrays_come_from_the_source_alone(recorded, copied, kind: str) -> None:
    path, model = copied(kind), model_of(kind)
    names = ARRAYS if kind in TEXTS else ("labels.bin",)
    for name in names:
        (path / name).unlink()
    assert sorted(mended(path, kind, model)) == sorted(names)
    assert model.ran == []
    assert content(path) == content(recorded(kind))


def test_without_digests_labels_that_are_gone_come_back(recorded, copied) -> None:
    path = copied("images")
    for name in ("digests.json", "labels.bin", shard(1)):
        (path / name).unlink()
    assert mended(path, "images") == ["labels.bin", shard(1)]
    expected = content(recorded("images"))
    del expected["digests.json"]
    assert content(path) == expected


@pytest.mark.parametrize("kind", ["images", "stream"])
def test_where_nothing_is_lost_nothing_runs(recorded, kind: str) -> None:
    path, model = recorded(kind), model_of(kind)
    before = stats(path)
    for _ in range(2):
        done = repair(model, source_of(kind), path, progress=False)
        assert (done.files, str(done)) == ((), "nothing is lost: no file was changed")
        assert done.to_dict() == {"url": str(path), "files": []}
    assert model.ran == []
    assert stats(path) == before


@pytest.mark.parametrize("kind", TEXTS)
def test_what_was_recorded_in_parts(recorded, copied, kind: str, tmp_path: Path) -> None:
    for rank in (1, 0, 2):
        store = dump(tmp_path / "parts", kind, part=(rank, 3))
    path = Path(store.url)
    for name in (shard(1), shard(5), "mask.bin"):
        (path / name).unlink()
    assert mended(path, kind) == ["mask.bin", shard(1), shard(5)]
    assert content(path) == content(recorded(kind))


def test_numbers_that_were_saturated(tmp_path: Path) -> None:
    def huge() -> torch.nn.Module:
        model = model_of("window")
        with torch.no_grad():
            model.wpe.weight *= 1e6
        return model

    options = {"dtype": "float16", "on_overflow": "saturate"}
    whole = Path(dump(tmp_path / "whole", "window", model=huge(), **options).url)
    path = Path(shutil.copytree(whole, tmp_path / whole.name))
    (path / shard(1)).unlink()
    assert mended(path, "window", huge(), on_overflow="saturate") == [shard(1)]
    assert content(path) == content(whole)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": (0, 2)}, "layers is [2, 0] there, [0, 2] in this call"),
        ({"hook_points": ("attn_out",)}, "hook_points"),
        ({"dtype": "float16"}, "dtype is 'bfloat16' there, 'float16' in this call"),
        ({"max_tokens_per_shard": 600}, "max_tokens_per_shard is 36 there, 600 in this call"),
        ({"ckpt": "other"}, "ckpt is 'tiny' there, 'other' in this call"),
        ({"source": source_of("window", batch_size=5)}, "data.recording.source.batch_size is 4 there, 5 in this call"),
        ({"source": source_of("window", bos=2)}, "data.recording.source.bos_id is 1 there, 2 in this call"),
        ({"source": Texts(IDS[:-1], context=5, bos=1, batch_size=4)}, "n_examples is 19 there, 17 in this call"),
        ({"model": "other"}, "data.recording.model.weights.digest is"),
        *(({name: "x"}, f"{name} is ") for name in ("dataset", "family")),
    ],
)
def test_what_was_recorded_in_another_way_is_refused_with_what_differs(
    copied, options: dict[str, object], said: str
) -> None:
    path, model = copied("window"), model_of("window")
    (path / shard(2)).unlink()
    before = stats(path)
    if options.pop("model", None):
        with torch.no_grad():
            model.wte.weight += 1
    with pytest.raises(ResumeError, match="the store was recorded in another way") as refused:
        mended(path, "window", model, **options)
    assert said in str(refused.value)
    assert stats(path) == before
    assert model.ran == []


def test_what_is_no_recording_is_refused_as_such(tmp_path: Path) -> None:
    """Not by differences of its metadata from those of a recording, or by what its protocol version cannot say of one."""
    acts = np.ones((4, 1, 5, 8), np.float32)
    store = ShardStore.from_array(
        acts, tmp_path, family="gpt2", ckpt="tiny", layers=[1], cls_token=True, progress=False
    )
    (Path(store.url) / shard(0)).unlink()
    model = model_of("window")
    with pytest.raises(ResumeError, match="the store is none that `record` has made"):
        repair(model, source_of("window"), store.url)
    assert model.ran == []


def other_bits(kind: str, monkeypatch: pytest.MonkeyPatch, by: float) -> torch.nn.Module:
    """A model that gives other vectors under the same digest, as another machine does."""
    model, digest = model_of(kind), _identity.weights_digest(model_of(kind))
    monkeypatch.setattr(_identity, "weights_digest", lambda _: digest)
    with torch.no_grad():
        (model.wpe.weight if kind in TEXTS else model.embeddings.cls_token)[:] += by
    return model


@pytest.mark.usefixtures("padding_is_known")
@pytest.mark.parametrize(("lost", "neighbour"), [((4, 6), 11), ((0, 5), 3), (range(6), 18)])
def test_other_vectors_are_refused_before_anything_is_replaced(
    copied, monkeypatch: pytest.MonkeyPatch, lost: tuple[int, ...], neighbour: int
) -> None:
    path = copied("window")
    for number in lost:
        (path / shard(number)).unlink()
    before, model = stats(path), other_bits("window", monkeypatch, 1e-3)
    with pytest.raises(ResumeError, match=f"example {neighbour} is not what the model gives now") as refused:
        mended(path, "window", model)
    assert "--recheck close" in str(refused.value)
    assert stats(path) == before
    assert len(model.ran) <= 2


def test_the_only_example_that_is_left_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IN_SHARD, "window", 1)
    for left in (0, 18):  # the first one, the last one
        path = Path(dump(tmp_path / str(left), "window").url)
        for number in range(19):
            if number != left:
                (path / shard(number)).unlink()
        before, model = stats(path), other_bits("window", monkeypatch, 1e-3)
        with pytest.raises(ResumeError, match=f"example {left} is not what the model gives now"):
            mended(path, "window", model)
        assert stats(path) == before


@pytest.mark.parametrize("recheck", ["close", "off"])
def test_other_bytes_are_accepted_if_asked(copied, monkeypatch: pytest.MonkeyPatch, recheck: str) -> None:
    path = copied("window")
    (path / shard(4)).unlink()
    before = stats(path)
    done = repair(
        other_bits("window", monkeypatch, 1e-5), source_of("window"), path, recheck=recheck, progress=False
    )  # fmt: skip
    assert [(file.name, file.examples, file.identical) for file in done.files] == [(shard(4), ((12, 15),), False)]
    assert str(done) == f"{shard(4)}: examples 12 to 14; other bytes than before"
    assert done.store.validate(deep=True, progress=False).ok
    after = stats(path)
    assert {name for name in after if before.get(name) != after[name]} == {shard(4), "digests.json"}


@pytest.mark.parametrize("left", [0, 1])
def test_where_no_example_is_left_to_compare_digests_refuse(copied, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """Also a token array: of other documents under the same description."""
    path = copied("stream")
    for file in path.glob("acts*.bin"):
        file.unlink()
    if left:
        (path / "token_ids.bin").unlink()
    before = stats(path)
    source = source_of("stream")
    if left:
        source.documents.tokens = lambda first, last: np.full(last - first, 3)
    with pytest.raises(ResumeError, match="would not be what was first written"):
        mended(path, "stream", other_bits("stream", monkeypatch, 1e-3), source=source)
    assert stats(path) == before


def test_lost_labels_need_a_source_with_labels(copied) -> None:
    path = copied("images")
    (path / "labels.bin").unlink()
    before = stats(path)
    with pytest.raises(ResumeError, match=r"data.recording.source.labels is .* there, absent in this call"):
        mended(path, "images", source=source_of("images", labels=None))
    with pytest.raises(ResumeError, match=r"data.recording.source.labels.digest.value is"):
        mended(path, "images", source=source_of("images", labels=LABELS + 1))
    assert stats(path) == before


def test_stores_that_are_not_there_or_no_recordings(copied, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        mended(tmp_path / "nothing", "window")
    part = dump(tmp_path / "begun", "window", part=(0, 2))
    with pytest.raises(IncompleteStoreError):
        mended(part.url, "window")
    store = ShardStore.open(copied("window"))
    metadata = store.metadata.replace(data={})
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(store.read(slice(None), dtype="stored").copy(), **dict(store.token_arrays))
    with pytest.raises(ResumeError, match="data.recording is absent there"):
        mended(tmp_path / metadata.hash, "window")
    for options in ({"recheck": "maybe"}, {"on_overflow": "warn"}):
        with pytest.raises(ArgumentError, match="it must be"):
            mended(store.url, "window", **options)


# -- crashes, full disks, others at work -------------------------------------------------------------------------------


def broken(path: Path) -> None:
    for name in (shard(1), shard(4), shard(6), "document_ids.bin"):
        (path / name).unlink(missing_ok=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
def test_killed_repairs_end_with_the_same_bytes(recorded, copied) -> None:
    path, expected = copied("stream"), content(recorded("stream"))

    def work() -> None:
        torch.set_num_threads(1)  # torch's pool does not survive a fork
        mended(path, "stream", recheck="close")

    model_of("stream")
    broken(path)
    began_s = time.monotonic()
    assert ended(in_child(work)) == 0
    whole_s, rng = time.monotonic() - began_s, np.random.default_rng(3)
    n_kills = 0
    for _ in range(int(os.environ.get("SAEV_STORE_KILLS", "6"))):
        if content(path) == expected:
            broken(path)
        child = in_child(work)
        time.sleep(whole_s * rng.uniform(0.2, 0.9))
        n_kills += killed(child) == -9
        for file in path.glob("*.bin"):  # the old one or the new one
            assert file.read_bytes() == expected[file.name]
    assert n_kills
    assert ended(in_child(work)) == 0
    assert content(path) == expected


@pytest.mark.parametrize("n_written", [0, 1, 2])
def test_on_a_full_disk_files_stay_as_they_were(
    recorded, copied, monkeypatch: pytest.MonkeyPatch, n_written: int
) -> None:
    """Space is reserved for a file before it is written."""
    path, expected = copied("window"), content(recorded("window"))
    broken(path)
    statvfs, asked = os.statvfs, list[int]()

    def full(fd: int) -> object:
        asked.append(fd)
        return statvfs(fd) if len(asked) <= n_written else SimpleNamespace(f_blocks=9, f_bavail=0, f_frsize=4096)

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", full)
        with pytest.raises(TransportError, match="ENOSPC"):
            mended(path, "window")
    there = content(path)
    names = ["document_ids.bin", shard(1), shard(4), shard(6)]
    assert set(expected) - set(there) == set(names[n_written:])
    assert all(expected[name] == data for name, data in there.items())
    mended(path, "window")
    assert content(path) == expected


def test_of_two_repairs_at_once_the_second_hears_of_the_first(recorded, copied) -> None:
    path, heard = copied("window"), list[WriterConflictError]()

    class Nosy(Texts):
        """While this source is read, another process repairs the same store."""

        def batches(self, start: int, end: int):
            with pytest.raises(WriterConflictError, match="is writing here") as error:
                mended(path, "window")
            heard.append(error.value)
            return super().batches(start, end)

    broken(path)
    mended(path, "window", source=Nosy(IDS, context=5, bos=1, batch_size=4))
    assert heard
    assert content(path) == content(recorded("window"))


def test_readers_see_right_vectors_or_an_error(recorded, copied) -> None:
    """A store that was opened before the damage, one that was opened with it, and new ones: before, amid and after the repair."""
    path, expected = copied("window"), ShardStore.open(recorded("window"))[:]
    opened = [ShardStore.open(path, engine=engine) for engine in ("mmap", "pread") for _ in range(2)]
    opened[0][:], opened[2][:]  # the others have no file open yet
    flip(path / shard(1), 8)
    (path / shard(4)).unlink()
    opened += [ShardStore.open(path, damaged_ok=True, engine=engine) for engine in ("mmap", "pread")]
    n_looks = 0

    def look(*, amid: bool) -> None:
        """Shard 1 has wrong bytes until it is replaced; without `validate` nobody can know."""
        nonlocal n_looks
        n_looks += 1
        for store in (*opened, ShardStore.open(path, damaged_ok=True)):
            for example in (0, *(() if amid else (3, 4, 5)), 12, 13, 14, 18):
                try:
                    found = store[example]
                except SaevStoreError:
                    continue
                assert np.array_equal(found, expected[example])
            assert np.array_equal(store[15], expected[15])

    class Looked(Texts):
        def batches(self, start: int, end: int):
            for batch in super().batches(start, end):
                look(amid=True)
                yield batch

    mended(path, "window", source=Looked(IDS, context=5, bos=1, batch_size=4))
    assert n_looks
    opened[:] = [ShardStore.open(path, engine=engine) for engine in ("mmap", "pread")]
    look(amid=False)
    assert all(np.array_equal(store[:], expected) for store in opened)
