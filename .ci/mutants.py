"""The mutation score of each room, from `mutmut results --all true` on standard input; fails below 0.95.

    mutmut results --all true | python .ci/mutants.py

A mutant is caught if a test fails or does not end. One that no test runs is not caught; one that was not tried is an error.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict

LEAST = 0.95
CAUGHT, ESCAPED = {"killed", "timeout"}, {"survived", "no tests"}


def main() -> int:
    """Print a line for each room; 1 if a room, or all together, has too low a score."""
    rooms: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for line in sys.stdin:
        name, _, status = line.strip().rpartition(": ")
        if name:
            room = ".".join(name.split(".")[:2])
            rooms[room][status] += 1
            rooms["all"][status] += 1
    worst = 1.0
    for room in sorted(rooms):
        counts = rooms[room]
        caught, n = sum(counts[status] for status in CAUGHT), counts.total()
        worst = min(worst, caught / n)
        told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        print(f"{room}: {caught / n:.4f} = {caught} of {n} ({told})")
    strange = set(rooms["all"]) - CAUGHT - ESCAPED
    if not rooms["all"] or strange:
        print(f"not all mutants were tried: {', '.join(sorted(strange)) or 'there are none'}")
        return 1
    return int(worst < LEAST)


if __name__ == "__main__":
    sys.exit(main())
