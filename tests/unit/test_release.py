"""What is released is described the same everywhere, and vendored files have their licences."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import saev_store

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_the_citation_is_that_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert cited["cff-version"] == "1.2.0"
    assert cited["version"] == saev_store.__version__
    assert cited["license"] == PROJECT["license"]
    assert [author["name"] for author in cited["authors"]] == [author["name"] for author in PROJECT["authors"]]
    assert set(cited["keywords"]) == set(PROJECT["keywords"])
    assert {"message", "title", "type"} <= set(cited)


def test_the_changelog_has_this_version():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert any(saev_store.__version__ in heading for heading in headings)


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_forms_and_workflows_are_yaml_of_the_right_shape(path):
    found = yaml.safe_load(path.read_text("utf-8"))
    if path.parent.name == "workflows":
        assert {"name", "jobs", "permissions"} <= set(found)
        uses = [step["uses"] for job in found["jobs"].values() for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"[\w-]+/[\w-]+@[\w./-]+", use) for use in uses)
    elif path.name != "config.yml":
        assert {"name", "description", "body"} <= set(found)
        assert len({field["id"] for field in found["body"] if "id" in field}) == sum(
            "id" in field for field in found["body"]
        )


def test_only_the_job_that_publishes_may_identify_itself():
    """And it runs none of the repository's code: a release is what the job before it has built."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert all("run" not in step for step in jobs["publish"]["steps"])


@pytest.mark.parametrize("folder", ["saev_store/view/static/vendor", "docs/vendor"])
def test_files_of_others_have_their_licences(folder):
    files = {path.name for path in (ROOT / folder).iterdir()}
    licences = {name.removesuffix(".LICENSE") for name in files if name.endswith(".LICENSE")}
    assert licences
    for name in files:
        assert any(name.startswith(licence) for licence in licences), name


def test_the_wheel_has_the_licences_of_the_files_in_it():
    found = {path for pattern in PROJECT["license-files"] for path in ROOT.glob(pattern)}
    assert found >= {ROOT / "LICENSE", *(ROOT / "saev_store").rglob("*.LICENSE")}
