"""A progress bar on standard error, or nothing."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self


class Progress:
    """Counts bytes; shows a bar on a terminal.

    Args:
        total_nbytes: All there is to do.
        title: What is being done.
        shown: None shows a bar on a terminal only.
    """

    def __init__(self, total_nbytes: int, title: str, *, shown: bool | None, done_nbytes: int = 0) -> None:
        self._bar = None
        if shown if shown is not None else sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total_nbytes, initial=done_nbytes, desc=title, unit="B", unit_scale=True, unit_divisor=1024
            )

    def advance(self, nbytes: int) -> None:
        if self._bar is not None:
            self._bar.update(nbytes)

    def note(self, text: str) -> None:
        """Show a few words behind the bar from its next step on."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
