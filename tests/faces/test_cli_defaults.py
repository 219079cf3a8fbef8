"""What the library gets of a command without options, and which of its errors the command names otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from command_calls import DONE, Calls, end

from saev_store import ShardStore, new_metadata
from saev_store.cli import main
from saev_store.errors import ArgumentError

DATA = Path(__file__).parents[1] / "data"
DOCUMENTS = DATA / "mmididx" / "core_seed_example_3_4_2_int32" / "data.idx"
SAMPLES = DATA / "energon" / "captioning_ratio_split" / "dataset"
TEXTS = ("--model", "m", "--to", "memory://to", "--layers", "3", "--text", "a.txt", "--context", "4")
IMAGES = ("--model", "m", "--to", "memory://to", "--layers", "3", "--images", "photos")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    metadata = new_metadata(
        family="clip", ckpt="tiny", layers=[2, 5], content_tokens_per_example=3, cls_token=True, d_model=4, n_examples=7,
        max_tokens_per_shard=24, dataset="pictures",
    )  # fmt: skip
    acts = np.random.default_rng(0).standard_normal((7, 2, 4, 4)).astype(np.float32)
    with ShardStore.create(tmp_path / "stores", metadata, progress=False) as writer:
        writer.append(acts)
    return ShardStore.open(writer.url)


# -- defaults -----------------------------------------------------------------------------------------------------------


def test_copy(calls: Calls) -> None:
    calls.catch_at("saev_store.writer.copy_store")
    assert main(["copy", "memory://from", "memory://to"]) == DONE
    (found,) = calls.found
    assert {name: value for name, value in found.items() if value is not None} == {
        "src": "memory://from", "dst": "memory://to", "tokens": "all", "on_overflow": "raise", "resume": True,
    }  # fmt: skip


def test_import(calls: Calls) -> None:
    calls.catch_at("saev_store.sources.caches.import_cache")
    assert main(["import", "memory://cache", "--to", "memory://to", "--family", "f"]) == DONE
    (found,) = calls.found
    assert {name: value for name, value in found.items() if value is not None} == {
        "url": "memory://cache", "root": "memory://to", "family": "f", "resume": True,
        "verify": True, "on_nonfinite": "raise", "on_overflow": "raise",
    }  # fmt: skip


def test_convert(calls: Calls) -> None:
    calls.catch_at("saev_store.sources.convert.documents_to_batches")
    calls.catch_at("saev_store.sources.convert.samples_to_documents")
    batches = ("memory://to/x.batch", "--seq-len", "3", "--batch-size", "2")
    assert main(["convert", str(DOCUMENTS), *batches]) == DONE
    assert main(["convert", str(SAMPLES), "memory://to/x.idx", "--tokenizer", "bytes"]) == DONE
    of_documents, of_texts = calls.found
    assert of_documents.pop("source").url == str(DOCUMENTS)
    assert {name: value for name, value in of_documents.items() if value is not None} == {
        "output_path": "memory://to/x.batch", "seq_len": 3, "batch_size": 2, "seed": 0, "overwrite": False, "verify": True,
    }  # fmt: skip
    source = of_texts.pop("source")
    assert len(source) == sum(len(source.split(name)) for name in source.splits)
    assert of_texts.pop("tokenizer")("a") == [97]
    assert {name: value for name, value in of_texts.items() if value is not None} == {
        "output_path": "memory://to/x.idx", "part": "txt", "dtype": "int32", "overwrite": False, "verify": True,
    }  # fmt: skip


def test_stats_and_validate(calls: Calls, store: ShardStore) -> None:
    calls.catch(ShardStore, "stats")
    calls.catch(ShardStore, "validate")
    assert main(["stats", store.url]) == DONE
    assert main(["validate", store.url]) == DONE
    for found in calls.found:
        found.pop("self")
    assert calls.found == [
        {"sample": None, "seed": 0, "client": None, "refresh": False, "save": True, "progress": None},
        {"deep": False, "client": None, "progress": None},
    ]


def test_head(capsys: pytest.CaptureFixture[str], store: ShardStore) -> None:
    assert main(["head", store.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["url"], found["layer"], found["tokens"]) == (store.url, 2, "all")
    assert [(row["example_idx"], row["token_idx"]) for row in found["vectors"]] == [
        (0, -1), (0, 0), (0, 1), (0, 2), (1, -1),
    ]  # fmt: skip
    np.testing.assert_array_equal([row["values"] for row in found["vectors"]], store[:2, 0].reshape(-1, 4)[:5])


def test_prepare_and_demo(calls: Calls, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    calls.catch_at("saev_store.sources.energon.prepare.prepare")
    calls.catch_at("saev_store.record.run_demo")
    assert main(["prepare", str(tmp_path), "--split", "8,1,1"]) == DONE
    assert main(["demo"]) == DONE
    prepared, demo = calls.found
    prepared.pop("transport")
    assert {name: value for name, value in prepared.items() if value is not None} == {
        "url": str(tmp_path), "split": "8,1,1", "split_parts": (), "overwrite": False,
    }  # fmt: skip
    assert {name: value for name, value in demo.items() if name != "say" and value is not None} == {
        "out": Path("saev-demo")
    }


def test_record(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("saev_store.cli.recording.load", lambda *_, **__: ("the model", "the source"))
    calls.catch_at("saev_store.record.record")
    calls.catch_at("saev_store.record.estimate_recording")
    assert main(["record", *TEXTS]) == DONE
    assert main(["record", *TEXTS, "--dry-run"]) == DONE
    recorded, estimated = calls.found
    assert callable(recorded.pop("on_report"))
    common = {
        "model": "the model", "source": "the source", "root": "memory://to", "layers": [3], "hook_points": ["resid_post"],
        "ckpt": "m", "dataset": "a.txt",
    }  # fmt: skip
    assert {name: value for name, value in estimated.items() if value is not None} == common
    assert {name: value for name, value in recorded.items() if value is not None} == {
        **common, "resume": True, "exist_ok": True, "on_nonfinite": "raise",
    }  # fmt: skip


def test_record_texts(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    calls.catch_at("saev_store.sources.TextFile", then=lambda: "the file")
    calls.catch_at("saev_store.record.load_language_model", then=lambda: ("the model", "the tokenizer"))
    calls.catch_at("saev_store.record.Texts", then=lambda: None)
    monkeypatch.setattr("saev_store.cli.recording._run", lambda *_, **__: end())
    assert main(["record", *TEXTS]) == DONE
    _, file, model, texts = calls.found
    assert file == {"url": "a.txt", "text_key": "text"}
    assert [*model.values()] == ["m", None, True, "auto", None, None]
    assert texts == {
        "documents": "the file", "tokenizer": "the tokenizer", "context": 4, "layout": "window", "bos": "tokenizer", "pack": False,
        "batch_size": 8, "example_tokens": None, "text_key": "text",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "bos", "needs_tokenizer"),
    [("--text", "7", True), ("--text", "none", True), ("--tokens", None, True), ("--tokens", "7", False), ("--tokens", "none", False)],
)  # fmt: skip
def test_which_recordings_need_a_tokenizer(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, source: str, bos: str | None, needs_tokenizer: bool
) -> None:
    pytest.importorskip("torch")
    opened: list[str] = []
    monkeypatch.setattr("saev_store.sources.TextFile", lambda url, **_: opened.append(url))
    monkeypatch.setattr("saev_store.sources.open_source", opened.append)
    calls.catch_at("saev_store.record.Texts", then=lambda: None)
    calls.catch_at("saev_store.record.load_language_model")
    arguments = ["--model", "m", "--to", "memory://to", "--layers", "3", "--context", "4", source, "a"]
    assert main(["record", *arguments, *(() if bos is None else ("--bos", bos))]) == DONE
    assert opened == ["a"]
    assert calls.found[0]["bos"] == {None: "tokenizer", "7": 7, "none": None}[bos]
    assert calls.found[-1]["needs_tokenizer"] is needs_tokenizer


def test_record_images(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    calls.catch_at("saev_store.record.load_image_processor", then=lambda: "the processor")
    calls.catch_at("saev_store.record.load_vision_model", then=lambda: "the model")
    calls.catch_at("saev_store.record.Images", then=lambda: None)
    monkeypatch.setattr("saev_store.cli.recording._run", lambda *_, **__: end())
    assert main(["record", *IMAGES]) == DONE
    processor, images, model = calls.found
    assert [*processor.values()] == ["m", None]
    assert images == {
        "images": "photos", "batch_size": 32, "processor": "the processor", "masks": None, "image_key": None, "on_bad_image": "raise",
    }  # fmt: skip
    assert [*model.values()] == ["m", "auto", None, None]


# -- errors of the library ----------------------------------------------------------------------------------------------


def raises(error: Exception) -> Callable[..., NoReturn]:
    def function(*_: object, **__: object) -> NoReturn:
        raise error

    return function


@pytest.mark.parametrize("where", ["acts", "array", "layers"])
def test_an_error_of_the_array_names_the_cache(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(
        "saev_store.sources.caches.import_cache", raises(ArgumentError("it is wrong", where=where, remedy="Mend it."))
    )
    assert main(["import", "memory://cache", "--to", "memory://to", "--family", "f"]) == 2
    named = "--layers" if where == "layers" else "memory://cache"
    assert capsys.readouterr().err == f"error: {named}: it is wrong. Mend it.\n"


@pytest.mark.parametrize("call", ["load", "record", "estimate_recording"])
@pytest.mark.parametrize("where", ["documents", "source", "inputs", "device"])
@pytest.mark.parametrize(("option", "value"), [("--text", "a.txt"), ("--tokens", "b.idx"), ("--images", "photos")])
def test_an_error_of_the_source_names_the_option_or_the_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, call: str, where: str, option: str, value: str
) -> None:
    pytest.importorskip("torch")
    error = raises(ArgumentError("it is wrong", where=where))
    if call == "load":
        monkeypatch.setattr("saev_store.cli.recording._load_texts", error)
        monkeypatch.setattr("saev_store.cli.recording._load_images", error)
    else:
        monkeypatch.setattr("saev_store.cli.recording.load", lambda *_, **__: (None, None))
        monkeypatch.setattr(f"saev_store.record.{call}", error)
    arguments = ["--model", "m", "--to", "memory://to", "--layers", "3", option, value]
    arguments += [] if option == "--images" else ["--context", "4"]
    assert main(["record", *arguments, *(["--dry-run"] if call == "estimate_recording" else [])]) == 2
    said = {"device": "--device: it is wrong"}.get(where, f"{value}: it is wrong")
    if (option, where) == ("--images", "inputs"):
        said = "--processor: it is wrong. Name the image processor of this model."
    assert capsys.readouterr().err == f"error: {said}\n"


# -- what is printed ----------------------------------------------------------------------------------------------------


def test_info_as_json(capsys: pytest.CaptureFixture[str], store: ShardStore) -> None:
    """7 examples x 2 layers x 4 tokens x 4 numbers; 3 examples of 8 vectors fill a shard."""
    assert main(["info", store.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "url": store.url, "name": store.name, "hash": store.name, "protocol": "2.0", "family": "clip", "ckpt": "tiny",
        "dataset": "pictures", "dims": ["example", "layer", "token", "d_model"], "shape": [7, 2, 4, 4], "dtype": "float32",
        "layers": [2, 5], "content_tokens_per_example": 3, "cls_token": True, "n_shards": 3, "examples_per_shard": 3, "nbytes": 896,
        "nbytes_by_dtype": {"float32": 896, "bfloat16": 448, "float16": 448}, "token_arrays": [], "labels": False,
        "engine": store.transport.name, "problems": [],
    }  # fmt: skip


def test_info_tells_labels_from_other_token_arrays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for names in (["mask"], ["mask", "labels"], ["labels"]):
        dtypes = {name: {"mask": "bool", "labels": "uint8"}[name] for name in names}
        metadata = new_metadata(
            family="gpt2", ckpt="x", layers=[0], content_tokens_per_example=3, cls_token=False, d_model=2, n_examples=4,
            token_arrays=dtypes, protocol="3.0",
        )  # fmt: skip
        with ShardStore.create(tmp_path, metadata, progress=False) as writer:
            writer.append(np.ones((4, 1, 3, 2), np.float32), **{name: np.ones((4, 3), dtypes[name]) for name in names})
        assert main(["info", writer.url, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["labels"] is ("labels" in names)
        assert {array["name"]: (array["dtype"], array["nbytes"]) for array in found["token_arrays"]} == {
            name: (dtypes[name], 12) for name in names
        }


def test_statistics_in_a_pipe_are_their_own_text(capsys: pytest.CaptureFixture[str], store: ShardStore) -> None:
    assert main(["stats", store.url, "--no-save"]) == 0
    shown = capsys.readouterr().out
    assert shown == f"{store.stats(save=False, progress=False)}\n"
    assert shown.splitlines()[-1] == "over 7 examples and 4 tokens"


@pytest.mark.parametrize("as_json", [False, True])
def test_an_address_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    store: ShardStore,
    tmp_path: Path,
    as_json: bool,
) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("saev_store.cli.documentation.files", lambda _: tmp_path)
    (tmp_path / "_site").mkdir()
    (tmp_path / "_site" / "index.html").touch()
    page = (tmp_path / "_site" / "index.html").as_uri()
    for command, address in ((["docs", "--no-open"], page),):
        assert main([*command, *(["--json"] if as_json else [])]) == 0
        shown = capsys.readouterr().out
        assert shown == (f'{{"url": "{address}"}}\n' if as_json else f"{address}\n")
    assert opened == []
    assert main(["docs", *(["--json"] if as_json else [])]) == 0
    assert opened == ([] if as_json else [page])
