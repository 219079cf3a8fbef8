"""What another process makes of a transport."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from waiting import HANG_S

from saev_store.errors import SaevStoreError


def read_part(transport: Any) -> bytes:
    """What a data loader's worker does: bytes 3 to 7 and the first one of `a.bin`."""
    return bytes(transport.get_ranges("a.bin", starts=[3], ends=[7])[0]) + transport.read("a.bin")[:1]


def read_whole(transport: Any) -> bytes:
    """All of `a.bin`."""
    return transport.read("a.bin")


def in_process(method: str, transport: Any, work: Callable[[Any], object] = read_part) -> object:
    """The answer or the error of another process, or a failure, never a hang."""
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    process = context.Process(target=_answer, args=(transport, answers, work))
    process.start()
    try:
        process.join(HANG_S)
        assert process.exitcode == 0, f"still running, or failed: {process.exitcode}"
        return answers.get()
    finally:
        process.kill()
        process.join()
        answers.close()


def _answer(transport: Any, answers: Any, work: Callable[[Any], object]) -> None:
    try:
        answers.put(work(transport))
    except SaevStoreError as error:
        answers.put(error)
