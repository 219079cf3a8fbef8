"""Bars of everything that writes or checks a store: none where `progress` is false, also on a terminal, and each to its end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from plain_stores import Plain, plain_store
from waiting import HANG_S

from saev_store import ShardStore
from saev_store._runtime import progress as progress_module
from saev_store._runtime.progress import Progress, counted_so_far, counting
from saev_store.loaders import stage
from saev_store.writer.copying import copy_store
from saev_store.writer.repair import open_repair

Call = Callable[[Plain, Path, bool | None], object]


def copied(**choices: object) -> Call:
    return lambda plain, to, shown: copy_store(plain.path, to, progress=shown, **choices)  # pyright: ignore[reportArgumentType]  # of the cases below


def copied_twice(plain: Plain, to: Path, shown: bool | None) -> None:
    for _ in range(2):
        copy_store(plain.path, to, layers=[5], resume=True, progress=shown)


def copied_after_another_recording(plain: Plain, to: Path, shown: bool | None) -> None:
    copy_store(plain.path, to, layers=[5], progress=False)
    plain.shard(0).write_bytes((2 * plain.truth(0)).tobytes())
    plain.acts[: plain.per_shard] *= 2
    plain.write_digests(block_bytes=64)
    copy_store(plain.path, to, layers=[5], resume=True, replace=True, progress=shown)


def repaired(plain: Plain, to: Path, shown: bool | None) -> None:
    del to
    plain.shard(1).write_bytes(b"")
    store = ShardStore.open(plain.path, damaged_ok=True)
    with open_repair(store.transport, store.metadata, deep=True, progress=shown) as writer:
        for start, end in writer.missing:
            writer.append(plain.acts[start:end])


def from_array(plain: Plain, to: Path, shown: bool | None) -> None:
    ShardStore.from_array(plain.acts, to, family="x", ckpt="x", cls_token=True, layers=[2, 5, 11], progress=shown)


EXAMPLES = 7
CALLS: list[tuple[Call, dict[str, int]]] = [
    (copied(), {}),
    (copied(layers=[5, 2]), {"writing": EXAMPLES}),
    (copied(dtype="bfloat16"), {"writing": EXAMPLES}),
    (copied_twice, {"writing": EXAMPLES}),
    (copied_after_another_recording, {}),
    (repaired, {}),
    (from_array, {}),
    (lambda plain, to, shown: ShardStore.open(plain.path).validate(deep=True, progress=shown), {}),
    (lambda plain, to, shown: ShardStore.open(plain.path).stats(progress=shown), {}),
]


@pytest.mark.parametrize(("call", "expected"), CALLS)
def test_no_bar_where_progress_is_false_and_one_to_the_end_on_a_terminal(
    call: Call,
    expected: dict[str, int],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress_module, "shows_lines_anew", lambda: True)
    for shown in (False, None):
        plain = plain_store(tmp_path / f"source-{shown}", n=EXAMPLES)
        plain.write_digests(block_bytes=64)
        with counting():
            call(plain, tmp_path / f"target-{shown}", shown)
            counted = {bar.title: bar.n for bar in counted_so_far()}
        assert counted
        assert expected.items() <= counted.items()
        assert np.array_equal(ShardStore.open(plain.path)[:], plain.acts)
        assert ("%|" in capfd.readouterr().err) is (shown is None)


def test_staging_shows_no_bar(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a finished copy is compared with its digests again: every process of a machine stages."""
    monkeypatch.setattr(progress_module, "shows_lines_anew", lambda: True)
    plain = plain_store(tmp_path / "source", n=EXAMPLES)
    plain.write_digests(block_bytes=64)
    copy = stage(plain.path, tmp_path / "near")
    for file in Path(copy).iterdir():
        os.utime(file, ns=(1, 1))
    assert stage(plain.path, tmp_path / "near") == copy
    assert capfd.readouterr().err == ""


class Drawn:
    """What tqdm is told."""

    def __init__(self, **how: object) -> None:
        self.how, self.steps, self.notes, self.n_closed = how, list[int](), list[str](), 0

    def update(self, n: int) -> None:
        self.steps.append(n)

    def set_postfix_str(self, text: str, *, refresh: bool) -> None:
        assert not refresh
        self.notes.append(text)

    def close(self) -> None:
        self.n_closed += 1


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Drawn]:
    bars: list[Drawn] = []
    monkeypatch.setattr("tqdm.tqdm", lambda **how: bars.append(Drawn(**how)) or bars[-1])
    return bars


def test_a_bar_of_examples_is_told_whole_ones_of_the_bytes_that_come(drawn: list[Drawn]):
    with counting():
        bar = Progress(100, "writing", shown=True, done=25, unit="examples", unit_nbytes=10)
        for amount in (3, 3, 0, 69):  # 28, 31, 31 and 100 bytes
            bar.advance(amount)
        bar.note("shard 2")
        assert counted_so_far() == []  # from when it is closed
        for _ in range(2):
            bar.close()
        assert [counted[:4] for counted in counted_so_far()] == [
            ("writing", "examples", 7, 75)
        ]  # what was there is not counted
        assert 0 <= counted_so_far()[0].seconds < HANG_S
    ((how, steps),) = [(bar.how, bar.steps) for bar in drawn]
    assert {name: how[name] for name in ("total", "initial", "desc", "unit", "unit_scale")} == {
        "total": 10, "initial": 2, "desc": "writing", "unit": " examples", "unit_scale": False,
    }  # fmt: skip
    assert (steps, drawn[0].notes) == ([0, 1, 0, 7], ["shard 2"])


def test_a_bar_of_bytes_is_scaled_and_others_have_no_bytes(drawn: list[Drawn]):
    with counting():
        with Progress(9, "reading", shown=True) as bar:
            bar.advance(4)
        with Progress(9, "looking", shown=False, unit="files") as hidden:
            hidden.advance(5)
            hidden.note("nobody sees it")
        with counting():
            assert counted_so_far() == []
            Progress(1, "inside", shown=False).close()
            assert [counted.title for counted in counted_so_far()] == ["inside"]
        assert [counted[:4] for counted in counted_so_far()] == [("reading", "B", 4, 4), ("looking", "files", 5, None)]
    assert counted_so_far() == []
    assert [(bar.how["unit"], bar.how["unit_scale"], bar.how["initial"], bar.n_closed) for bar in drawn] == [
        ("B", True, 0, 1)
    ]


@pytest.mark.parametrize(
    ("is_terminal", "term", "shows"),
    [(True, "xterm", True), (True, None, True), (True, "dumb", False), (False, "xterm", False)],
)
def test_where_a_bar_is_shown_if_nobody_says_it(
    is_terminal: bool, term: str | None, shows: bool, drawn: list[Drawn], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    monkeypatch.delenv("TERM", raising=False)
    if term is not None:
        monkeypatch.setenv("TERM", term)
    for shown, n_bars in ((None, int(shows)), (True, 1), (False, 0)):
        Progress(1, "writing", shown=shown).close()
        assert len(drawn) == n_bars
        drawn.clear()


def test_without_a_standard_error_nothing_is_shown(drawn: list[Drawn], monkeypatch: pytest.MonkeyPatch):
    """Under `pythonw`, and in some services."""
    monkeypatch.setattr("sys.stderr", None)
    Progress(1, "writing", shown=None).close()
    assert drawn == []
