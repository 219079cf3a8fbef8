"""Recordings that were interrupted, killed, begun by other ranks or by another model: the same bytes, or a refusal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kill_children import content, ended, in_child, killed
from photographs import png, write_folder
from tiny_models import VOCABULARY, tiny_language, tiny_vision

from saev_store import ShardStore
from saev_store.errors import (
    ArgumentError,
    IncompleteStoreError,
    LayerNotFoundError,
    NotFoundError,
    ResumeError,
    SaevStoreWarning,
    StoreExistsError,
    WriterConflictError,
)
from saev_store.record import (
    HookPoint,
    Images,
    RecordedPart,
    TextAdapter,
    Texts,
    adapt,
    estimate_recording,
    finalize,
    record,
)
from saev_store.sources.mmididx import IndexedDatasetBuilder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

N_KILLS = int(os.environ.get("SAEV_STORE_KILLS", "3"))
N_EXAMPLES = 23
PIXELS = np.random.default_rng(1).standard_normal((N_EXAMPLES, 3, 32, 32), dtype=np.float32)
LABELS = np.arange(N_EXAMPLES * 16, dtype=np.uint8).reshape(-1, 16)
DOCUMENTS = [np.random.default_rng(4).integers(3, VOCABULARY, n) for n in (7, 1, 12, 5, 3, 9, 5, 11, 2, 6, 8)]
KINDS = ["images", "window", "stream"]
#: Batches do not divide shards; seven or eight shards.
BUDGETS = {"images": 3 * 17 * 2, "window": 3 * 6 * 2, "stream": 2 * 5 * 2}


def source_of(kind: str, **changes: object) -> object:
    if kind == "images":
        return Images(PIXELS, **({"batch_size": 4, "labels": LABELS} | changes))
    return Texts(DOCUMENTS, **({"context": 5, "layout": kind, "bos": 1, "batch_size": 4} | changes))


def model_of(kind: str) -> torch.nn.Module:
    return tiny_vision("Dinov2Model") if kind == "images" else tiny_language("GPT2Model")


def dump(root: object, kind: str = "window", model: object = None, source: object = None, **options: object) -> object:
    """A recording, of protocol 2.0 for images and of 3.0 for texts."""
    defaults = {"layers": (2, 0), "ckpt": "tiny", "progress": False, "max_tokens_per_shard": BUDGETS[kind]}
    defaults |= {} if kind == "images" else {"dtype": "bfloat16"}
    return record(model or model_of(kind), source or source_of(kind), root, **(defaults | options))


def named(kind: str = "window", model: object = None, source: object = None, **options: object) -> str:
    """The name of the store that `dump` makes."""
    defaults = {"layers": (2, 0), "ckpt": "tiny", "max_tokens_per_shard": BUDGETS[kind]}
    defaults |= {} if kind == "images" else {"dtype": "bfloat16"}
    return estimate_recording(
        model or model_of(kind), source or source_of(kind), "memory://", **(defaults | options)
    ).name


class Runs:
    """Counts the rows that a model runs, on its class: a hook would make it another recording."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        self.rows: list[int] = []
        cls = type(model_of(kind))
        forward = cls.forward

        def counted(*args: object, **keywords: object) -> object:
            self.rows.append(len(keywords["pixel_values" if kind == "images" else "input_ids"]))
            return forward(*args, **keywords)

        monkeypatch.setattr(cls, "forward", counted)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The files that one process writes, by kind."""
    found = {}
    for kind in KINDS:
        root = tmp_path_factory.mktemp(kind)
        store = dump(root, kind)
        assert store.layout.n_shards in {7, 8}
        assert store.metadata.protocol == ("2.0" if kind == "images" else "3.0")
        found[kind] = content(root)
    return found


def stopped(source: object, n_batches: int) -> object:
    """A source that somebody interrupts after so many batches of a call."""
    whole = source.batches

    def batches(start: int, end: int):
        for number, batch in enumerate(whole(start, end)):
            if number == n_batches:
                raise KeyboardInterrupt
            yield batch

    source.batches = batches
    return source


def begun(root: Path, whole: ShardStore, n_there: int, change: Callable = lambda acts: acts) -> None:
    """An unfinished store of the first examples of a recording, the last one maybe changed."""
    with pytest.raises(IncompleteStoreError), ShardStore.create(root, whole.metadata, progress=False) as writer:
        labels = {} if whole.labels is None else {"labels": whole.labels[:n_there]}
        arrays = {name: values[:n_there] for name, values in whole.token_arrays.items()} or labels
        writer.append(change(whole.read(slice(0, n_there), dtype="stored").copy()), **arrays)


# -- interruptions -----------------------------------------------------------------------------------------------------


def test_record_that_was_interrupted_continues_to_the_same_bytes(
    tmp_path: Path, alone: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in KINDS:
        runs = Runs(monkeypatch, kind)
        n_stops = 0
        while True:
            try:
                dump(tmp_path / kind, kind, source=stopped(source_of(kind), n_stops))
                break
            except KeyboardInterrupt:
                n_stops += 1
                assert n_stops < 20
        assert n_stops >= 1
        assert content(tmp_path / kind) == alone[kind]
        runs.rows.clear()
        with pytest.raises(StoreExistsError):
            dump(tmp_path / kind, kind)
        again = dump(tmp_path / kind, kind, exist_ok=True)
        assert content(tmp_path / kind) == alone[kind]
        assert again.validate(deep=True, progress=False).ok
        assert runs.rows == []


def test_record_after_errors_of_the_source_or_the_model_keeps_what_came_before(tmp_path: Path, alone: dict) -> None:
    class Stopping:
        def __init__(self, fail_at: int, error: BaseException) -> None:
            self.fail_at, self.error, self.asked = fail_at, error, list[int]()

        def __len__(self) -> int:
            return N_EXAMPLES

        def __getitem__(self, example: int) -> np.ndarray:
            self.asked.append(example)
            if example == self.fail_at:
                raise self.error
            return PIXELS[example]

    options = {"data": {"noise": 1}}
    whole = dump(tmp_path / "whole", "images", source=Images(Stopping(-1, OSError()), 4, labels=LABELS, **options))
    for fail_at in (1, 9, 22):
        with pytest.raises(KeyboardInterrupt):
            source = Images(Stopping(fail_at, KeyboardInterrupt()), 4, labels=LABELS, **options)
            dump(tmp_path / "cut", "images", source=source)
        with pytest.raises(IncompleteStoreError):
            ShardStore.open(tmp_path / "cut" / whole.name)
    data = Stopping(-1, OSError())
    dump(tmp_path / "cut", "images", source=Images(data, 4, labels=LABELS, **options))
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert min(data.asked[1:]) >= 12  # the first image has the shape; then come batches that are not wholly there


@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
def test_recordings_and_ranks_that_are_killed_end_with_the_same_bytes(tmp_path: Path) -> None:
    documents = [np.random.default_rng(n).integers(3, VOCABULARY, 1 + n % 60) for n in range(120)]

    def start(root: Path, part: tuple[int, int] | None) -> int:
        def work() -> None:
            torch.set_num_threads(1)  # torch's pool does not survive a fork
            source = Texts(documents, context=20, layout="stream", bos=1, batch_size=3)
            dump(root, "stream", source=source, max_tokens_per_shard=2 * 20 * 8, part=part, exist_ok=True)

        return in_child(work)

    tiny_language("GPT2Model")  # what children need is imported once
    began_s = time.monotonic()
    assert ended(start(tmp_path / "whole", None)) == 0
    whole_s, rng = time.monotonic() - began_s, np.random.default_rng(9)
    n_kills = n_stores = 0
    while n_kills < N_KILLS:
        root, n_ranks = tmp_path / f"cut{n_stores}", 1 if n_stores % 2 else 4
        children = [start(root, None if n_ranks == 1 else (rank, 4)) for rank in range(n_ranks)]
        time.sleep(whole_s * rng.uniform(0.1, 0.9))
        n_kills += killed(children.pop(int(rng.integers(n_ranks)))) == -9
        assert [ended(child) for child in children] == [0] * len(children)
        last = [start(root, (rank, 2)) for rank in range(2)] if n_ranks == 4 else [start(root, None)]
        assert [ended(child) for child in last] == [0] * len(last)
        # A kill within the publication may leave the file that was to become a document.
        left = {path: data for path, data in content(root).items() if ".saev_store" not in path}
        assert left == content(tmp_path / "whole")
        n_stores += 1


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_ranks_in_any_order_and_number_write_the_store_of_one_process(tmp_path: Path, alone: dict) -> None:
    orders = [
        ((1, 2), (0, 2)),
        ((3, 5), (1, 5), (0, 5), (2, 5), (4, 5)),
        ((1, 4), (2, 3), (0, 2), (1, 2)),
        ((1, 3), (0, 1)),
        ((1, 3), None),
        tuple((rank, 10) for rank in range(10)),
    ]
    for kind in KINDS:
        for number, parts in enumerate(orders if kind == "stream" else orders[1:4]):
            root = tmp_path / kind / str(number)
            for part in parts[:-1]:
                found = dump(root, kind, part=part, exist_ok=True)
                if isinstance(found, RecordedPart):
                    assert found.part == part
                    assert found.missing
            store = dump(root, kind, part=parts[-1], exist_ok=True)
            assert isinstance(store, ShardStore)
            assert content(root) == alone[kind]


def test_ranks_run_no_batch_twice_and_read_no_images_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, "images")
    dump(tmp_path, "images", part=(1, 4))  # the shards 2 and 3: examples 6 to 11
    assert runs.rows == [4, 4]  # the batches from 4 to 11
    runs.rows.clear()
    dump(tmp_path, "images", part=(0, 2))  # examples 0 to 5, and the batch of the last one that is there
    assert sum(runs.rows) <= 12
    runs.rows.clear()
    dump(tmp_path, "images", part=(0, 2))  # all of it is there
    assert sum(runs.rows) <= 4


def test_finalize_publishes_what_is_whole_and_names_what_is_missing(tmp_path: Path, alone: dict) -> None:
    part = dump(tmp_path, part=(0, 2))
    with pytest.raises(IncompleteStoreError):
        finalize(part.url)
    for where in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NotFoundError):
            finalize(where)
    store = dump(tmp_path, part=(1, 2))
    assert finalize(store.url).name == store.name
    assert content(tmp_path) == alone["window"]


def test_parts_that_are_none_are_refused(tmp_path: Path) -> None:
    for part in ((2, 2), (-1, 2), (0, 0), (0.0, 1), "auto", 3, [0, 1]):
        with pytest.raises(ArgumentError) as refused:
            dump(tmp_path, part=part)
        assert refused.value.where == "part"


def test_two_processes_with_one_part_do_not_write_the_same_shard(tmp_path: Path, alone: dict) -> None:
    heard: list[WriterConflictError] = []

    class Nosy(Texts):
        """While this source is read, another process records the same part."""

        def batches(self, start: int, end: int):
            for batch in super().batches(start, end):
                if not heard:
                    with pytest.raises(WriterConflictError) as error:
                        dump(tmp_path, part=(0, 2))
                    heard.append(error.value)
                yield batch

    dump(tmp_path, source=Nosy(DOCUMENTS, context=5, bos=1, batch_size=4), part=(0, 2))
    assert heard
    dump(tmp_path, part=(1, 2))
    assert content(tmp_path) == alone["window"]


# -- the identity ------------------------------------------------------------------------------------------------------


def words(vocabulary: str = "ab cd ef gh") -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(["?", *vocabulary.split()])}, unk_token="?")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


def changed_weight() -> torch.nn.Module:
    model = tiny_language("GPT2Model")
    with torch.no_grad():
        model.wpe.weight[3, 3] += 1e-3
    return model


def hooked() -> torch.nn.Module:
    model = tiny_language("GPT2Model")
    model.h[0].register_forward_hook(lambda _module, _args, _out: None)
    return model


def other_points(path: str, side: str = "output") -> TextAdapter:
    made = adapt(tiny_language("GPT2Model"))
    return TextAdapter(
        model=made.model, blocks=made.blocks, d_model=made.d_model, family="gpt2", keywords=True,
        points={"probe": HookPoint(path, side)},
    )  # fmt: skip


def test_another_model_source_or_call_is_another_recording_and_not_continued(tmp_path: Path) -> None:
    whole = dump(tmp_path / "whole")
    begun(tmp_path / "cut", whole, 4)
    before = content(tmp_path / "cut")
    probe = {"hook_points": ("probe",)}
    text = [" ".join(["ab", "cd", "gh"][: 1 + n % 3]) for n in range(9)]
    changes: dict[str, dict[str, object]] = {
        "a weight": {"model": changed_weight()},
        "the configuration": {"model": tiny_language("GPT2Model", layer_norm_epsilon=1e-3)},
        "a foreign hook": {"model": hooked()},
        "the dtype of computation": {"model": tiny_language("GPT2Model").bfloat16()},
        "the batch size": {"source": source_of("window", batch_size=5)},
        "the context": {"source": source_of("window", context=4)},
        "packing": {"source": source_of("window", pack=True)},
        "BOS": {"source": source_of("window", bos=2)},
        "the layout": {"source": source_of("stream")},
        "the tokens": {"source": Texts(DOCUMENTS[::-1], context=5, bos=1, batch_size=4)},
        "the tokenizer": {"source": Texts(text, words(), context=5)},
        "another tokenizer": {"source": Texts(text, words("ab cd ef gh ij"), context=5)},
        "the layers": {"layers": (0, 2)},
        "the hook point": {"hook_points": ("mlp_out",)},
        "a hook point elsewhere": {"model": other_points("mlp")} | probe,
        "a hook point yet elsewhere": {"model": other_points("mlp", "input")} | probe,
        "the dtype": {"dtype": "float16"},
        "the weights' name": {"ckpt": "other"},
    }
    names = {whole.name}
    for what, changed in changes.items():
        names.add(named(**changed))
        assert whole.name in names, what
    assert len(names) == len(changes) + 1
    dump(tmp_path / "cut", model=changed_weight())
    after = content(tmp_path / "cut")
    assert {name: after[name] for name in before} == before
    same = [
        {"model": tiny_language("GPT2LMHeadModel").transformer},
        {"model": tiny_language("GPT2Model").train()},
        {"source": Texts([document.tolist() for document in DOCUMENTS], context=5, bos=1, batch_size=4)},
    ]
    same[0]["model"].load_state_dict(tiny_language("GPT2Model").state_dict())
    assert {named(**unchanged) for unchanged in same} == {whole.name}


def test_other_processors_descriptions_or_folders_are_another_recording(tmp_path: Path) -> None:
    def processor(size: int = 32, **options: object) -> object:
        return transformers.ViTImageProcessorPil(size={"height": size, "width": size}, **options)

    pictures = [np.random.default_rng(i).integers(0, 256, (40, 40, 3), np.uint8) for i in range(N_EXAMPLES)]
    for name in ("a", "b"):
        write_folder(tmp_path / name, {f"{i}.png": png(picture) for i, picture in enumerate(pictures)})
        write_folder(
            tmp_path / f"masks {name}", {f"{i}.png": png(picture[..., 0]) for i, picture in enumerate(pictures)}
        )
    write_folder(tmp_path / "b", {"1.png": png(pictures[2])})
    write_folder(tmp_path / "masks b", {"1.png": png(pictures[2][..., 0])})
    described = {"data": {"split": "train"}}
    sources = [
        Images(pictures, 4, processor=processor()),
        Images(pictures, 4, processor=processor(image_mean=[0.4, 0.5, 0.5])),
        Images(pictures, 4, processor=processor(), **described),
        Images(pictures, 5, processor=processor()),
        Images(pictures, 4, processor=processor(), cls_token=False),
        *(Images(tmp_path / name, 4, processor=processor(), **data) for name in ("a", "b") for data in ({}, described)),
        *(Images(tmp_path / "a", 4, processor=processor(), masks=tmp_path / f"masks {name}") for name in ("a", "b")),
    ]
    model = model_of("images")
    assert len({named("images", model, source) for source in sources}) == len(sources)


class Packed(torch.nn.Module):
    """State that is not a tensor, as libraries that quantise keep it."""

    def get_extra_state(self) -> object:
        return {"scale": 1.0}


def test_tensors_of_modules_are_part_of_the_identity_and_packed_weights_are_refused(tmp_path: Path) -> None:
    def changed(change: Callable[[torch.nn.Module], None]) -> torch.nn.Module:
        model = tiny_language("GPT2Model")
        change(model.h[0])
        return model

    changes: list[Callable[[torch.nn.Module], None]] = [
        lambda _: None,
        lambda block: setattr(block, "table", torch.ones(2)),
        lambda block: setattr(block, "table", torch.zeros(2)),
        lambda block: block.register_buffer("more", torch.ones(1), persistent=False),
    ]
    assert len({named(model=changed(change)) for change in changes * 2}) == len(changes)
    wrong: list[Callable[[torch.nn.Module], None]] = [
        lambda block: setattr(block, "codes", torch.ones(2, 2).to_sparse()),
        lambda block: setattr(block, "codes", torch.empty(2, device="meta")),
        lambda block: setattr(block, "packed", Packed()),
    ]
    for change in wrong:
        with pytest.raises(ArgumentError) as refused:
            dump(tmp_path, model=changed(change))
        assert refused.value.where == "model"


def test_names_of_models_do_not_depend_on_the_folders_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {"a/run": "run", "b/run/checkpoint-7": "run/checkpoint-7", "c/models--lab--m/snapshots/1f": "lab/m"}
    for path, name in paths.items():
        (tmp_path / path).mkdir(parents=True)
        assert named(ckpt=str(tmp_path / path)) == named(ckpt=name)
    monkeypatch.chdir(tmp_path / "a")
    assert named(ckpt="run") == named(ckpt=str(tmp_path / "a/run"))
    model = tiny_language("GPT2Model")
    model.config._name_or_path = "gpt2"
    store = dump(tmp_path / "root", model=model, ckpt=None, family=None)
    assert (store.metadata.ckpt, store.metadata.family) == ("gpt2", "gpt2")


# -- the last kept example ---------------------------------------------------------------------------------------------


def scaled(factor: float) -> Callable:
    def change(acts: np.ndarray) -> np.ndarray:
        acts[-1] = (acts[-1].astype(np.float32) * factor).astype(acts.dtype)
        return acts

    return change


def test_a_kept_example_that_the_model_does_not_give_any_more_is_refused(tmp_path: Path) -> None:
    cases = [(kind, n, 1.5, "refused") for kind, n in (("images", 3), ("window", 6), ("stream", 2), ("stream", 4))]
    cases += [("images", 6, 1.009, "close"), ("images", 6, 0.98, "refused"), ("images", 6, 1.0, "exact")]
    wholes = {kind: dump(tmp_path / kind, kind) for kind in KINDS}
    for number, (kind, n_there, factor, accepted) in enumerate(cases):
        root, whole = tmp_path / str(number), wholes[kind]
        begun(root / "cut", whole, n_there, scaled(factor))
        for recheck in ("exact", "close"):
            if recheck == accepted:
                break
            with pytest.raises(ResumeError) as refused:
                dump(root / "cut", kind, recheck=recheck)
            assert whole.name in refused.value.where
            assert not list(root.glob("cut/*/metadata.json"))
        if accepted == "refused":
            continue
        store = dump(root / "cut", kind, recheck=accepted)
        assert len(store) == len(whole)
        assert (store[n_there - 1].tobytes() == whole[n_there - 1].tobytes()) is (factor == 1)


def test_kept_labels_that_the_source_does_not_give_any_more_are_refused(tmp_path: Path) -> None:
    """Of masks that a data set makes when it is asked nothing is known beforehand."""

    class Made:
        def __init__(self, plus: int) -> None:
            self.plus = plus

        def __len__(self) -> int:
            return N_EXAMPLES

        def __getitem__(self, sample: int) -> np.ndarray:
            return np.full((32, 32), sample + self.plus)

    def images(plus: int) -> Images:
        return Images(PIXELS, 4, masks=Made(plus))

    with pytest.raises(KeyboardInterrupt):
        dump(tmp_path, "images", source=stopped(images(0), 3))
    with pytest.raises(ResumeError):
        dump(tmp_path, "images", source=images(1))
    assert dump(tmp_path, "images", source=images(0)).labels[:, 0].tolist() == [*range(N_EXAMPLES)]


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_numbers_that_are_not_finite_are_refused_or_kept(tmp_path: Path) -> None:
    def broken() -> torch.nn.Module:
        model = tiny_language("GPT2Model")
        with torch.no_grad():
            model.h[0].mlp.c_proj.bias[3], model.h[0].mlp.c_proj.bias[5] = torch.nan, -torch.inf
        return model

    options = {"layers": (0,), "dtype": "float32"}
    with pytest.raises(ArgumentError) as refused:
        dump(tmp_path / "raise", model=broken(), **options)
    assert 'on_nonfinite="allow"' in refused.value.remedy
    whole = dump(tmp_path / "whole", model=broken(), on_nonfinite="allow", **options)
    finite = dump(tmp_path / "finite", **options)
    mask = np.asarray(whole.token_arrays["mask"][:], bool)
    content_acts, without = (found[:, 0, 1:][mask] for found in (whole[:], finite[:]))
    assert np.isnan(content_acts[:, 3]).all()
    assert np.isneginf(content_acts[:, 5]).all()
    np.testing.assert_array_equal(*(np.delete(found, (3, 5), axis=-1) for found in (content_acts, without)))
    with pytest.warns(SaevStoreWarning):
        dump(tmp_path / "warn", model=broken(), on_nonfinite="warn", **options)

    for recheck in ("exact", "close"):
        with pytest.raises(KeyboardInterrupt):
            source = stopped(source_of("window"), 2)
            dump(tmp_path / recheck, model=broken(), source=source, on_nonfinite="allow", **options)
        store = dump(tmp_path / recheck, model=broken(), on_nonfinite="allow", recheck=recheck, **options)
        assert store[:].tobytes() == whole[:].tobytes()


def test_numbers_that_the_dtype_cannot_hold_are_refused_or_saturated(tmp_path: Path) -> None:
    def huge() -> torch.nn.Module:
        model = tiny_language("GPT2Model")
        with torch.no_grad():
            model.h[0].mlp.c_proj.bias[3] = 1e6
        return model

    options = {"dtype": "float16", "layers": (0,)}
    with pytest.raises(ArgumentError):
        dump(tmp_path / "raise", model=huge(), **options)
    whole = dump(tmp_path / "whole", model=huge(), on_overflow="saturate", **options)
    begun(tmp_path / "cut", whole, 5)
    store = dump(tmp_path / "cut", model=huge(), on_overflow="saturate", **options)
    assert store[:].tobytes() == whole[:].tobytes()
    assert store[0, 0, 1, 3] == 65504.0
    double = tiny_language("GPT2Model").double()
    with pytest.raises(ArgumentError) as refused:
        dump(tmp_path / "double", model=double, dtype=None)
    assert refused.value.where == "dtype"
    assert dump(tmp_path / "double", model=double, dtype="float32").metadata.dtype == "float32"


class Upcasting(torch.nn.Module):
    """Parameters of half precision whose block computes in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding, self.block = torch.nn.Embedding(VOCABULARY, 8).half(), torch.nn.Identity()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.block(self.embedding(ids).float() * 1.001)


