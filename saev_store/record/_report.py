"""Speed of a recording, and what the model waited for."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal

from saev_store._runtime.progress import human_seconds
from saev_store.errors import counted
from saev_store.store.card import human_bytes


@dataclass(frozen=True, slots=True)
class RecordingReport:
    """Counts and times of a recording, so far or as a whole. Only what this call does counts.

    Attributes:
        n_examples: Examples that were recorded; those of interrupted calls are not among them.
        n_left: Examples that are still to be recorded by this call.
        nbytes: Bytes of the recorded vectors.
        elapsed_s: Seconds since the first batch was asked for.
        source_wait_s: Seconds of them in which the model waited for the source.
        writer_wait_s: Seconds of them in which the model waited for the writer; publication is among them.

    >>> report = RecordingReport(n_examples=600, n_left=200, nbytes=3 << 30, elapsed_s=60.0, source_wait_s=15.0,
    ...                          writer_wait_s=0.6)
    >>> report.examples_per_s, report.left_s
    (10.0, 20.0)
    >>> print(report)
    recorded 600 examples (3.0 GiB) in 60 s, 10.0 examples/s; the model waited 25 % of the time for the source and 1 % for the writer
    """

    n_examples: int = 0
    n_left: int = 0
    nbytes: int = 0
    elapsed_s: float = 0.0
    source_wait_s: float = 0.0
    writer_wait_s: float = 0.0

    @property
    def examples_per_s(self) -> float:
        """Examples per second."""
        return self._per_s(self.n_examples)

    @property
    def left_s(self) -> float | None:
        """Seconds that the rest takes at the speed so far; None while that is not known."""
        if not self.n_left:
            return 0.0
        return self.n_left / self.examples_per_s if self.n_examples else None

    @property
    def brief(self) -> str:
        """A few words for the end of a bar, which has the rate and the time left itself."""
        return (
            f"waited {self._per_s(self.source_wait_s):.0%} for source, {self._per_s(self.writer_wait_s):.0%} for writer"
        )

    def to_dict(self) -> dict[str, object]:
        """The attributes and what follows from them, as plain JSON types."""
        return {**asdict(self), "examples_per_s": self.examples_per_s, "left_s": self.left_s}

    def __str__(self) -> str:
        if not self.n_examples:
            return "recorded nothing: all examples were there"
        waits = [100 * self._per_s(seconds) for seconds in (self.source_wait_s, self.writer_wait_s)]
        return (
            f"recorded {counted(self.n_examples, 'example')} ({human_bytes(self.nbytes)}) in {human_seconds(self.elapsed_s)}, "
            f"{self._per_s(self.n_examples):,.1f} examples/s; the model waited {waits[0]:.0f} % of the time for the "
            f"source and {waits[1]:.0f} % for the writer"
        )

    def _per_s(self, amount: float) -> float:
        return amount / self.elapsed_s if self.elapsed_s else 0.0


class Meter:
    """Counts and times of a call, which a report is made of.

    Args:
        n_examples: Examples that the call will record.
        example_nbytes: Bytes of one.

    Attributes:
        n_done: Examples that are recorded.
    """

    def __init__(self, n_examples: int, example_nbytes: int) -> None:
        self.n_done, self._n_examples, self._example_nbytes = 0, n_examples, example_nbytes
        self._waits_s, self._began_s = {"source": 0.0, "writer": 0.0}, time.perf_counter()

    @contextmanager
    def waiting(self, what: Literal["source", "writer"]) -> Generator[None]:
        """A block in which the model waits."""
        began_s = time.perf_counter()
        yield
        self._waits_s[what] += time.perf_counter() - began_s

    def report(self) -> RecordingReport:
        """The state of now."""
        n, elapsed_s = self.n_done, time.perf_counter() - self._began_s
        return RecordingReport(n, self._n_examples - n, n * self._example_nbytes, elapsed_s, *self._waits_s.values())
