"""Every option of a command reaches the library: each is given another value than its default, and what arrives is compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from command_calls import DONE, Calls, end

from saev_store import ShardStore, new_metadata
from saev_store.cli import main
from saev_store.cli._common import check_destination
from saev_store.cli._run import app
from saev_store.errors import ArgumentError
from saev_store.sources import open_source
from saev_store.transport import LocalTransport as MmapTransport

STORAGE = ("--storage-options", '{"deep": {"a": [1]}}', "-o", "anon=true", "-o", "name=x=y")
STORAGE_FOUND = {"deep": {"a": [1]}, "anon": True, "name": "x=y"}
DST = ("--dst-storage-options", '{"b": 2}', "--dst-option", "c=3")
DST_FOUND = {"b": 2, "c": 3}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    metadata = new_metadata(
        family="clip", ckpt="tiny", layers=[2, 5], content_tokens_per_example=3, cls_token=True, d_model=4, n_examples=6,
        max_tokens_per_shard=24,
    )  # fmt: skip
    acts = np.random.default_rng(0).standard_normal((6, 2, 4, 4)).astype(np.float32)
    with ShardStore.create(tmp_path / "stores", metadata, progress=False) as writer:
        writer.append(acts)
    return ShardStore.open(writer.url)


def options_of(command: str) -> set[str]:
    """The options of a command, each by its first name, without those of all commands."""
    found = {parameter.opts[0] for parameter in app().commands[command].params if parameter.opts[0].startswith("-")}
    return found - {"--help", "--json"}


def check_all_are_given(command: str, arguments: tuple[str, ...], also: set[str] = frozenset()) -> None:
    names = {
        parameter.opts[0]: set(parameter.opts + parameter.secondary_opts)
        for parameter in app().commands[command].params
    }
    given = {name for name in options_of(command) if names[name] & {*arguments}}
    assert given | also == options_of(command)


# -- commands that write ------------------------------------------------------------------------------------------------


def test_copy(calls: Calls) -> None:
    arguments = (
        "--layers", "3:attn_out,-2", "--tokens", "content", "--protocol", "2.1", "--dtype", "float16", "--on-overflow", "warn",
        "--no-resume", "--max-mb-per-s", "2.5", "--max-requests-per-s", "7", "--scheduler", "tcp://h:1", "--no-progress",
        *STORAGE, *DST,
    )  # fmt: skip
    check_all_are_given("copy", arguments)
    calls.catch_at("saev_store.writer.copy_store")
    assert main(["copy", "memory://from", "memory://to", *arguments]) == DONE
    assert calls.found == [
        {
            "src": "memory://from", "dst": "memory://to", "layers": [(3, "attn_out"), -2], "tokens": "content",
            "protocol": "2.1", "dtype": "float16", "on_overflow": "warn", "resume": False, "max_mb_per_s": 2.5,
            "max_requests_per_s": 7.0, "client": "tcp://h:1", "progress": False, "storage_options": STORAGE_FOUND,
            "dst_storage_options": DST_FOUND,
        }
    ]  # fmt: skip


def test_import(calls: Calls) -> None:
    arguments = (
        "--to", "memory://to", "--family", "gpt2", "--ckpt", "own", "--format", "saelens", "--layers", "3,5:mlp_out",
        "--layer-ids", "4,9", "--context", "12", "--no-cls-token",
        "--dtype", "bfloat16", "--dataset", "pile", "--max-tokens-per-shard", "99", "--no-resume", "--no-verify",
        "--on-nonfinite", "allow", "--on-overflow", "saturate", "--no-progress", *STORAGE, *DST,
    )  # fmt: skip
    check_all_are_given("import", arguments)
    calls.catch_at("saev_store.sources.caches.import_cache")
    assert main(["import", "memory://cache", *arguments]) == DONE
    assert calls.found == [
        {
            "url": "memory://cache", "root": "memory://to", "format": "saelens", "family": "gpt2", "ckpt": "own",
            "layers": [3, (5, "mlp_out")], "layer_ids": [4, 9], "context": 12, "cls_token": False,
            "dtype": "bfloat16", "dataset": "pile", "max_tokens_per_shard": 99,
            "resume": False, "verify": False, "on_nonfinite": "allow", "on_overflow": "saturate", "progress": False,
            "storage_options": STORAGE_FOUND, "dst_storage_options": DST_FOUND,
        }
    ]  # fmt: skip
    assert main(["import", "memory://cache", "--to", "memory://to", "--family", "f", "--cls-token"]) == DONE
    assert (calls.found[1]["resume"], calls.found[1]["cls_token"], calls.found[1]["verify"]) == (True, True, True)


def test_clean(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        "saev_store.cli.writing.open_transport", lambda url, options, *, engine: opened.append((url, options, engine))
    )
    calls.catch_at("saev_store.writer.clean_leftovers")
    arguments = ("--dry-run", "--older-than", "1.5h", "--engine", "fsspec", *STORAGE)
    check_all_are_given("clean", arguments)
    assert main(["clean", "s3://lab", *arguments]) == DONE
    assert main(["clean", "s3://lab"]) == DONE
    assert opened == [("s3://lab", STORAGE_FOUND, "fsspec"), ("s3://lab", None, "auto")]
    assert [(call["dry_run"], call["older_than_s"]) for call in calls.found] == [(True, 5400.0), (False, 86400.0)]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("2m", 120), ("3h", 10800), ("2d", 172800), ("0", 0), ("0s", 0), ("0.5m", 30)]
)
def test_an_age_is_a_number_with_its_unit(calls: Calls, tmp_path: Path, text: str, seconds: float) -> None:
    calls.catch_at("saev_store.writer.clean_leftovers")
    assert main(["clean", str(tmp_path), "--older-than", text]) == DONE
    assert calls.found[0]["older_than_s"] == seconds


DATA = Path(__file__).parents[1] / "data"


def test_convert_documents(calls: Calls) -> None:
    source = DATA / "mmididx" / "core_seed_example_3_4_2_int32" / "data.idx"
    arguments = (
        "--seq-len", "3", "--batch-size", "2", "--seed", "5", "--pad-token", "8", "--end-token", "9", "--overwrite",
        "--no-verify", "--no-progress", *DST,
    )  # fmt: skip
    of_texts = {"--dtype", "--tokenizer", "--part", "--split"}
    check_all_are_given(
        "convert", arguments, also={*of_texts, "--storage-options", "-o", "--scheduler"} & options_of("convert")
    )
    calls.catch_at("saev_store.sources.convert.documents_to_batches")
    assert main(["convert", str(source), "memory://to/x.batch", *arguments]) == DONE
    found = calls.found[0]
    assert found.pop("source").format == "mmididx"
    found.pop("client", None)
    assert found == {
        "output_path": "memory://to/x.batch", "seq_len": 3, "batch_size": 2, "seed": 5, "pad_token": 8, "end_token": 9,
        "overwrite": True, "verify": False, "progress": False, "storage_options": DST_FOUND,
    }  # fmt: skip


@pytest.mark.parametrize(("end", "n_records"), [((), 3), (("--end-token", "0"), 4)])
def test_documents_that_just_fill_a_batch(calls: Calls, end: tuple[str, ...], n_records: int) -> None:
    """Nine tokens in three documents: three records of three tokens, with a token after each document four."""
    source = DATA / "mmididx" / "core_seed_example_3_4_2_int32" / "data.idx"
    calls.catch_at("saev_store.sources.convert.documents_to_batches")
    for batch_size, code in ((n_records, DONE), (n_records + 1, 2)):
        arguments = ["--seq-len", "3", "--batch-size", str(batch_size), *end]
        assert main(["convert", str(source), "memory://to/x.batch", *arguments]) == code
    for batch_size, code in ((3, DONE), (4, 2)):
        arguments = ["--seq-len", "99", "--batch-size", str(batch_size), "--pad-token", "0", *end]
        assert main(["convert", str(source), "memory://to/x.batch", *arguments]) == code


def test_convert_texts(calls: Calls) -> None:
    source = DATA / "energon" / "captioning_ratio_split" / "dataset"
    calls.catch_at("saev_store.sources.convert.samples_to_documents")
    arguments = (
        "--tokenizer", "bytes", "--part", "json[caption]", "--split", "train", "--dtype", "uint16", "--end-token", "9",
        "--overwrite", "--no-verify", "--no-progress", *DST,
    )  # fmt: skip
    assert main(["convert", str(source), "memory://to/x.idx", *arguments]) == DONE
    found = calls.found[0]
    given, tokenizer = found.pop("source"), found.pop("tokenizer")
    found.pop("client", None)
    assert len(given) == len(open_source(source).split("train")) < len(open_source(source))
    assert tokenizer("ü") == [0xC3, 0xBC]
    assert found == {
        "output_path": "memory://to/x.idx", "part": "json[caption]", "dtype": "uint16", "end_token": 9, "overwrite": True,
        "verify": False, "progress": False, "storage_options": DST_FOUND,
    }  # fmt: skip


def test_demo(calls: Calls, tmp_path: Path) -> None:
    arguments = ("--out", str(tmp_path / "x"), "--device", "cuda:1", "--no-progress")
    check_all_are_given("demo", arguments)
    calls.catch_at("saev_store.record.run_demo")
    assert main(["demo", *arguments]) == DONE
    calls.found[0].pop("say")
    assert calls.found == [{"out": tmp_path / "x", "device": "cuda:1", "progress": False}]


def test_prepare(calls: Calls, tmp_path: Path) -> None:
    arguments = (
        "--split-parts", "train:a.*", "--split-parts", "val:b", "--exclude", "c+", "--sample-type", "VQASample", "--field",
        "image=jpg", "--field-map", '{"caption": "txt", "image": "png"}', "--num-workers", "3", "--overwrite", "--no-progress",
    )  # fmt: skip
    check_all_are_given(
        "prepare",
        arguments,
        also={"--split", "--interactive", "--force-overwrite", "--storage-options", "-o", "--option"}
        & options_of("prepare"),
    )
    calls.catch_at("saev_store.sources.energon.prepare.prepare")
    assert main(["prepare", str(tmp_path), *arguments]) == DONE
    assert main(["prepare", str(tmp_path), "--split", "8,1,1"]) == DONE
    assert main(["prepare", str(tmp_path), "--split", "8,1,1", "--force-overwrite"]) == DONE
    found = calls.found[0]
    assert found.pop("transport").url == str(tmp_path)
    assert found == {
        "url": str(tmp_path), "split": None, "split_parts": ["train:a.*", "val:b"], "exclude": "c+", "sample_type": "VQASample",
        "field_map": {"caption": "txt", "image": "jpg"}, "num_workers": 3, "overwrite": True, "progress": False,
    }  # fmt: skip
    assert (calls.found[1]["split"], calls.found[1]["overwrite"], calls.found[1]["progress"]) == ("8,1,1", False, None)
    assert calls.found[2]["overwrite"] is True


# -- commands that read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["info", "estimate", "head", "validate", "stats", "repair"])
def test_the_store_is_opened_with_its_options(calls: Calls, command: str) -> None:
    calls.catch(ShardStore, "open")
    assert main([command, "memory://nowhere/x", *STORAGE]) == DONE
    found = calls.found[0]
    assert (found.get("url", found.get("root")), found["storage_options"]) == ("memory://nowhere/x", STORAGE_FOUND)
    # What does not read all of a store opens damaged ones, too.
    assert found.get("damaged_ok", False) is (command in {"info", "head", "validate", "repair"})


def test_ls_looks_at_the_folder_with_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For stores, for a data set there or in a folder above, and for the state of each store."""
    opened, listed = [], []

    def open_noted(url: str, options: object = None) -> MmapTransport:
        opened.append((url, options))
        return MmapTransport(tmp_path)

    def list_noted(url: str, options: object = None) -> object:
        listed.append((url, options))
        return list_stores(tmp_path)

    list_stores = ShardStore.list
    monkeypatch.setattr("saev_store.cli.ls.open_transport", open_noted)
    monkeypatch.setattr(ShardStore, "list", list_noted)
    assert main(["ls", "memory://nowhere/x", *STORAGE]) == 0
    assert listed == [("memory://nowhere/x", STORAGE_FOUND)]
    assert opened[0][0] == opened[-1][0] == "memory://nowhere/x"
    assert all(options == STORAGE_FOUND for _, options in opened)


