"""The words that CONTRIBUTING.md asks writers to avoid, counted over the package and its documentation.

    python .ci/prose.py

Prints each place. Exits with 1 if there are more than the allowed number, or if more than one docstring in a hundred
begins with a question word.
"""

import ast
import re
import sys
from pathlib import Path

ALLOWED = 25
WORDS = re.compile(
    r"\b(?<![Tt]here )(?:is|are|was|were) no (?!more\b|longer\b)"
    r"|\b(?:told|tells?|said|says?|lies|goes on|stands (?!for\b))\b(?![(=:])"
)
QUESTION = re.compile(r"(?:What|Whether|Where|When|How|Who)\b")


def prose(path: Path) -> list[tuple[int, str]]:
    """Return the numbered lines of a page, or of a module's comments and strings."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(number, line) for number, line in enumerate(lines, 1) if not line.lstrip().startswith((">>>", "..."))]


def docstrings(path: Path) -> list[tuple[int, str]]:
    """Return the docstrings of a module with the lines where they begin."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                found.append((node.body[0].lineno, text))
    return found


def main() -> int:
    """Print the places and return the exit status."""
    modules = sorted(Path("saev_store").rglob("*.py"))
    pages = [*sorted(Path("docs").rglob("*.md")), Path("README.md"), Path("CONTRIBUTING.md")]
    places = [
        f"{path}:{number}: {line.strip()}"
        for path in [*modules, *pages]
        for number, line in prose(path)
        if WORDS.search(line)
    ]
    texts = [(path, number, text) for path in modules for number, text in docstrings(path)]
    questions = [f"{path}:{number}: {text.splitlines()[0]}" for path, number, text in texts if QUESTION.match(text)]
    print(*places, *questions, sep="\n")
    print(f"{len(places)} places of avoided words (at most {ALLOWED})")
    print(f"{len(questions)} of {len(texts)} docstrings begin with a question word (at most one in a hundred)")
    return int(len(places) > ALLOWED or len(questions) * 100 > len(texts))


if __name__ == "__main__":
    sys.exit(main())
