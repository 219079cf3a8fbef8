"""A progress bar on standard error, or nothing; and what the bars of a block have counted, for a line at its end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import NamedTuple, Self

#: The only unit that is shown with a prefix: 1.20GB.
BYTES = "B"
#: `{n:,}` and the others are fields of tqdm.
_OF_BYTES = (
    "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}B of {total_fmt}B [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"
)
_OF_OTHERS = (
    "{desc}: {percentage:3.0f}%|{bar}| {n:,} of {total:,}{unit} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"
)


class Counted(NamedTuple):
    """What a bar has counted.

    Attributes:
        title: What was done, such as `writing`.
        unit: `B`, or a plural such as `examples`.
        n: How many of them, without those that were there before.
        nbytes: Bytes of them; None: not known.
        seconds: How long it took.
    """

    title: str
    unit: str
    n: int
    nbytes: int | None
    seconds: float


_COUNTED: ContextVar[list[Counted] | None] = ContextVar("counted", default=None)


@contextmanager
def counting() -> Generator[None]:
    """A block in which `counted_so_far` has what each bar has counted, shown or not, from when that bar is closed."""
    token = _COUNTED.set([])
    try:
        yield
    finally:
        _COUNTED.reset(token)


def counted_so_far() -> list[Counted]:
    """What the closed bars of the block have counted; empty outside of one."""
    return list(_COUNTED.get() or ())


class Progress:
    """Counts; shows a bar with the rate and the time left on a terminal.

    Args:
        total: All there is to do, as `advance` counts it.
        title: What is being done.
        shown: None shows a bar on a terminal only.
        done: How much of it was there before.
        unit: What people count: `B`, which is shown as MB and GB, or a plural such as `examples`.
        unit_nbytes: Bytes of an example, where `advance` counts bytes and people count examples.
    """

    def __init__(
        self, total: int, title: str, *, shown: bool | None, done: int = 0, unit: str = BYTES, unit_nbytes: int = 1
    ) -> None:
        self._bar, self._title, self._unit, self._each = None, title, unit, unit_nbytes
        self._before = self._done = done
        self._started, self._counted = time.perf_counter(), _COUNTED.get()
        if shown if shown is not None else shows_lines_anew():
            from tqdm import tqdm

            is_bytes = unit == BYTES
            self._bar = tqdm(
                total=total // unit_nbytes,
                initial=done // unit_nbytes,
                desc=title,
                unit=unit if is_bytes else f" {unit}",
                unit_scale=is_bytes,
                unit_divisor=1000,
                bar_format=_OF_BYTES if is_bytes else _OF_OTHERS,
                dynamic_ncols=True,
            )

    def advance(self, amount: int) -> None:
        before, self._done = self._done, self._done + amount
        if self._bar is not None:
            self._bar.update(self._done // self._each - before // self._each)

    def note(self, text: str) -> None:
        """Show a few words behind the bar from its next step on."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)

    def close(self) -> None:
        """End the bar's line. A second call does nothing."""
        if self._bar is not None:
            self._bar.close()
        if self._counted is not None:
            amount = self._done - self._before
            has_bytes = self._unit == BYTES or self._each > 1
            seconds = time.perf_counter() - self._started
            self._counted.append(
                Counted(self._title, self._unit, amount // self._each, amount if has_bytes else None, seconds)
            )
            self._counted = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def shows_lines_anew() -> bool:
    """Whether standard error is a terminal that can write a line again."""
    # Under `pythonw`, and in some services, there is none.
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def human_gb(nbytes: float) -> str:
    """A number of bytes in powers of 1000, as disks and networks are sold, and bars count.

    >>> human_gb(999), human_gb(1_234_567), human_gb(48e9)
    ('999 B', '1.2 MB', '48.0 GB')
    """
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    size, unit = nbytes / 1000, "kB"
    for larger in ("MB", "GB", "TB", "PB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.1f} {unit}"


def human_seconds(seconds: float) -> str:
    """A time as text.

    >>> human_seconds(0.25), human_seconds(312.4), human_seconds(4000), human_seconds(200_000)
    ('0.2 s', '312 s', '67 min', '55.6 h')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def human_rate(n: int, unit: str, seconds: float) -> str:
    """How many of them in a second; empty where the time was too short to say.

    >>> human_rate(1000, "examples", 12.0), human_rate(3_000_000, "B", 2.0), human_rate(5, "examples", 20.0)
    ('83 examples/s', '1.5 MB/s', '0.25 examples/s')
    """
    if seconds <= 0:
        return ""
    if unit == BYTES:
        return f"{human_gb(n / seconds)}/s"
    per_s = n / seconds
    return f"{per_s:,.0f} {unit}/s" if per_s >= 10 else f"{per_s:.2g} {unit}/s"
