"""Commands in the documentation exist with their options, and its page of errors has them all."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from saev_store import errors
from saev_store.cli._app import app

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
    assert len(seen) > 8
