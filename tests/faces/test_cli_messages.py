"""What commands print, to the letter: refusals with their remedies, documents of `--json`, the last lines."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import numpy as np
import pytest
from plain_stores import Plain, plain_store

from saev_store import ShardStore, new_metadata
from saev_store.errors import (
    AccessError,
    ArgumentError,
    CorruptShardError,
    LayerNotFoundError,
    SaevStoreError,
    SaevStoreWarning,
    SelectionError,
)
from saev_store.problems import Problem
from saev_store.sources.mmididx import IndexedDataset
from saev_store.writer import Cleaned, Leftover

DATA = Path(__file__).parents[1] / "data"
DOCUMENTS = str(DATA / "mmididx" / "core_seed_example_3_4_2_int32" / "data.idx")
TEXTS = str(DATA / "energon" / "captioning_ratio_split" / "dataset")
BATCHES = str(DATA / "llmbatch" / "padding_small" / "data.batch")
LAYERS = "Separate them by commas: --layers 2,5. With hook points: --layers 2:attn_out,5:resid_mid."
SMALLER = "Choose a smaller batch, or shorter records."
JSON_REMEDY = """Quote it for the shell: '{"anon": true}'."""


@pytest.fixture
def store(tmp_path: Path) -> Plain:
    return plain_store(tmp_path / "root", labels=True)


def raises(error: BaseException) -> Callable[..., NoReturn]:
    def function(*_: object, **__: object) -> NoReturn:
        raise error

    return function


# -- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["copy", "x", "memory://to", "--layers", "5:"],
         f"--layers: '5:' is not a list of layers. {LAYERS}"),
        (["copy", "x", "memory://to", "--layers", "5,2,5"], "--layers: '5,2,5' names a layer twice. Name each layer once."),
        (["copy", "x", "memory://to", "--layers", "5:a,5:a"], "--layers: '5:a,5:a' names a layer twice. Name each layer once."),
        (["copy", "x", "memory://to", "--max-mb-per-s", "0"], "--max-mb-per-s: the limit is 0.0; it must be more than 0"),
        (["copy", "x", "memory://to", "--max-requests-per-s", "-2"],
         "--max-requests-per-s: the limit is -2.0; it must be more than 0"),
        (["import", "x", "--to", "memory://to", "--family", "f", "--layer-ids", "2;5"],
         "--layer-ids: '2;5' is not a list of integers. Separate them by commas: --layer-ids 2,5."),
        (["info", "x", "--storage-options", "{"],
         "--storage-options: '{' is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)). "
         + JSON_REMEDY),
        (["info", "x", "--storage-options", "[1]"],
         "--storage-options: '[1]' is JSON, but not an object. Pass '{\"key\": value}'."),
        (["info", "x", "-o", "=1"], "--option: '=1' is not KEY=VALUE. Write for example --option anon=true."),
        (["convert", DOCUMENTS, "memory://to/x.batch"], "--seq-len, --batch-size: both options are needed to write batches"),
        (["convert", DOCUMENTS, "memory://to/x.batch", "--seq-len", "3"],
         "--seq-len, --batch-size: both options are needed to write batches"),
        (["convert", DOCUMENTS, "memory://to/x.batch", "--batch-size", "3"],
         "--seq-len, --batch-size: both options are needed to write batches"),
        (["convert", DOCUMENTS, "memory://to/x.batch", "--seq-len", "4", "--batch-size", "3"],
         f"--seq-len, --batch-size: the documents make 2 records of 4 tokens, which fill no batch of 3. {SMALLER}"),
        (["convert", TEXTS, "memory://to/x.batch", "--seq-len", "8", "--tokenizer", "bytes"],
         "--seq-len, --batch-size, --pad-token: only documents become batches; these options are of no use here"),
        *((["convert", DOCUMENTS, "memory://to/x.batch", "--seq-len", "3", "--batch-size", "1", *option],
           f"{option[0]}: documents become batches; there is no use for this here. Leave it out.")
          for option in (("--split", "nope"), ("--part", "json[x]"), ("--tokenizer", "no.json"), ("--dtype", "uint8"))),
        *((["convert", BATCHES, "memory://to/x.idx", *option],
           f"{option[0]}: the source has tokens, not texts; there is no use for this here. Leave it out.")
          for option in (("--part", "json[x]"), ("--tokenizer", "no.json"))),
        (["convert", TEXTS, "memory://to/x.idx"],
         "--tokenizer: converting texts needs a tokenizer. Name a tokenizer.json, or 'bytes'."),
        (["clean", "x", "--engine", "obstore"], "--engine: 'obstore' is not an engine here. Use auto or fsspec."),
        (["clean", "x", "--older-than", "5"], "--older-than: '5' is not an age. Write 90s, 30m, 12h or 2d."),
        (["clean", "x", "--older-than", "1d2"], "--older-than: '1d2' is not an age. Write 90s, 30m, 12h or 2d."),
        (["head", "x", "--layer", "2,5"], "--layer: '2,5' names several layers. Name one."),
        (["validate", DOCUMENTS, "--scheduler", "tcp://h:1"],
         f"--scheduler: {DOCUMENTS} is a data set; a cluster validates stores only"),
        (["prepare", "memory://x", "--field", "image="], "--field: 'image=' is not FIELD=PART. Write for example --field image=jpg."),
        (["prepare", "memory://x", "--field", "=jpg"], "--field: '=jpg' is not FIELD=PART. Write for example --field image=jpg."),
        (["prepare", "memory://x", "--field", "image"], "--field: 'image' is not FIELD=PART. Write for example --field image=jpg."),
        (["prepare", "memory://x", "--field-map", "[1]"], "--field-map: '[1]' is not an object of strings"),
        (["prepare", "memory://x", "--field-map", '{"a": 1}'], "--field-map: '{\"a\": 1}' is not an object of strings"),
        (["prepare", "memory://x", "--field-map", "{"],
         "--field-map: '{' is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"),
    ],
)  # fmt: skip
def test_a_refusal_names_value_rule_and_remedy(run, arguments: list[str], said: str) -> None:
    assert run(*arguments) == (2, "", f"error: {said}\n")


PLAN = ("--model", "m", "--to", "memory://to", "--layers", "3")
PART = "Write 1/4 to 4/4 for four processes, or auto under torchrun and Slurm."


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*PLAN], "--text, --tokens, --images: one of the three is needed, and only one"),
        ([*PLAN, "--text", "a", "--images", "b"], "--text, --tokens, --images: one of the three is needed, and only one"),
        ([*PLAN, "--text", "a", "--tokens", "b", "--images", "c"],
         "--text, --tokens, --images: one of the three is needed, and only one"),
        ([*PLAN, "--text", "a.txt"], "--context: texts need it: the most tokens that the model sees at once"),
        ([*PLAN, "--tokens", "a.idx"], "--context: texts need it: the most tokens that the model sees at once"),
        ([*PLAN, "--text", "a.txt", "--context", "4", "--text-key", "body"],
         "--text-key: a.txt is one text; only the lines of a file *.jsonl have keys. Leave it out."),
        ([*PLAN, "--text", "a.txt", "--context", "4", "--masks", "m"], "--masks: masks is an option for images. Leave it out."),
        ([*PLAN, "--tokens", "a.idx", "--context", "4", "--on-bad-image", "skip", "--image-key", "jpg"],
         "--image-key, --on-bad-image: image_key is an option for images. Leave it out."),
        *[
            ([*PLAN, "--images", "a", *option], f"{option[0]}: {option[0][2:].replace('-', '_')} is an option for texts. Leave it out.")
            for option in (["--context", "4"], ["--tokenizer", "t"], ["--text-key", "k"], ["--layout", "window"], ["--pack"],
                           ["--bos", "1"], ["--example-tokens", "4"])
        ],
        *[
            ([*PLAN, "--text", "a", "--context", "4", "--part", part], f"--part: {part!r} is not a part. {PART}")
            for part in ("0/4", "5/4", "1/", "/4", "1", "a/4", "1/b", "-1/4", "0/0")
        ],
        ([*PLAN, "--text", "a", "--context", "4", "--layers", "3,x"],
         "--layers: '3,x' is not a list of integers. Separate them by commas: --layers 2,5."),
    ],
)  # fmt: skip
def test_a_refusal_of_a_recording(run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str) -> None:
    for name in ("_load_texts", "_load_images"):
        monkeypatch.setattr(f"saev_store.cli.recording.{name}", lambda *_, **__: pytest.fail("a model was loaded"))
    assert run("record", *arguments) == (2, "", f"error: {said}\n")


@pytest.mark.parametrize(("part", "found"), [("1/1", (0, 1)), ("4/4", (3, 4)), ("1/4", (0, 4)), ("auto", "auto")])
def test_parts_count_from_one(run, monkeypatch: pytest.MonkeyPatch, part: str, found: object) -> None:
    pytest.importorskip("torch")
    given: list[object] = []
    monkeypatch.setattr("saev_store.cli.recording.load", lambda *_, **__: (None, None))
    monkeypatch.setattr(
        "saev_store.record.record", lambda *_, part, **__: given.append(part) or raises(SystemExit(7))()
    )
    assert run("record", *PLAN, "--text", "a", "--context", "4", "--part", part)[0] == 7
    assert given == [found]


def test_pairs_take_precedence_over_the_object(run, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(ShardStore, "open", lambda _, options, **__: given.append(options) or raises(SystemExit(7))())
    options = ["--storage-options", '{"a": 1, "b": 2}', "-o", "b=x=[1", "-o", 'c="3"', "-o", "d="]
    assert run("estimate", "memory://x", *options)[0] == 7
    assert run("estimate", "memory://x")[0] == 7
    assert given == [{"a": 1, "b": "x=[1", "c": "3", "d": ""}, None]


# -- errors as documents ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "document", "text"),
    [
        (CorruptShardError("it is cut", where="acts000001.bin", remedy="Call store.repair().",
                           problems=[Problem("short_shard", "store.validate() lists it", where="x", lost=((1, 3),))]), 1,
         {"kind": "corrupt_shard", "message": "it is cut", "where": "acts000001.bin", "remedy": "Call `saev-store repair`.",
          "problems": [{"severity": "error", "kind": "short_shard", "where": "x", "loc": [],
                        "message": "`saev-store validate` lists it", "lost": [[1, 3]]}]},
         "error: acts000001.bin: it is cut. Call `saev-store repair`.\n"),
        (ArgumentError("store.validate() says no", where="url"), 2,
         {"kind": "argument", "message": "`saev-store validate` says no", "where": "URL", "remedy": None, "problems": []},
         "error: URL: `saev-store validate` says no\n"),
        (AccessError("no", where="--chunks"), 2,
         {"kind": "access", "message": "no", "where": "--chunks", "remedy": None, "problems": []}, "error: --chunks: no\n"),
        (AccessError("no", where="dtype"), 1,
         {"kind": "access", "message": "no", "where": "dtype", "remedy": None, "problems": []}, "error: dtype: no\n"),
        (ZeroDivisionError("by zero"), 3,
         {"kind": "defect", "message": "ZeroDivisionError: by zero", "where": None, "remedy": None, "problems": []},
         "internal error: ZeroDivisionError: by zero\nThis is a defect; --debug shows where it happened.\n"),
    ],
    ids=["damage", "argument", "option", "place", "defect"],
)  # fmt: skip
def test_an_error_as_text_and_as_a_document(
    run, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, document: dict[str, object], text: str
) -> None:
    fields = dict(vars(error))
    monkeypatch.setattr(ShardStore, "open", raises(error))
    assert run("estimate", "memory://x") == (code, "", text)
    vars(error).update(fields)
    found, out, err = run("estimate", "memory://x", "--json")
    assert (found, out, json.loads(err)) == (code, "", {"error": document})


def test_all_warnings_and_problems_are_told(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a warning that was given before, in the same words."""
    problems = [Problem("short_shard", f"problem {number}", where="x") for number in range(3)]

    def fails(*_: object, **__: object) -> NoReturn:
        for text in ("careful", "careful", "see store.validate()"):
            warnings.warn(text, SaevStoreWarning, stacklevel=2)
        raise CorruptShardError("it is cut", where="x", problems=problems)

    monkeypatch.setattr(ShardStore, "open", fails)
    said = ["careful", "careful", "see `saev-store validate`"]
    code, out, err = run("estimate", "memory://x", "--json")
    found = json.loads(err)
    assert (code, out, found["warnings"]) == (1, "", said)
    assert [one["message"] for one in found["error"]["problems"]] == ["problem 0", "problem 1", "problem 2"]
    assert run("estimate", "memory://x")[2].splitlines()[:3] == [f"warning: {text}" for text in said]