def test_stats(calls: Calls, store: ShardStore) -> None:
    arguments = ("--sample", "5", "--seed", "3", "--scheduler", "tcp://h:1", "--refresh", "--no-save", "--no-progress")
    check_all_are_given("stats", arguments, also={"--storage-options", "-o"})
    calls.catch(ShardStore, "stats")
    assert main(["stats", store.url, *arguments]) == DONE
    calls.found[0].pop("self")
    assert calls.found == [
        {"sample": 5, "seed": 3, "client": "tcp://h:1", "refresh": True, "save": False, "progress": False}
    ]


def test_validate(calls: Calls, store: ShardStore) -> None:
    arguments = ("--deep", "--scheduler", "tcp://h:1", "--no-progress")
    check_all_are_given("validate", arguments, also={"--storage-options", "-o"})
    calls.catch(ShardStore, "validate")
    assert main(["validate", store.url, *arguments]) == DONE
    calls.found[0].pop("self")
    assert calls.found == [{"deep": True, "client": "tcp://h:1", "progress": False}]


def test_finalize(calls: Calls) -> None:
    pytest.importorskip("torch")
    check_all_are_given("finalize", STORAGE)
    calls.catch_at("saev_store.record.finalize")
    assert main(["finalize", "memory://x", *STORAGE]) == DONE
    assert main(["finalize", "memory://x"]) == DONE
    assert calls.found == [{"url": "memory://x", "storage_options": options} for options in (STORAGE_FOUND, None)]


