"""Metadata sets: YAML documents that name the auxiliary data sets of a primary one."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import Field

from saev_store.errors import ArgumentError, DocumentError, SelectionError, UnsafeContentError, brief
from saev_store.names import joined_url
from saev_store.sources.address import Url, locate, split_address
from saev_store.sources.energon.documents import MAX_YAML_NBYTES, MODULE, Document, check_document, load_yaml
from saev_store.sources.energon.joins import FolderFiles, JoinedDataset
from saev_store.sources.energon.reader import EnergonDataset
from saev_store.transport import Engine

_CLASS = "MetadatasetV2"
_FOLDER = re.compile(r"filesystem(?:\+([A-Za-z][A-Za-z0-9+.-]*))?://")
#: Ways to combine several primary data sets, or to take a part of one.
_NOT_READ = ("blend", "blend_epochized", "join", "dataset_config", "split_config", "subset")


class _Metadataset(Document):
    module: str = Field(alias="__module__", pattern=f"^{re.escape(MODULE)}")
    name: str = Field(alias="__class__", pattern=f"^{_CLASS}$")
    splits: dict[str, dict[str, object]]


class _Split(Document):
    path: str
    split_part: str | None = None
    aux: dict[str, str] | None = None
    subflavors: dict[str, object] | None = None


@dataclass(frozen=True)
class Reference:
    """The data sets of one split of a metadata set.

    Attributes:
        primary: The address of the primary data set.
        split: The split of it.
        auxiliary: The addresses of auxiliary data sets, by name.
        folders: The addresses of folders of single files, by name.
        subflavors: Values that the document gives to all samples.
    """

    primary: str
    split: str
    auxiliary: Mapping[str, str] = field(default_factory=dict[str, str])
    folders: Mapping[str, str] = field(default_factory=dict[str, str])
    subflavors: Mapping[str, object] = field(default_factory=dict[str, object])


def read_metadataset(
    url: Url,
    storage_options: Mapping[str, object] | None = None,
    *,
    engine: Engine = "auto",
    outside_ok: bool = False,
) -> dict[str, Reference]:
    """The splits of a metadata set (`MetadatasetV2`), each with one primary data set and its auxiliary ones.

    Args:
        url: The YAML document: a path, or any fsspec URL. Addresses in it are relative to its folder.
        storage_options: Options of the fsspec file system.
        engine: As in `open_source`.
        outside_ok: Allow addresses outside the document's folder: absolute ones, URLs, and those with `..`.

    Raises:
        UnsafeContentError: an address is outside the folder, and `outside_ok` is false; or the document has tags.
        DocumentError: it is not such a document, or a split combines several primary data sets: open those one by one.

    >>> import fsspec
    >>> fsspec.filesystem("memory").pipe("/lab/meta.yaml", b'''
    ... __module__: megatron.energon
    ... __class__: MetadatasetV2
    ... splits:
    ...   train: {path: texts, aux: {images: images, clips: 'filesystem://clips'}}
    ... ''')
    >>> found = read_metadataset("memory://lab/meta.yaml")["train"]
    >>> found.primary, found.auxiliary, found.folders
    ('memory://lab/texts', {'images': 'memory://lab/images'}, {'clips': 'memory://lab/clips'})
    """
    transport, name = locate(url, storage_options, engine=engine, transport=None)
    where = transport.where(name)
    document = check_document(
        _Metadataset, load_yaml(transport.read(name, max_bytes=MAX_YAML_NBYTES), where=where), where=where
    )
    folder = split_address(os.fspath(url))[0]

    def full_address(address: str) -> str:
        """An address of the document, relative to its folder, in full."""
        absolute = "://" in address or "::" in address or address.startswith("/")
        if not address or "\0" in address:
            raise DocumentError(f"{brief(address)} is not a path", where=where)
        if (absolute or ".." in address.split("/")) and not outside_ok:
            raise UnsafeContentError(
                f"{brief(address)} is not below the document's folder",
                where=where,
                remedy="Pass outside_ok=True if you trust the document.",
            )
        relative = "/".join(part for part in address.split("/") if part not in {"", "."})
        if absolute or not relative:
            return address if absolute else folder
        return joined_url(folder, relative)

    found: dict[str, Reference] = {}
    for split, value in document.splits.items():
        if any(name in value for name in _NOT_READ):
            raise DocumentError(
                f"splits[{split!r}] is {brief(value)}; one primary data set is read, without {', '.join(_NOT_READ)}",
                where=where,
                remedy="Open each of its data sets on its own.",
            )
        given = check_document(_Split, value, where=where)
        auxiliary, folders = dict[str, str](), dict[str, str]()
        for name, address in (given.aux or {}).items():
            if (scheme := _FOLDER.match(address)) is None:
                auxiliary[name] = full_address(address)
            else:  # the folder's own address: without the word `filesystem`
                below = address[scheme.end() :]
                folders[name] = full_address(f"{scheme[1]}://{below}" if scheme[1] else below)
        part = split if given.split_part is None else given.split_part
        found[split] = Reference(full_address(given.path), part, auxiliary, folders, given.subflavors or {})
    return found


def open_metadataset(
    url: Url,
    split: str = "train",
    storage_options: Mapping[str, object] | None = None,
    *,
    names: Mapping[str, str],
    engine: Engine = "auto",
    outside_ok: bool = False,
) -> JoinedDataset:
    """The primary data set of a split, joined with the auxiliary ones that `names` lists.

    In Energon a function of the training program decides which files a sample needs; here `names` does.

    Args:
        url: As in `read_metadataset`.
        split: A split of the metadata set.
        storage_options: Options of the file systems of the document and of all data sets that it names.
        names: As in `JoinedDataset`, for some of the auxiliary data sets.
        engine: As in `open_source`.
        outside_ok: As in `read_metadataset`.

    Raises:
        SelectionError: there is no such split.
        ArgumentError: `names` lists auxiliary data sets that the split does not have.
        As `read_metadataset`, and opening the data sets.
    """
    splits = read_metadataset(url, storage_options, engine=engine, outside_ok=outside_ok)
    if split not in splits:
        raise SelectionError(
            f"there is no split {brief(split)}; there are {', '.join(map(repr, splits))}", where="split"
        )
    found = splits[split]
    known = {**found.auxiliary, **found.folders}
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ArgumentError(f"there is no {brief(unknown[0])}; there are {', '.join(known) or 'none'}", where="names")
    auxiliary: dict[str, EnergonDataset | FolderFiles] = {}
    for name in names:
        kind = FolderFiles if name in found.folders else EnergonDataset
        auxiliary[name] = kind(known[name], storage_options, engine=engine)
    primary = EnergonDataset(found.primary, storage_options, engine=engine).split(found.split)
    return JoinedDataset(primary, auxiliary, names=names)
