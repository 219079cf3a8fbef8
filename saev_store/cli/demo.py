"""`saev-store demo`: the whole way once, on real photographs, with every claim checked on the spot."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the store and the picture.")] = Path("saev-demo"),
    device: Annotated[str | None, typer.Option(help="Where the model runs, such as cuda; the CPU by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Record a vision transformer over photographs, check the store in every way, and draw what it holds."""
    from saev_store.record import run_demo

    def say(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    try:
        result = run_demo(out, device=device, say=say)
    except KeyboardInterrupt:
        again = f"saev-store demo --out {shlex.quote(str(out))}"
        print(f"\nInterrupted. What is recorded is kept; continue with: {again}", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        print(f"finished   in {result.seconds:.0f} s; look closer with: saev-store info {shlex.quote(result.store)}")
    if not result.ok:
        raise typer.Exit(1)
