"""The command line: one document on standard output, everything else on standard error, exit codes to rely on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from plain_stores import Plain, plain_store
from servers import s3_bucket  # noqa: F401  (a fixture)
from token_stores import token_store
from waiting import HANG_S

import saev_store_command
from saev_store import ShardStore, __version__, new_metadata
from saev_store.cli import main
from saev_store.cli._run import app
from saev_store.documents import parse_metadata
from saev_store.names import WORK_FOLDER

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "tests" / "data" / "saev"
COMMANDS = (
    "info", "estimate", "ls", "head", "validate", "copy", "import", "clean", "convert", "prepare", "stats", "view",
    "record", "repair", "finalize", "docs", "demo",
)  # fmt: skip


def shell(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "saev_store", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False, **options)


@pytest.fixture
def store(tmp_path: Path) -> Plain:
    return plain_store(tmp_path / "root", labels=True)


# -- every command -------------------------------------------------------------------------------------------------------


def test_version_and_help(run):
    assert run("--version") == (0, f"saev-store {__version__}\n", "")
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert all(command in out for command in COMMANDS)
    code, out, _ = run()
    assert code == 2
    assert "Usage" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(run, command):
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "")
    assert "--json" in out


def test_the_commands_are_these():
    assert tuple(app().commands) == COMMANDS


def test_help_is_light():
    code = "import sys; from saev_store.cli import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in result.stderr.split()}
    assert not loaded & {
        "torch",
        "zarr",
        "xarray",
        "dask",
        "fsspec",
        "s3fs",
        "transformers",
        "tqdm",
        "matplotlib",
        "rich",
    }


def test_installed_entry_point():
    try:
        distribution = importlib.metadata.distribution("saev-store")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package runs from its folder here, it is not installed")
    (entry,) = [point for point in distribution.entry_points if point.name == "saev-store"]
    # An installation from a folder may have the entry point of an earlier version.
    assert entry.load() in {main, saev_store_command.main}


def test_ctrl_c_while_modules_are_imported_is_one_line():
    code = (
        "import signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'numpy.linalg':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from saev_store_command import main\n"
        "print(main())"
    )
    command = [sys.executable, "-c", code, "--version"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "interrupted\n")
    ignored = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    found = subprocess.run(ignored, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert (found.returncode, found.stdout, found.stderr) == (0, f"saev-store {__version__}\n0\n", "")


# -- info, ls, head ------------------------------------------------------------------------------------------------------


def test_info(run, store):
    code, out, err = run("info", store.path)
    assert (code, err) == (0, "")
    assert store.path.name in out
    assert "2, 5, 11" in out
    code, out, err = run("info", store.path, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["shape"] == [7, 3, 5, 8]
    assert found["layers"] == [2, 5, 11]
    assert found["hash"] == found["name"] == store.path.name
    assert found["labels"] is True
    assert found["problems"] == []
    assert found["nbytes"] == store.acts.nbytes


def test_what_a_store_takes_in_other_dtypes(run, store, tmp_path):
    nbytes, labels = store.acts.nbytes, store.labels.nbytes
    described = json.loads(run("info", store.path, "--json")[1])
    assert described["nbytes_by_dtype"] == {"float32": nbytes, "bfloat16": nbytes // 2, "float16": nbytes // 2}
    assert described["token_arrays"] == [{"name": "labels", "dtype": "uint8", "nbytes": labels}]
    assert "3.3 KiB of float32 (1.6 KiB as bfloat16 or float16)" in run("info", store.path)[1]
    code, out, err = run("estimate", store.path, "--json")
    found = json.loads(out)
    assert (code, err, found["dtype"], list(found["dtypes"])) == (0, "", "float32", ["float32", "bfloat16", "float16"])
    for dtype, entry in found["dtypes"].items():
        wanted = nbytes if dtype == "float32" else nbytes // 2
        assert (entry["vectors_nbytes"], entry["token_arrays_nbytes"], entry["nbytes"]) == (
            wanted,
            labels,
            wanted + labels,
        )
        assert entry["read"]["bytes_wanted"] == wanted
    half = run("copy", store.path, tmp_path, "--dtype", "bfloat16")[1].splitlines()[0]
    there = json.loads(run("estimate", half, "--json", "--dtype", "bfloat16")[1])["dtypes"]
    assert there == {"bfloat16": found["dtypes"]["bfloat16"]}
    _, out, _ = run("estimate", half)
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["dtype", "vectors"], ["float32", "3.3"], ["bfloat16", "(stored)"], ["float16", "1.6"],
    ]  # fmt: skip
    assert "1.6 KiB of bfloat16 (3.3 KiB as float32, 1.6 KiB as float16)" in run("info", half)[1]
    assert "labels (uint8): 28 B" in run("info", half)[1]


def test_info_opens_damaged_stores_and_says_so(run, store):
    store.shard(1).unlink()
    code, out, _ = run("info", store.path, "--json")
    assert code == 0
    assert [p["kind"] for p in json.loads(out)["problems"]] == ["missing_shard"]
    assert "acts000001.bin cannot be read" in run("info", store.path)[1]


@pytest.mark.parametrize(
    "sample", sorted(SAMPLES.glob("v*/**/metadata.json")), ids=lambda p: p.relative_to(SAMPLES).parts[0]
)
def test_info_and_head_of_real_stores(run, sample):
    assert run("info", sample.parent)[0] == 0
    code, out, _ = run("head", sample.parent, "-n", 3, "--json")
    assert code == 0
    truth = np.load(SAMPLES / sample.relative_to(SAMPLES).parts[0] / "acts.npy")
    for row in json.loads(out)["vectors"]:
        cls = ShardStore.open(sample.parent).layout.n_special_tokens
        vector = truth[row["example_idx"], 0, row["token_idx"] + cls]
        assert np.array_equal(np.float32(row["values"]), vector)
        assert row["norm"] == pytest.approx(np.linalg.norm(vector.astype(float)))


def test_head(run, store):
    code, out, _ = run("head", store.path, "-n", 100, "--layer", 11, "--tokens", "special", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["layer"] == 11
    assert [(row["example_idx"], row["token_idx"]) for row in found["vectors"]] == [(i, -1) for i in range(7)]
    assert np.array_equal(np.float32([row["values"] for row in found["vectors"]]), store.acts[:, 2, 0])
    code, out, _ = run("head", store.path, "--tokens", "content", "-n", 2)
    assert code == 0
    assert len(out.splitlines()) == 4
    assert "layer 2 of [2, 5, 11]" in out


def test_head_of_numbers_that_json_does_not_know(run, store):
    store.acts[0, 0, 0, :2] = [np.nan, np.inf]
    store.shard(0).write_bytes(store.truth(0).tobytes())
    code, out, _ = run("head", store.path, "-n", 1, "--json")
    assert code == 0
    row = json.loads(out, parse_constant=pytest.fail)["vectors"][0]
    assert row["values"][:2] == [None, None]
    assert row["norm"] is None


def test_head_with_token_arrays(run, tmp_path):
    made = token_store(tmp_path, dtype="bfloat16", arrays={"token_ids": "int32", "score": "float32", "layer": "bool"})
    options = ["-n", 6, "--token-array", "token_ids", "--token-array", "layer"]
    code, out, _ = run("head", made.path, *options, "--json")
    found = json.loads(out)
    assert code == 0
    for row in found["vectors"]:
        at, special = (row["example_idx"], row["token_idx"]), row["token_idx"] < 0
        assert row["token_arrays"] == {
            "token_ids": None if special else made.arrays["token_ids"][at],
            "tokens_layer": None if special else bool(made.arrays["layer"][at]),
        }
    code, out, _ = run("head", made.path, *options)
    lines = out.splitlines()
    assert (code, lines[1].split()) == (0, ["example", "token", "token_ids", "tokens_layer", "norm", "values"])
    assert lines[2].split()[:4] == ["0", "CLS", "-", "-"]
    assert lines[3].split()[:4] == ["0", "0", str(made.arrays["token_ids"][0, 0]), str(made.arrays["layer"][0, 0])]
    code, out, _ = run(
        "head", made.path, *options, "--tokens", "special", "--json"
    )  # the column that was asked for, empty
    assert code == 0
    assert [row["token_arrays"] for row in json.loads(out)["vectors"]] == [
        {"token_ids": None, "tokens_layer": None}
    ] * min(6, len(made.acts))
    assert run("head", made.path, *options, "--tokens", "special")[1].splitlines()[2].split()[:4] == [
        "0",
        "CLS",
        "-",
        "-",
    ]
    code, out, err = run("head", made.path, "--token-array", "text")
    assert (code, out) == (2, "")
    assert "no token array 'text'; it has ['token_ids', 'score', 'layer']" in err


def test_head_of_several_hook_points(run, tmp_path):
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=[5, 5], hook_points=["resid_mid", "attn_out"], content_tokens_per_example=2,
        cls_token=False, d_model=2, n_examples=1, max_tokens_per_shard=4,
    )  # fmt: skip
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(np.arange(8, dtype=np.float32).reshape(1, 2, 2, 2))
    code, out, _ = run("head", tmp_path / metadata.hash, "--json")
    assert code == 0
    assert [row["values"] for row in json.loads(out)["vectors"]] == [[0, 1], [2, 3]]


def test_head_of_a_layer_that_is_not_there(run, store):
    code, out, err = run("head", store.path, "--layer", 3)
    assert (code, out) == (2, "")
    assert "[2, 5, 11]" in err


def test_head_of_what_is_lost(run, store):
    store.shard(0).unlink()
    code, out, err = run("head", store.path)
    assert (code, out) == (1, "")
    assert "acts000000.bin" in err


def test_ls(run, store, tmp_path):
    other = plain_store(tmp_path / "root", n=4, layers=(0,), seed=1)
    (other.path / "shards.json").unlink()
    (tmp_path / "root" / "notes").mkdir()
    metadata = ShardStore.open(store.path).metadata.replace(n_examples=6)
    writer = ShardStore.create(tmp_path / "root", metadata)
    writer.append(store.acts[:5], labels=store.labels[:5])
    writer.close()
    code, out, err = run("ls", tmp_path / "root", "--json")
    assert (code, err) == (0, "")
    found = {entry["name"]: entry for entry in json.loads(out)["stores"]}
    assert set(found) == {store.path.name, other.path.name, metadata.hash}
    assert found[store.path.name]["state"] == "complete"
    assert found[store.path.name]["shape"] == [7, 3, 5, 8]
    assert found[other.path.name]["state"] == "broken"
    assert "shards.json" in found[other.path.name]["note"]
    assert found[metadata.hash]["state"] == "unfinished"
    assert found[metadata.hash]["note"] == "3 of 6 examples"  # whole shards
    _, out, _ = run("ls", tmp_path / "root")
    assert "unfinished: 3 of 6 examples" in out
    assert len(out.splitlines()) == 4


def test_ls_tells_how_far_a_writer_is_by_its_receipts(run, store):
    """Of 7 examples in shards of 3."""
    work = store.path.parent / WORK_FOLDER / "begun"
    (work / "receipts").mkdir(parents=True)
    (work / "metadata.json").write_bytes((store.path / "metadata.json").read_bytes())
    for name, n_safe in (
        ("x.json", 0),
        ("9" * 30 + ".json", 0),
        ("000002.json", 1),
        ("000000.json", 4),
        ("000009.json", 4),
    ):
        (work / "receipts" / name).write_text("{")
        code, out, _ = run("ls", store.path.parent, "--json")
        (entry,) = (entry for entry in json.loads(out)["stores"] if entry["name"] == "begun")
        assert (code, entry["state"], entry["note"]) == (0, "unfinished", f"{n_safe} of 7 examples")


@pytest.mark.parametrize("n", [1, 6, 7, 8, 100_000])
def test_head_shows_no_more_rows_than_there_are(run, store, n):
    code, out, _ = run("head", store.path, "-n", n, "--layer", "11", "--tokens", "special", "--json")
    found = json.loads(out)["vectors"]
    assert (code, [row["example_idx"] for row in found]) == (0, list(range(min(n, 7))))
    assert [row["values"] for row in found] == store.acts[: min(n, 7), 2, 0].tolist()


def test_head_of_layer_zero(run, tmp_path):
    """Zero is a label as others are, and not the default."""
    store = plain_store(tmp_path, layers=(4, 0))
    for options, label, position in ((("--layer", "0"), 0, 1), ((), 4, 0)):
        found = json.loads(run("head", store.path, *options, "-n", "1", "--json")[1])
        assert found["layer"] == label
        assert found["vectors"][0]["values"] == store.acts[0, position, 0].tolist()


@pytest.mark.parametrize("option", ["--max-mb-per-s", "--max-requests-per-s"])
@pytest.mark.parametrize("limit", ["0", "-1", "nan"])
def test_a_limit_of_nothing_is_wrong_usage(run, store, tmp_path, option, limit):
    code, _, err = run("copy", store.path, tmp_path / "near", f"{option}={limit}")
    assert (code, "must be more than 0" in err) == (2, True)
    assert option in err
    assert not (tmp_path / "near").exists()


def test_ls_of_nothing(run, tmp_path, store):
    assert run("ls", tmp_path / "nothing")[0] == 1
    (tmp_path / "empty").mkdir()
    code, out, _ = run("ls", tmp_path / "empty")
    assert (code, out) == (0, f"no stores in {tmp_path / 'empty'}\n")
    assert json.loads(run("ls", tmp_path / "empty", "--json")[1])["stores"] == []
    assert "saev-store info" in run("ls", store.path)[1]


# -- validate ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_an_error_that_loses_no_example_is_an_exit_status_too(run, tmp_path, deep):
    made = token_store(tmp_path, dtype="bfloat16", arrays={"token_ids": "int32"})
    (made.path / "token_ids.bin").unlink()
    code, out, _ = run("validate", made.path, *deep)
    assert code == 1
    assert "token_ids.bin" in out


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_validate(run, store, deep):
    code, out, err = run("validate", store.path, *deep)
    assert code == 0
    kb = (
        sum(shard.stat().st_size for shard in store.path.glob("acts*.bin")) / 1e3
    )  # the zeros at the end are read as well
    done = rf"validated {kb:.1f} kB in [\d.]+ s, .+/s, at {re.escape(str(store.path))}\n"
    assert re.fullmatch(done if deep else "", err)
    assert ": ok" in out
    store.shard(1).write_bytes(bytes(100))
    code, out, _ = run("validate", store.path, *deep, "--json")
    found = json.loads(out)
    assert code == 1
    assert found["ok"] is False
    assert found["lost"] == [[3, 6]]
    assert found["deep"] is bool(deep)


def test_validate_progress_goes_to_stderr(run, store):
    code, out, err = run("validate", "--deep", "--progress", "--json", store.path)
    assert code == 0
    assert json.loads(out)["ok"]
    assert "validating" in err


@pytest.mark.parametrize(
    "case", json.loads((SAMPLES / "malformed" / "manifest.json").read_text())["cases"], ids=lambda c: c["case"]
)
def test_malformed_samples(run, case):
    (found,) = (SAMPLES / case["path"]).glob(case["store"])
    code, out, err = run("validate", "--deep", "--json", found)
    if case["expect"].startswith("ok"):
        assert code == 0, err
    elif case["expect"] == "error_or_warning":
        assert json.loads(out)["problems"]
    else:
        assert code == 1
        document = json.loads(out or err)
        assert document["error"]["message"] if "error" in document else document["problems"]
    assert "Traceback" not in err
    assert not Path("SAEV_FIXTURE_PICKLE_WAS_EXECUTED").exists()


# -- copy ----------------------------------------------------------------------------------------------------------------


def test_copy(run, store, tmp_path):
    code, out, err = run("copy", store.path, tmp_path / "to")
    url = str(tmp_path / "to" / store.path.name)
    assert (code, out) == (0, f"{url}\n")
    assert re.fullmatch(rf"copied 3\.4 kB in [\d.]+ s, .+/s, at {re.escape(url)}\n", err)
    code, out, _ = run("copy", store.path, tmp_path / "to", "--layers", "11,2", "--json")
    assert code == 0
    assert ShardStore.open(json.loads(out)["url"]).layers == (2, 11)
    code, out, _ = run("copy", store.path, tmp_path / "to", "--protocol", "2.1")
    assert code == 0
    assert ShardStore.open(out.strip()).metadata.protocol == "2.1"
    code, _, err = run("copy", store.path, tmp_path / "to", "--no-resume")
    assert code == 1
    assert "already" in err


def test_copy_in_another_dtype(run, store, tmp_path):
    code, out, err = run("copy", store.path, tmp_path / "to", "--dtype", "bfloat16")
    url, report = out.splitlines()
    assert (code, ShardStore.open(url).metadata.dtype) == (0, "bfloat16")
    assert re.fullmatch(rf"copied 7 examples \(1\.7 kB\) in [\d.]+ s, [\d,]+ examples/s, at {re.escape(url)}\n", err)
    assert re.fullmatch(r"float32 to bfloat16: .*% of 105 vectors changed, max absolute error \S+, mean .* \S+", report)
    code, out, _ = run("copy", url, tmp_path / "back", "--dtype", "float32", "--json")
    found = json.loads(out)
    assert (code, Path(found["url"]).name) == (0, store.path.name)
    assert found["conversion"]["is_bit_lossless"] is True
    assert found["conversion"]["n_vectors"] == 105
    code, _, err = run("copy", store.path, tmp_path / "to", "--dtype", "int8")
    assert (code, "--dtype" in err) == (2, True)


@pytest.mark.parametrize("layers", ["", "2,", "a", "2 5", "1.5"])
def test_copy_with_layers_that_are_none(run, store, tmp_path, layers):
    code, out, err = run("copy", store.path, tmp_path / "to", "--layers", layers)
    assert (code, out) == (2, "")
    assert "--layers 2,5" in err


def test_copy_to_a_folder_that_may_not_be_written(run, store):
    code, out, err = run("copy", store.path, "/proc/nowhere")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")


def test_a_bucket_on_the_command_line(run, store, tmp_path, s3_bucket):
    url = f"{s3_bucket.url}/shards"
    options = [f"{key}={value}" for key, value in s3_bucket.options.items()]
    pairs = [word for option in options for word in ("-o", option)]
    code, out, err = run("copy", store.path, url, *(w.replace("-o", "--dst-option") for w in pairs))
    assert (code, out) == (0, f"{url}/{store.path.name}\n"), err
    code, out, _ = run("ls", url, "--storage-options", json.dumps(s3_bucket.options), "--json")
    assert code == 0
    assert [entry["state"] for entry in json.loads(out)["stores"]] == ["complete"]
    code, out, _ = run("validate", "--deep", f"{url}/{store.path.name}", *pairs)
    assert code == 0
    assert "very-secret-key" not in out
    code, out, err = run("info", f"{url}/nothing", *pairs)
    assert (code, out) == (1, "")
    assert "very-secret-key" not in err


# -- how it fails --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nfo"], 2, "No such command"),
        (["info"], 2, "Missing argument"),
        (["info", "--nope", "x"], 2, "--nope"),
        (["head", "x", "-n", "0"], 2, "-n"),
        (["head", "x", "-n", "many"], 2, "-n"),
        (["head", "x", "--tokens", "some"], 2, "--tokens"),
        (["info", "x", "--storage-options", "{"], 2, "not JSON"),
        (["info", "x", "--storage-options", "[1]"], 2, "not an object"),
        (["info", "x", "--storage-options", "[" * 100_000], 2, "not JSON"),
        (["info", "x", "-o", "anon"], 2, "KEY=VALUE"),
        (["info", "/tmp", "-o", "anon=true"], 2, "local files take no options"),
        (["info", ""], 2, "must be a path"),
        (["info", "nosuch://x"], 1, "nosuch"),
        (["info", "/nonexistent/store"], 1, "no such folder"),
        (["validate", "/dev/null"], 1, "/dev/null"),
        (["ls", "/dev/null"], 1, "/dev/null"),
        (["copy", "/nonexistent", "/nonexistent/to"], 1, "no such folder"),
    ],
)  # fmt: skip
def test_errors_name_what_is_wrong_and_show_no_traceback(run, arguments, code, text):
    found, out, err = run(*arguments)
    assert (found, out) == (code, "")
    assert text in err
    assert "Traceback" not in err
    found, out, err = run(*arguments, "--json")
    assert (found, out) == (code, "")
    error = json.loads(err)["error"]
    assert error["kind"]
    assert text in json.dumps(error, ensure_ascii=False).replace('\\"', '"')


def test_a_root_is_no_store_but_is_described(run, store):
    code, _, err = run("info", store.path.parent)
    assert code == 1
    assert store.path.name in err


def test_debug_shows_the_traceback(run):
    code, _, err = run("info", "/nonexistent", "--debug")
    assert code == 1
    assert "Traceback" in err
    assert "error: /nonexistent" in err


def test_a_defect_is_no_traceback_either(run, monkeypatch, store):
    monkeypatch.setattr(ShardStore, "open", lambda *_, **__: 1 / 0)
    code, out, err = run("info", store.path)
    assert (code, out) == (3, "")
    assert "ZeroDivisionError" in err
    assert "--debug" in err
    assert "Traceback" not in err
    assert "Traceback" in run("info", store.path, "--debug")[2]


def test_a_second_interrupt_while_the_first_is_handled_ends_the_process():
    code = (
        "import sys, threading\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "from saev_store import cli\n"
        "def run(argv):\n"
        "    raise KeyboardInterrupt\n"
        "cli.run = run\n"
        "sys.exit(cli.main())"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert (found.returncode, found.stderr) == (130, "")


def test_warnings_are_one_line_on_stderr(run, store):
    renamed = store.path.with_name("mine")
    store.path.rename(renamed)
    code, out, err = run("head", renamed, "--json")
    assert code == 0
    assert json.loads(out)
    assert err.startswith("warning: ")
    assert len(err.splitlines()) == 1
    code, out, plain = run("head", renamed)
    assert (code, plain) == (0, err)
    assert out.startswith("layer 2 of ")
    code, out, err = run("head", renamed, "--layer", "9", "--json")
    failed = json.loads(err)
    assert (code, out, {*failed}) == (2, "", {"error", "warnings"})
    assert [f"warning: {text}\n" for text in failed["warnings"]] == [plain]
    code, out, err = run("head", renamed, "--layer", "9")
    assert (code, out, err.count("warning: "), err.count("error: ")) == (2, "", 1, 1)
    assert err.startswith(plain)


def test_a_closed_pipe_is_quiet(store):
    script = f'"{sys.executable}" -m saev_store head "{store.path}" -n 28 --json | head -n 1; echo "${{PIPESTATUS[0]}}"'
    slow_reader = f'"{sys.executable}" -m saev_store head "{store.path}" --json | true; echo "${{PIPESTATUS[0]}}"'
    for text in (script, slow_reader):
        result = subprocess.run(
            ["bash", "-c", text], cwd=ROOT, capture_output=True, text=True, check=True, timeout=HANG_S
        )
        assert result.stderr == ""
        assert result.stdout.splitlines()[-1] in {"0", "141"}
    assert result.stdout == "141\n"


@pytest.mark.parametrize("arguments", ["--help", "copy --help", "--version"])
def test_a_closed_pipe_of_a_help_text_is_quiet(arguments):
    text = f'"{sys.executable}" -m saev_store {arguments} | true; echo "${{PIPESTATUS[0]}}"'
    result = subprocess.run(["bash", "-c", text], cwd=ROOT, capture_output=True, text=True, check=True, timeout=HANG_S)
    assert (result.stdout, result.stderr) == ("141\n", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", ['info "{}"', 'info "{}" --json', "--help", "info --help", "--version"])
def test_output_that_cannot_be_written_is_no_defect(store, arguments):
    text = f'"{sys.executable}" -m saev_store {arguments.format(store.path)} > /dev/full'
    # Python would hold nothing back that it flushes at exit.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    result = subprocess.run(
        ["bash", "-c", text], cwd=ROOT, env=buffered, capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert result.returncode == 1
    assert "standard output" in result.stderr
    assert "it cannot be written: No space left" in result.stderr
    assert result.stderr.count("\n") == 1 or "--json" in arguments


@pytest.mark.parametrize("closed", ["1", "2", "1 2"])
def test_a_command_whose_output_is_closed_does_its_work(store, tmp_path, closed):
    ends = " ".join(f"{number}>&-" for number in closed.split())
    text = f'"{sys.executable}" -m saev_store copy "{store.path}" "{tmp_path}/to" {ends}'
    result = subprocess.run(["bash", "-c", text], cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert result.returncode == 0, result.stderr
    (copied,) = tmp_path.glob("to/*/metadata.json")
    assert result.stdout == ("" if "1" in closed else f"{copied.parent}\n")  # nothing that was for standard error


def test_an_address_with_a_scheme_of_one_letter_is_no_folder(run, store, tmp_path, monkeypatch):
    """fsspec takes it for a drive of Windows."""
    monkeypatch.chdir(tmp_path)
    code, _, err = run("copy", store.path, "x://y")
    assert (code, (tmp_path / "x:").exists()) == (1, False)
    assert "Protocol not known: x" in err


@pytest.mark.parametrize("is_ignored", [False, True])
def test_an_interrupt_after_the_work_is_done(tmp_path, is_ignored):
    """While the interpreter ends: no traceback, and the exit code of Ctrl-C; below `nohup` it is ignored."""
    code = (
        "import atexit, os, signal, sys\n"
        f"if {is_ignored}:\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "from saev_store_command import main\n"
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "info", str(plain_store(tmp_path).path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert (result.returncode, result.stderr) == (0 if is_ignored else 130, "")
    assert "example" in result.stdout


def test_output_that_the_terminal_cannot_show(store, tmp_path):
    document = json.loads((store.path / "metadata.json").read_text())
    document["ckpt"] = "модель-\u2603"
    (store.path / "metadata.json").write_text(json.dumps(document))
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONWARNINGS": ""}
    result = shell("info", store.path, env=environment)
    assert result.returncode == 0, result.stderr
    assert "\\u2603" in result.stdout
    assert json.loads(shell("info", store.path, "--json", env=environment).stdout)["ckpt"] == "модель-\u2603"


def test_hundreds_of_stores(run, tmp_path):
    first = plain_store(tmp_path / "root")
    for number in range(200):
        shutil.copytree(first.path, tmp_path / "root" / f"copy{number:03d}", copy_function=os.link)
    code, out, _ = run("ls", tmp_path / "root", "--json")
    assert code == 0
    assert len(json.loads(out)["stores"]) == 201


def test_short_help(run):
    for command in ([], ["info"], ["copy"]):
        assert run(*command, "-h") == run(*command, "--help")
        assert run(*command, "-h")[0] == 0


def test_the_list_of_commands_has_whole_descriptions(run):
    _, out, _ = run("--help")
    assert "..." not in out.partition("Commands:")[2]
    text = " ".join(out.split())
    assert "Copy a store and verify every byte; an interrupted copy continues where it stopped." in text


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["copy", "STORE", "OUT", "--max-mb-per-s", "0"], "--max-mb-per-s"),
        (["stats", "STORE", "--sample", "0"], "--sample, --seed"),
        (["head", "STORE", "--layer", "99"], "--layer"),
        (["head", "STORE", "--token-array", "nix"], "--token-array"),
        (["copy", "STORE", "OUT", "--layers", "99"], "--layers"),
    ],
)
def test_errors_name_options_instead_of_arguments(run, store, tmp_path, arguments, name):
    places = {"STORE": str(store.path), "OUT": str(tmp_path / "out")}
    code, _, err = run(*(places.get(argument, argument) for argument in arguments))
    assert code in {1, 2}
    assert err.startswith(f"error: {name}: ")


def test_ls_of_a_damaged_store(run, store):
    store.shard(1).unlink()
    code, out, _ = run("ls", str(store.path.parent), "--json")
    (entry,) = json.loads(out)["stores"]
    assert (code, entry["state"], entry["note"]) == (0, "damaged", "3 of 7 examples lost")
    assert "damaged: 3 of 7 examples lost" in run("ls", str(store.path.parent))[1]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, "2.0"),
        ({"dtype": "bfloat16"}, "--dtype float32 --protocol 2.1"),
        ({"dtype": "bfloat16", "token_arrays": {"labels": "uint8"}}, "--dtype float32 --protocol 2.1"),
        ({"dtype": "bfloat16", "token_arrays": {"labels": "uint8", "mask": "bool"}}, ", which has no token arrays"),
        ({"token_arrays": {"labels": "uint8"}, "text": {"layout": "window", "bos": True}}, "no token arrays or texts"),
        ({"hook_points": ["attn_out"]}, ", which has no hook points"),
    ],
)
def test_what_the_card_advises_for_the_reference_project_works(run, tmp_path, more, told):
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=[5], content_tokens_per_example=2, cls_token=False, d_model=2, n_examples=1,
        max_tokens_per_shard=4, **more,
    )  # fmt: skip
    arrays = {name: np.ones((1, 2), bool) for name in more.get("token_arrays", ())}
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2), **arrays)
    _, out, _ = run("info", tmp_path / metadata.hash)
    (advice,) = re.findall(r"code reads 2.1 only(.*)", out)
    assert told in advice or told == "2.0"
    command = advice.partition(": saev-store ")[2].split() or ["copy", "--protocol", "2.1", "--dtype", "float32"]
    code, _, err = run(*command, tmp_path / metadata.hash, tmp_path / "copy")
    assert (code, "cannot hold" in err) == ((2, True) if "has no" in advice else (0, False))


def test_the_advice_for_hook_points_that_are_all_the_default(run, tmp_path):
    """Hook points that are all "resid_post" may be left out; other programs may say them."""
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=[5], content_tokens_per_example=2, cls_token=False, d_model=2, n_examples=1,
        max_tokens_per_shard=4, dtype="bfloat16",
    )  # fmt: skip
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2))
    said = json.dumps({**json.loads(metadata.raw), "hook_points": ["resid_post"]}).encode()
    (tmp_path / metadata.hash / "metadata.json").write_bytes(said)
    folder = (tmp_path / metadata.hash).rename(tmp_path / parse_metadata(said, where="metadata.json").hash)
    _, out, _ = run("info", folder)
    (command,) = re.findall(r"code reads 2.1 only: saev-store (.*)", out)
    assert run(*command.split(), folder, tmp_path / "copy")[0] == 0
    (copy,) = (tmp_path / "copy").iterdir()
    assert ShardStore.open(copy)[0, 0].tolist() == [[0, 1], [2, 3]]


@pytest.fixture
def hooked(tmp_path):
    """(path, activations) of a store with a layer at two hook points."""
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=[5, 5, -2], hook_points=["resid_mid", "attn_out", "resid_post"],
        content_tokens_per_example=2, cls_token=False, d_model=2, n_examples=1, max_tokens_per_shard=6,
    )  # fmt: skip
    acts = np.arange(12, dtype=np.float32).reshape(1, 3, 2, 2)
    with ShardStore.create(tmp_path / "root", metadata, progress=False) as writer:
        writer.append(acts)
    return tmp_path / "root" / metadata.hash, acts


def test_layers_are_named_with_their_hook_points(run, hooked, tmp_path):
    """The error for a label of several hook points says to name a pair, so there must be a way to."""
    path, acts = hooked
    for layer, at, told in (("5:resid_mid", 0, [5, "resid_mid"]), ("5:attn_out", 1, [5, "attn_out"]), ("-2", 2, -2)):
        code, out, _ = run("head", path, "--layer", layer, "--json")
        assert code == 0
        assert [row["values"] for row in json.loads(out)["vectors"]] == acts[0, at].tolist()
        assert json.loads(out)["layer"] == told
    code, out, _ = run("copy", path, tmp_path / "copies", "--layers", "5:attn_out,-2")
    assert code == 0
    copied = ShardStore.open(out.strip())
    assert copied.layout.layer_keys == ((5, "attn_out"), (-2, "resid_post"))
    assert np.array_equal(copied[...], acts[:, 1:])


def test_lists_of_stores_name_hook_points(run, hooked):
    """Labels alone would say `5,5,-2`."""
    path, _ = hooked
    names = ["5:resid_mid", "5:attn_out", "-2:resid_post"]
    _, out, _ = run("ls", path.parent)
    assert out.splitlines()[1].split()[8] == ",".join(names)
    assert f"layers [{', '.join(names)}]" in str(ShardStore.list(path.parent)[0])
    (listed,) = json.loads(run("ls", path.parent, "--json")[1])["stores"]
    for found in (listed, json.loads(run("info", path, "--json")[1])):
        assert (found["layers"], found["hook_points"]) == ([5, 5, -2], ["resid_mid", "attn_out", "resid_post"])


def test_lists_of_stores_without_hook_points_say_nothing_of_them(run, store):
    (listed,) = json.loads(run("ls", store.path.parent, "--json")[1])["stores"]
    assert "hook_points" not in listed
    assert "layers [2, 5, 11]" in str(ShardStore.list(store.path.parent)[0])


@pytest.mark.parametrize("command", ["head", "copy"])
def test_a_label_of_several_hook_points_is_refused_with_what_to_write(run, hooked, tmp_path, command):
    arguments = ("--layer", "5") if command == "head" else ("--layers", "5", tmp_path / "copies")
    code, out, err = run(command, hooked[0], *arguments)
    assert (code, out) == (2, "")
    assert "5:resid_mid" in err
    assert "5:attn_out" in err


@pytest.mark.parametrize("junk", ["x", "5:", ":resid_mid", "5.0", "", "2,5"])
def test_what_is_no_layer_is_wrong_usage(run, hooked, junk):
    code, out, err = run("head", hooked[0], "--layer", junk)
    assert (code, out) == (2, "")
    assert "--layer" in err


@pytest.mark.parametrize(("layers", "code"), [("5,5", 2), ("2,5,2", 2), ("5,2", 0)])
def test_no_layer_is_named_twice(run, store, tmp_path, layers, code):
    found, out, err = run("copy", store.path, tmp_path / "copies", "--layers", layers)
    assert found == code
    if code:
        assert out == ""
        assert f"--layers: '{layers}' names a layer twice. Name each layer once." in err
        assert not (tmp_path / "copies").exists()


def test_statistics_name_hook_points(run, hooked):
    code, out, _ = run("stats", hooked[0])
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["5:resid_mid", "5:attn_out", "-2:resid_post"]
    code, out, _ = run("stats", hooked[0], "--json")
    found = json.loads(out)
    assert (found["layers"], found["hook_points"]) == ([5, 5, -2], ["resid_mid", "attn_out", "resid_post"])


@pytest.mark.parametrize(("option", "kept"), [((), True), (("--save",), True), (("--no-save",), False)])
def test_statistics_are_kept_unless_told_otherwise(run, store, option, kept):
    code, out, _ = run("stats", store.path, "--json", *option)
    assert code == 0
    assert json.loads(out)["layers"] == [2, 5, 11]
    assert (store.path / "stats.json").exists() == kept
