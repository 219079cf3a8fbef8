"""What a terminal shows and what a pipe gets: tables, cards, bars and the line at the end of long commands."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from plain_stores import Plain, plain_store

from saev_store import ShardStore, new_metadata
from saev_store._runtime.progress import Progress, counted_so_far, counting
from saev_store.cli import _tables, reading
from saev_store.cli._common import naming_what_to_check
from saev_store.cli._ends import end_line
from saev_store.errors import NotFoundError

ROOT = Path(__file__).resolve().parents[2]
HEADER = ("store", "size", "state")
ROWS = [("1a2b", "49.0 GiB", "complete"), ("9f[red]", "2.1 TiB", "unfinished: 403,968 of 1,281,167 examples")]
PLAIN = """\
store    size      state
1a2b     49.0 GiB  complete
9f[red]  2.1 TiB   unfinished: 403,968 of 1,281,167 examples
"""
WIDE = """\
store         size   state
──────────────────────────────────────────────────────────────
1a2b      49.0 GiB   complete
9f[red]    2.1 TiB   unfinished: 403,968 of 1,281,167 examples
"""
FOLDED = """\
store         size   state
──────────────────────────────────────
1a2b      49.0 GiB   complete
9f[red]    2.1 TiB   unfinished:
                     403,968 of
                     1,281,167
                     examples
"""
NARROW = """\
store 1a2b
  size   49.0 GiB
  state  complete
store 9f[red]
  size   2.1 TiB
  state  unfinished:
         403,968 of
         1,281,167
         examples
"""


@pytest.fixture
def store(tmp_path: Path) -> Plain:
    return plain_store(tmp_path / "root", labels=True)


def without_styles(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def in_terminal(*arguments: object, columns: int, **variables: str) -> tuple[int, str]:
    """A command in a terminal of a width of its own: its exit code and what it shows."""
    command = [sys.executable, "-m", "saev_store", *map(str, arguments)]
    unset = {"NO_COLOR", "FORCE_COLOR", "CI", "GITHUB_ACTIONS", "TTY_COMPATIBLE"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {
        "TERM": "xterm-256color",
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
        "COLUMNS": str(columns),
        **variables,
    }
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 1 << 16):
                shown += part
        except OSError:  # the other end is closed
            pass
        os.close(ours)
    return process.returncode, shown.decode().replace("\r\n", "\n")


# -- tables --------------------------------------------------------------------------------------------------------------


def test_a_table_in_a_pipe_is_aligned_text(capsys: pytest.CaptureFixture[str]):
    _tables.emit_table(HEADER, ROWS, right="size")
    assert capsys.readouterr().out == PLAIN


@pytest.mark.parametrize(("columns", "shown"), [(100, WIDE), (38, FOLDED), (20, NARROW)])
def test_a_table_in_a_terminal_is_drawn_and_loses_nothing(monkeypatch, capsys, columns, shown):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(_tables, "is_drawn", lambda: True)
    _tables.emit_table(HEADER, ROWS, right="size")
    drawn = capsys.readouterr().out
    assert [line.rstrip() for line in without_styles(drawn).splitlines()] == shown.splitlines()
    assert all(line == line.rstrip() and line for line in drawn.splitlines())
    _tables.emit_card("a title", [("state", "complete"), ("note", "a b " * 40)])
    card = capsys.readouterr().out
    assert all(line == line.rstrip() and line for line in card.splitlines())
    words = without_styles(card).split()
    assert words == ["a", "title", "state", "complete", "note", *["a", "b"] * 40]


@pytest.mark.parametrize("columns", range(24, 60))
def test_a_table_of_any_width_shows_every_word(monkeypatch: pytest.MonkeyPatch, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    header = ("store", "size", "state")
    rows = [("abcdefghijkl", "1.5 GiB", "complete: all of it is there"), ("mn", "20 B", "damaged")]
    shown = without_styles(_tables.drawn_table(header, rows, right=["size"], whole=["store"])).replace("─", " ")
    found = [word for word in re.split(r"[\s:]+", shown) if word not in header]
    assert sorted(found) == sorted(word for row in rows for cell in row for word in re.split(r"[\s:]+", cell))


@pytest.mark.parametrize("columns", [60, 140])
@pytest.mark.parametrize("command", ["info", "ls", "stats", "validate", "clean"])
def test_a_terminal_shows_every_word_that_a_pipe_gets(run, store, command, columns):
    url = store.path.parent if command in {"ls", "clean"} else store.path
    (store.path / "acts000000.bin.tmp").touch()
    arguments = [
        command,
        url,
        *(["--no-save"] if command == "stats" else []),
        *(["--dry-run"] if command == "clean" else []),
    ]
    code, out, _ = run(*arguments)
    found, shown = in_terminal(*arguments, columns=columns)
    assert found == code == 0
    shown = without_styles(shown)
    joined, wanted = re.sub(r"\s|─", "", shown), re.findall(r"\S+", out)
    missing = [word for word in wanted if word.rstrip(":") not in joined and "/" not in word]
    assert not missing, shown
    assert "…" not in shown


def test_a_terminal_without_colours_or_lines_gets_none(store):
    drawn = in_terminal("ls", store.path.parent, columns=140)[1]
    assert "─" in drawn
    assert "\x1b[" in drawn
    assert not re.search(r"\x1b\[(?:3|4|9)\d", in_terminal("ls", store.path.parent, columns=140, NO_COLOR="1")[1])
    dumb = in_terminal("ls", store.path.parent, columns=140, TERM="dumb")[1]
    assert "─" not in dumb
    assert "\x1b" not in dumb
    assert dumb == subprocess.run(
        [sys.executable, "-m", "saev_store", "ls", store.path.parent], cwd=ROOT, capture_output=True, text=True
    ).stdout.replace("\r\n", "\n")


@pytest.mark.parametrize("encoding", ["UTF-8", "utf8", "utf_8", "ascii", None])
@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("kind", ["xterm", "dumb", None])
def test_lines_are_drawn_only_where_they_can_be_shown(monkeypatch, encoding, is_terminal, kind):
    monkeypatch.setattr(
        _tables, "sys", SimpleNamespace(stdout=SimpleNamespace(encoding=encoding, isatty=lambda: is_terminal))
    )
    monkeypatch.delenv("TERM", raising=False)
    if kind is not None:
        monkeypatch.setenv("TERM", kind)
    assert _tables.is_drawn() is (is_terminal and kind != "dumb" and encoding in {"UTF-8", "utf8"})


@pytest.fixture
def drawn(monkeypatch):
    """Commands believe that a terminal shows lines."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    for module in (_tables, reading):
        monkeypatch.setattr(module, "is_drawn", lambda: True)


