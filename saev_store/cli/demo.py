"""`saev-store demo`: records, validates, reads and plots activations of real photographs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from saev_store.cli._options import AsJson, Progress
from saev_store.cli._output import emit, emit_json


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the store and the picture.")] = Path("saev-demo"),
    device: Annotated[str | None, typer.Option(help="Device of the model, such as cuda [default: cpu].")] = None,
    as_json: AsJson = False,
    progress: Progress = None,
) -> None:
    """Record a vision transformer over photographs, validate the store, and plot what it holds.

    A second run with the same --out uses the finished store, or continues an interrupted recording.
    """
    from saev_store.record import run_demo

    def say(line: str) -> None:
        print(line, file=sys.stderr) if as_json else emit(line)

    try:
        result = run_demo(out, device=device, progress=progress, say=say)
    except KeyboardInterrupt:
        again = f"saev-store demo --out {shlex.quote(str(out))}"
        print(f"\nInterrupted. Recorded examples are kept; continue with: {again}", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        emit_json(result.to_dict())
    else:
        emit(f"finished   in {result.seconds:.0f} s; inspect it with: saev-store info {shlex.quote(result.store)}")
    if not result.ok:
        raise typer.Exit(1)
