"""Imports: floors, private modules, cycles, heavy libraries. Reads the source of the package and imports nothing of it.

Each test reports all violations at once.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "saev_store"

#: Room -> floor. A room is a module or a folder directly below `saev_store/`. A new room has to be entered here.
FLOORS = {
    "_version": 0,
    "errors": 0,
    "names": 0,
    "problems": 0,
    "core": 0,
    "order": 0,
    "_runtime": 1,
    "documents": 1,
    "transport": 2,
    "store": 3,
    "validation": 3,
    "writer": 3,
    "sources": 4,
    "loaders": 4,
    "stats": 4,
    "cli": 5,
    "record": 5,
    "torch": 5,
    "zarr": 5,
    "xarray": 5,
    "dask": 5,
    "export": 5,
    "view": 5,
    "__main__": 6,
    "integrations": 6,
    "__init__": 6,  # the front door; test_import_time.py judges what it loads
}

#: Imports that go up, all inside functions: a method of a store opens a face, and a process that does not call it does not
#: load it. (file, room above it)
FACES = {
    ("store/store.py", "zarr"),
    ("store/store.py", "xarray"),
    ("store/store.py", "dask"),
    ("store/store.py", "export"),
    ("store/store.py", "stats"),
    ("store/store.py", "sources"),
    ("store/viewing.py", "view"),
}

#: Modules on the same floor that import each other, by a function-level import. (importing module, imported module)
LAZY_CYCLES = {
    ("store.opening", "store.listing"),  # the error for a folder without metadata.json lists the stores in it
    ("store.store", "store.listing"),
    ("store.store", "writer"),
    ("store.opening", "writer"),
    ("store.listing", "writer"),
    ("validation._validate", "writer"),
    ("store.importing", "writer.importing"),
}

#: Heavy library -> beginnings of the names of the only files that may import it.
HEAVY = {
    "aiohttp": ("transport/_fsspec",),
    "boto3": (),
    "botocore": ("transport/fsspec",),
    "dask": (
        "dask/",
        "xarray/",
        "zarr/",
        "stats/",
        "writer/importing.py",
        "_runtime/cluster.py",
    ),
    "distributed": ("_runtime/cluster.py",),
    "fsspec": ("transport/_fsspec", "sources/energon/filesystem.py"),
    "gcsfs": ("transport/fsspec",),
    "huggingface_hub": ("record/",),
    "matplotlib": (),
    "obstore": ("transport/obstore", "transport/_obstore"),
    "PIL": ("record/", "sources/pixels.py", "view/_pictures.py"),
    "pandas": ("xarray/",),
    "pyarrow": ("sources/caches/_arrow.py",),
    "pydantic": (
        "documents/",
        "sources/places.py",
        "sources/provenance.py",
        "stats/",
    ),
    "s3fs": ("transport/fsspec",),
    "skimage": ("record/",),
    "starlette": ("view/",),
    "torch": (
        "torch/",
        "sources/llmbatch/reader.py",
        "record/",
        "integrations/",
    ),
    "tqdm": ("_runtime/progress.py", "validation/", "cli/"),
    "transformers": ("record/",),
    "typer": ("cli/",),
    "uvicorn": ("view/",),
    "virtualizarr": ("export/",),
    "xarray": ("xarray/", "zarr/", "export/"),
    "zarr": ("zarr/", "xarray/", "dask/", "export/"),
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


def is_module(package: str, name: str) -> bool:
    """Whether `from package import name` imports a module of ours."""
    parts = package.split(".")
    if parts[0] != "saev_store":
        return False
    below = PACKAGE.joinpath(*parts[1:], name)
    return below.is_dir() or below.with_suffix(".py").is_file()


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
                for alias in node.names:
                    add(f"{module}.{alias.name}" if is_module(module, alias.name) else module)
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
MODULES = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for _, name, path in FILES}


def module_of(name: str) -> str:
    """The module of a file: `order._window` of `order/_window.py`."""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def modules_imported(path: Path) -> set[str]:
    """Our modules that a file imports when it runs, in functions too, without `saev_store.`."""
    found: set[str] = set()
    for imported in imports_of(path):
        if imported.type_checking or imported.room is None:
            continue
        module = imported.module.removeprefix("saev_store").removeprefix(".")
        while module and module not in MODULES:  # a name in a module
            module = module.rpartition(".")[0]
        found.add(module or "__init__")
    return found


def test_the_package_was_found():
    assert len(FILES) >= 5


def test_every_room_has_a_floor():
    assert {room for room, _, _ in FILES} == set(FLOORS)


def test_imports_go_down_only():
    upward = []
    for room, name, path in FILES:
        for imported in imports_of(path):
            entered = imported.room
            if entered is None or imported.type_checking:
                continue
            assert entered in FLOORS, f"{name}:{imported.line} imports the unknown room {imported.module!r}"
            if FLOORS[entered] > FLOORS[room] and not (imported.in_function and (name, entered) in FACES):
                upward.append(
                    f"{name}:{imported.line} (floor {FLOORS[room]}) imports {imported.module} ({FLOORS[entered]})"
                )
    assert upward == []


def test_packages_import_public_names_of_each_other_only():
    """`saev_store.x._y` is private to `saev_store/x`."""
    wrong = []
    for room, name, path in FILES:
        for imported in imports_of(path):
            if imported.room is None or imported.room == room:
                continue
            parts = imported.module.split(".")
            private = any(part.startswith("_") and not part.startswith("__") for part in parts[2:])
            if private:
                wrong.append(f"{name}:{imported.line} imports {imported.module}")
    assert wrong == []


def test_modules_do_not_import_each_other():
    """No cycles, not even through imports in functions, except the listed ones."""
    allowed = LAZY_CYCLES | {(module_of(file), room) for file, room in FACES}
    graph = {
        module: {found for found in modules_imported(path) if found != module and (module, found) not in allowed}
        for module, path in MODULES.items()
        if module != "__init__"
    }
    sorter = TopologicalSorter({module: found - {"__init__"} for module, found in graph.items()})
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(f"a cycle: {' -> '.join(error.args[1])}")


def test_heavy_libraries_stay_in_their_own_files():
    wrong = []
    for room, name, path in FILES:
        for imported in imports_of(path):
            library = imported.module.split(".")[0]
            if library not in HEAVY or imported.type_checking:
                continue
            if not name.startswith(HEAVY[library]):
                wrong.append(f"{name}:{imported.line} imports {library}; only {HEAVY[library]} may")
            # pydantic is what floor 1 is made of; everything else waits until it is needed.
            elif FLOORS[room] <= 3 and library != "pydantic" and not imported.in_function:
                wrong.append(f"{name}:{imported.line} imports {library} at module level; do it inside the function")
    assert wrong == []


def test_floor_0_opens_nothing():
    wrong = []
    allowed = (set(sys.stdlib_module_names) | {"numpy", "ml_dtypes"}) - OPENS
    for room, name, path in FILES:
        if FLOORS[room] != 0:
            continue
        foreign = {i.module.split(".")[0]: i.line for i in imports_of(path) if i.room is None and not i.type_checking}
        wrong += [f"{name}:{line} imports {module}" for module, line in foreign.items() if module not in allowed]
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call) and _is_open(n.func)]
        wrong += [f"{name}:{call.lineno} opens a file" for call in calls]
    assert wrong == []


def _is_open(func: ast.expr) -> bool:
    reads_files = {"load", "save", "fromfile", "memmap", "loadtxt", "savetxt", "tofile", "genfromtxt"}
    if isinstance(func, ast.Name):
        return func.id == "open"
    return isinstance(func, ast.Attribute) and func.attr in reads_files


def test_nothing_from_data_is_executed():
    """No pickle, marshal, shelve, eval or exec anywhere: a file must never be able to run code."""
    wrong = []
    for room, name, path in FILES:
        if room == "testing":  # it pickles and reopens what it tests, and reads no file that way
            continue
        loaders = {"marshal", "pickle", "shelve", "dill", "joblib"}
        wrong += [f"{name}:{i.line} imports {i.module}" for i in imports_of(path) if i.module.split(".")[0] in loaders]
        wrong += [
            f"{name}:{node.lineno} calls {node.func.id}"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"eval", "exec", "compile"}
        ]
    assert wrong == []


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
        "from saev_store import core, ShardStore\n"
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
        ("saev_store.core", "core", False, False),
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
