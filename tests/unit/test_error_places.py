"""Every error of the package says where: the file, the address or the argument that has the value."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import saev_store
from saev_store import errors

ROOT = Path(saev_store.__file__).parent
OURS = {
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.SaevStoreError)
}


def made(path: Path):
    """The calls in a module that make one of our errors."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OURS:
            yield node


@pytest.mark.parametrize("room", sorted({path.relative_to(ROOT).parts[0] for path in ROOT.rglob("*.py")}))
def test_every_error_says_where(room):
    paths = [ROOT / room] if room.endswith(".py") else sorted((ROOT / room).rglob("*.py"))
    silent = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in paths
        for call in made(path)
        if not {"where", None} & {keyword.arg for keyword in call.keywords}
    ]
    assert silent == []


def test_errors_are_found():
    assert len(list(made(ROOT / "transport/checks.py"))) > 3
