"""Which options the calls of recording hand on, and to what: each with a value of its own."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_models import VOCABULARY, tiny_language, tiny_vision

from saev_store import ShardStore, new_metadata
from saev_store.errors import AccessError, ArgumentError, DocumentError
from saev_store.record import (
    Images,
    Recorder,
    Texts,
    _demo_text,
    _estimate,
    _load,
    _ranks,
    _record,
    _repair,
    adapt,
    demo,
    estimate_recording,
    finalize,
    load_language_model,
    load_vision_model,
    record,
    repair,
)
from saev_store.record._record import describe, prepare
from saev_store.transport import open_transport

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IDS = np.random.default_rng(2).integers(3, VOCABULARY, (8, 5))
#: Two examples in a shard.
SHAPE = {"layers": (1, 0), "max_tokens_per_shard": 2 * 5 * 2, "dtype": "float16"}
NAMES = {"dataset": "/data/x", "family": "mine", "ckpt": "mine/1"}


class Caught(Exception):
    """What a call was given ends the test."""


class Catching:
    """Stands in the place of a function, and keeps what it is given."""

    def __init__(self) -> None:
        self.positional: tuple[object, ...] = ()
        self.named: dict[str, object] = {}

    def __call__(self, *positional: object, **named: object) -> None:
        self.positional, self.named = positional, named
        raise Caught


@pytest.fixture
def catch(monkeypatch: pytest.MonkeyPatch) -> Callable[[object, str], Catching]:
    def at(module: object, name: str) -> Catching:
        catching = Catching()
        monkeypatch.setattr(module, name, catching)
        return catching

    return at


def texts(**options: object) -> Texts:
    return Texts(IDS, **{"context": 5, "batch_size": 3} | options)


# -- record ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "handed"),
    [
        ({}, {"resume": True, "exist_ok": False, "on_nonfinite": "raise", "on_overflow": "raise", "progress": None}),
        (
            {"resume": True, "exist_ok": True, "on_nonfinite": "warn", "on_overflow": "saturate", "progress": False},
            {"resume": True, "exist_ok": True, "on_nonfinite": "warn", "on_overflow": "saturate", "progress": False},
        ),
        ({"resume": False, "on_nonfinite": "allow", "progress": True}, {"resume": False, "on_nonfinite": "allow", "progress": True}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("part", [None, (1, 2)])
def test_how_record_opens_a_store(tmp_path: Path, catch: Callable, given: dict, handed: dict, part: object) -> None:
    created = catch(_record, "create_store")
    model = tiny_language("LlamaModel")
    with pytest.raises(Caught):
        record(model, texts(), tmp_path, part=part, **SHAPE, **NAMES, **given)
    transport, metadata = created.positional
    assert transport.url == str(tmp_path)
    expected = describe(prepare(model, texts(), (1, 0)), texts(), dtype="float16", max_tokens_per_shard=20, **NAMES)
    assert metadata.hash == expected.hash
    assert created.named == created.named | handed
    assert created.named["part"] == part


def test_options_of_a_file_system_reach_it(catch: Callable) -> None:
    options, model = {"anon": True}, tiny_language("LlamaModel")
    calls = (
        (_record, lambda: record(model, texts(), "s3://b/x", storage_options=options, **SHAPE, **NAMES)),
        (_estimate, lambda: estimate_recording(model, texts(), "s3://b/x", storage_options=options, **SHAPE, **NAMES)),
        (_repair, lambda: repair(model, texts(), "s3://b/x", storage_options=options)),
        (_ranks, lambda: finalize("s3://b/x", storage_options=options)),
    )
    for module, call in calls:
        opened = catch(module, "open_transport")
        with pytest.raises(Caught):
            call()
        assert opened.positional == ("s3://b/x", options)


@pytest.mark.parametrize(
    ("part", "expected"), [(None, "cuda"), ((0, 1), "cuda"), ("auto", "cuda of this rank")]
)  # fmt: skip
def test_a_rank_that_the_environment_numbers_has_a_device_of_its_own(
    tmp_path: Path, catch: Callable, monkeypatch: pytest.MonkeyPatch, part: object, expected: str
) -> None:
    monkeypatch.setattr(_record, "this_device", lambda device: f"{device} of this rank")
    placed = catch(_record, "place")
    model = tiny_language("LlamaModel")
    with pytest.raises(Caught):
        record(model, texts(), tmp_path, device="cuda", part=part, **SHAPE, **NAMES)
    assert placed.positional == (model, expected)


def test_models_are_moved_to_the_device_of_the_call(tmp_path: Path, catch: Callable) -> None:
    model = tiny_language("LlamaModel")
    store = record(model, texts(), tmp_path, progress=False, **SHAPE, **NAMES)
    small = SimpleNamespace(model=tiny_vision("ViTModel"), note="", ckpt="x")
    for module, call, moved in (
        (_record, lambda: estimate_recording(model, texts(), tmp_path, device="meta", **SHAPE, **NAMES), model),
        (_record, lambda: repair(model, texts(), store.url, device="meta"), model),
        (demo, lambda: demo.run_demo(tmp_path, device="meta", model=small, n_photographs=1, tile_px=32), small.model),
    ):
        if module is demo:
            pytest.importorskip("skimage")
        placed = catch(module, "place")
        with pytest.raises(Caught):
            call()
        assert placed.positional == (moved, "meta")
    placed = catch(_demo_text, "place")
    with pytest.raises(Caught):
        _demo_text.run_text(tmp_path, device="meta", progress=False, say=lambda _: None)
    assert placed.positional[1] == "meta"


def test_how_the_text_of_the_demo_is_recorded(tmp_path: Path, catch: Callable) -> None:
    recorded = catch(_demo_text, "record")
    for progress in (True, None):
        with pytest.raises(Caught):
            _demo_text.run_text(tmp_path, device=None, progress=progress, say=lambda _: None)
        model, source, out = recorded.positional
        assert (type(model).__name__, source.context, source.bos, source.batch_size, out) == ("GPTNeoXModel", 64, 0, 8, tmp_path)  # fmt: skip
        named = recorded.named
        assert (named["layers"], named["max_tokens_per_shard"], named["dataset"]) == (
            (0, 2, 4),
            4096,
            "fables of Aesop",
        )
        assert (named["exist_ok"], named["recheck"], named["progress"]) == (True, "close", progress)
        assert named["ckpt"].startswith("gpt-neox-6-layers-random-")


# -- estimate_recording ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {}, {"hook_points": ("mlp_out", "resid_pre")}, {"dtype": "bfloat16"}, {"dataset": "/data/y"}, {"family": "other"},
        {"ckpt": "other"}, {"protocol": "3.0"}, {"max_tokens_per_shard": 10}, {"layers": (-1,)},
    ],
)  # fmt: skip
def test_an_estimate_is_of_the_store_of_the_same_arguments(tmp_path: Path, options: dict) -> None:
    model, given = tiny_language("LlamaModel"), SHAPE | NAMES | options
    found = estimate_recording(model, texts(), tmp_path, **given)
    layers, points = given.pop("layers"), given.pop("hook_points", ("resid_post",))
    expected = describe(prepare(model, texts(), layers, hook_points=points), texts(), **given)
    assert found.name == expected.hash
    assert (found.n_shards, found.n_left, found.part) == (expected.layout.n_shards, 8, None)


def test_what_is_left_of_a_part(tmp_path: Path) -> None:
    """Of four shards of two examples each rank of three has one or two."""
    model, options = tiny_language("LlamaModel"), SHAPE | NAMES

    def left() -> list[int]:
        parts = (None, (0, 3), (1, 3), (2, 3), (0, 1))
        found = [estimate_recording(model, texts(), tmp_path, part=part, **options) for part in parts]
        assert [one.part for one in found] == [*parts]
        return [one.n_left for one in found]

    before = left()
    assert (before[0], sum(before[1:4]), before[4]) == (8, 8, 8)
    assert sorted(before[1:4]) == [2, 2, 4]
    record(model, texts(), tmp_path, part=(1, 3), progress=False, **options)
    assert left() == [8 - before[2], before[1], 0, before[3], 8 - before[2]]
    record(model, texts(), tmp_path, part=(0, 1), progress=False, **options)
    assert left() == [0] * 5
    found = estimate_recording(model, texts(), tmp_path, **options)
    assert (found.model_s, found.source_s, found.n_measured) == (0.0, 0.0, 8)


# -- repair ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "handed"),
    [
        ({}, {"exact": True, "on_nonfinite": "raise", "on_overflow": "raise", "progress": None}),
        ({"recheck": "close", "on_nonfinite": "warn", "progress": False}, {"exact": False, "on_nonfinite": "warn", "progress": False}),
        ({"recheck": "off", "on_overflow": "saturate", "progress": True}, {"exact": False, "on_overflow": "saturate", "progress": True}),
    ],
)  # fmt: skip
def test_how_repair_opens_a_store(tmp_path: Path, catch: Callable, given: dict, handed: dict) -> None:
    model = tiny_language("LlamaModel")
    store = record(model, texts(), tmp_path, progress=False, **SHAPE, **NAMES)
    opened = catch(_repair, "open_repair")
    with pytest.raises(Caught):
        repair(model, texts(), store.url, **given)
    transport, metadata = opened.positional
    assert (transport.url, metadata.hash) == (store.url, store.name)
    assert opened.named == opened.named | handed | {"deep": True}


def test_how_repair_records_what_is_lost(tmp_path: Path, catch: Callable) -> None:
    model = tiny_language("LlamaModel")
    store = record(model, texts(), tmp_path, progress=False, **SHAPE, **NAMES)
    (Path(store.url) / "acts000002.bin").unlink()
    filled = catch(_repair, "fill_missing")
    for recheck, on_overflow in (("exact", "raise"), ("close", "saturate"), ("off", "raise")):
        with pytest.raises(Caught):
            repair(model, texts(), store.url, recheck=recheck, on_overflow=on_overflow, on_report=print, progress=False)
        named = filled.named
        assert (named["recheck"], named["saturate"]) == (recheck, on_overflow == "saturate")
        assert named["on_report"] is print
        writer = filled.positional[0]
        assert (writer.missing, writer.url) == ([range(4, 6)], store.url)


def test_reports_of_a_repair_count_all_ranges(tmp_path: Path) -> None:
    model, reports = tiny_language("LlamaModel"), []
    store = record(model, texts(), tmp_path, progress=False, **SHAPE, **NAMES)
    whole = store[:]
    for number in (0, 2):
        (Path(store.url) / f"acts00000{number}.bin").unlink()
    done = repair(model, texts(), store.url, progress=False, on_report=reports.append)
    # The example behind the first range is compared.
    assert all(report.n_examples + report.n_left == 4 for report in reports)
    assert (reports[0].n_examples, reports[-1].n_examples) == (0, 4)
    assert reports[-1].nbytes == 4 * store.layout.example_nbytes
    assert [(file.name, file.examples, file.identical) for file in done.files] == [
        ("acts000000.bin", ((0, 2),), True), ("acts000002.bin", ((4, 6),), True),
    ]  # fmt: skip
    assert done.store[:].tobytes() == whole.tobytes()


@pytest.mark.parametrize(
    ("missing", "recheck", "spans"),
    [
        ([(2, 4), (6, 8)], "exact", [(1, 2, 4), (6, 6, 8)]),
        ([(2, 4), (6, 8)], "off", [(2, 2, 4), (6, 6, 8)]),
        ([(0, 4), (6, 8)], "close", [(4, 5, 5), (0, 0, 4), (6, 6, 8)]),
        ([(0, 7)], "exact", [(7, 8, 8), (0, 0, 7)]),
        ([(0, 8)], "exact", [(0, 0, 8)]),
        ([(7, 8)], "exact", [(6, 7, 8)]),
        ([], "exact", []),
    ],
)
def test_which_example_is_compared(
    monkeypatch: pytest.MonkeyPatch, missing: list, recheck: str, spans: list[tuple[int, int, int]]
) -> None:
    """(first, the first that is lost, end) of each range that is read."""
    found: list[tuple[int, int, int]] = []

    def filled(_writer: object, _recorder: object, _source: object, span: tuple, *_: object, **named: object) -> object:
        found.append(span)
        assert named["recheck"] == recheck
        return named["before"]

    monkeypatch.setattr(_record, "_fill", filled)
    writer = SimpleNamespace(missing=[range(*some) for some in missing], complete=False, layout=None)
    _record.fill_missing(
        writer, None, None, range(8), store=None, work=None, recheck=recheck, saturate=False
    )  # fmt: skip
    assert found == spans


# -- the demo ----------------------------------------------------------------------------------------------------------


def test_the_demo_continues_what_an_earlier_run_has_begun(tmp_path: Path, catch: Callable) -> None:
    pytest.importorskip("skimage")
    created = catch(demo.ShardStore, "create")
    small = SimpleNamespace(model=tiny_vision("ViTModel"), note="", ckpt="x")
    for progress in (True, None):
        with pytest.raises(Caught):
            demo.run_demo(tmp_path, model=small, n_photographs=2, tile_px=32, layers=(0, 2), progress=progress)
        assert created.named == {"resume": True, "exist_ok": True, "progress": progress}
        out, metadata = created.positional
        assert (out, metadata.dataset, metadata.ckpt, metadata.layers) == (tmp_path, "skimage/data", "x", (0, 2))
        assert metadata.layout.examples_per_shard == 12 // 4 + 1
        assert metadata.data["tiles"] == [2, 3]
        assert metadata.data["titles"] == ["Chelsea the cat", "Eileen Collins"]
        assert metadata.data["tile_px"] == 32


def test_files_that_vanish_while_room_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(bytes(5000))
    whole, lstat = _estimate._used_nbytes(tmp_path), os.lstat

    def gone(path: str) -> object:
        if path.endswith("b"):
            raise FileNotFoundError(path)
        return lstat(path)

    monkeypatch.setattr(os, "lstat", gone)
    assert _estimate._used_nbytes(tmp_path) == whole * 2 // 3
    monkeypatch.setattr(os, "lstat", lambda path: SimpleNamespace(st_size=513))  # of a system without blocks
    assert _estimate._used_nbytes(tmp_path) == 3 * 1024
    assert _estimate._used_nbytes(tmp_path / "none") == 0
    monkeypatch.chdir(tmp_path)
    assert _estimate._free_nbytes(Path("to") / "be") > 0


# -- models from folders -----------------------------------------------------------------------------------------------


def test_how_models_are_loaded(catch: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_load, "_check_input", lambda *_: None)
    loaded = catch(transformers.AutoModel, "from_pretrained")
    always = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    for load in (load_language_model, load_vision_model):
        for given, handed in (
            ({}, {"dtype": "auto"}),
            ({"dtype": "bfloat16"}, {"dtype": "bfloat16"}),
            ({"attention": "eager"}, {"dtype": "auto", "attn_implementation": "eager"}),
        ):
            with pytest.raises(DocumentError):  # what is no error of a file is one of damaged files
                load("some/model", progress=False, **given)
            assert loaded.positional == ("some/model",)
            assert loaded.named == always | handed


def test_weights_of_another_size_than_the_configuration_says(tmp_path: Path) -> None:
    tiny_vision("ViTModel").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 64', '"intermediate_size": 48'))
    with pytest.raises(DocumentError) as caught:
        load_vision_model(str(tmp_path), progress=False)
    assert "has the shape (64,) in its files, and (48,) according to its config.json" in caught.value.message
    assert caught.value.where == str(tmp_path)
    assert caught.value.remedy == "Check that config.json belongs to these weights."


@pytest.mark.parametrize("is_terminal", [True, False])
def test_bars_are_shown_where_standard_error_is_a_terminal(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    shown: list[bool] = []
    real = _load._bars
    monkeypatch.setattr(_load, "_bars", lambda *, shown: real(shown=note(shown)))

    def note(value: bool) -> bool:
        shown.append(value)
        return value

    monkeypatch.setattr(_load.sys, "stderr", SimpleNamespace(isatty=lambda: is_terminal, write=len, flush=int))
    for progress in (None, True, False):
        with _load._loading("x", progress=progress):
            pass
    assert shown == [is_terminal, True, False]


# -- towers ------------------------------------------------------------------------------------------------------------


def test_the_towers_and_the_encoder_that_a_refusal_names_are_taken(tmp_path: Path) -> None:
    size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    both = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config=size | {"vocab_size": 20, "eos_token_id": 2}, vision_config=size | {"image_size": 8, "patch_size": 4}
        )
    )  # fmt: skip
    both.save_pretrained(tmp_path)
    loaded = load_vision_model(str(tmp_path), progress=False)
    assert "Vision" in type(loaded).__name__
    vision, text = adapt(both.vision_model), adapt(both.text_model)
    assert (len(vision.blocks), len(text.blocks), text.vocabulary_size) == (2, 2, 20)
    assert adapt(loaded).patch_px == (4, 4)
    store = record(
        vision, Images(np.zeros((2, 3, 8, 8), np.float32)), tmp_path / "a", layers=(1,), ckpt="x", progress=False
    )
    assert store.shape == (2, 1, 5, 8)
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=3, num_heads=2, vocab_size=61)
    encoder = transformers.T5Model(config).get_encoder()
    store = record(encoder, texts(), tmp_path / "b", layers=(2, 0), ckpt="x", progress=False)
    assert store.shape == (8, 2, 5, 8)
    assert isinstance(ShardStore.open(open_transport(store.url)), ShardStore)


# -- the demo's own looks ----------------------------------------------------------------------------------------------


def test_what_the_demo_uses_where_nothing_is_said(
    tmp_path: Path, catch: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("skimage")
    folder = catch(demo, "writable_folder")
    with pytest.raises(Caught):
        demo.run_demo()
    assert folder.positional == (Path("saev-demo"),)
    monkeypatch.setattr(demo, "writable_folder", lambda out: out)
    photographs = catch(demo, "load_photographs")
    with pytest.raises(Caught):
        demo.run_demo(tmp_path)
    assert photographs.named == {"n": 8, "tile_px": 224}
    monkeypatch.setattr(demo, "load_photographs", lambda **_: None)
    loaded = catch(demo, "load_model")
    with pytest.raises(Caught):
        demo.run_demo(tmp_path)
    assert (loaded.positional, loaded.named) == ((), {})


def test_a_folder_without_permission_and_a_model_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo.writable_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(AccessError) as caught:
        demo.writable_folder(tmp_path)
    assert caught.value.message == f"the folder cannot be created or written: {os.strerror(errno.EACCES)}"
    assert (caught.value.where, caught.value.remedy) == (str(tmp_path), "Choose another one.")
    with pytest.raises(ArgumentError, match="GPT2Model is no model of images") as refused:
        demo._patch_px(tiny_language("GPT2Model"))
    assert refused.value.where == "model"
    assert demo._patch_px(tiny_vision("ViTModel")) == 8


@pytest.mark.parametrize("wrong", [None, 0, 7])
def test_engines_that_read_other_bytes_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int | None
) -> None:
    """Also where only the first shard differs, or a number that is none."""
    metadata = new_metadata(
        family="vit",
        ckpt="x",
        layers=[0],
        content_tokens_per_example=2,
        cls_token=False,
        d_model=3,
        n_examples=8,
        max_tokens_per_shard=6,
    )
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(np.arange(48, dtype=np.float32).reshape(8, 1, 2, 3))
    store, opened = ShardStore.open(writer.url), ShardStore.open

    class Other:
        def __init__(self, inner: ShardStore) -> None:
            self.inner = inner

        def read(self, rows: slice, *, out: np.ndarray) -> None:
            self.inner.read(rows, out=out)
            if wrong is not None and rows.start <= wrong < rows.stop:
                out[wrong - rows.start, 0, 1, 2] = np.nan

    monkeypatch.setattr(
        demo.ShardStore, "open", lambda url, *, engine: Other(opened(url)) if engine == "fsspec" else opened(url)
    )
    speeds, equal = demo._read_back(store)
    assert {*speeds} == {"mmap", "fsspec"}
    assert bool(equal) is (wrong is None)


def test_the_largest_difference_of_the_first_and_last_batch_is_told() -> None:
    """And the largest number of a fresh pass: what a store has in between is not looked at."""
    model = tiny_vision("ViTModel")
    pixels = np.random.default_rng(0).standard_normal((19, 3, 32, 32)).astype(np.float32)
    with Recorder(model, (2, 0)) as recorder:
        batches = [recorder(pixels[first : first + 8]).numpy() for first in (0, 8, 16)]
    acts = np.concatenate(batches)
    largest = float(np.abs(np.concatenate([batches[0], batches[2]])).max())
    for first, last, expected in ((0.0, 0.0, 0.0), (0.5, 0.25, 0.5), (0.25, 0.5, 0.5), (-0.75, 0.0, 0.75)):
        kept = acts.copy()
        kept[3, 0, 4, 5] += first
        kept[18, 1, 0, 0] += last
        kept[9] += 100

        class Kept:
            layers = (2, 0)
            layout = SimpleNamespace(cls_token=True, vectors_per_example=2 * 17)

            def __getitem__(self, rows: slice, kept: np.ndarray = kept) -> np.ndarray:
                return kept[rows]

        n_checked, most, worst = demo._compare(Kept(), model, pixels)
        assert n_checked == (8 + 3) * 34
        assert most == pytest.approx(largest)
        assert worst == pytest.approx(expected, abs=1e-6)