def test_warnings_of_a_command_that_succeeds_are_beside_its_document(
    run, monkeypatch: pytest.MonkeyPatch, store: Plain
) -> None:
    def warns(*_: object, **__: object) -> SimpleNamespace:
        for text in ("one", "two"):
            warnings.warn(text, SaevStoreWarning, stacklevel=2)
        return SimpleNamespace(to_dict=lambda: {"a": 1})

    monkeypatch.setattr(ShardStore, "stats", warns)
    assert run("stats", store.path, "--json") == (0, '{\n  "a": 1\n}\n', "warning: one\nwarning: two\n")


@pytest.mark.parametrize(
    ("kind", "code"), [(SelectionError, 2), (LayerNotFoundError, 2), (ArgumentError, 2), (AccessError, 1)]
)
def test_errors_of_what_was_asked_for_name_the_option(
    run, monkeypatch: pytest.MonkeyPatch, kind: type[SaevStoreError], code: int
) -> None:
    """The place of others is a file, which may have the name of an option."""
    monkeypatch.setattr(ShardStore, "open", raises(kind("bad", where="dtype")))
    where = "dtype" if kind is AccessError else "--dtype"
    assert run("estimate", "memory://x") == (code, "", f"error: {where}: bad\n")


@pytest.mark.parametrize("arguments", [("--debug", "estimate", "memory://x"), ("estimate", "memory://x", "--debug")])
def test_where_an_error_comes_from_is_shown_on_demand(
    run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(ShardStore, "open", raises(AccessError("no", where="x")))
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith("\nerror: x: no\n")
    assert run("estimate", "memory://x")[2] == "error: x: no\n"


def test_wrong_usage_as_a_document(run) -> None:
    code, out, err = run("estimate", "--json")
    found = json.loads(err)
    assert (code, out, {*found}, {*found["error"]}) == (
        2,
        "",
        {"error"},
        {"kind", "message", "where", "remedy", "problems"},
    )
    assert {**found["error"], "message": ""} == {
        "kind": "usage",
        "message": "",
        "where": None,
        "remedy": None,
        "problems": [],
    }
    message, usage, hint = found["error"]["message"].splitlines()
    assert (message, hint) == ("Missing argument 'URL'.", "Try 'saev-store estimate --help'.")
    assert usage.startswith("Usage: saev-store estimate")
    assert run("estimate")[2] == f"error: {found['error']['message']}\n"


def test_an_interrupt_says_nothing_where_a_document_is_expected(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardStore, "open", raises(KeyboardInterrupt()))
    assert run("estimate", "memory://x") == (130, "", "interrupted\n")
    assert run("estimate", "memory://x", "--json") == (130, "", "")


def test_a_command_is_needed(run) -> None:
    code, out, err = run()
    assert (code, err) == (2, "")
    assert (0, out, "") == run("--help")


def test_numbers_that_json_does_not_know_are_null(run, monkeypatch: pytest.MonkeyPatch, store: Plain) -> None:
    values = {"a": float("inf"), "b": [-float("inf"), (float("nan"), 1.5)], "c": {"d": float("nan")}}
    monkeypatch.setattr(ShardStore, "stats", lambda *_, **__: SimpleNamespace(to_dict=lambda: values))
    assert json.loads(run("stats", store.path, "--json")[1], parse_constant=pytest.fail) == {
        "a": None, "b": [None, [None, 1.5]], "c": {"d": None},
    }  # fmt: skip


# -- documents of commands ----------------------------------------------------------------------------------------------


def test_ls_as_a_document(run, tmp_path: Path) -> None:
    metadata = new_metadata(
        family="gpt2", ckpt="small", layers=(3, 9), hook_points=("mlp_out", "resid_post"), content_tokens_per_example=2,
        cls_token=False, d_model=4, n_examples=5, max_tokens_per_shard=8,
    )  # fmt: skip
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(np.zeros((5, 2, 2, 4), np.float32))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metadata.json").write_text("{")
    code, out, err = run("ls", tmp_path, "--json")
    found = json.loads(out)
    broken = next(entry for entry in found["stores"] if entry["name"] == "broken")
    assert {name: broken[name] for name in ("url", "state")} == {"url": f"{tmp_path}/broken", "state": "broken"}
    assert {*broken} == {"name", "url", "state", "note"}
    found["stores"].remove(broken)
    assert (code, err, found) == (0, "", {
        "root": str(tmp_path),
        "stores": [{
            "name": metadata.hash, "url": f"{tmp_path}/{metadata.hash}", "state": "complete", "note": "", "protocol": "3.0",
            "family": "gpt2", "ckpt": "small", "shape": [5, 2, 2, 4], "layers": [3, 9], "hook_points": ["mlp_out", "resid_post"],
            "nbytes": 320,
        }],
    })  # fmt: skip
    rows = [line.split("  ") for line in run("ls", tmp_path)[1].splitlines()]
    (row,) = ([cell.strip() for cell in cells if cell.strip()] for cells in rows if cells[0].startswith("broken"))
    assert row[1].startswith("broken: ")


def cleaned(*, uploads_listed: bool) -> Cleaned:
    return Cleaned(
        (
            Leftover("", "unfinished store", 2048, 5.0),
            Leftover("a/x.tmp", "temporary file", None, None, "written 5 s ago"),
            Leftover("b", "upload", None, 7.0),
        ),
        uploads_listed=uploads_listed,
    )


NOT_LISTED = (
    "Unfinished multipart uploads cannot be listed by this client; a life-cycle rule of the bucket removes them, see "
)


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("uploads_listed", [False, True])
def test_clean(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dry_run: bool, uploads_listed: bool) -> None:
    monkeypatch.setattr("saev_store.writer.clean_leftovers", lambda *_, **__: cleaned(uploads_listed=uploads_listed))
    options = ["--dry-run"] if dry_run else []
    code, out, err = run("clean", tmp_path, *options)
    done = "would be removed" if dry_run else "removed"
    table, rest = out.splitlines()[:4], out.splitlines()[4:]
    assert (code, [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table]) == (0, [
        ["path", "what", "size", "state"], [".", "unfinished store", "2.0 KiB", done],
        ["a/x.tmp", "temporary file", "kept: written 5 s ago"], ["b", "upload", done],
    ])  # fmt: skip
    assert [line.startswith(NOT_LISTED) for line in rest] == ([] if uploads_listed else [True])
    assert err.startswith("removed 2 leftovers in ") is not dry_run
    assert (err == "") is dry_run
    code, out, err = run("clean", tmp_path, *options, "--json")
    assert (code, err, json.loads(out)) == (0, "", {
        "url": str(tmp_path), "dry_run": dry_run, "uploads_listed": uploads_listed,
        "leftovers": [
            {"path": "", "kind": "unfinished store", "nbytes": 2048, "age_s": 5.0, "kept_because": ""},
            {"path": "a/x.tmp", "kind": "temporary file", "nbytes": None, "age_s": None, "kept_because": "written 5 s ago"},
            {"path": "b", "kind": "upload", "nbytes": None, "age_s": 7.0, "kept_because": ""},
        ],
    })  # fmt: skip


def test_nothing_to_clean(run, tmp_path: Path) -> None:
    assert run("clean", tmp_path, "--dry-run") == (0, "Nothing to clean.\n", "")
    assert run("clean", tmp_path) == (
        0, "Nothing to clean.\n", f"removed nothing: nothing was left over, at {tmp_path}\n"
    )  # fmt: skip


def test_a_store_that_shares_its_shards_was_not_there_before(run, store: Plain, tmp_path: Path) -> None:
    code, _, err = run("copy", store.path, tmp_path / "to", "--protocol", "2.1")
    assert code == 0
    assert "all of it was there" not in err


def test_what_was_converted(run, tmp_path: Path) -> None:
    to = tmp_path / "x.batch"
    options = ["--seq-len", "3", "--batch-size", "2", "--no-progress"]
    assert run("convert", DOCUMENTS, to, *options)[:2] == (0, f"{to}: 1 batches\n")
    code, found, err = run("convert", DOCUMENTS, tmp_path / "y.batch", *options, "--json")
    assert (code, json.loads(found), err) == (0, {"url": f"{tmp_path}/y.batch", "batches": 1}, "")
    options = ["--tokenizer", "bytes", "--no-progress"]
    code, found, err = run("convert", TEXTS, tmp_path / "z.idx", *options, "--json")
    assert (code, json.loads(found), err) == (0, {"url": f"{tmp_path}/z.idx", "documents": 6}, "")
    assert run("convert", TEXTS, tmp_path / "z2.idx", *options)[:2] == (0, f"{tmp_path}/z2.idx: 6 documents\n")
    assert IndexedDataset(tmp_path / "z2.idx")[0].tobytes() == np.array([*b"caption number 0\n"], np.int32).tobytes()


@pytest.mark.parametrize("ok", [True, False])
def test_the_demo_ends_with_one_where_a_store_is_damaged(
    run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ok: bool
) -> None:
    pytest.importorskip("torch")
    result = SimpleNamespace(seconds=12.4, ok=ok, to_dict=lambda: {"ok": ok})

    def run_demo(*_: object, say: Callable[[str], None], **__: object) -> object:
        say("a line")
        return result

    monkeypatch.setattr("saev_store.record.run_demo", run_demo)
    out = tmp_path / "a b"
    assert run("demo", "--out", out) == (
        1 - ok, f"a line\nfinished   in 12 s; inspect them with: saev-store ls '{out}'\n", ""
    )  # fmt: skip
    assert run("demo", "--out", out, "--json") == (1 - ok, json.dumps({"ok": ok}, indent=2) + "\n", "a line\n")
    monkeypatch.setattr("saev_store.record.run_demo", raises(KeyboardInterrupt()))
    code, shown, err = run("demo", "--out", out)
    assert (code, shown) == (130, "")
    assert f"\nRecorded examples are kept; continue with: saev-store demo --out '{out}'\n" in err


def test_ctrl_c_in_a_recording_repeats_the_command_as_a_shell_takes_it(run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("saev_store.cli.recording.load", lambda *_, **__: (None, None))
    monkeypatch.setattr("saev_store.record.record", raises(KeyboardInterrupt()))
    arguments = ["record", *PLAN, "--text", "it's a.txt", "--context", "4"]
    monkeypatch.setattr(sys, "argv", ["/bin/saev-store", *arguments])
    code, out, err = run(*arguments)
    assert (code, out) == (130, "")
    again = " ".join([*arguments[:-3], """'it'"'"'s a.txt'""", "--context", "4"])
    assert f"\nRecorded examples are kept; continue with: saev-store {again}\n" in err
