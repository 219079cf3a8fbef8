"""The command that opens the documentation, and the page of errors, which has them all."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from saev_store import cli, errors
from saev_store.cli._run import app

ROOT = Path(__file__).resolve().parents[2]


def test_every_kind_of_error_has_its_row():
    def tree(root):
        yield root
        for below in root.__subclasses__():
            yield from tree(below)

    text = (ROOT / "docs/errors.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", text, re.MULTILINE))
    named = {
        one
        for one in tree(errors.SaevStoreError)
        if one.__module__ == errors.__name__ and not one.__name__.startswith("_")
    }
    assert rows == {one.kind: one.__name__ for one in named if one is not errors.SaevStoreError}
    for row in re.findall(r"^\| `\w+` \| `(\w+)` \| `(\w+)`", text, re.MULTILINE):
        assert row[1] in {base.__name__ for base in getattr(errors, row[0]).__mro__}


def documented_commands() -> list[tuple[str, list[str]]]:
    """(page, words) of each command line of this package in a block of the documentation."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(
            r"^```(?:sh|console|bash|text)\b[^\n]*\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
        ):
            for line in block.replace("\\\n", " ").splitlines():
                started = re.match(r"(?:\$ )?(?:torchrun .*-m saev_store|saev-store) ([a-z].*)", line)
                if started:
                    found.append((page.name, shlex.split(started[1], comments=True)))
    return found


def test_commands_in_blocks_exist_with_their_options():
    commands, wrong, seen = app().commands, [], set()
    for page, (name, *words) in documented_commands():
        seen.add(name)
        if name not in commands:
            wrong.append(f"{page}: {name}")
            continue
        parameters = [parameter for parameter in commands[name].params if parameter.param_type_name == "option"]
        known = {opt for parameter in parameters for opt in [*parameter.opts, *parameter.secondary_opts]}
        used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        wrong += [f"{page}: {name} {option}" for option in sorted(used - known - {"--help", "-h"})]
    assert not wrong
    assert len(seen) > 10


def test_the_command_opens_the_pages_that_are_installed(tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("saev_store.cli.documentation.files", lambda _: tmp_path)
    assert cli.main(["docs"]) == 1
    # The site is built in the clone: what is installed gets it with the next installation.
    assert "mkdocs build --strict && pip install ." in capsys.readouterr().err
    (tmp_path / "_site").mkdir()
    (tmp_path / "_site/index.html").write_text("<h1>")
    assert cli.main(["docs"]) == 0
    address = (tmp_path / "_site/index.html").as_uri()
    assert (capsys.readouterr().out.strip(), opened) == (address, [address])
    assert cli.main(["docs", "--json"]) == 0
    assert cli.main(["docs", "--no-open"]) == 0
    assert len(opened) == 1
