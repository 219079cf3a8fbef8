"""The line at the end of a long command: what was done, how fast, and where the result is."""

from __future__ import annotations

import sys

from saev_store._runtime.progress import BYTES, counted_so_far, human_gb, human_rate, human_seconds
from saev_store.errors import counted


def end_line(verb: str, titles: str, *, at: str, nothing: str = "all of it was there") -> str:
    """What the bars of this command have counted.

    Args:
        verb: What was done, such as `copied`.
        titles: Of the bars that count it, separated by spaces; others, such as those that verify, do not count.
        at: Where the result is.
        nothing: Why there was nothing to do, where no bar has counted anything.

    >>> from saev_store._runtime.progress import Progress, counting
    >>> with counting(), Progress(4000, "writing", shown=False, unit="examples", unit_nbytes=1000) as bar:
    ...     bar.advance(4000)
    ...     bar.close()
    ...     print(end_line("imported", "writing", at="/scratch/1a2b"))
    imported 4 examples (4.0 kB) in 0.0 s, ... examples/s, at /scratch/1a2b
    """
    found = [each for each in counted_so_far() if each.title in titles.split()]
    n, seconds = sum(each.n for each in found), sum(each.seconds for each in found)
    if not n:
        return f"{verb} nothing: {nothing}, at {at}"
    unit, nbytes = found[0].unit, sum(each.nbytes or 0 for each in found)
    if unit == BYTES:
        what = human_gb(n)
    else:
        what = counted(n, unit.removesuffix("s")) + (f" ({human_gb(nbytes)})" if nbytes else "")
    parts = [f"{verb} {what} in {human_seconds(seconds)}", human_rate(n, unit, seconds), f"at {at}"]
    return ", ".join(filter(None, parts))


def say_done(verb: str, titles: str, *, at: str, as_json: bool, nothing: str = "all of it was there") -> None:
    """Print the line on standard error; with `--json` that is one document or nothing."""
    if not as_json:
        print(end_line(verb, titles, at=at, nothing=nothing), file=sys.stderr)