# -- record and repair --------------------------------------------------------------------------------------------------

#: Options of both sources, and what the library gets of them.
RECORD = (
    "--layers", "3,-1", "--hook-points", "resid_pre,mlp_out", "--dtype", "float16", "--device", "cuda:1", "--max-tokens-per-shard",
    "99", "--on-nonfinite", "warn",
)  # fmt: skip
RECORD_FOUND = {
    "layers": [3, -1], "hook_points": ["resid_pre", "mlp_out"], "dtype": "float16", "device": "cuda:1",
    "max_tokens_per_shard": 99,
}  # fmt: skip
OF_TEXTS = (
    "--text", "a.jsonl", "--context", "16", "--layout", "stream", "--pack", "--bos", "7", "--example-tokens", "12", "--text-key",
    "content", "--tokenizer", "own", "--batch-size", "5", "--compute-dtype", "bfloat16", "--attention", "eager",
)  # fmt: skip


def test_record(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pair = object(), object()
    monkeypatch.setattr("saev_store.cli.recording.load", lambda *_, **__: pair)
    calls.catch_at("saev_store.record.record")
    calls.catch_at("saev_store.record.estimate_recording")
    arguments = ["--model", "m", "--to", "memory://to", *RECORD, *OF_TEXTS, "--part", "2/3", *STORAGE]
    assert main(["record", *arguments, "--no-resume", "--no-progress"]) == DONE
    assert main(["record", *arguments, "--resume"]) == DONE
    assert main(["record", *arguments, "--dry-run"]) == DONE
    common = {
        **RECORD_FOUND, "model": pair[0], "source": pair[1], "root": "memory://to", "ckpt": "m", "dataset": "a.jsonl", "part": (1, 3),
        "storage_options": STORAGE_FOUND,
    }  # fmt: skip
    for found in calls.found[:2]:
        found.pop("on_report")
    recorded = {**common, "exist_ok": True, "on_nonfinite": "warn"}
    assert calls.found[0] == {**recorded, "resume": False, "progress": False}
    assert calls.found[1] == {**recorded, "resume": True, "progress": None}
    assert calls.found[2] == common


def test_record_texts(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    calls.catch_at("saev_store.sources.TextFile", then=lambda: "the file")
    calls.catch_at("saev_store.record.load_language_model", then=lambda: ("the model", "the tokenizer"))
    calls.catch_at("saev_store.record.Texts", then=lambda: None)
    monkeypatch.setattr("saev_store.cli.recording._run", lambda *_, **__: end())
    arguments = ["--model", "m", "--to", "memory://to", *RECORD, *OF_TEXTS, "--no-progress"]
    assert main(["record", *arguments]) == DONE
    settings = {
        "context": 16, "layout": "stream", "bos": 7, "pack": True, "batch_size": 5, "example_tokens": 12, "text_key": "content",
    }  # fmt: skip
    tried, file, model, texts = calls.found
    assert tried == {"documents": [[0]], "tokenizer": None, **settings}
    assert file == {"url": "a.jsonl", "text_key": "content"}
    assert model.pop(next(iter(model))) == "m"
    assert model == {
        "tokenizer": "own", "needs_tokenizer": True, "dtype": "bfloat16", "attention": "eager", "progress": False,
    }  # fmt: skip
    assert texts == {"documents": "the file", "tokenizer": "the tokenizer", **settings}


def test_record_images(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    calls.catch_at("saev_store.record.load_image_processor", then=lambda: "the processor")
    calls.catch_at("saev_store.record.load_vision_model", then=lambda: "the model")

    class Source:
        format = "energon"

    class Made:
        source = Source()

    calls.catch_at("saev_store.record.Images", then=Made)
    monkeypatch.setattr("saev_store.cli.recording._run", lambda *_, **__: end())
    given = [
        "--model", "m", "--to", "memory://to", *RECORD, "--images", "memory://images", "--image-key", "png", "--masks",
        "memory://masks", "--on-bad-image", "skip", "--compute-dtype", "float16", "--attention", "eager", "--no-progress",
    ]  # fmt: skip
    assert main(["record", *given, "--processor", "own", "--batch-size", "5"]) == DONE
    assert main(["record", *given]) == DONE
    processor, images, model = calls.found[:3]
    assert [*processor.values()] == ["own", False]
    assert images == {
        "images": "memory://images", "batch_size": 5, "processor": "the processor", "masks": "memory://masks", "image_key": "png",
        "on_bad_image": "skip",
    }  # fmt: skip
    assert [*model.values()] == ["m", "float16", "eager", False]
    assert ([*calls.found[3].values()], calls.found[4]["batch_size"]) == (["m", False], 32)


def test_every_option_of_record_is_in_these_tests() -> None:
    of_images = {"--images", "--processor", "--image-key", "--masks", "--on-bad-image"}
    others = {
        "--config",
        "--model",
        "--tokens",
        "--to",
        "--resume",
        "--part",
        "--dry-run",
        "--progress",
        "--storage-options",
        "-o",
    }
    assert {*RECORD, *OF_TEXTS} & options_of("record") | of_images | others == options_of("record")


def test_repair(calls: Calls, store: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pair = object(), object()
    monkeypatch.setattr("saev_store.cli.repairing.load", lambda *_, **__: pair)
    calls.catch_at("saev_store.record.repair")
    texts = ["--model", "m", "--text", "a.txt", "--context", "4"]
    assert main(["repair", store.url, *texts, *RECORD, "--recheck", "close", "--no-progress"]) == DONE
    assert main(["repair", store.url, *texts]) == DONE
    given = {"model": pair[0], "source": pair[1], "url": store.url, "storage_options": None}
    assert calls.found[0] == {
        **given, **RECORD_FOUND, "recheck": "close", "on_nonfinite": "warn", "progress": False,
    }  # fmt: skip
    assert calls.found[1] == {
        **given, "layers": [*dict.fromkeys(store.layers)], "hook_points": [*dict.fromkeys(store.metadata.hook_points or ("resid_post",))],
        "dtype": store.layout.dtype, "max_tokens_per_shard": store.metadata.max_tokens_per_shard, "device": None,
        "recheck": "exact", "on_nonfinite": "raise", "progress": None,
    }  # fmt: skip


# -- what is printed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "continues"), [("copy", True), ("import", True), ("info", False), ("stats", False)]
)
def test_which_commands_continue(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: str, continues: bool
) -> None:
    def interrupted(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("saev_store.cli._run.app", lambda: interrupted)
    assert main([command, "x"]) == 130
    assert capfd.readouterr().err == ("interrupted; the same command continues\n" if continues else "interrupted\n")


@pytest.mark.parametrize(("fits", "code"), [(True, 0), (None, 0), (False, 1)])
def test_a_dry_run_fails_only_where_a_disk_is_too_small(
    monkeypatch: pytest.MonkeyPatch, fits: bool | None, code: int
) -> None:
    class Found:
        def __str__(self) -> str:
            return "the estimate"

    found = Found()
    found.fits = fits
    monkeypatch.setattr("saev_store.cli.recording.load", lambda *_, **__: (None, None))
    monkeypatch.setattr("saev_store.cli.recording._estimate", lambda *_: found)
    arguments = ["--model", "m", "--to", "memory://to", "--layers", "0", "--text", "a.txt", "--context", "4"]
    assert main(["record", *arguments, "--dry-run"]) == code


def test_numbers_are_float64_in_json(capsys: pytest.CaptureFixture[str], store: ShardStore) -> None:
    assert main(["head", store.url, "-n", "3", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["vectors"]
    rows = store.sel(layer=store.layout.layer_keys[0], tokens="all")
    for number, one in enumerate(shown):
        np.testing.assert_array_equal(np.float32(one["values"]), rows[number])
        assert one["norm"] == pytest.approx(float(np.linalg.norm(rows[number].astype(np.float64))), rel=1e-12)


@pytest.mark.parametrize(
    ("url", "is_right"), [("{}/x", True), ("file:{}/x", True), ("local:{}/x", True), ("s3:{}/x", False)]
)
def test_an_address_with_one_slash_is_a_mistake_unless_it_is_of_this_machine(
    tmp_path: Path, url: str, is_right: bool
) -> None:
    if is_right:
        check_destination(url.format(tmp_path), where="--to")
    else:
        with pytest.raises(ArgumentError, match="two slashes follow the colon"):
            check_destination(url.format(tmp_path), where="--to")


@pytest.mark.parametrize(
    ("raised", "named"),
    [("url", "--to"), ("storage_options", "--dst-storage-options"), ("engine", "engine"), (None, None)],
)
def test_an_error_of_a_destination_names_its_option(
    monkeypatch: pytest.MonkeyPatch, raised: str | None, named: str | None
) -> None:
    def refuse(url: str, options: object) -> NoReturn:
        assert (url, options) == ("s3://b/c", {"a": 1})
        raise ArgumentError("bad", where=raised)

    monkeypatch.setattr("saev_store.cli._common.open_transport", refuse)
    with pytest.raises(ArgumentError) as caught:
        check_destination("s3://b/c", {"a": 1}, where="--to", options_name="--dst-storage-options")
    assert caught.value.where == named
