"""Recording by several processes: any ranks together write the bytes of one process, and any others can go on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kill_children import content
from tiny_models import VOCABULARY, tiny_language, tiny_vision

from saev_store import ShardStore
from saev_store.errors import (
    ArgumentError,
    IncompleteStoreError,
    NotFoundError,
    ResumeError,
    StoreExistsError,
    WriterConflictError,
)
from saev_store.record import Images, RecordedPart, Texts, _ranks, finalize, record

torch = pytest.importorskip("torch")

#: Images; three in a shard are eight shards.
N_EXAMPLES = 23
DOCUMENTS = [np.random.default_rng(4).integers(3, VOCABULARY, n) for n in (7, 1, 12, 5, 3, 9, 5, 11, 2, 6, 8)]
KINDS = ["images", "window", "stream"]


def dump(root: object, kind: str = "window", model: object = None, **options: object) -> object:
    """A recording of seven or eight shards, of protocol 2.0 for images and of 3.0 for texts; batches do not divide shards."""
    if kind == "images":
        pixels = np.random.default_rng(1).standard_normal((N_EXAMPLES, 3, 32, 32), dtype=np.float32)
        source: object = Images(pixels, batch_size=4, labels=np.arange(N_EXAMPLES * 16, dtype=np.uint8).reshape(-1, 16))
        model = tiny_vision("Dinov2Model") if model is None else model
        shape = {"max_tokens_per_shard": 3 * 17 * 2}
    else:
        source = Texts(DOCUMENTS, context=5, layout=kind, bos=1, batch_size=4)
        model = tiny_language("GPT2Model") if model is None else model
        tokens = 5 + (kind == "window")
        shape = {"dtype": "bfloat16", "max_tokens_per_shard": (3 if kind == "window" else 2) * tokens * 2}
    return record(model, source, root, **{"layers": (2, 0), "ckpt": "tiny", "progress": False} | shape | options)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone(kind: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files that one process writes."""
    root = tmp_path_factory.mktemp("alone")
    store = dump(root, kind)
    assert store.layout.n_shards in {7, 8}
    assert store.metadata.protocol == ("2.0" if kind == "images" else "3.0")
    return content(root)


@pytest.mark.parametrize("order", [(1, 0), (3, 1, 0, 2, 4), tuple(range(10))])
def test_ranks_write_the_store_of_one_process_and_the_last_one_publishes(
    kind: str, alone: dict[str, bytes], order: tuple[int, ...], tmp_path: Path
) -> None:
    n = len(order)
    for rank in order[:-1]:
        found = dump(tmp_path, kind, part=(rank, n))
        if isinstance(found, ShardStore):  # the ranks behind it have no shard: there are more of them than shards
            assert n > 8
            break
        assert found.part == (rank, n)
        assert order[-1] in found.ranks_left
        assert rank not in found.ranks_left
    store = dump(tmp_path, kind, part=(order[-1], n), exist_ok=True)
    assert isinstance(store, ShardStore)
    assert content(tmp_path) == alone
    assert store.validate(deep=True, progress=False).ok


def test_other_ranks_go_on(kind: str, alone: dict[str, bytes], tmp_path: Path) -> None:
    for part in ((1, 4), (2, 3), (0, 2)):
        assert isinstance(dump(tmp_path, kind, part=part), RecordedPart)
    assert isinstance(dump(tmp_path, kind, part=(1, 2)), ShardStore)
    assert content(tmp_path) == alone


@pytest.mark.parametrize("part", [None, (0, 1)])
def test_one_process_goes_on_with_parts(kind: str, alone: dict[str, bytes], part: object, tmp_path: Path) -> None:
    dump(tmp_path, kind, part=(1, 3))
    assert isinstance(dump(tmp_path, kind, part=part), ShardStore)
    assert content(tmp_path) == alone


def test_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    ran: list[int] = []

    def counted() -> torch.nn.Module:
        model = tiny_vision("Dinov2Model")
        model.register_forward_pre_hook(
            lambda _model, args, kwargs: ran.append(len(args[0] if args else kwargs["pixel_values"])), with_kwargs=True
        )
        return model

    dump(tmp_path, "images", counted(), part=(1, 4))  # the shards 2 and 3: examples 6 to 11
    assert ran == [4, 4]  # the batches from 4 to 11
    ran.clear()
    dump(tmp_path, "images", counted(), part=(0, 2))  # examples 0 to 5, and the batch of one that is there
    assert ran == [4, 4, 4]
    ran.clear()
    dump(tmp_path, "images", counted(), part=(0, 2))  # compared with what is there
    assert ran == []


# -- who may go on -----------------------------------------------------------------------------------------------------


def test_ranks_go_on_with_a_store_that_one_process_has_begun(tmp_path: Path) -> None:
    whole = dump(tmp_path / "whole")
    with (
        pytest.raises(IncompleteStoreError),
        ShardStore.create(tmp_path / "cut", whole.metadata, progress=False) as writer,
    ):
        arrays = {name: values[:4] for name, values in whole.token_arrays.items()}
        writer.append(whole.read(slice(0, 4), dtype="stored").copy(), **arrays)
    with pytest.raises(IncompleteStoreError):
        finalize(tmp_path / "cut" / whole.name)
    for rank in range(2):
        dump(tmp_path / "cut", part=(rank, 2))
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_without_resume_nothing_is_continued(tmp_path: Path) -> None:
    dump(tmp_path, part=(0, 2), resume=False)
    for part in ((0, 2), (0, 3), None):
        with pytest.raises(IncompleteStoreError, match="unfinished store"):
            dump(tmp_path, part=part, resume=False)
    dump(tmp_path, part=(1, 2), resume=False)  # nothing of this part is there
    with pytest.raises(StoreExistsError):
        dump(tmp_path, part=(1, 2))


