"""A progress bar on standard error, or nothing."""

from __future__ import annotations

import sys
from typing import Self

#: The only unit that is shown with a prefix: 1.20GB.
BYTES = "B"


class Progress:
    """Counts to `total`; shows a bar with the rate and the time left, with `shown=None` on a terminal only.

    `done` was there before. `unit` is `B`, which is shown as MB and GB, or a plural such as `examples`.
    """

    def __init__(self, total: int, title: str, *, shown: bool | None, done: int = 0, unit: str = BYTES) -> None:
        self._bar = None
        # Under `pythonw`, and in some services, there is no standard error.
        if shown or (shown is None and sys.stderr is not None and sys.stderr.isatty()):
            from tqdm import tqdm

            is_bytes = unit == BYTES
            self._bar = tqdm(
                total=total, initial=done, desc=title, dynamic_ncols=True,
                unit=unit if is_bytes else f" {unit}", unit_scale=is_bytes,
            )  # fmt: skip

    def advance(self, amount: int) -> None:
        """Count what was done."""
        if self._bar is not None:
            self._bar.update(amount)

    def note(self, text: str) -> None:
        """Show a few words behind the bar from its next step on."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)

    def close(self) -> None:
        """End the bar's line. A second call does nothing."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def human_seconds(seconds: float) -> str:
    """A time as text.

    >>> human_seconds(312.4), human_seconds(4000), human_seconds(200_000)
    ('312.4 s', '67 min', '55.6 h')
    """
    if seconds < 600:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
