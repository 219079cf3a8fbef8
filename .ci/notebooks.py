"""Runs notebooks and judges what they show; `--write` keeps the outputs.

    python .ci/notebooks.py [--write] notebooks/*.ipynb

Each notebook runs in a temporary folder. It fails if a cell fails or writes to standard error, if an axes of a figure has no title or
no labels with units, if an output has a path of this machine, or if its kernel takes a minute of processor time.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nbformat import NotebookNode

#: Processor seconds of a kernel. On two cores that do nothing else it then takes less than a minute.
LIMIT_S = 60
_UNIT = re.compile(r"\(.+\)$")
_PATH = re.compile(r"(?<![\w.:/<>*~-])/[A-Za-z][\w.-]*/[\w.-]+")
#: What the functions below found in this process, which is the kernel's.
found: list[str] = []


class Axes(Protocol):
    """What is looked at of matplotlib's axes."""

    def get_title(self) -> str: ...
    def get_xlabel(self) -> str: ...
    def get_ylabel(self) -> str: ...
    def get_label(self) -> object: ...


def unlabelled(axes: Axes) -> list[str]:
    """What an axes lacks: a title, and labels that end with a unit in parentheses. A colour bar has one label.

    >>> from types import SimpleNamespace
    >>> has = lambda text: (lambda: text)
    >>> unlabelled(SimpleNamespace(get_title=has("norms"), get_xlabel=has("layer (block)"), get_ylabel=has("norm"), get_label=has("")))
    ["'norms': the y axis is labelled 'norm', without a unit in parentheses"]
    """
    title, labels = axes.get_title(), {"x": axes.get_xlabel(), "y": axes.get_ylabel()}
    if axes.get_label() == "<colorbar>":
        title, labels = "colour bar", {"": labels["x"] or labels["y"]}
    lacking = [] if title else ["an axes has no title"]
    return lacking + [
        f"{title!r}: the {which} axis is labelled {label!r}, without a unit in parentheses".replace("the  axis", "it")
        for which, label in labels.items()
        if not _UNIT.search(label)
    ]


def watch() -> None:
    """Look at every axes that is drawn from now on. Called in the kernel."""
    from matplotlib.figure import Figure

    draw = Figure.draw

    @functools.wraps(draw)
    def watched(self: Figure, *arguments: object, **options: object) -> object:
        found.extend(problem for axes in self.axes for problem in unlabelled(axes))
        return draw(self, *arguments, **options)

    Figure.draw = watched


def texts_of(notebook: NotebookNode) -> Iterator[tuple[str, str]]:
    """(kind, text) of all outputs but pictures; kinds are stream names, `error`, and types of data."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.output_type == "stream":
                yield output.name, output.text
            elif output.output_type == "error":
                yield "error", f"{output.ename}: {output.evalue}"
            else:
                yield from ((kind, str(data)) for kind, data in output.data.items() if not kind.startswith("image/"))


def problems_of(notebook: NotebookNode) -> list[str]:
    """What is wrong with the outputs of a notebook: errors, warnings, paths of this machine."""
    problems: list[str] = []
    for kind, text in texts_of(notebook):
        shown = (
            re.sub(r"<style>.*?</style>|<svg.*?</svg>|<[^>]*>", " ", text, flags=re.DOTALL) if "html" in kind else text
        )
        if kind in {"error", "stderr"}:
            problems.append(f"{kind}: {text[:300]}")
        problems += [f"a path of this machine: {path}" for path in _PATH.findall(shown)]
    return problems


def run(path: Path, *, write: bool) -> list[str]:
    """Run a notebook; what is wrong with it."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that wait for others take no processor time
    begun_s = time.perf_counter()
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        here = str(Path(__file__).resolve().parent)
        first = f"import sys, time\nsys.path.append({here!r})\nimport notebooks\nnotebooks.watch()"
        last = "import json\nprint(json.dumps([time.process_time(), notebooks.found]))"
        cells = notebook.cells
        notebook.cells = [nbformat.v4.new_code_cell(first), *cells, nbformat.v4.new_code_cell(last)]
        client = NotebookClient(notebook, timeout=300, record_timing=False, resources={"metadata": {"path": folder}})
        try:
            client.execute()
        except CellExecutionError as error:
            return [str(error)]
        used_s, problems = json.loads(notebook.cells[-1].outputs[0].text)
        notebook.cells = cells
        for cell in cells:
            if cell.cell_type == "code":
                cell.execution_count -= 1
                for output in cell.outputs:
                    if "execution_count" in output:
                        output.execution_count -= 1
        notebook.metadata = {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
        kept = nbformat.reads(nbformat.writes(notebook).replace(folder, "."), as_version=4)
    if used_s > LIMIT_S:
        problems.append(f"{used_s:.0f} s of processor time; the limit is {LIMIT_S} s")
    print(f"{path.name}: {time.perf_counter() - begun_s:.0f} s, of the processor {used_s:.0f} s")
    problems = list(dict.fromkeys(problems)) + problems_of(kept)  # a figure is drawn several times
    if write and not problems:
        nbformat.write(kept, path)
    return problems


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="NOTEBOOK")
    parser.add_argument("--write", action="store_true", help="keep the outputs of notebooks that have no problem")
    options = parser.parse_args()
    is_bad = False
    for path in options.paths:
        for problem in run(path, write=options.write):
            is_bad = True
            print(f"{path}: {problem}")
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