def test_two_processes_with_one_part(tmp_path: Path) -> None:
    """The second one hears what to do; nothing of the first is lost."""
    heard: list[WriterConflictError] = []

    class Nosy(Texts):
        """While this source is read, another process records the same part."""

        def batches(self, start: int, end: int):
            for batch in super().batches(start, end):
                if not heard:
                    heard.append(None)
                    with pytest.raises(WriterConflictError) as error:
                        dump(tmp_path, part=(0, 2))
                    heard[0] = error.value
                yield batch

    source = Nosy(DOCUMENTS, context=5, bos=1, batch_size=4)
    options = {"layers": (2, 0), "ckpt": "tiny", "progress": False, "dtype": "bfloat16", "max_tokens_per_shard": 36}
    record(tiny_language("GPT2Model"), source, tmp_path, part=(0, 2), **options)
    assert "is writing here" in str(heard[0])
    assert "when it has ended, the same call records what is left" in str(heard[0])
    dump(tmp_path, part=(1, 2))
    dump(tmp_path / "alone")
    assert content(tmp_path / "alone") == {
        name: data for name, data in content(tmp_path).items() if "alone" not in name
    }


def test_overlapping_ranks_do_not_write_one_shard(tmp_path: Path) -> None:
    """Another rank records a shard that this one would have come to: this one stops, and the shard stays as it is."""

    class Overtaken(Texts):
        def batches(self, start: int, end: int):
            for number, batch in enumerate(super().batches(start, end)):
                if number == 1:
                    dump(tmp_path, part=(2, 7))
                yield batch

    source = Overtaken(DOCUMENTS, context=5, bos=1, batch_size=4)
    options = {"layers": (2, 0), "ckpt": "tiny", "progress": False, "dtype": "bfloat16", "max_tokens_per_shard": 36}
    with pytest.raises(WriterConflictError, match="shard 2 was written by another process") as refused:
        record(tiny_language("GPT2Model"), source, tmp_path, part=(0, 1), **options)
    assert "the same call records what is left" in str(refused.value)
    (there,) = tmp_path.glob("*/acts000002.bin")
    before = there.stat()
    dump(tmp_path, part=(0, 1))
    assert there.stat().st_mtime_ns == before.st_mtime_ns
    dump(tmp_path / "alone")
    assert content(tmp_path / "alone") == {
        name: data for name, data in content(tmp_path).items() if "alone" not in name
    }


def test_processes_without_parts_hear_of_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    whole = dump(tmp_path / "whole")  # no part: all of it
    with (
        pytest.raises(IncompleteStoreError),
        ShardStore.create(tmp_path, whole.metadata, progress=False),
        pytest.raises(WriterConflictError, match="pass part='auto'"),
    ):
        dump(tmp_path)


def test_a_rank_on_another_machine_is_refused_by_the_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last example of its own shards that is there is computed again."""
    from saev_store.record import _identity

    monkeypatch.setattr(_identity, "weights_digest", lambda model: "0" * 32)
    dump(tmp_path, part=(0, 4))
    other = tiny_language("GPT2Model")
    with torch.no_grad():
        other.wpe.weight += 1e-3
    with pytest.raises(ResumeError, match="is not what the model gives now"):
        dump(tmp_path, model=other, part=(0, 2))
    assert isinstance(dump(tmp_path, model=other, part=(0, 2), recheck="off"), RecordedPart)


# -- publication -------------------------------------------------------------------------------------------------------


def killed_before_publishing(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All parts are recorded, and nobody has published the store."""

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    dump(root, part=(0, 2))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_ranks, "publish", fail)
        dump(root, part=(1, 2))
    (folder,) = (path for path in root.iterdir() if path.name != ".saev_store")
    assert not (folder / "metadata.json").exists()
    return folder


def test_finalize_says_what_is_missing_and_publishes(tmp_path: Path) -> None:
    done = dump(tmp_path, part=(1, 4))
    assert (done.missing, done.ranks_left) == (((0, 3), (9, 19)), (0, 2, 3))
    with pytest.raises(
        IncompleteStoreError, match=r"13 of 19 examples are not recorded, as whole shards: 0 to 2, 9 to 18"
    ):
        finalize(done.url)
    dump(tmp_path, part=(0, 1))
    store = finalize(done.url)  # it is published
    assert store.url == done.url
    with pytest.raises(NotFoundError, match="no recording was begun there"):
        finalize(tmp_path / "nowhere")


def test_finalize_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = killed_before_publishing(tmp_path / "a", monkeypatch)
    with pytest.raises(NotFoundError, match=f"below it are the unfinished stores {folder.name}"):
        finalize(tmp_path / "a")
    finalize(folder)
    dump(tmp_path / "b")
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_a_rank_that_has_nothing_to_do_publishes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_before_publishing(tmp_path / "a", monkeypatch)
    dump(tmp_path / "a", part=(0, 7))
    dump(tmp_path / "b")
    assert content(tmp_path / "a") == content(tmp_path / "b")


@pytest.mark.parametrize("part", [(0,), (2, 2), (-1, 2), (0, 0), (True, 2), ("0", "2"), "1/2", 3, (0, 1, 2), [0, 2]])
def test_parts_that_are_none(part: object, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="part is .*; it must be") as refused:
        dump(tmp_path, part=part)
    assert refused.value.where == "part"
    assert not list(tmp_path.iterdir())