def test_statistics_in_a_terminal_say_what_they_cover(run, store, drawn):
    code, out, _ = run("stats", store.path, "--no-save", "--sample", "3")
    first, line, *_, last = without_styles(out).splitlines()
    assert (code, last) == (0, "over 3 examples (a sample of 7) and 5 tokens")
    assert first.split()[:3] == ["layer", "count", "mean"]
    assert set(line) == {"─"}


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_report_in_a_terminal_is_two_lines_and_a_table(run, store, drawn, is_damaged):
    url = str(store.path)
    if is_damaged:
        store.shard(1).unlink()
    code, out, _ = run("validate", url)
    head, facts, *table = without_styles(out).splitlines()
    assert (code, head) == ((1, f"{url}: NOT OK: 1 error") if is_damaged else (0, f"{url}: ok")), out
    assert facts == f"  7 examples in 3 shards, names and sizes only{'; 3 lost' if is_damaged else ''}"
    if is_damaged:
        assert re.split("  +", table[0]) == ["severity", "kind", "where", "problem", "lost examples"]
        cells = re.split("  +", table[2])
        assert (cells[0], cells[1], cells[-1]) == ("error", "missing_shard", "3:6")
        assert len(table) == 3
    else:
        assert table == []


def test_info_lists_all_problems(run, store):
    for path in store.path.glob("acts*.bin"):
        path.unlink()
    code, out, _ = run("info", store.path)
    problems = json.loads(run("info", store.path, "--json")[1])["problems"]
    assert code == 0
    assert len(problems) >= 1
    assert all(problem["message"] in out for problem in problems)
    assert "store.problems" not in out


# -- bars and the line at the end --------------------------------------------------------------------------------------------


def test_bars_count_examples_and_gigabytes(capsys: pytest.CaptureFixture[str]):
    with Progress(4_000, "writing", shown=True, unit="examples", unit_nbytes=2, done=1_000) as bar:
        bar.advance(999)
        bar.advance(2_001)
    assert re.search(
        r"writing: 100%\|.*\| 2,000 of 2,000 examples \[\d\d:\d\d<00:00, .* examples/s\]\n$", capsys.readouterr().err
    )
    with Progress(3_000_000_000, "checking", shown=True) as bar:
        bar.advance(1_500_000_000)
    assert re.search(r"checking:  50%\|.*\| 1\.50GB of 3\.00GB \[.*B/s\]\n$", capsys.readouterr().err)


