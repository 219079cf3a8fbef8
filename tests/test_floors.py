"""Imports go down only, and a heavy library is met in its own files only. Reads the source, imports nothing of it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "saev_store"

#: Room -> floor. A room is a module or a folder directly below `saev_store/`. A new room has to be entered here.
FLOORS = {
    "_version": 0,
    "_threads": 1,
    "_forgotten": 1,
    "errors": 0,
    "names": 0,
    "problems": 0,
    "layout": 0,
    "selection": 0,
    "indexing": 0,
    "coalesce": 0,
    "chunks": 0,
    "order": 0,
    "documents": 1,
    "transport": 2,
    "_open": 3,
    "cost": 3,
    "store": 3,
    "reader": 3,
    "writer": 3,
    "inspect": 3,
    "display": 3,
    "faces": 3,
    "listing": 3,
    "selected": 3,
    "copying": 4,
    "formats": 4,
    "loaders": 4,
    "stats": 4,
    "cli": 5,
    "record": 5,
    "testing": 5,
    "torch": 5,
    "zarr": 5,
    "xarray": 5,
    "dask": 5,
    "export": 5,
    "serve": 5,
    "__main__": 6,
    "__init__": 6,  # the front door; test_import_time.py judges what it loads
}

#: The few imports that go up, all of them inside a function: a store hands out its faces, so it has to know them, but a
#: process that never asks for a face never loads it. (file, room it may reach up to)
FACES = {
    ("faces.py", "zarr"),
    ("faces.py", "xarray"),
    ("faces.py", "dask"),
    ("faces.py", "export"),
    ("faces.py", "stats"),
    ("faces.py", "formats"),
}

#: Heavy library -> how the names of the only files begin that may import it.
HEAVY = {
    "aiohttp": ("transport/_fsspec",),
    "boto3": (),
    "botocore": ("transport/_fsspec",),
    "dask": ("dask.py", "xarray.py", "zarr/", "testing/", "stats/"),
    "distributed": ("stats/",),
    "fastparquet": ("export/",),
    "fsspec": ("transport/_fsspec", "formats/energon/filesystem.py"),
    "gcsfs": ("transport/_fsspec",),
    "huggingface_hub": ("record/",),
    "icechunk": ("export/",),
    "matplotlib": (),
    "obstore": ("transport/_obstore",),
    "PIL": ("record/", "formats/energon/_images.py"),
    "pandas": ("export/",),
    "pydantic": ("documents/", "stats/", "torch/"),
    "rich": ("cli/",),
    "s3fs": ("transport/_fsspec",),
    "skimage": ("record/",),
    "starlette": ("serve/",),
    "tensorstore": ("export/",),
    "torch": ("torch/", "formats/llmbatch/_torch.py", "record/", "testing/"),
    "tqdm": ("writer/_progress.py", "inspect/", "cli/"),
    "transformers": ("record/",),
    "typer": ("cli/",),
    "uvicorn": ("serve/",),
    "virtualizarr": ("export/",),
    "xarray": ("xarray.py", "zarr/", "export/", "testing/"),
    "zarr": ("zarr/", "xarray.py", "dask.py", "export/", "serve/", "testing/"),
}

#: What floor 0 may not import although it is in the standard library: anything that opens, starts or waits for something.
OPENS = {
    "asyncio", "concurrent", "http", "importlib", "io", "mmap", "multiprocessing", "os", "pathlib", "pickle", "shutil",
    "socket", "sqlite3", "subprocess", "tempfile", "threading", "urllib",
}  # fmt: skip


@dataclass(frozen=True)
class Import:
    """One imported module: `saev_store.x.y` or a foreign one, and where it is written."""

    module: str
    line: int
    in_function: bool
    type_checking: bool

    @property
    def room(self) -> str | None:
        """The room of ours that it enters, if it is ours."""
        parts = self.module.split(".")
        if parts[0] != "saev_store":
            return None
        return parts[1] if len(parts) > 1 else "__init__"


def rooms_and_files() -> Iterator[tuple[str, str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        yield relative.parts[0].removesuffix(".py"), relative.as_posix(), path


def imports_of(path: Path) -> list[Import]:
    package = ["saev_store", *path.relative_to(PACKAGE).parts[:-1]]
    found: list[Import] = []

    def visit(node: ast.AST, *, in_function: bool, type_checking: bool) -> None:
        def add(module: str) -> None:
            found.append(Import(module, node.lineno, in_function, type_checking))

        if isinstance(node, ast.Import):
            for alias in node.names:
                add(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            # `from saev_store import x` enters the room x; a name that is no room comes through the front door.
            if module == "saev_store":
                for alias in node.names:
                    add(f"saev_store.{alias.name}" if alias.name in FLOORS else "saev_store")
            else:
                add(module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}:
            for argument in node.args[:1]:
                add(str(argument.value) if isinstance(argument, ast.Constant) else "")
        in_function = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                visit(child, in_function=in_function, type_checking=True)
            for child in node.orelse:
                visit(child, in_function=in_function, type_checking=type_checking)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, in_function=in_function, type_checking=type_checking)

    visit(ast.parse(path.read_text(encoding="utf-8")), in_function=False, type_checking=False)
    return found


FILES = list(rooms_and_files())
every_file = pytest.mark.parametrize(("room", "name", "path"), FILES, ids=[name for _, name, _ in FILES])


def test_the_package_was_found():
    assert len(FILES) >= 5


@every_file
def test_imports_go_down_only(room: str, name: str, path: Path):
    assert room in FLOORS, f"{name}: enter the new room {room!r} in FLOORS"
    upward = []
    for imported in imports_of(path):
        entered = imported.room
        if entered is None or imported.type_checking:
            continue
        assert entered in FLOORS, f"{name}:{imported.line} imports the unknown room {imported.module!r}"
        if FLOORS[entered] > FLOORS[room] and not (imported.in_function and (name, entered) in FACES):
            upward.append(
                f"{name}:{imported.line} (floor {FLOORS[room]}) imports {imported.module} ({FLOORS[entered]})"
            )
    assert not upward


@every_file
def test_heavy_libraries_stay_in_their_own_files(room: str, name: str, path: Path):
    wrong = []
    for imported in imports_of(path):
        library = imported.module.split(".")[0]
        if library not in HEAVY or imported.type_checking:
            continue
        if not name.startswith(HEAVY[library]):
            wrong.append(f"{name}:{imported.line} imports {library}; only {HEAVY[library]} may")
        # pydantic is what floor 1 is made of; everything else waits until it is needed.
        elif FLOORS[room] <= 3 and library != "pydantic" and not imported.in_function:
            wrong.append(f"{name}:{imported.line} imports {library} at module level; do it inside the function")
    assert not wrong


@every_file
def test_floor_0_opens_nothing(room: str, name: str, path: Path):
    if FLOORS.get(room) != 0:
        return
    foreign = {i.module.split(".")[0]: i.line for i in imports_of(path) if i.room is None and not i.type_checking}
    allowed = (set(sys.stdlib_module_names) | {"numpy"}) - OPENS
    assert not {module: line for module, line in foreign.items() if module not in allowed}
    calls = [n.lineno for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call) and _is_open(n.func)]
    assert not calls


def _is_open(func: ast.expr) -> bool:
    reads_files = {"load", "save", "fromfile", "memmap", "loadtxt", "savetxt", "tofile", "genfromtxt"}
    if isinstance(func, ast.Name):
        return func.id == "open"
    return isinstance(func, ast.Attribute) and func.attr in reads_files


@every_file
def test_nothing_from_data_is_executed(room: str, name: str, path: Path):
    """No pickle, marshal, shelve, eval or exec anywhere: a file must never be able to run code."""
    if room == "testing":  # it pickles and reopens what it tests, and reads no file that way
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wrong = [i for i in imports_of(path) if i.module.split(".")[0] in {"marshal", "pickle", "shelve", "dill", "joblib"}]
    called = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"eval", "exec", "compile"}
    ]
    assert not wrong, name
    assert not called, name


def test_the_judge_sees_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The walk itself: relative, nested, conditional and front-door imports."""
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "transport").mkdir()
    path = tmp_path / "transport" / "_x.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "from . import _base\n"
        "from ..errors import NotFoundError\n"
        "from saev_store import layout, ShardStore\n"
        "if TYPE_CHECKING:\n"
        "    import torch\n"
        "def f():\n"
        "    import zarr.storage\n"
        "    return importlib.import_module('fsspec.core')\n"
    )
    seen = [(i.module, i.room, i.in_function, i.type_checking) for i in imports_of(path)][2:]
    assert seen == [
        ("saev_store.transport", "transport", False, False),
        ("saev_store.errors", "errors", False, False),
        ("saev_store.layout", "layout", False, False),
        ("saev_store", "__init__", False, False),
        ("torch", None, False, True),
        ("zarr.storage", None, True, False),
        ("fsspec.core", None, True, False),
    ]


def test_every_suppression_says_why():
    root = PACKAGE.parent
    silent = re.compile(r"# (?:noqa|type: ignore|pyright: ignore)(?:: [A-Z0-9, ]+|\[[A-Za-z, -]+\])?\s*$")
    found = [
        f"{path.relative_to(root)}:{number}"
        for folder in ("saev_store", "tests", "benchmarks", "examples")
        for path in sorted((root / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if silent.search(line)
    ]
    assert found == []
