"""The documentation site: built strictly, without a dead link, and with nothing of it on the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("mkdocs")

import saev_store

ROOT = Path(__file__).resolve().parents[2]
#: What loads a file when a page is opened.
LOADING = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}


class Page(HTMLParser):
    """The names, links and loaded files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in {"id", "name"} and value:
                self.names.add(value)
            if (tag, name) == ("a", "href") and value:
                self.links.append(value)
            if (tag, name) in LOADING and value and ("rel", "canonical") not in attrs:
                self.loaded.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    return {path: Page(path.read_text("utf-8")) for path in folder.rglob("*.html")}, folder


def test_no_link_is_dead(site):
    pages, folder = site
    dead = []
    for path, page in pages.items():
        if path.name == "404.html":  # which is served at any address
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            found = pages.get(there)
            if not there.exists() or (
                parts.fragment and found and unquote(parts.fragment) not in found.names | {"__top"}
            ):
                dead.append(f"{path.relative_to(folder)}: {link}")
    assert not dead


def test_nothing_is_loaded_from_the_network(site):
    pages, folder = site
    for path, page in pages.items():
        assert [address for address in page.loaded if re.match(r"(https?:)?//", address)] == [], path
    for sheet in folder.rglob("*.css"):
        assert not re.search(r"url\([\"']?https?:|@import", sheet.read_text("utf-8")), sheet


def test_every_page_of_the_documentation_is_on_the_site(site):
    pages, folder = site
    made = {path.relative_to(folder).as_posix() for path in pages}
    for path in (ROOT / "docs").rglob("*.md"):
        name = path.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert {"README.html": "pages.html"}.get(name, name.replace("README.html", "index.html")) in made, path
    assert {"index.html", "quick-start.html", "changelog.html", "benchmarks.html", "contributing.html"} <= made


def test_the_references_have_every_public_name_and_command(site):
    pages, folder = site
    names = pages[folder / "reference/saev_store.html"].names
    assert {f"saev_store.{name}" for name in saev_store.__all__ if not name.startswith("__")} <= names
    for module, name in {
        "loaders": "Loader", "torch": "StoreLoader", "record": "record", "view": "View", "stats": "Stats.scale",
        "integrations.saelens": "data_provider", "sources.mmididx": "IndexedDataset",
    }.items():  # fmt: skip
        assert f"saev_store.{module}.{name}" in pages[folder / f"reference/saev_store.{module}.html"].names
    assert "saev_store.ShardStore.open" in names
    done = subprocess.run([sys.executable, "-m", "saev_store", "--help"], capture_output=True, text=True, check=True)
    commands = re.findall(r"^  ([a-z]+)  ", done.stdout.partition("Commands:")[2], re.MULTILINE)
    assert len(commands) > 15
    assert set(commands) <= pages[folder / "reference/cli.html"].names


def test_every_integration_has_a_page(site):
    pages, folder = site
    for path in (ROOT / "saev_store/integrations").glob("[a-z]*.py"):
        assert folder / f"reference/saev_store.integrations.{path.stem}.html" in pages


def test_links_between_pages_of_the_repository_lead_to_pages_of_the_site(site):
    pages, folder = site
    links = pages[folder / "recording.html"].links
    assert any(link.startswith("protocol.html") for link in links)
    assert "benchmarks.html" in pages[folder / "index.html"].links
    assert not any(link.endswith((".md", ".py")) for page in pages.values() for link in page.links)


def test_what_a_reader_looks_for_is_two_clicks_away(site):
    """Buckets, resuming, SAELens and errors are in the navigation of the first page."""
    pages, folder = site
    home = pages[folder / "index.html"].links
    assert {"cloud.html", "writing.html", "integrations.html", "errors.html"} <= set(home)
    # One click, also on a telephone, which shows no navigation until it is opened.
    assert {"writing.html#after-a-crash", "integrations.html#saelens"} <= set(home)
