"""A progress bar on standard error, or nothing."""

from __future__ import annotations

import sys
from contextlib import ExitStack


class Progress(ExitStack):
    """Counts to `total` until it is closed; shows a bar with the rate and the time left, with `shown=None` on a terminal only.

    `unit` is `B`, which is shown as MB and GB, or a plural such as `examples`.
    """

    def __init__(self, total: int, title: str, *, shown: bool | None, unit: str = "B") -> None:
        super().__init__()
        self._bar = None
        # Under `pythonw`, and in some services, there is no standard error.
        if shown or (shown is None and sys.stderr is not None and sys.stderr.isatty()):
            from tqdm import tqdm

            label, is_scaled = (unit, True) if unit == "B" else (f" {unit}", False)
            bar = tqdm(total=total, desc=title, dynamic_ncols=True, unit=label, unit_scale=is_scaled)
            self._bar = self.enter_context(bar)

    def advance(self, amount: int) -> None:
        """Count what was done."""
        if self._bar is not None:
            self._bar.update(amount)
