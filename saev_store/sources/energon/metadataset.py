"""Metadata sets: YAML documents that name the auxiliary data sets of a primary one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from saev_store.errors import ArgumentError, DocumentError, SelectionError, UnsafeContentError, brief
from saev_store.sources.address import Url, address_below, full_url, locate, split_address
from saev_store.sources.energon.documents import MAX_YAML_NBYTES, MODULE, is_mapping, load_yaml
from saev_store.sources.energon.joins import FolderFiles, JoinedDataset, MediaFiles
from saev_store.sources.energon.reader import EnergonDataset
from saev_store.transport import Engine

_CLASS = "MetadatasetV2"
_FOLDER = re.compile(r"filesystem(?:\+([A-Za-z][A-Za-z0-9+.-]*))?://")
#: Ways to combine several primary data sets, or to take a part of one.
_NOT_READ = ("blend", "blend_epochized", "join", "dataset_config", "split_config", "subset")


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
        DocumentError: it is no such document, or a split combines several primary data sets: open those one by one.

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
    document = load_yaml(transport.read(name, max_bytes=MAX_YAML_NBYTES), where=where)
    found: Mapping[str, object] = document if is_mapping(document) else {}
    module, kind, splits = found.get("__module__"), found.get("__class__"), found.get("splits")
    if kind != _CLASS or not isinstance(module, str) or not module.startswith(MODULE) or not is_mapping(splits):
        raise DocumentError(
            f"it is {brief(module)}, {brief(kind)}; a {_CLASS} of {MODULE} with a mapping 'splits' is read", where=where
        )
    full_address = partial(_full_address, folder=split_address(os.fspath(url))[0], where=where, outside_ok=outside_ok)
    return {split: _reference(split, value, full_address, where) for split, value in splits.items()}


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
    auxiliary: dict[str, MediaFiles] = {}
    for name in names:
        kind = FolderFiles if name in found.folders else EnergonDataset
        auxiliary[name] = kind(known[name], storage_options, engine=engine)
    primary = EnergonDataset(found.primary, storage_options, engine=engine).split(found.split)
    return JoinedDataset(primary, auxiliary, names=names)


def _full_address(value: object, what: str, *, folder: str, where: str, outside_ok: bool) -> str:
    """An address of the document, relative to its folder, in full."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise DocumentError(f"{what} is {brief(value)}; it must be a path", where=where)
    absolute = "://" in value or "::" in value or value.startswith("/")
    if (absolute or ".." in value.split("/")) and not outside_ok:
        raise UnsafeContentError(
            f"{what} is {brief(value)}, which is not below the document's folder",
            where=where,
            remedy="Pass outside_ok=True if you trust the document.",
        )
    relative = "/".join(part for part in value.split("/") if part not in {"", "."})
    if absolute or not relative:
        return value if absolute else folder
    return address_below(folder, relative)


def _reference(split: str, found: object, full_address: Callable[[object, str], str], where: str) -> Reference:
    what = f"splits[{split!r}]"
    if not is_mapping(found) or "path" not in found or any(name in found for name in _NOT_READ):
        raise DocumentError(
            f"{what} is {brief(found)}; one primary data set with a path is read, without {', '.join(_NOT_READ)}",
            where=where,
            remedy="Open each of its data sets on its own.",
        )
    nothing = dict[str, object]()
    given, subflavors, part = (
        found.get("aux") or nothing,
        found.get("subflavors") or nothing,
        found.get("split_part", split),
    )
    if not is_mapping(given) or not is_mapping(subflavors) or not isinstance(part, str):
        raise DocumentError(f"{what} has 'aux', 'subflavors' or a 'split_part' of another type", where=where)
    auxiliary: dict[str, str] = {}
    folders: dict[str, str] = {}
    for name, address in given.items():
        scheme = _FOLDER.match(address) if isinstance(address, str) else None
        if not isinstance(address, str) or scheme is None:
            auxiliary[name] = full_address(address, f"{what}['aux'][{name!r}]")
        else:  # the folder's own address: without the word `filesystem`
            below = address[scheme.end() :]
            own = f"{scheme[1]}://{below}" if scheme[1] else below
            folders[name] = full_address(own, f"{what}['aux'][{name!r}]")
    return Reference(full_address(found["path"], f"{what}['path']"), part, auxiliary, folders, subflavors)
