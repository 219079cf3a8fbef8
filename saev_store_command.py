"""The command `saev-store`. A module next to the package, because importing the package takes a second."""

from __future__ import annotations


def main() -> int:
    """Run the command of `sys.argv`, and return its exit code; Ctrl-C while modules are imported is 130."""
    try:
        from saev_store.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130
