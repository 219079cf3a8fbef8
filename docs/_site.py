"""What the documentation site has beside the files of this folder: pages of other files, notebooks, the commands and the API.

Hooks of MkDocs, named in mkdocs.yml. Nothing is written into this folder.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "docs"))  # MkDocs loads this file by its path
from _notebooks import NAMES, page_of  # noqa: E402

#: Notebooks that are pages, by their paths from the root.
NOTEBOOKS = {f"notebooks/{name}.ipynb": f"notebooks/{name}.md" for name in NAMES}
#: Files outside this folder that are pages, by their paths from the root.
PAGES = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/RESULTS.md": "benchmarks.md",
}
#: Modules with a page of the API reference: what their `__all__` has, or all public names.
ROOMS = (
    "saev_store", "saev_store.documents", "saev_store.errors", "saev_store.integrations.crosscoders",
    "saev_store.integrations.dictionary_learning", "saev_store.integrations.saelens", "saev_store.integrations.saev",
    "saev_store.loaders", "saev_store.order",
    "saev_store.record", "saev_store.sources", "saev_store.sources.caches", "saev_store.sources.energon",
    "saev_store.sources.energon.joins", "saev_store.sources.energon.prepare",
    "saev_store.sources.llmbatch", "saev_store.sources.mmididx", "saev_store.stats",
    "saev_store.torch", "saev_store.transport", "saev_store.view", "saev_store.writer", "saev_store.xarray", "saev_store.zarr",
)  # fmt: skip
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^)\s]+)\)")
#: The theme loads this script from the network; a copy is on the site.
_SHIM_ADDRESS, _SHIM = "https://unpkg.com/iframe-worker/shim", "vendor/iframe-worker.js"
_FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the parts of the navigation that are lists of files."""
    lists: dict[str, list[str]] = {
        "API": [_page_of(room) for room in ROOMS],
        "NOTEBOOKS": [*NOTEBOOKS.values()],
    }
    config.nav = _filled(config.nav, lists)
    return config


def _filled(entry: object, lists: dict[str, list[str]]) -> object:
    if isinstance(entry, list):
        return [_filled(item, lists) for item in entry]
    if isinstance(entry, dict):
        return {title: _filled(item, lists) for title, item in entry.items()}
    return lists.get(entry, entry) if isinstance(entry, str) else entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    made = {page: (ROOT / source).read_text("utf-8") for source, page in PAGES.items()}
    made["reference/cli.md"] = "\n".join(_commands())
    for room in ROOMS:
        made[_page_of(room)] = _api(room)
    for source, page in NOTEBOOKS.items():
        made[page], pictures = page_of(ROOT / source)
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Make links lead to pages of the site; those to files that are no page become their text."""
    sources = {**PAGES, **NOTEBOOKS}
    source = {made: path for path, made in sources.items()}.get(page.file.src_uri)
    # Where the text is in the repository, from its root.
    home = dirname(source if source is not None else f"docs/{page.file.src_uri}")

    def replaced(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        path, hash_mark, anchor = target.partition("#")
        there = normpath(f"{home}/{path}" if home else path)
        if (ROOT / there).is_dir():
            there = f"{there}/README.md"
        inside = sources.get(there) or (there.removeprefix("docs/") if there.startswith("docs/") else None)
        if inside is None or files.get_file_from_path(inside) is None:
            return text
        return f"{mark}[{text}]({relpath(inside, dirname(page.file.src_uri) or '.')}{hash_mark}{anchor})"

    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(replaced, part) for part in parts)


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Take the script that searches without a server from the site itself; the theme's address of it is on the network."""
    return output.replace(_SHIM_ADDRESS, relpath(_SHIM, dirname(page.file.dest_uri) or "."))


def on_post_template(output: str, **_: object) -> str:
    """The same for the page of addresses that do not exist."""
    return output.replace(_SHIM_ADDRESS, _SHIM)


# -- the API -----------------------------------------------------------------------------------------------------------


def _page_of(room: str) -> str:
    return f"reference/{room}.md"


def _api(room: str) -> str:
    """A page with the public names of a room, read from its source."""
    parts = room.split(".")
    path = ROOT.joinpath(*parts) / "__init__.py"
    path = path if path.exists() else ROOT.joinpath(*parts).with_suffix(".py")
    names = next((_strings(node.value) for node in ast.parse(path.read_text("utf-8")).body if _is_all(node)), [])
    shown = "".join(f"\n        - {name}" for name in names if not name.startswith("__"))
    members = f"\n    options:\n      members:{shown}" if shown else ""
    return f"# {room}\n\n::: {room}{members}\n"


def _is_all(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(at, ast.Name) and at.id == "__all__" for at in node.targets)


def _strings(node: ast.expr) -> list[str]:
    return [item.value for item in node.elts if isinstance(item, ast.Constant)] if isinstance(node, ast.List) else []


# -- the commands ------------------------------------------------------------------------------------------------------


def _commands() -> Iterator[str]:
    """Every command with its arguments and options, as `--help` has them."""
    from saev_store.cli._app import app

    yield "# Commands and options\n"
    yield "Commands with their arguments and options. Output and exit codes: [errors](../errors.md#on-the-command-line).\n"
    for name, command in app().commands.items():
        yield f"## {name}\n"
        yield f"{_escaped(command.help)}\n"
        yield "| argument or option | meaning |"
        yield "|---|---|"
        for parameter in command.params:
            if getattr(parameter, "hidden", False):
                continue
            is_option = parameter.param_type_name == "option"
            names = ", ".join(f"`{one}`" for one in [*parameter.opts, *parameter.secondary_opts]) if is_option else ""
            value = parameter.metavar or "" if is_option else parameter.metavar or parameter.name.upper()
            is_flag = is_option and getattr(parameter, "is_flag", False)
            shown = " ".join(part for part in (names, "" if is_flag or not value else f"`{value}`") if part)
            yield f"| {shown.replace('|', chr(92) + '|')} | {_escaped(getattr(parameter, 'help', '') or '')} |"
        yield ""


def _escaped(text: str | None) -> str:
    """A text of `--help` as Markdown."""
    return re.sub(r"([<>*_|])", r"\\\1", " ".join((text or "").split()))
