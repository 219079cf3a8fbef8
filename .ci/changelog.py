"""Write the section *Unreleased* of CHANGELOG.md from the fragments in changelog.d/; `--check` only compares.

python .ci/changelog.py [--check]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r'__version__ = "(.+)"')
#: The section that is written: from its heading to that of the newest release, or to the end.
SECTION = re.compile(r"^## Unreleased.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def rendered() -> str:
    """What towncrier makes of the fragments."""
    (version,) = VERSION.findall((ROOT / "saev_store/_version.py").read_text("utf-8"))
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", version]
    draft = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return re.sub(r"\n{3,}", "\n\n", draft[draft.index("## Unreleased") :]).strip() + "\n"


def with_section(text: str, section: str) -> str:
    """The changelog with this section."""
    return SECTION.sub(lambda found: section + ("\n" if found.end() < len(text) else ""), text, count=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if it is not up to date")
    target = ROOT / "CHANGELOG.md"
    before = target.read_text("utf-8")
    after = with_section(before, rendered())
    if parser.parse_args().check:
        print(
            "up to date" if after == before else "CHANGELOG.md is not what the fragments say: python .ci/changelog.py"
        )
        return int(after != before)
    target.write_text(after, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
