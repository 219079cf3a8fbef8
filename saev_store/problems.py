"""`Problem`: one thing that is wrong with a store or a data set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from saev_store.names import printable

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, or worth knowing, about a store or a data set.

    Attributes:
        kind: A stable code, such as `"missing_shard"`; codes are append-only.
        message: One sentence: the value, the rule, the remedy.
        where: The file, relative to the store, or the document's name.
        loc: The path within the document, such as `("layers", 2)`.
        severity: `"error"`: data is lost or was not checked; `"warning"`: unusual; `"info"`: worth knowing.
        lost: Half-open ranges of examples that cannot be read because of it.

    >>> print(Problem("missing_shard", "acts000001.bin is gone", where="acts000001.bin", lost=((3, 6),)))
    error missing_shard acts000001.bin: acts000001.bin is gone (examples 3:6 are lost)
    """

    kind: str
    message: str
    where: str = ""
    loc: tuple[str | int, ...] = ()
    severity: Severity = "error"
    lost: tuple[tuple[int, int], ...] = field(default=())

    def __str__(self) -> str:
        place = self.where + "".join(f"[{part!r}]" for part in self.loc)
        text = (
            f"{self.severity} {self.kind} {place}: {self.message}"
            if place
            else f"{self.severity} {self.kind}: {self.message}"
        )
        if self.lost:
            shown = ", ".join(f"{start}:{end}" for start, end in self.lost[:8])
            more = f", … {len(self.lost) - 8} more" if len(self.lost) > 8 else ""
            text += f" (examples {shown}{more} are lost)"
        return printable(text)
