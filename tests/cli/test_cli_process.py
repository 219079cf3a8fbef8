"""The command as a process: version, help, errors, exit codes, Ctrl-C and readers that stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Self

import pytest
from viewed_stores import store_of, structured
from waiting import HANG_S

import saev_store
from saev_store import ShardStore

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "clean", "convert", "copy", "demo", "docs", "estimate", "finalize", "head", "import", "info", "ls", "prepare", "record",
    "repair", "stats", "validate", "view",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_of(tmp_path_factory.mktemp("cli"), structured(7, 3, 5, 8))


def process(*arguments: object, **options: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "saev_store", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_help_lists_all_commands_and_each_has_its_own(run):
    assert run("--version") == (0, f"saev-store {saev_store.__version__}\n", "")
    code, out, _ = run()
    assert code == 2
    listed = [line.split()[0] for line in out.partition("Commands:")[2].splitlines() if line[2:3].strip()]
    assert tuple(sorted(listed)) == COMMANDS
    for command in COMMANDS:
        code, out, err = run(command, "--help")
        assert (code, err) == (0, "")
        assert f"Example: saev-store {command}" in " ".join(out.split())
        assert run(command, "-h").out == out


def test_mistakes_in_arguments_are_usage(run, folder):
    for arguments in (
        ("nix",), ("info",), ("info", folder, "--nix"), ("head", folder, "-n", "0"), ("head", folder, "-n", "x"),
        ("head", folder, "--tokens", "some"), ("estimate", folder, "--dtype", "int8"),
    ):  # fmt: skip
        code, out, err = run(*arguments)
        assert (code, out) == (2, ""), arguments
        assert err.startswith("error: "), arguments
        assert run(*arguments, "--json").error["kind"] == "usage"
    for arguments in (
        ("info", folder, "-o", "x"), ("info", folder, "-o", "=1"), ("head", folder, "--layer", "two"), ("head", folder, "--layer", "1,2"),
        ("stats", folder, "--sample", "0"), ("clean", folder, "--older-than", "1"), ("clean", folder, "--older-than", "x"),
        ("head", folder, "--layer", "99"), ("head", folder, "--token-array", "nix"),
    ):  # fmt: skip
        assert run(*arguments).code == 2, arguments
        assert run(*arguments, "--json").error["where"], arguments


def test_errors_are_one_document_and_warnings_are_in_it(run, tmp_path, folder):
    error = run("info", tmp_path / "nix", "--json").error
    assert error["kind"] == "not_found"
    assert set(error) == {"kind", "message", "where", "remedy", "problems"}
    (tmp_path / "a").mkdir()
    (tmp_path / "a/metadata.json").write_text("{}")
    code, _, err = run("info", tmp_path / "a")
    assert (code, err.startswith("error: ")) == (1, True)
    assert len(run("info", tmp_path / "a", "--json").error["problems"]) > 5
    (tmp_path / "b").mkdir()
    assert run("info", folder, "--json").err == ""


def test_warnings_go_to_standard_error(run, monkeypatch, folder):
    import warnings

    def warns(store: ShardStore, **_: object) -> None:
        warnings.warn("careful", saev_store.SaevStoreWarning, stacklevel=1)
        raise saev_store.SaevStoreError("broken")

    monkeypatch.setattr(ShardStore, "stats", warns)
    assert run("stats", folder).err == "warning: careful\nerror: broken\n"
    document = json.loads(run("stats", folder, "--json").err)
    assert (document["warnings"], document["error"]["message"]) == (["careful"], "broken")


def test_warnings_of_a_command_that_succeeds_follow_its_document(run, monkeypatch, folder):
    import warnings

    from saev_store.stats import Stats

    monkeypatch.setattr(Stats, "to_dict", lambda _: warnings.warn("careful", saev_store.SaevStoreWarning, stacklevel=1))
    assert run("stats", folder, "--no-save", "--json") == (0, "null\n", "warning: careful\n")


def test_defects_are_named_and_traced_with_debug(run, monkeypatch, folder):
    monkeypatch.setattr(ShardStore, "stats", lambda *_, **__: 1 / 0)
    code, out, err = run("stats", folder)
    assert (code, out, "Traceback" in err, "ZeroDivisionError" in err) == (3, "", False, True)
    assert run("stats", folder, "--json").error["kind"] == "defect"
    for arguments in (("--debug", "stats", folder), ("stats", folder, "--debug")):
        assert "Traceback" in run(*arguments).err


def test_interrupts_end_with_130(run, monkeypatch, folder):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ShardStore, "stats", interrupted)
    code, out, err = run("stats", folder)
    assert (code, out, err.startswith("interrupted")) == (130, "", True)
    assert run("stats", folder, "--json") == (130, "", "")


@pytest.mark.skipif(os.name != "posix", reason="signals and pipes of POSIX")
def test_readers_that_stop_end_a_command_with_141(folder):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "saev_store", "head", str(folder), "-n", "35"]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=HANG_S)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_output_is_printed_in_any_encoding(tmp_path):
    folder = tmp_path / "é€"
    (folder / "stores").mkdir(parents=True)
    done = process("ls", folder, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    out, err = done.communicate(timeout=HANG_S)
    assert (done.returncode, err) == (0, "")
    assert "\\xe9\\u20ac" in out


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_view_prints_its_address_and_runs_until_ctrl_c(folder):
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    started = process("view", folder, folder, "--json")
    try:
        url = json.loads(started.stdout.readline())["url"]
        with urllib.request.urlopen(f"{url}api/store", timeout=HANG_S) as answer:
            assert json.loads(answer.read())["other"] == folder.name
    finally:
        started.send_signal(signal.SIGINT)
        out, err = started.communicate(timeout=HANG_S)
    assert (started.returncode, out, err) == (0, "", "")


def test_view_passes_its_options_on(run, folder, tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    from saev_store import view

    given: dict[str, object] = {}

    class View:
        url = "http://here/"

        def __init__(self, store: ShardStore, **options: object) -> None:
            given.update(options, name=store.name)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def wait(self) -> None:
            raise KeyboardInterrupt

    opened: list[str] = []
    monkeypatch.setattr(view, "View", View)
    monkeypatch.setattr("webbrowser.open", opened.append)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "cat": 1}, unk_token="<s>"))
    made.add_special_tokens(["<s>"])
    made.save(str(tmp_path / "own.json"))
    assert run("view", folder, "--port", 81, "--tokenizer", tmp_path / "own.json", "--open") == (
        0,
        "http://here/\n",
        "",
    )
    assert (given["name"], given["port"], given["other"], given["source"]) == (folder.name, 81, None, None)
    assert [given["tokenizer"](0), given["tokenizer"](1)] == ["<s>", "cat"]
    assert opened == ["http://here/"]
    (tmp_path / "wrong.json").write_text("{}")
    assert run("view", folder, "--tokenizer", tmp_path / "wrong.json").code == 2
    assert run("view", folder, "--source", tmp_path / "nix").code == 1


def test_docs_opens_the_installed_pages(run, tmp_path, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("saev_store.cli.reading.files", lambda _: tmp_path)
    assert run("docs").code == 1
    (tmp_path / "_site").mkdir()
    (tmp_path / "_site/index.html").touch()
    page = (tmp_path / "_site/index.html").resolve().as_uri()
    assert run("docs", "--no-open") == (0, f"{page}\n", "")
    assert run("docs", "--json").json == {"url": page}
    assert opened == []
    assert run("docs").code == 0
    assert opened == [page]
