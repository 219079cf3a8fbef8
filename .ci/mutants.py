"""The mutation score of each room, from `mutmut results --all true` on standard input; fails below 0.95.

    mutmut results --all true | python .ci/mutants.py

To be run where `mutants/` is. A mutant is caught if a test fails or does not end. One that no test runs is not caught; one that was
not tried is an error. Mutants that cannot change what the code does are told apart by comparing the functions, and do not count:

* the type that is passed to `cast`, which ignores it;
* `strict=` of a `zip`: the arguments have one length wherever it is written, so it never raises and never cuts;
* the case of a codec's name.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import Counter, defaultdict
from pathlib import Path

LEAST = 0.95
CAUGHT, ESCAPED, EQUIVALENT = {"killed", "timeout"}, {"survived", "no tests"}, "equivalent"


class _Same(ast.NodeTransformer):
    """Makes one tree of all functions that do the same for one of the reasons above."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "cast" and node.args:
            node.args[0] = ast.Constant(None)
        if name == "zip":
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "strict"]
        if isinstance(node.func, ast.Attribute) and node.func.attr in {"encode", "decode"}:
            node.args[:1] = [ast.Constant(codec.lower()) for codec in map(_text, node.args[:1])]
        return node


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.dump(node)


@functools.cache
def _functions(module: str) -> dict[str, ast.FunctionDef]:
    """All functions of a changed module, by name: as they were, and each mutant."""
    tree = ast.parse(Path("mutants", *module.split(".")).with_suffix(".py").read_text("utf-8"))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def is_equivalent(mutant: str) -> bool:
    """Return True if a mutant does the same as the function that it was made of, for one of the reasons above."""
    module, _, name = mutant.rpartition(".")
    found = [_functions(module)[which] for which in (name, f"{name.rpartition('__mutmut_')[0]}__mutmut_orig")]
    trees = [_Same().visit(ast.parse(ast.unparse(function))) for function in found]
    before, after = ([ast.dump(part) for part in (tree.body[0].args, *tree.body[0].body)] for tree in trees)
    return before == after


def main() -> int:
    """Print a line for each room; 1 if a room, or all together, has too low a score."""
    rooms: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for line in sys.stdin:
        name, _, status = line.strip().rpartition(": ")
        if name:
            if status in ESCAPED and is_equivalent(name):
                status = EQUIVALENT
            room = ".".join(name.split(".")[:2])
            rooms[room][status] += 1
            rooms["all"][status] += 1
    worst = 1.0
    for room in sorted(rooms):
        counts = rooms[room]
        caught, n = sum(counts[status] for status in CAUGHT), counts.total() - counts[EQUIVALENT]
        worst = min(worst, caught / max(n, 1))
        parts = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        print(f"{room}: {caught / max(n, 1):.4f} = {caught} of {n} ({parts})")
    strange = set(rooms["all"]) - CAUGHT - ESCAPED - {EQUIVALENT}
    if not rooms["all"] or strange:
        print(f"not all mutants were tried: {', '.join(sorted(strange)) or 'there are none'}")
        return 1
    return int(worst < LEAST)


if __name__ == "__main__":
    sys.exit(main())
