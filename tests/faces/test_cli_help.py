"""Help: every command has examples that parse, every option a whole description, in a pipe and in a terminal."""

from __future__ import annotations

import re

import pytest

from saev_store.cli import _run, _tables
from saev_store.cli._run import app

COMMANDS = tuple(app().commands)
OPTIONS = [
    (name, parameter.opts[-1], parameter)
    for name, command in app().commands.items()
    for parameter in command.params
    if parameter.name != "help"
]
#: What typer makes of the wide help of `drawn` is compared without lines and spaces.
_LINES = re.compile(r"[\s│╭╮╰╯─]|\x1b\[[\d;]*m")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch):
    """Help as a terminal has it, of any width."""
    monkeypatch.setattr(_run, "is_drawn", lambda: True)
    monkeypatch.setattr(_tables, "is_drawn", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    return lambda columns: monkeypatch.setenv("COLUMNS", str(columns))


@pytest.mark.parametrize(
    ("command", "option", "parameter"), OPTIONS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_option_has_a_whole_description(command, option, parameter):
    text = parameter.help
    assert re.match(r"[A-Z0-9\"-]", text), text
    assert text.endswith("."), text
    assert len(text.split()) >= 4, text
    assert "=True" not in text
    assert "=False" not in text


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_shows_all_of_it(run, drawn, command, columns):
    drawn(columns)
    described = [parameter.help for parameter in app().commands[command].params if parameter.name != "help"]
    code, out, err = run(command, "-h")
    assert (code, err) == (0, "")
    shown = _LINES.sub("", out)
    assert "╭" in out
    assert "…" not in out
    for name, option, parameter in OPTIONS:
        if name == command and option.startswith("-"):
            assert option in shown or parameter.hidden
            # rich would take what is in brackets for a style
            for part in () if parameter.hidden else re.findall(r"\[[^\]]+\]", parameter.help):
                assert _LINES.sub("", part) in shown, (option, part)
    if columns == 140:  # in a row of its own where it fits
        plain = [
            _LINES.sub("", text.replace("\\[", "[")) for text in described if len(text) < 40 and "Energon's" not in text
        ]
        assert [text for text in plain if text not in shown] == []


def test_repair_asks_for_nothing_that_the_store_says():
    of_record, of_repair = ({each.name: each for each in app().commands[name].params} for name in ("record", "repair"))
    for name in ("layers", "hook_points", "dtype", "max_tokens_per_shard"):
        assert of_repair[name].help.endswith(" [default: the store's].")
        assert of_record[name].help.endswith(("Needed.", "].")) and "store's]" not in of_record[name].help
        assert of_repair[name].opts == of_record[name].opts
    assert [name for name, each in of_repair.items() if "Needed" in (each.help or "")] == ["model", "context"]


def test_choices_are_listed(run):
    assert "float32|bfloat16|float16" in run("copy", "-h")[1]


#: Group of options -> the options of `record`, of `copy` and of `import` that are in it.
GROUPS = {
    "Source": ("--text --tokens --images --processor --image-key --masks --on-bad-image --text-key", "--tokens", ""),
    "Model": (
        "--model --tokenizer --layers --hook-points --compute-dtype --attention --device --batch-size", "--layers", "--layers",
    ),
    "Rows of texts": ("--context --layout --pack --bos --example-tokens", "", "--context"),
    "Result": ("--to --dtype --max-tokens-per-shard", "--dtype", "--to --dtype --max-tokens-per-shard"),
    "Writing": ("--resume --part --on-nonfinite", "--resume --on-overflow", "--resume --verify --on-nonfinite --on-overflow"),
    "Load": ("", "--max-mb-per-s --max-requests-per-s --scheduler", ""),
    "Output": ("--json --progress --dry-run", "--json --progress", "--json --progress"),
    "File systems": ("--storage-options --option", *["--storage-options --option --dst-storage-options --dst-option"] * 2),
}  # fmt: skip


def panels(command: str) -> dict[str, str | None]:
    """The group of each option by its long name."""
    options = [each for each in app().commands[command].params if each.opts[0].startswith("-")]
    return {next(name for name in each.opts if name.startswith("--")): each.rich_help_panel for each in options}


@pytest.mark.parametrize(("at", "command"), [(0, "record"), (1, "copy"), (2, "import")])
def test_groups_of_the_options_of_long_commands(at: int, command: str):
    expected = {option: title for title, options in GROUPS.items() for option in options[at].split()}
    assert {option: title for option, title in panels(command).items() if title} == expected


def test_options_of_short_commands_are_not_grouped_but_those_of_all_commands():
    assert panels("convert") == {
        **dict.fromkeys(
            ("--seq-len", "--batch-size", "--seed", "--pad-token", "--end-token", "--dtype", "--tokenizer", "--part", "--split"),
        ),
        "--overwrite": None, "--verify": None, "--scheduler": "Load", "--json": "Output", "--progress": "Output",
        **dict.fromkeys(("--storage-options", "--option", "--dst-storage-options", "--dst-option"), "File systems"),
    }  # fmt: skip
    assert panels("clean")["--dry-run"] == "Output"
    assert panels("clean")["--engine"] == "File systems"
    assert panels("prepare")["--num-workers"] == "Load"


def test_groups_of_commands():
    found: dict[str, list[str]] = {}
    for name, command in app().commands.items():
        found.setdefault(command.rich_help_panel, []).append(name)
    assert {title: sorted(names) for title, names in found.items()} == {
        "Look at stores": ["estimate", "head", "info", "ls", "stats", "validate", "view"],
        "Record and import": ["demo", "finalize", "import", "record", "repair"],
        "Copy and clean": ["clean", "copy"],
        "Other formats": ["convert", "prepare"],
        "Help": ["docs"],
    }


def test_commands_and_options_are_in_groups(run, drawn):
    drawn(120)
    out = run("-h")[1]
    assert all(f"─ {title} ─" in out for title in ("Look at stores", "Record and import", "Copy and clean"))
    assert all(f"─ {title} ─" in run("record", "-h")[1] for title in ("Model", "Source", "Rows of texts", "Result"))
