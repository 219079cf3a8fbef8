"""`estimate_recording` and `saev-store record --dry-run`: what they say is what the finished store, its server and its disk show."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from servers import s3_bucket  # noqa: F401  # a fixture
from tiny_models import VOCABULARY, tiny_language, tiny_vision

from saev_store import ShardStore
from saev_store.cli import main
from saev_store.errors import ArgumentError
from saev_store.record import ImageBatches, Images, RecordingEstimate, Texts, _estimate, estimate_recording, record

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

PIXELS = np.random.default_rng(3).standard_normal((41, 3, 32, 32), dtype=np.float32)
LABELS = np.random.default_rng(4).integers(0, 9, (41, 16), dtype=np.uint8)
IDS = [np.random.default_rng(n).integers(3, VOCABULARY, n) for n in range(1, 30)]
OPTIONS = {"layers": (2, 0), "ckpt": "tiny", "max_tokens_per_shard": 17 * 2 * 8}
SOURCES: dict[str, Callable[[], object]] = {
    "images": lambda: Images(PIXELS, 2),
    "labelled": lambda: Images(PIXELS, 2, labels=LABELS),
    "batches": lambda: ImageBatches([PIXELS[i : i + 7] for i in range(0, 41, 7)], 41),
    "window": lambda: Texts(IDS, context=16, bos=1, batch_size=2),
    "packed": lambda: Texts(IDS, context=16, pack=True, batch_size=1),
    "stream": lambda: Texts(IDS, context=16, layout="stream", batch_size=2, example_tokens=12),
}


def model_for(kind: str) -> torch.nn.Module:
    return tiny_vision("ViTModel") if kind in {"images", "labelled", "batches"} else tiny_language("LlamaModel")


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", SOURCES)
def test_bytes_and_shards_are_those_of_the_finished_store(tmp_path: Path, kind: str, dtype: str) -> None:
    model, options = model_for(kind), OPTIONS | {"dtype": dtype}
    found = estimate_recording(model, SOURCES[kind](), tmp_path, **options)
    assert not any(tmp_path.iterdir())
    store = record(model, SOURCES[kind](), tmp_path, progress=False, **options)
    files = sizes(Path(store.url))
    shards = {name: nbytes for name, nbytes in files.items() if name.startswith("acts")}
    arrays = {name: nbytes for name, nbytes in files.items() if name.endswith(".bin") and name not in shards}
    assert (found.name, found.n_examples, found.n_shards) == (store.name, len(store), len(shards))
    assert (found.vectors_nbytes, found.token_arrays_nbytes) == (store.nbytes, sum(arrays.values()))
    assert found.n_requests is None
    assert found.fits
    assert found.model_s > 0 <= found.source_s
    assert found.seconds == max(found.model_s, found.source_s)
    # What is there is not needed again.
    again = estimate_recording(model, SOURCES[kind](), tmp_path, **options)
    assert again.there_nbytes == sum(path.stat().st_blocks * 512 for path in Path(store.url).iterdir())
    assert (found.there_nbytes, again.needed_nbytes) == (0, 0)
    assert found.needed_nbytes == store.nbytes + 2 * sum(arrays.values())


def test_only_the_batches_of_the_first_examples_run(tmp_path: Path) -> None:
    model, sizes_run = model_for("images"), list[int]()
    handle = model.register_forward_pre_hook(
        lambda _module, _args, kwargs: sizes_run.append(len(kwargs["pixel_values"])), with_kwargs=True
    )
    found = estimate_recording(model, Images(PIXELS, 4), tmp_path, n_examples=9, **OPTIONS)
    handle.remove()
    assert sizes_run == [4, 4, 4]
    assert found.n_measured == 12
    assert not model.training
    all_of_it = estimate_recording(model, Images(PIXELS, 41), tmp_path, n_examples=1000, **OPTIONS)
    assert all_of_it.n_measured == 41
    exactly = estimate_recording(model, Images(PIXELS, 4), tmp_path, n_examples=8, **OPTIONS)
    assert exactly.n_measured == 8


@pytest.mark.parametrize(
    ("batch_size", "n_examples", "source_s", "model_s"),
    [(4, 12, 1 / 4, 2 / 4), (4, 5, 1 / 4, 2 / 4), (8, 8, 100 / 8, 1000 / 8), (41, 1000, 100 / 41, 1000 / 41)],
)
def test_the_first_batch_counts_only_where_it_is_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int, n_examples: int, source_s: float, model_s: float
) -> None:
    """By a clock on which the first batch takes 100 s in the source and 1000 s in the model, and each other one 1 s and 2 s."""
    now, steps = [0.0], iter([0.0, 100.0, 1000.0, *[0.0, 1.0, 2.0] * 20])

    def perf_counter() -> float:
        now[0] += next(steps)
        return now[0]

    monkeypatch.setattr(_estimate, "time", SimpleNamespace(perf_counter=perf_counter))
    found = estimate_recording(
        model_for("images"), Images(PIXELS, batch_size), tmp_path, n_examples=n_examples, **OPTIONS
    )
    assert found.source_s == pytest.approx(41 * source_s)
    assert found.model_s == pytest.approx(41 * model_s)


def test_memory_is_that_of_the_batches(tmp_path: Path) -> None:
    """Six batches of pixels; four of vectors, which are (4, 2, 17, 32) float32."""
    found = estimate_recording(model_for("images"), Images(PIXELS, 4), tmp_path, **OPTIONS)
    assert found.memory_nbytes == 6 * (4 * 3 * 32 * 32 * 4) + 4 * (4 * 2 * 17 * 32 * 4)


def test_what_is_there_is_what_takes_room_there(tmp_path: Path) -> None:
    """Not what links in the folder lead to."""
    arguments = model_for("images"), Images(PIXELS, 4), tmp_path
    folder = tmp_path / estimate_recording(*arguments, **OPTIONS).name
    (folder / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere").write_bytes(bytes(10 << 20))
    before = estimate_recording(*arguments, **OPTIONS).there_nbytes
    (folder / "deep/some").write_bytes(bytes(range(256)) * 4096)
    os.symlink(tmp_path / "elsewhere", folder / "link")
    assert 1 << 20 <= estimate_recording(*arguments, **OPTIONS).there_nbytes - before < 2 << 20


@pytest.mark.parametrize("n_free", [0, 10**15])
def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_free: int) -> None:
    usage = shutil.disk_usage(tmp_path)
    asked: list[Path] = []

    def disk_usage(path: Path) -> object:
        asked.append(path)
        return usage._replace(free=n_free)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    found = estimate_recording(model_for("images"), SOURCES["images"](), tmp_path / "to" / "be", **OPTIONS)
    assert asked == [tmp_path]  # the folder below it does not exist
    assert (found.fits, found.free_nbytes) == (n_free > 0, n_free)
    assert ("IT DOES NOT FIT" in str(found)) is not found.fits


@pytest.mark.parametrize("n_examples", [0, -1, True, 2.5])
def test_bad_numbers_of_examples(tmp_path: Path, n_examples: object) -> None:
    with pytest.raises(ArgumentError, match="n_examples"):
        estimate_recording(model_for("images"), SOURCES["images"](), tmp_path, n_examples=n_examples, **OPTIONS)


def test_an_estimate_as_text() -> None:
    found = RecordingEstimate(
        name="abc", n_examples=120_000, n_shards=34, vectors_nbytes=400 << 30, token_arrays_nbytes=1 << 30, n_requests=None,
        part=None, n_left=120_000, n_measured=32, model_s=22_320.0, source_s=540.0, memory_nbytes=1 << 30, there_nbytes=100 << 30, free_nbytes=302 << 30,
    )  # fmt: skip
    assert str(found).splitlines() == [
        "store      abc",
        "size       120,000 examples, 401.0 GiB in 34 shards",
        "time       6.2 h: 6.2 h in the model, beside it 540 s in the source; measured with 32 examples",
        "memory     1.0 GiB for batches",
        "disk       302.0 GiB needed, 302.0 GiB free: it fits",
    ]
    assert found.fits


# -- on the command line -----------------------------------------------------------------------------------------------


@pytest.fixture
def dry_run(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """The command on a model in a folder and a text: (exit code, standard output, standard error)."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    from saev_store.sources.mmididx import IndexedDatasetBuilder

    tiny_language("LlamaForCausalLM").save_pretrained(tmp_path / "model")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path / "model")
    with IndexedDatasetBuilder(tmp_path / "tokens", dtype=np.uint16) as builder:
        for document in IDS:
            builder.add_document(document)

    def call(*arguments: object) -> tuple[int, str, str]:
        given = [
            "--model", tmp_path / "model", "--tokens", tmp_path / "tokens.idx", "--context", 8, "--layers", 1, "--to",
            tmp_path / "out", "--no-progress", *arguments,
        ]  # fmt: skip
        code = main(["record", *map(str, given)])
        out, err = capfd.readouterr()
        return code, out, err

    capfd.readouterr()
    return call


def test_the_command_says_what_it_would_take(dry_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = dry_run("--dry-run", "--json")
    assert (code, err) == (0, "")
    assert not (tmp_path / "out").exists()
    found = json.loads(out)
    code, out, _ = dry_run()
    assert code == 0
    files = sizes(Path(out.strip()))
    assert Path(out.strip()).name == found["name"]
    assert found["n_shards"] == len([name for name in files if name.startswith("acts")])
    arrays = sum(nbytes for name, nbytes in files.items() if name.endswith(".bin") and not name.startswith("acts"))
    assert found["nbytes"] == ShardStore.open(out.strip()).nbytes + arrays
    assert found["fits"] is True
    assert found["seconds"] > 0
    code, out, _ = dry_run("--dry-run", "--context", "7")
    assert (code, "it fits" in out) == (0, True)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    code, out, _ = dry_run("--dry-run", "--context", "6")
    assert (code, "10 B free: IT DOES NOT FIT" in out) == (1, True)
    assert len(os.listdir(tmp_path / "out")) == 1
