"""A transport that repeats what failed for a passing reason: what a patient user does, for campaigns of faults."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from transports import Wrapper

from saev_store.errors import SaevStoreError, StoreExistsError, TransportError
from saev_store.transport import Buffer, Transport

T = TypeVar("T")


class Retrying(Wrapper):
    """Tries each operation up to `attempts` times, with growing, randomised waits.

    A creation whose answer was lost is recognised by reading it back. Whether a commit had succeeded cannot be known: the
    error is that of the first attempt.
    """

    def __init__(self, inner: Transport, attempts: int = 5, max_wait_s: float = 10.0) -> None:
        super().__init__(inner)
        self._attempts, self._max_wait_s = attempts, max_wait_s

    def _arguments(self) -> tuple[object, ...]:
        return (self._attempts, self._max_wait_s)

    def _around(self, operation: str, nbytes: int | None, call: Callable[[], T]) -> T:
        first: SaevStoreError | None = None
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(random.uniform(0, min(0.1 * 2**attempt, self._max_wait_s)))
            try:
                return call()
            except TransportError as error:
                first = first or error
                if not error.transient or attempt == self._attempts - 1:
                    raise
            except SaevStoreError as error:
                if operation == "sink.commit" and first is not None:
                    raise first from error
                raise
        raise AssertionError

    def create(self, path: str, data: Buffer) -> None:
        n_failed = 0

        def attempt() -> None:
            nonlocal n_failed
            try:
                self._inner.create(path, data)
            except TransportError:
                n_failed += 1
                raise
            except StoreExistsError:
                if not n_failed or self._inner.read(path) != bytes(data):
                    raise

        self._around("create", len(data), attempt)
