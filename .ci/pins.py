"""Rewrite constraints.txt from what resolves today on the oldest and on the newest supported Python.

    python .ci/pins.py --old python3.11 --new python3.13 [--free]

Pins that are there already are kept, unless `--free` asks for today's newest. Nothing is installed: pip only resolves.
torch has no pin for the newer Python, where the torch-free part is tested.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Chosen by hand: one torch, and per Python the zarr that the tests want to see.
CHOSEN = """\
torch==2.13.0
zarr==3.1.6; python_version < "3.12"
"""
HEADER = """\
# Every version that the tests ran with. Written by .ci/pins.py: change it there.
# Where the two tested Pythons need different ones, a marker says which.
"""


def resolve(python: str, extras: str, constraints: str) -> dict[str, str]:
    """What `pip install .[extras]` would install under this Python, as name -> version."""
    with tempfile.TemporaryDirectory() as folder:
        venv, pins, report = Path(folder, "venv"), Path(folder, "pins.txt"), Path(folder, "report.json")
        pins.write_text(constraints)
        subprocess.run([python, "-m", "venv", venv], check=True)
        command = [venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--dry-run", "--report", report]
        subprocess.run([*command, "-c", pins, f"{ROOT}[{extras}]"], check=True)
        found = json.loads(report.read_text())["install"]
    # A local part such as "+cpu" names a build, not a version.
    pins_of = {item["metadata"]["name"].lower(): item["metadata"]["version"].split("+")[0] for item in found}
    return {name: version for name, version in pins_of.items() if name != "saev-store"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", required=True, help="an interpreter of the oldest supported Python")
    parser.add_argument("--new", required=True, help="an interpreter of the newest supported Python")
    parser.add_argument("--free", action="store_true", help="drop the pins of today first")
    options = parser.parse_args()
    target = ROOT / "constraints.txt"
    start = CHOSEN if options.free or not target.exists() else target.read_text()
    old = resolve(options.old, "all,docs,frameworks,test,lint,notebook", start)
    new = resolve(options.new, "gcs,obstore,test", start)
    lines = []
    for name in sorted(old | new):
        if name in old and name in new and old[name] != new[name]:
            lines.append(f'{name}=={old[name]}; python_version < "3.12"')
            lines.append(f'{name}=={new[name]}; python_version >= "3.12"')
        else:
            lines.append(f"{name}=={old.get(name) or new[name]}")
    target.write_text(HEADER + "\n".join(lines) + "\n")
    print(f"{len(lines)} pins in {target.name}")


if __name__ == "__main__":
    main()
