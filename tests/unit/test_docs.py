"""The documentation: links have targets, examples run, named files exist, and public names have docstrings."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import textwrap
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())

#: The modules whose `__all__` is a promise, with the extra that each needs.
PUBLIC = {
    "saev_store": None,
    "saev_store.integrations.saev": "torch",
    "saev_store.documents": None,
    "saev_store.loaders": None,
    "saev_store.order": None,
    "saev_store.record": "torch",
    "saev_store.torch": "torch",
    "saev_store.transport": None,
}
FENCED = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", flags=re.MULTILINE | re.DOTALL)
#: What a block of code that no test runs has behind its language: the site shows it above the block.
ILLUSTRATION = 'title="Illustration, not run"'
#: Languages of blocks that a reader may copy and run.
CODE = {"bash", "console", "js", "pycon", "python", "sh"}
NEEDS_TORCH = re.compile(r"^>>> (?:import torch|from saev_store.(?:record|torch) import)", flags=re.MULTILINE)
#: Whole scripts and commands that other tests run, and continuous integration: page, what is in the block, where that is.
RUN_ELSEWHERE = [
    ("README.md", "saev-store demo", ".ci/run"),
    ("README.md", "python -m pytest -n auto", ".ci/run"),
    ("docs/reading.md", "icechunk.Repository", "tests/views/test_recipes.py"),
    ("docs/reading.md", "store_app", "tests/views/test_recipes.py"),
    ("docs/reading.md", "open_zarr", "tests/views/test_recipes.py"),
    ("docs/integrations.md", "ShardStore.from_array(", "tests/integrations/test_integrations_page.py"),
    ("docs/integrations.md", "saev_store.integrations.saev", "tests/integrations/test_integrations_page.py"),
    ("docs/integrations.md", "transcoder_batches(", "tests/integrations/test_integrations_page.py"),
    ("docs/integrations.md", "SAETrainer(", "tests/peers/test_training_peers.py"),
    ("docs/integrations.md", "trainSAE(", "tests/peers/test_training_peers.py"),
    ("docs/integrations.md", "MultiSAETrainer(", "tests/helpers/peer_training.py"),
    ("docs/integrations.md", "ActivationStream", "tests/integrations/test_training_recipes.py"),
    ("docs/integrations.md", "def get_batch", "tests/integrations/test_training_recipes.py"),
    ("docs/integrations.md", "HiddenStatesBackend", "tests/integrations/test_training_recipes.py"),
    ("docs/integrations.md", "VisionAdapter(", "tests/record/test_recording_recipes.py"),
    ("docs/integrations.md", "HookedAdapter(", "tests/record/test_recording_recipes.py"),
    ("docs/integrations.md", "from nnsight import", "tests/peers/test_record_lens.py"),
]


class Block(NamedTuple):
    """A fenced block: line number, language, what follows it, and the text without the indentation of a list."""

    line: int
    language: str
    more: str
    body: str

    @property
    def is_session(self) -> bool:
        """Whether it has prompts, so that it is run here."""
        return self.language in {"python", "pycon"} and self.body.startswith(">>>")


def blocks(text: str) -> list[Block]:
    """Every fenced block of a page."""
    return [
        Block(text.count("\n", 0, match.start(4)), match[2], match[3].strip(), textwrap.dedent(match[4]))
        for match in FENCED.finditer(text)
    ]


def anchors(text: str) -> set[str]:
    """The names that headings can be linked by."""
    headings = re.findall(r"^#+ +(.*?)\s*$", FENCED.sub("", text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_links_lead_somewhere(page: Path):
    text = page.read_text(encoding="utf-8")
    prose = FENCED.sub("", text)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", prose):
        link = target[0] or target[1]
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there.read_text(encoding="utf-8"))):
            broken.append(link)
    assert not broken


@every_page
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Python blocks with a prompt run from top to bottom, as one session, in an empty folder.

    Without torch those are left out that import it.
    """
    sessions = [block for block in blocks(page.read_text("utf-8")) if block.is_session]
    if find_spec("torch") is None:
        sessions = [block for block in sessions if not NEEDS_TORCH.search(block.body)]
    if not sessions:
        return
    monkeypatch.chdir(tmp_path)
    parser, flags = doctest.DocTestParser(), doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    runner, names = doctest.DocTestRunner(optionflags=flags), {}
    said: list[str] = []
    for block in sessions:
        test = parser.get_doctest(block.body, names, page.name, str(page), block.line)
        runner.run(test, out=said.append, clear_globs=False)
        names = test.globs
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


