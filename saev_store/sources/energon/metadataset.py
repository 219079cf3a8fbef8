"""Metadata sets: a YAML document that says which auxiliary data go with a primary data set."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from saev_store.errors import ArgumentError, DocumentError, SelectionError, UnsafeContentError, brief
from saev_store.sources.address import Url, full_url, locate, split_address
from saev_store.sources.energon import _yaml
from saev_store.sources.energon._yaml import as_mapping
from saev_store.sources.energon.joins import FolderFiles, JoinedDataset, MediaFiles
from saev_store.sources.energon.nvmeta import MODULE
from saev_store.sources.energon.reader import EnergonDataset
from saev_store.transport import Engine

_CLASS = "MetadatasetV2"
_FOLDER = re.compile(r"filesystem(?:\+([A-Za-z][A-Za-z0-9+.-]*))?://")


@dataclass(frozen=True)
class Reference:
    """What one split of a metadata set refers to.

    Attributes:
        primary: The address of the primary data set.
        split: Which split of it.
        auxiliary: The addresses of auxiliary data sets, by name.
        folders: The addresses of folders of single files, by name.
        subflavors: What the document says about the samples.
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
    """The splits of a metadata set (`MetadatasetV2`), each with one primary data set and what is joined to it.

    Args:
        url: The YAML document: a path, or any fsspec URL. Addresses in it count from its folder.
        storage_options: Options of the fsspec file system.
        engine: As in `open_transport`.
        outside_ok: Follow addresses that leave the document's folder: absolute ones, URLs, and those with `..`.

    Raises:
        UnsafeContentError: an address leaves the folder, and `outside_ok` is false; or the document has tags.
        DocumentError: it is no such document, or a split blends or zips several primary data sets: read those one by one.

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
    where = full_url(transport, name)
    found = as_mapping(_yaml.loads(transport.read(name, max_bytes=_yaml.MAX_NBYTES), where=where)) or {}
    if found.get("__class__") != _CLASS or not str(found.get("__module__")).startswith(MODULE):
        raise DocumentError(
            f"it describes {brief(found.get('__module__'))}, {brief(found.get('__class__'))}; {_CLASS} of {MODULE} is read",
            where=where,
        )
    splits = as_mapping(found.get("splits"))
    if splits is None:
        raise DocumentError("it has no mapping 'splits'", where=where)
    addresses = _Addresses(split_address(os.fspath(url))[0], where, outside_ok=outside_ok)
    return {split: _reference(split, value, addresses) for split, value in splits.items()}


def open_metadataset(
    url: Url,
    split: str = "train",
    storage_options: Mapping[str, object] | None = None,
    *,
    names: Mapping[str, str],
    engine: Engine = "auto",
    outside_ok: bool = False,
) -> JoinedDataset:
    """The primary data set of a split, joined with the auxiliary ones that `names` asks for.

    In Energon a function of the training program says which files a sample needs; here `names` does.

    Args:
        url: As in `read_metadataset`.
        split: A split of the metadata set.
        storage_options: Options of the file systems of the document and of everything that it names.
        names: As in `JoinedDataset`, for some of the auxiliary data.
        engine: As in `open_transport`.
        outside_ok: As in `read_metadataset`.

    Raises:
        SelectionError: there is no such split.
        ArgumentError: `names` asks for auxiliary data that the split does not have.
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
    auxiliary: dict[str, MediaFiles] = {}
    for name in names:
        open_files = FolderFiles if name in found.folders else EnergonDataset
        auxiliary[name] = open_files(known[name], storage_options, engine=engine)
    primary = EnergonDataset(found.primary, storage_options, engine=engine).split(found.split)
    return JoinedDataset(primary, auxiliary, names=names)


@dataclass(frozen=True)
class _Addresses:
    """Addresses as they count from the document's folder."""

    folder: str
    where: str
    outside_ok: bool

    def full(self, value: object, what: str) -> str:
        if not isinstance(value, str) or not value or "\0" in value:
            raise DocumentError(f"{what} is {brief(value)}; it must be a path", where=self.where)
        absolute = "://" in value or "::" in value or value.startswith("/")
        if (absolute or ".." in value.split("/")) and not self.outside_ok:
            raise UnsafeContentError(
                f"{what} is {brief(value)}, which is not below the document's folder",
                where=self.where,
                remedy="Pass outside_ok=True if you trust the document.",
            )
        relative = "/".join(part for part in value.split("/") if part not in {"", "."})
        if absolute:
            return value
        head, sep, rest = self.folder.partition("::")
        return f"{head.rstrip('/')}/{relative}{sep}{rest}" if relative else self.folder


def _reference(split: str, value: object, addresses: _Addresses) -> Reference:
    what = f"splits[{split!r}]"
    found = as_mapping(value)
    if found is None:
        raise DocumentError(f"{what} is {brief(value)}; it must be a mapping", where=addresses.where)
    several = [name for name in ("blend", "blend_epochized", "join") if name in found]
    unread = sorted({"subset", "dataset_config", "split_config"} & found.keys())
    if several or unread or "path" not in found:
        rule = f"has {(several + unread)[0]!r}" if several or unread else "has no 'path'"
        raise DocumentError(
            f"{what} {rule}; one primary data set with a path is read", where=addresses.where,
            remedy="Open each of its data sets on its own.",
        )  # fmt: skip
    auxiliary: dict[str, str] = {}
    folders: dict[str, str] = {}
    given = as_mapping(found.get("aux") or {})
    if given is None:
        raise DocumentError(
            f"{what}['aux'] is {brief(found['aux'])}; it must be a mapping from names", where=addresses.where
        )
    for name, address in given.items():
        label = f"{what}['aux'][{name!r}]"
        match = _FOLDER.match(address) if isinstance(address, str) else None
        if match is None:
            auxiliary[name] = addresses.full(address, label)
        else:
            below = cast("str", address)[match.end() :]
            folders[name] = addresses.full(f"{match[1]}://{below}" if match[1] else below, label)
    flavors = as_mapping(found.get("subflavors") or {})
    part = found.get("split_part", split)
    if flavors is None or not isinstance(part, str):
        raise DocumentError(f"{what} has subflavors or a split_part of another type", where=addresses.where)
    return Reference(addresses.full(found["path"], f"{what}['path']"), part, auxiliary, folders, flavors)
