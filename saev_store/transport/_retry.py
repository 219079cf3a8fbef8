"""Trying again where that can help, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DeadlineError,
    NotFoundError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
)
from saev_store.transport._base import Buffer, Moves, Transport, Writes
from saev_store.transport._wrap import Wrapper

T = TypeVar("T")

_FIRST_WAIT_S = 0.1


class RetryTransport(Wrapper):
    """Repeats operations that failed for a passing reason, with growing, randomised waits.

    Only a `TransportError` that says it is `transient` is repeated; a file that looks too short is read once more,
    for it may just have been grown. A missing file, refused access or a full disk is reported at once. An exclusive
    creation whose answer was lost is recognised as ours by reading it back, a move by the size of what lies there then.
    Whether a commit had succeeded cannot be known: what is reported is how it failed first.

    Args:
        inner: Does the work.
        attempts: How often an operation is tried at most.
        max_wait_s: Longest wait between two attempts.
        total_timeout_s: No attempt starts later than this after the first one; `DeadlineError` then. An attempt that
            is under way is not interrupted: `inner` has its own deadlines.

    Raises:
        ArgumentError: a number is out of range.
    """

    def __init__(
        self, inner: Transport, attempts: int = 5, max_wait_s: float = 10.0, total_timeout_s: float = 120.0
    ) -> None:
        if attempts < 1:
            raise ArgumentError(f"{attempts} attempts are too few: it takes at least 1", where="attempts")
        if not (max_wait_s >= 0 and total_timeout_s > 0):
            raise ArgumentError(
                f"{max_wait_s} and {total_timeout_s} seconds: neither may be negative, nor the second 0",
                where="max_wait_s, total_timeout_s",
            )
        super().__init__(inner)
        self._attempts, self._max_wait_s, self._total_timeout_s = attempts, max_wait_s, total_timeout_s

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if issubclass(cls, Moves):
            # Not a method of this class: all its objects would count as `Moves`, whatever they wrap.
            setattr(cls, "move", cls._move)  # noqa: B010  # a type checker would take it for such a method

    def _arguments(self) -> tuple[object, ...]:
        return (self._attempts, self._max_wait_s, self._total_timeout_s)

    def _around(self, operation: str, nbytes: int | None, call: Callable[[], T]) -> T:  # noqa: ARG002  # the number of bytes does not matter here
        import tenacity

        n_corrupt = 0
        first: BaseException | None = None

        def may_help(error: BaseException) -> bool:
            nonlocal n_corrupt, first
            first = first or error
            if isinstance(error, CorruptShardError):
                n_corrupt += 1
                return n_corrupt == 1
            return isinstance(error, TransportError) and error.transient

        too_late = tenacity.stop_before_delay(self._total_timeout_s)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(may_help),
            stop=tenacity.stop_any(tenacity.stop_after_attempt(self._attempts), too_late),
            wait=tenacity.wait_random_exponential(multiplier=_FIRST_WAIT_S, max=self._max_wait_s),
        )
        try:
            return retrying(call)
        except tenacity.RetryError as gave_up:
            last = gave_up.last_attempt.exception()
            if last is None or gave_up.last_attempt.attempt_number >= self._attempts:
                raise (last or gave_up) from None
            raise DeadlineError(
                f"{operation} did not succeed within {self._total_timeout_s:g} s "
                f"({gave_up.last_attempt.attempt_number} attempts); the last one said: {last}",
                where=self._inner.url,
            ) from last
        except SaevStoreError as error:
            # Most likely that it is committed already, by the attempt whose answer was lost.
            if operation == "sink.commit" and first is not None and first is not error:
                raise first from error
            raise

    def _create(self, writes: Writes, path: str, data: Buffer) -> Callable[[], None]:
        n_failed = 0

        def create() -> None:
            nonlocal n_failed
            try:
                writes.create(path, data)
            except TransportError:
                n_failed += 1
                raise
            except StoreExistsError:
                if not n_failed or self._inner.size(path) != len(data) or self._inner.read(path) != bytes(data):
                    raise

        return create

    def _move(self, source: str, target: str) -> None:
        """What `move` is where there is one."""
        inner = cast("Moves", self._inner)
        nbytes: int | None = None
        n_failed = 0

        def move() -> None:
            nonlocal nbytes, n_failed
            if nbytes is None:
                nbytes = self._inner.size(source)
            try:
                inner.move(source, target)
            except TransportError:
                n_failed += 1
                raise
            except NotFoundError:
                if not n_failed or self._inner.size(target) != nbytes:
                    raise

        self._around("move", 0, move)
