"""The demo from end to end on a tiny model, and the parts of it that can be wrong on their own."""

from __future__ import annotations

import io
import itertools
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from saev_store import ShardStore
from saev_store.cli.recording import demo
from saev_store.errors import AccessError
from saev_store.problems import Problem
from saev_store.record import _demo_text, run_demo
from saev_store.record._demo_steps import say_checked, say_recorded, validate
from saev_store.record._demo_text import BOS, BOS_ID, TextDemoResult, run_text, tokenizer_of
from saev_store.record._fables import FABLES
from saev_store.record._photos import Photographs, draw, load_photographs, patch_colours, principal_colours, stitch
from saev_store.record._record import fill
from saev_store.record._report import RecordingReport
from saev_store.record._weights import hub_refusal, random_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("skimage")


def test_torch_random_state_of_the_caller_survives_a_random_model() -> None:
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first, second = (random_model(config, name="tiny", reason="test") for _ in range(2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert first.ckpt == second.ckpt
    assert not first.pretrained
    assert "random weights of seed 17 (test)" in first.note
    assert first.title == "tiny with random weights"
    others = [random_model(config, name="tiny", reason="test", dtype=torch.bfloat16)]
    config.num_hidden_layers = 2
    others.append(random_model(config, name="tiny", reason="test"))
    assert first.ckpt.startswith("tiny-random-")
    assert len({first.ckpt, *(other.ckpt for other in others)}) == 3
    assert others[0].model.dtype == torch.bfloat16
    assert not first.model.training


@pytest.mark.parametrize("wrong", [(0, 0), (0, 1), (8, 0), (8, 1)])
def test_the_largest_of_all_differences_is_told(wrong: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any batch and layer, not of the last one."""
    monkeypatch.setattr(_demo_text, "BATCH_SIZE", 8)
    kept = np.zeros((9, 2, 4, 5), np.float32)
    kept[wrong[0], wrong[1], 2, 3] = 0.5

    class Store:
        token_arrays: ClassVar = {"token_ids": np.ones((9, 3), np.int32), "mask": np.ones((9, 3), bool)}
        layers = (0, 1)

        def __len__(self) -> int:
            return 9

        def __getitem__(self, rows: slice) -> np.ndarray:
            return kept[rows]

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
            return SimpleNamespace(hidden_states=[torch.zeros(*input_ids.shape, 5)] * 3)

    assert _demo_text._compare(Store(), Network()) == (9 * 4 * 2, 0.0, 0.5)


def test_the_hub_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    released = threading.Event()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "model_info", lambda *_args, **_options: released.wait(30))
    assert "did not answer within 0.05 s" in hub_refusal(0.05)
    released.set()
    monkeypatch.setattr(huggingface_hub, "model_info", lambda *_args, **_options: None)
    assert hub_refusal(30) == ""

    def unreachable(name: str, *, timeout: float) -> None:
        assert (name, timeout) == ("facebook/dinov2-small", 30)
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "model_info", unreachable)
    assert hub_refusal(30) == "the hub cannot be reached: ConnectionError"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in hub_refusal(0.05)


def test_the_demo_on_a_tiny_model(tmp_path: Path) -> None:
    from PIL import Image

    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=56, patch_size=14
    )
    tiny = random_model(config, name="tiny", reason="test")
    lines: list[str] = []
    options = {"model": tiny, "layers": (0, 2), "n_photographs": 2, "tile_px": 56, "progress": False}
    result = run_demo(tmp_path / "out", say=lines.append, **options)
    assert result.ok
    assert result.shape == (12, 2, 17, 32)
    assert result.n_recorded == 12
    assert result.max_abs_diff == 0.0
    assert result.problems == ()
    store = ShardStore.open(result.store)
    assert result.n_checked == 12 * 2 * 17  # two batches, which are all of it
    assert result.max_abs == np.abs(store[:]).max()
    assert (result.n_shards, result.nbytes, result.n_examples, result.n_photographs) == (3, store.nbytes, 12, 2)
    assert (result.ckpt, result.weights) == (tiny.ckpt, tiny.note)
    assert set(result.read_bytes_per_s) == {"mmap", "fsspec"}
    largest = result.max_abs
    for changes, is_ok in (
        ({"problems": ("a shard is missing",)}, False),
        ({"engines_equal": False}, False),
        ({"max_abs_diff": 0.0099 * largest}, True),
        ({"max_abs_diff": 0.0101 * largest}, False),
        ({"text": replace(result.text, text_equal=False)}, False),
    ):
        assert replace(result, **changes).ok is is_ok, changes
    assert store.layout.n_shards == 3
    assert store.labels is not None
    assert int(store.labels.max()) < 8
    with Image.open(result.picture) as picture:
        assert picture.format == "PNG"
        assert picture.width > picture.height // 2
    text = "\n".join(lines)
    for word in (
        "random weights of seed 17",
        "recorded",
        "<ShardStore",
        "validated",
        "the same bytes",
        "bit for bit",
        "picture",
    ):
        assert word in text
    fields = json.loads(json.dumps(result.to_dict()))
    assert fields["ok"] is True
    assert fields["layers"] == [0, 2]
    assert fields["pretrained"] is False
    assert fields["text"]["ok"] is True

    again = run_demo(tmp_path / "out", say=lines.append, **options)
    assert again.ok
    assert again.n_recorded == again.text.n_recorded == 0
    assert "an earlier run finished this store" in "\n".join(lines)
    assert again.store == result.store


def test_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second with each look at it."""
    from saev_store.record import demo as module

    def filled(*args: object, **options: object) -> RecordingReport:
        fill(*args, **options)
        return RecordingReport(12, 0, 100, 5.0, 1.0, 0.5)

    text = TextDemoResult(
        store="", ckpt="", n_documents=1, n_tokens=1, n_examples=1, n_shards=1, nbytes=1, dtype="bfloat16", layers=(0,),
        shape=(1, 1, 1, 1), n_recorded=1, problems=(), text_equal=True, n_checked=1, max_abs=1.0, max_abs_diff=0.0,
    )  # fmt: skip
    monkeypatch.setattr(module, "fill", filled)
    monkeypatch.setattr(module, "run_text", lambda *_, **__: text)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    tiny = random_model(config, name="tiny", reason="test")
    result = run_demo(tmp_path, model=tiny, layers=(-1,), n_photographs=2, tile_px=28, progress=False)
    assert (result.n_recorded, result.forward_s, result.wait_s) == (
        12,
        3.5,
        1.5,
    )  # publication took a second of the wait
    assert result.write_bytes_per_s == result.nbytes
    assert result.read_bytes_per_s == dict.fromkeys(("mmap", "fsspec"), result.nbytes / 3)
    assert result.seconds == 2 + 2 + 2 * 2 * 3 + 1


def test_the_demo_records_a_text(tmp_path: Path) -> None:
    lines: list[str] = []
    result = run_text(tmp_path, device=None, progress=False, say=lines.append)
    assert result.ok
    assert (result.dtype, result.max_abs_diff, result.problems) == ("bfloat16", 0.0, ())
    assert result.n_recorded == result.n_examples
    assert result.n_shards > 1
    store = ShardStore.open(result.store)
    assert store.metadata.text is not None
    assert (store.metadata.text["layout"], store.metadata.text["bos"]) == ("window", True)
    is_token, documents = store.token_arrays["mask"], store.token_arrays["document_ids"]
    assert is_token.sum() == result.n_tokens
    assert result.n_checked == len(store.layers) * (result.n_tokens + len(store))
    # Each fable is its tokens, in the order of examples.
    tokenizer = tokenizer_of([text.replace("\n", " ") for text in FABLES.values()])
    assert tokenizer.token_to_id(BOS) == BOS_ID
    assert tokenizer.get_vocab_size() == 512
    for number, text in enumerate(FABLES.values()):
        ids = store.token_arrays["token_ids"][is_token & (documents == number)]
        assert tokenizer.decode(ids.tolist()).split() == text.split()
    said = "\n".join(lines)
    for words in (
        "random weights of seed 17",
        "12 fables",
        "the hidden_states of a fresh forward pass bit for bit",
        "the fables again",
    ):
        assert words in said


@pytest.mark.parametrize(
    "damage", [{"text_equal": False}, {"problems": ("a shard is missing",)}, {"max_abs_diff": 0.051}], ids=str
)
def test_a_text_store_that_is_wrong_is_not_ok(damage: dict) -> None:
    result = TextDemoResult(
        store="", ckpt="", n_documents=1, n_tokens=1, n_examples=1, n_shards=1, nbytes=1, dtype="bfloat16", layers=(0,),
        shape=(1, 1, 1, 1), n_recorded=1, problems=(), text_equal=True, n_checked=1, max_abs=1.0, max_abs_diff=0.0,
    )  # fmt: skip
    assert result.ok
    assert replace(result, max_abs_diff=0.049).ok
    assert not replace(result, **damage).ok


def test_tiles_fit_together_again() -> None:
    photographs = load_photographs(n=2, tile_px=56)
    whole = photographs.pixels.reshape(2, 8, 14, 12, 14, 3).astype(np.float32).mean(axis=(2, 4)) / 255
    np.testing.assert_allclose(stitch(patch_colours(photographs, 14)), whole, atol=1e-5)
    labels = photographs.luminance_steps(14)
    assert labels.dtype == np.uint8
    assert labels.shape == (12, 16)
    white = (whole @ np.array((0.2126, 0.7152, 0.0722))).max()
    assert int(labels.max()) == int(white * 255 / 256 * 8)
    flat = np.zeros((4, 28, 42, 3), np.uint8)
    flat[[0, 1, 2, 3], ..., [0, 1, 2, 2]] = 255
    flat[3] = 255
    steps = Photographs(flat, ("red", "green", "blue", "white"), 14).luminance_steps(14).reshape(4, 6)
    assert steps.tolist() == [[step] * 6 for step in (1, 5, 0, 7)]


class Fake:
    """A store of some length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return "<a store>"


@pytest.mark.parametrize(
    ("n_recorded", "said"),
    [
        (0, "recorded   nothing: an earlier run finished this store"),
        (10, "recorded   10 examples (1.0 kB) in 2.0 s, 5 examples/s; the model waited 50 % of the time for the source and 0 % for the writer"),
        (4, "recorded   4 examples (1.0 kB) in 2.0 s, 2 examples/s; the model waited 50 % of the time for the source and 0 % for the writer, after the 6 that an interrupted run had left"),
    ],
)  # fmt: skip
def test_what_a_run_says_that_it_has_recorded(n_recorded: int, said: str) -> None:
    lines: list[str] = []
    say_recorded(Fake(10), RecordingReport(n_recorded, 0, 1000, 2.0, 1.0, 0.0), lines.append)
    assert lines == [said, "<a store>"]


@pytest.mark.parametrize(
    ("difference", "verdict"), [(0.0, "bit for bit"), (0.01234, "up to 0.0123 (largest absolute difference)")]
)
def test_what_a_run_says_of_vectors(difference: float, verdict: str) -> None:
    lines: list[str] = []
    say_checked(12_345, difference, "others", lines.append)
    assert lines == [f"checked    12,345 vectors equal others {verdict}"]


def test_another_text_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(_demo_text, "_documents_of", lambda *_: ["another"])
    result = run_text(tmp_path, device=None, progress=False, say=lines.append)
    assert not result.text_equal
    assert not result.ok
    ids = ShardStore.open(result.store).token_arrays["token_ids"][4]
    text = tokenizer_of([text.replace("\n", " ") for text in FABLES.values()]).decode(ids.tolist())
    assert lines[-1] == f"decoded    the store's token ids: ANOTHER TEXT; example 4 begins {text[:48]!r}"
    assert result.max_abs == np.abs(ShardStore.open(result.store)[:]).max()


def test_what_validation_finds_counts_unless_it_is_only_worth_knowing() -> None:
    problems = [Problem("k", f"a {severity}", "f", severity=severity) for severity in ("error", "warning", "info")]
    asked: list[dict] = []
    lines: list[str] = []

    def looked_at(**how: object) -> SimpleNamespace:
        asked.append(how)
        return SimpleNamespace(problems=problems, elapsed_s=2.0)

    store = SimpleNamespace(validate=looked_at, nbytes=640_000_000)
    assert validate(store, lines.append, progress=False) == (tuple(map(str, problems[:2])), 2.0)
    assert asked == [{"deep": True, "progress": False}]
    found = "; ".join(map(str, problems[:2]))
    assert lines == [f"validated  320 MB/s, every byte against its digest: {found}"]
    problems.clear()
    assert validate(store, lines.append, progress=None)[0] == ()
    assert lines[1].endswith("every byte against its digest: no problems")


def test_the_picture_has_each_photograph_and_its_maps_in_a_row() -> None:
    """Of five photographs four; every cell is filled up to its corners, and nothing lies between the cells."""
    from PIL import Image

    level = np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1) * 40
    pixels = np.broadcast_to(level + np.array((0, 10, 20), np.uint8), (5, 28, 42, 3))
    photographs = Photographs(pixels, tuple("abcde"), 14)
    maps = {
        layer: np.broadcast_to(np.arange(5).reshape(5, 1, 1, 1) / 10 + layer / 100, (5, 2, 3, 3)).astype(np.float32)
        for layer in (7, 3)
    }
    png = draw(photographs, maps, title="A title", captions=["one", "two"])
    with Image.open(io.BytesIO(png)) as image:
        found = np.asarray(image).astype(int)
    assert found.shape == (28 + 84 + 4 * 290 + 28 + 6 + 2 * 26, 2 * 28 + 3 * 430 - 10, 3)
    for row in range(4):
        colours = [
            pixels[row, 0, 0].astype(int),
            *(np.full(3, int(float(maps[layer][row, 0, 0, 0]) * 255)) for layer in (7, 3)),
        ]
        for column, colour in enumerate(colours):
            left, top = 28 + column * 430, 112 + row * 290
            for y, x in ((1, 1), (278, 418), (1, 418), (278, 1), (140, 210)):
                assert np.abs(found[top + y, left + x] - colour).max() <= 1, (row, column, y, x)
            assert found[top + 140, left + 425].tolist() == [252, 251, 248]
            assert found[top + 285, left + 210].tolist() == [252, 251, 248]
    is_written = (found != [252, 251, 248]).any(axis=2)
    assert is_written[20:60].any()
    assert is_written[70:112, 28:200].any()
    assert is_written[-82:-60].any()
    assert is_written[-56:-34].any()
    one = draw(photographs, maps, title="", captions=[], n_rows=1)
    with Image.open(io.BytesIO(one)) as image:
        assert image.height == 28 + 84 + 290 + 34


def test_components_find_what_was_put_in() -> None:
    rng = np.random.default_rng(0)
    colours = rng.random((6, 16, 3)).astype(np.float32)
    strength = np.array((9.0, 3.0, 1.0))
    basis = np.linalg.qr(rng.standard_normal((20, 3)))[0]
    tokens = ((colours - colours.mean(axis=0)) * strength) @ basis.T + rng.standard_normal((1, 16, 20)) * 50
    found = principal_colours(tokens.astype(np.float32), colours)
    assert found.min() == 0.0
    assert found.max() == 1.0
    for channel in range(3):
        kept = (colours - colours.mean(axis=0))[..., channel]
        assert np.corrcoef(found[..., channel].ravel(), kept.ravel())[0, 1] > 0.9


@pytest.fixture
def command() -> typer.Typer:
    app = typer.Typer()
    app.command()(demo)
    return app


@pytest.mark.parametrize("damaged", [False, True])
def test_the_command_prints_json_and_exits_by_what_it_found(
    command: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, damaged: bool
) -> None:
    import dataclasses

    import saev_store.record

    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    tiny = random_model(config, name="tiny", reason="test")

    def small(out: Path, **options: object) -> object:
        result = run_demo(out, model=tiny, layers=(-1,), n_photographs=1, tile_px=28, **options)
        return dataclasses.replace(result, engines_equal=not damaged)

    monkeypatch.setattr(saev_store.record, "run_demo", small)
    result = CliRunner().invoke(command, ["--out", str(tmp_path), "--json"])
    assert result.exit_code == int(damaged)
    fields = json.loads(result.stdout)
    assert fields["ok"] is not damaged
    assert fields["layers"] == [-1]
    assert "bit for bit" in result.stderr


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for out in (file, file / "below"):
        with pytest.raises(AccessError, match="cannot be created or written"):
            run_demo(out)
