"""A data set as folders and files: what `saev-store ls` and the file system show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from saev_store.errors import NotFoundError
from saev_store.sources.energon.keys import join_name, split_name
from saev_store.sources.energon.reader import EnergonDataset

_PAGE = 10_000


@dataclass(frozen=True, slots=True)
class Node:
    """A file (a part) or a folder; folders have no size."""

    path: str
    nbytes: int | None

    @property
    def is_dir(self) -> bool:
        return self.nbytes is None


def children(dataset: EnergonDataset, folder: str = "") -> Iterator[Node]:
    """What lies directly in a folder, in the order of names as UTF-8: folders once, parts as files."""
    index = dataset.places.index
    if index is None:
        raise NotFoundError(
            "it cannot be listed: it has no index.sqlite",
            where=dataset.url,
            remedy="Run `saev-store prepare --overwrite`.",
        )
    prefix = f"{folder}/" if folder else ""
    after = ""
    while True:
        rows = index.files(prefix, after=after, limit=_PAGE)
        if not rows:
            return
        jumped = False
        for key, part, nbytes in rows:
            inner, slash, _ = key[len(prefix) :].partition("/")
            if slash:
                yield Node(prefix + inner, None)
                # Everything below that folder sorts before the character behind "/".
                after, jumped = prefix + inner + "0", True
                break
            if part is None:
                for found in dataset.parts(dataset.index_of(key)):
                    yield Node(join_name(key, found.name), found.nbytes)
            else:
                yield Node(join_name(key, part), nbytes)
            after = key
        if not jumped and len(rows) < _PAGE:
            # A page is cut between keys, so a short one is the last.
            rows = index.files(prefix, after=after, limit=1)
            if not rows:
                return


def node(dataset: EnergonDataset, path: str) -> Node:
    """The file or folder of a path."""
    if not path:
        return Node("", None)
    found = split_name(path)
    if found is not None:
        key, part = found
        places = dataset.places.find(key)
        if len(places) == 1:
            for place in dataset.parts(key):
                if place.name == part:
                    return Node(path, place.nbytes)
    index = dataset.places.index
    if index is not None and index.keys(f"{path}/", limit=1):
        return Node(path, None)
    raise NotFoundError(f"there is no {path!r}", where=dataset.url)
