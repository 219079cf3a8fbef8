"""The changelog's section of what is not released is what the fragments say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("towncrier")

ROOT = Path(__file__).resolve().parents[2]


def test_the_changelog_is_what_its_fragments_say():
    done = subprocess.run([sys.executable, ".ci/changelog.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "up to date\n"), done.stdout + done.stderr


def test_every_fragment_is_in_it_once_and_in_order():
    section = (ROOT / "CHANGELOG.md").read_text("utf-8").partition("## Unreleased")[2].partition("\n## ")[0]
    flat = " ".join(section.split())
    for folder in sorted(path for path in (ROOT / "changelog.d").iterdir() if path.is_dir()):
        at = -1
        for path in sorted(folder.glob("*.added.md")):
            text = " ".join(path.read_text("utf-8").split())
            assert flat.count(f"- {text}") == 1, path
            assert (at := flat.index(f"- {text}", at + 1)) >= 0, path


def test_every_fragment_has_a_section_and_a_kind():
    for path in (ROOT / "changelog.d").rglob("*.md"):
        assert re.fullmatch(
            r"[a-z]+/[\w-]+\.(added|changed|fixed|removed)\.md", path.relative_to(ROOT / "changelog.d").as_posix()
        )