@every_page
def test_code_is_run_or_says_that_it_is_an_illustration(page: Path):
    name, wrong = page.relative_to(ROOT).as_posix(), []
    for block in blocks(page.read_text("utf-8")):
        elsewhere = [word for where, word, _ in RUN_ELSEWHERE if where == name and word in block.body]
        is_illustration = block.more == ILLUSTRATION
        is_run = block.is_session or (bool(elsewhere) and block.more == "")
        if block.language in CODE and is_run == is_illustration:
            wrong.append(f"{name}, line {block.line}: {block.body[:60]!r}")
        if "+SKIP" in block.body or (">>>" in block.body and is_illustration):
            wrong.append(f"{name}, line {block.line}: a session that is not run")
    assert not wrong


def test_what_is_run_elsewhere_is_there():
    for page, word, where in RUN_ELSEWHERE:
        text = (ROOT / page).read_text("utf-8")
        assert [block for block in blocks(text) if word in block.body and block.more == ""], (page, word)
        runner = (ROOT / where).read_text("utf-8")
        assert page in runner or f'"{Path(page).name}"' in runner


def test_every_page_is_in_the_index():
    folder = ROOT / "docs"
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)\)", (folder / "README.md").read_text(encoding="utf-8")))
    assert linked == {path.name for path in folder.glob("*.md")} - {"README.md"}


def test_where_things_are():
    """Each file that CONTRIBUTING.md names exists and defines the names that follow it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Where things are")[1].split("## House")[0]
    named = re.findall(r"`(saev_store/[\w/.]+)`(?:: `([\w.]+)`)?", text)
    assert len(named) >= 20
    wrong = []
    for path, name in named:
        file = ROOT / path
        if not file.exists():
            wrong.append(path)
        elif name:
            body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
            for part in name.split("."):
                found = [node for node in body if part in defined_by(node)]
                wrong += [] if found else [f"{path}: {name}"]
                body = getattr(found[0], "body", []) if found else []
    assert not wrong


def defined_by(node: ast.stmt) -> set[str]:
    """The names that a statement defines: of a class, a function or an assignment."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_the_two_set_up_commands_are_there():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line for line in text.splitlines() if line.startswith("pip install ")]
    assert len(commands) == 2
    assert commands[0].endswith(" && saev-store demo")
    assert commands[1].endswith(" && python -m pytest -n auto")


@pytest.mark.parametrize(("module", "extra"), PUBLIC.items())
def test_public_names_are_explained(module: str, extra: str | None):
    if extra:
        pytest.importorskip(extra)
    bare = []
    room = importlib.import_module(module)
    for name in room.__all__:
        thing = getattr(room, name)
        if not (inspect.isclass(thing) or inspect.isroutine(thing)):
            continue
        if not inspect.getdoc(thing):
            bare.append(name)
        elif inspect.isclass(thing):
            bare += [f"{name}.{member}" for member in bare_members(thing)]
    assert not bare


def bare_members(cls: type) -> list[str]:
    """Public methods of `cls` without a docstring; properties may have none, because names and types often explain them."""
    return [
        name
        for name, member in vars(cls).items()
        if not name.startswith("_")
        and isinstance(member, (FunctionType, classmethod, staticmethod))
        and not inspect.getdoc(getattr(cls, name))
    ]
