"""Steps that both stores of the demo take."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from saev_store.record._report import RecordingReport
    from saev_store.store.store import ShardStore


def say_recorded(store: ShardStore, recorded: RecordingReport, say: Callable[[str], None]) -> None:
    """Say what this run recorded, and what the store is."""
    if not recorded.n_examples:
        say("recorded   nothing: an earlier run finished this store")
    else:
        there = len(store) - recorded.n_examples
        after = f", after the {there} that an interrupted run had left" if there else ""
        say(f"recorded   {str(recorded).removeprefix('recorded ')}{after}")
    say(repr(store))


def validate(store: ShardStore, say: Callable[[str], None], *, progress: bool | None) -> tuple[tuple[str, ...], float]:
    """The problems that a look at every byte finds, and the seconds that it takes.

    Without what is only worth knowing: the vectors of padding are zeros, for example.
    """
    report = store.validate(deep=True, progress=progress)
    problems = tuple(str(problem) for problem in report.problems if problem.severity != "info")
    found = "; ".join(problems) or "no problems"
    say(f"validated  {rate(store.nbytes / report.elapsed_s)}, every byte against its digest: {found}")
    return problems, report.elapsed_s


def say_checked(n_checked: int, max_abs_diff: float, against: str, say: Callable[[str], None]) -> None:
    """Say how near the stored vectors are to others."""
    verdict = "bit for bit" if max_abs_diff == 0 else f"up to {max_abs_diff:.3g} (largest absolute difference)"
    say(f"checked    {n_checked:,} vectors equal {against} {verdict}")


def rate(bytes_per_s: float) -> str:
    """A speed as text.

    >>> rate(3.2e8), rate(4.56e9)
    ('320 MB/s', '4.6 GB/s')
    """
    return f"{bytes_per_s / 1e6:,.0f} MB/s" if bytes_per_s < 1e9 else f"{bytes_per_s / 1e9:,.1f} GB/s"
