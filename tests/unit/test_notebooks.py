"""The notebooks: listed everywhere, run in order, with labelled axes, and without warnings or paths of a machine in their outputs."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
#: Of a whole file, with its pictures: a clone, and a page that shows it, must stay small.
MAX_BYTES = 600_000
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    """`.ci/notebooks.py`, which the continuous integration runs notebooks with."""
    spec = importlib.util.spec_from_file_location("notebook_checks", ROOT / ".ci" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def read(path: Path) -> SimpleNamespace:
    """A notebook with attributes, as nbformat gives it."""

    def made(found: dict[str, object]) -> object:
        found = {key: "".join(value) if is_lines(key, value) else value for key, value in found.items()}
        return found if any("/" in key for key in found) else Node(found)

    return json.loads(path.read_text("utf-8"), object_hook=made)


def is_lines(key: str, value: object) -> bool:
    """Whether a text is kept as a list of its lines."""
    return isinstance(value, list) and (key in {"source", "text"} or "/" in key)


class Node(SimpleNamespace):
    """A dictionary of nbformat."""

    def __init__(self, found: dict[str, object]) -> None:
        super().__init__(**found)

    def get(self, name: str, default: object = None) -> object:
        return getattr(self, name, default)


def test_all_are_listed_in_the_documentation_and_on_the_site():
    names = {path.name for path in NOTEBOOKS}
    assert len(names) == 5
    for page in ("README.md", "docs/notebooks.md"):
        linked = re.findall(r"notebooks/(\w+\.ipynb)\)", (ROOT / page).read_text("utf-8"))
        assert set(linked) == names, page
    shown = re.search(r"NAMES = \((.*?)\)", (ROOT / "docs/_notebooks.py").read_text("utf-8"))
    assert shown is not None
    assert {f"{name}.ipynb" for name in re.findall(r'"(\w+)"', shown[1])} == names


@every_notebook
def test_outputs_are_those_of_one_run(path: Path):
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert path.stat().st_size < MAX_BYTES


@every_notebook
def test_outputs_have_no_warning_and_no_path_of_a_machine(path: Path, checks: ModuleType):
    assert checks.problems_of(read(path)) == []
    assert str(ROOT) not in path.read_text("utf-8")
    assert str(Path.home()) + "/" not in path.read_text("utf-8")


@every_notebook
def test_every_figure_has_titles_and_labels(path: Path):
    """The source is looked at here; `.ci/notebooks.py` looks at the axes that are drawn."""
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    drawing = [cell.source for cell in cells if "plt.subplots" in cell.source]
    assert drawing
    for source in drawing:
        calls = re.findall(r"\.set\(\s*title=.*?xlabel=.*?ylabel=", source, flags=re.DOTALL)
        assert calls, source
        bars = source.count(".colorbar(")
        assert len(re.findall(r"\.colorbar\(.*label=", source)) == bars, source


def test_the_checks_find_what_they_are_for(checks: ModuleType):
    def axes(title: str, x: str, y: str, label: str = "") -> SimpleNamespace:
        return SimpleNamespace(
            get_title=lambda: title, get_xlabel=lambda: x, get_ylabel=lambda: y, get_label=lambda: label
        )

    assert checks.unlabelled(axes("norms", "layer (block)", "L2 norm (stream units)")) == []
    assert checks.unlabelled(axes("", "", "", "<colorbar>"))
    assert checks.unlabelled(axes("", "", "norm (units)", "<colorbar>")) == []
    assert len(checks.unlabelled(axes("", "layer", ""))) == 3

    def shown(**output: object) -> list[str]:
        return checks.problems_of(Node({"cells": [Node({"outputs": [Node(output)]})]}))

    assert shown(output_type="stream", name="stderr", text="UserWarning: …")
    assert shown(output_type="display_data", data={"text/plain": "where  /scratch/someone/shards"})
    assert shown(output_type="display_data", data={"text/html": "<td>/home/me/shards</td>"})
    harmless = "s3://lab/shards ./saev-demo/1a2b http://127.0.0.1:80/a/b BOS / other </td></tr>"
    assert shown(output_type="display_data", data={"text/plain": harmless, "image/png": "/9j/4AAQ/abc"}) == []