def test_a_model_that_computes_in_more_bits_is_not_rounded_unasked(tmp_path: Path) -> None:
    model = Upcasting()
    adapter = TextAdapter(model=model, blocks=[model.block], d_model=8, family="own")
    with pytest.raises(ArgumentError) as refused:
        dump(tmp_path, model=adapter, dtype=None, layers=(0,))
    assert refused.value.where == "dtype"
    for dtype in ("float32", "float16"):
        assert dump(tmp_path, model=adapter, dtype=dtype, layers=(0,)).metadata.dtype == dtype


# -- the call ----------------------------------------------------------------------------------------------------------


def test_record_refuses_wrong_arguments_before_anything_is_written(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"layers": (3,)}, LayerNotFoundError, "layers"),
        ({"device": "abacus"}, ArgumentError, "device"),
        ({"ckpt": None}, ArgumentError, "ckpt"),
        ({"hook_points": ("attn",)}, ArgumentError, "hook_points"),
        ({"recheck": "off"}, ArgumentError, "recheck"),
        ({"on_nonfinite": "ignore"}, ArgumentError, "on_nonfinite"),
        ({"max_tokens_per_shard": 3}, ArgumentError, "metadata"),
        ({"protocol": "2.0"}, ArgumentError, "protocol"),
    ]
    for changes, error, where in cases:
        with pytest.raises(error) as refused:
            dump(tmp_path, **changes)
        assert refused.value.where == where, changes
    assert not list(tmp_path.glob("*/metadata.json"))


def test_record_writes_each_protocol_version_with_the_same_bytes(tmp_path: Path) -> None:
    first = dump(tmp_path / "2.0", "images")
    for protocol in ("1.0.0", "2.1"):
        store = dump(tmp_path / protocol, "images", protocol=protocol)
        assert store.metadata.protocol == protocol
        assert store[:].tobytes() == first[:].tobytes()
        np.testing.assert_array_equal(store.labels, LABELS)
    half = dump(tmp_path / "half", "images", dtype="bfloat16")
    assert half.metadata.protocol == "3.0"
    assert half[:].tobytes() == torch.from_numpy(first[:]).bfloat16().float().numpy().tobytes()


def test_token_files_of_other_tokens_are_another_recording(tmp_path: Path) -> None:
    from saev_store.sources import open_source

    names = set()
    for plus in (0, 1):
        with IndexedDatasetBuilder(tmp_path / str(plus), dtype=np.uint16) as builder:
            for document in DOCUMENTS:
                builder.add_document(np.minimum(document + plus, VOCABULARY - 1))
        names.add(named(source=Texts(open_source(tmp_path / f"{plus}.idx"), context=5, bos=1)))
    assert len(names) == 2