def test_a_bar_ends_its_line_when_its_block_fails(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(KeyboardInterrupt), Progress(10, "checking", shown=True):
        raise KeyboardInterrupt
    assert capsys.readouterr().err.endswith("\n")


def test_bars_are_counted_shown_or_not():
    with counting():
        with Progress(4_000, "writing", shown=False, unit="examples", unit_nbytes=2, done=1_000) as bar:
            bar.advance(3_000)
        bar.close()
        (found,) = counted_so_far()
        assert found[:4] == ("writing", "examples", 1_500, 3_000)
        assert re.fullmatch(
            r"recorded 1,500 examples \(3\.0 kB\) in 0\.0 s, .+ examples/s, at /x",
            end_line("recorded", "writing", at="/x"),
        )
        assert end_line("copied", "copying", at="/x") == "copied nothing: all of it was there, at /x"
        with Progress(500, "importing", shown=False, unit="examples", unit_nbytes=4) as bar:
            bar.advance(2_000)
        assert re.fullmatch(
            r"imported 2,000 examples \(5\.0 kB\) in 0\.0 s, .+ examples/s, at /x",
            end_line("imported", "writing importing", at="/x"),
        )
    assert counted_so_far() == []


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["stats", "URL"], r"read 3\.4 kB in [\d.]+ s, .+B/s, at URL"),
        (
            ["copy", "URL", "TO", "--layers", "5"],
            r"copied 7 examples \(1\.1 kB\) in [\d.]+ s, .+ examples/s, at TO/\w+",
        ),
        (["clean", "URL"], r"removed nothing: nothing was left over, at URL"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_long_commands_end_with_a_line(run, store, tmp_path, command, line):
    (tmp_path / "to").mkdir()
    places = {"URL": str(store.path), "TO": str(tmp_path / "to")}
    for name, place in places.items():
        command, line = [word.replace(name, place) for word in command], line.replace(name, re.escape(place))
    code, _, err = run(*command)
    assert code == 0
    assert re.fullmatch(f"{line}\n", err), err
    assert run(*command, "--json")[2] == ""


def test_only_what_is_removed_is_counted(run, tmp_path):
    options = {"family": "gpt2", "ckpt": "tiny", "layers": [0], "content_tokens_per_example": 4, "cls_token": False}
    made = [new_metadata(n_examples=n, d_model=8, **options) for n in (1, 2, 3)]
    writer, *others = [ShardStore.create(tmp_path, metadata, progress=False) for metadata in made]
    for other in others:
        other.close()
    code, out, err = run("clean", tmp_path, "--older-than", "1h", "--dry-run")
    assert (code, err, out.count("would be removed"), out.count("kept: written")) == (0, "", 0, 3)
    code, out, err = run("clean", tmp_path, "--older-than", "0", "--dry-run")
    assert (code, err, out.count("would be removed"), out.count("kept: ")) == (0, "", 2, 1)
    code, out, err = run("clean", tmp_path, "--older-than", "0")
    assert (code, out.count("removed"), out.count("kept: ")) == (0, 2, 1)
    assert re.fullmatch(rf"removed 2 leftovers in .+ s, .+ leftovers/s, at {re.escape(str(tmp_path))}\n", err), err
    assert run("clean", tmp_path, "--older-than", "1h")[2].startswith(
        "removed nothing: what was left over is kept, at "
    )
    writer.close()


def test_what_was_done_before_is_said(run, store, tmp_path):
    run("copy", store.path, tmp_path / "to")
    assert run("copy", store.path, tmp_path / "to")[2].startswith("copied nothing: all of it was there, at ")
    run("stats", store.path)
    assert run("stats", store.path)[2].startswith("read nothing: stats.json has it, at ")


# -- what is wrong with input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ls", "clean"])
def test_a_missing_folder_has_a_remedy(run, tmp_path, command):
    code, out, err = run(command, tmp_path / "nothing")
    assert (code, out) == (1, "")
    assert "Check the address" in err


def test_a_remedy_of_its_own_stays():
    for given, said in (
        ("Ask the owner.", "Ask the owner."),
        (None, "Check the address, and that its disk is mounted."),
    ):
        with pytest.raises(NotFoundError) as found, naming_what_to_check():
            raise NotFoundError("it is gone", where="x", remedy=given)
        assert (found.value.message, found.value.remedy) == ("it is gone", said)


def test_ctrl_c_during_the_imports_of_the_module_is_one_line():
    code = (
        "import runpy, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "runpy.run_module('saev_store', run_name='__main__')"
    )
    found = subprocess.run([sys.executable, "-c", code, "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("command", ["info", "ls"])
def test_no_terminal_obeys_what_is_in_a_document(run, tmp_path, command) -> None:
    """Escape sequences of colours, titles and cleared screens; and lines that look like those of others."""
    hidden = {"family": "f\x1b[31m", "ckpt": "c\nlabels  none\x1b]0;title\x07", "dataset": "/x\x9b2J\x7f"}
    metadata = new_metadata(
        layers=[1],
        content_tokens_per_example=3,
        cls_token=False,
        d_model=2,
        n_examples=4,
        max_tokens_per_shard=12,
        **hidden,
    )
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(np.zeros((4, 1, 3, 2), np.float32))
    store = ShardStore.open(tmp_path / metadata.hash)
    code, out, err = run(command, str(tmp_path if command == "ls" else store.url))
    for text in (out, repr(store), repr(ShardStore.list(tmp_path))):
        assert all(character.isprintable() for character in text.replace("\n", ""))
        assert r"c\nlabels  none\x1b]0;title\x07" in text
    assert (code, err) == (0, "")
