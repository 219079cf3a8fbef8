"""What all importers of caches share: what the caller says, the layers, the identity of files."""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from saev_store.core.dtypes import StoredDtype
from saev_store.core.layout import RESID_POST, LayerKey
from saev_store.errors import ArgumentError, NotFoundError, brief
from saev_store.sources.address import full_url
from saev_store.transport import Entry, Lists, Transport
from saev_store.writer.importing import Block

#: Files of caches, of any format. Editors make hidden links to nothing.
_FILE = re.compile(r"[^.].*\.(?:safetensors|pt|json|memmap|meta|arrow)")


@dataclass(frozen=True)
class Wanted:
    """What the caller says of a cache; None where it is for the files to tell, or for nobody.

    Attributes:
        layers: Labels, or pairs (label, hook point), of the entries of the layer axis.
        layer_ids: The same in vLLM's numbers.
        context: How many tokens an example has, where documents lie end to end.
        bos_token: The token id with which every document begins.
        cls_token: Whether token 0 of each example is a special one.
        dims: The names of an array's axes.
        dtype: Of the store.
    """

    layers: Sequence[LayerKey] | None = None
    layer_ids: Sequence[int] | None = None
    context: int | None = None
    bos_token: int | None = None
    cls_token: bool | None = None
    dims: Sequence[str] | None = None
    dtype: StoredDtype | None = None


class Cache(ABC):
    """A cache of another program, opened.

    A format is a subclass: `detect` looks at names, opening it at the headers.

    Args:
        transport: The folder of the cache.
        entries: The names in it.
        wanted: What the caller says.
    """

    #: Its short name.
    format: ClassVar[str]
    #: Which fields of `Wanted`, beside `dtype`, it takes.
    takes: ClassVar[frozenset[str]]

    @abstractmethod
    def __init__(self, transport: Transport, entries: Sequence[Entry], wanted: Wanted) -> None: ...

    @classmethod
    @abstractmethod
    def detect(cls, names: Sequence[str]) -> bool:
        """Whether these are the names in a folder of this format."""

    @abstractmethod
    def arguments(self) -> dict[str, object]:
        """The arguments of `new_metadata` that follow from the files and from what the caller says; maybe `ckpt` too."""

    @abstractmethod
    def digest(self) -> str:
        """What tells these files from others, and from what they were."""

    @abstractmethod
    def blocks(self, first: int, end: int, max_block_bytes: int) -> Iterator[Block]:
        """The examples from `first` to `end`; see `Examples.blocks`."""


def check_wanted(kind: type[Cache], wanted: Wanted) -> None:
    """Refuse what a format has no use for: the caller would believe that it did something.

    Raises:
        ArgumentError: an argument is given that this format does not take.
    """
    for field in fields(wanted):
        if getattr(wanted, field.name) is not None and field.name not in {*kind.takes, "dtype"}:
            raise ArgumentError(
                f"{field.name} says nothing about a cache of the format {kind.format!r}",
                where=field.name,
                remedy="Leave it out: the files tell it, or have no such thing.",
            )


def layer_axis(wanted: Wanted, n_layers: int, *, where: str, names: Sequence[str] = ()) -> dict[str, object]:
    """`layers` and `hook_points` of a cache that does not tell them.

    vLLM numbers the points between layers: the hidden states of id i enter layer i, so they are what layer i - 1 has left.

    Args:
        wanted: What the caller says of them.
        n_layers: How many there are.
        where: What errors call them.
        names: Those that the cache has for them, in its order. Numbers that are given and in the names come in this order.

    Raises:
        ArgumentError: they are not given, are not as many as the cache has, or are in another order than the names say.

    >>> layer_axis(Wanted(layer_ids=(2, 36)), 2, where="hs_0.safetensors")
    {'layers': [1, 35], 'hook_points': ['resid_post', 'resid_post']}
    """
    if (wanted.layers is None) == (wanted.layer_ids is None):
        raise ArgumentError(
            f"the cache has {n_layers} layers and does not say which",
            where="layers",
            remedy="Pass layers=…, as labels of blocks, or layer_ids=…, as vLLM was given them: one of the two.",
        )
    for number in wanted.layer_ids or ():
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ArgumentError(f"layer_ids has {brief(number)}; ids are integers of 0 or more", where="layer_ids")
    pairs = [layer if isinstance(layer, tuple) else (layer, RESID_POST) for layer in wanted.layers or ()]
    pairs += [(number - 1, RESID_POST) if number else (0, "resid_pre") for number in wanted.layer_ids or ()]
    if len(pairs) != n_layers:
        raise ArgumentError(f"{len(pairs)} layers are named; {where} has {n_layers}", where="layers")
    labels = [label for label, _ in pairs]
    given = labels if wanted.layer_ids is None else list(wanted.layer_ids)
    _check_order(given, names, where="layers" if wanted.layer_ids is None else "layer_ids")
    return {"layers": labels, "hook_points": [hook_point for _, hook_point in pairs]}


def _check_order(given: Sequence[int], names: Sequence[str], *, where: str) -> None:
    """Refuse numbers that the names have at one place, but in another order."""
    numbers = [re.findall("[0-9]{1,9}", name) for name in names]
    if len({*map(len, numbers)}) != 1:
        return
    for column in zip(*numbers, strict=True):
        found = [int(number) for number in column]
        if found != given and sorted(found) == sorted(given):
            raise ArgumentError(
                f"the layers are given as {given}; by their names they are {found}",
                where=where,
                remedy="Give them in that order.",
            )


def by_numbers(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """The order of names by the numbers in them: hs_2 before hs_10."""
    parts = re.split(r"([0-9]{1,18})", name)
    return [(0, int(part), "") if part.isascii() and part.isdigit() else (1, 0, part) for part in parts], name


def check_context(context: object) -> int:
    """The number of tokens of an example.

    Raises:
        ArgumentError: it is not given, or is no positive integer.
    """
    if context is None:
        raise ArgumentError(
            "documents lie end to end in this cache, and have to be cut into examples",
            where="context",
            remedy="Pass context=256 or the like: every example has so many tokens.",
        )
    if not isinstance(context, int) or isinstance(context, bool) or not 1 <= context < 2**31:
        raise ArgumentError(f"context is {brief(context)}; it must be a positive integer", where="context")
    return context


def sizes_of(transport: Transport, entries: Sequence[Entry]) -> dict[str, int]:
    """The sizes of the files among some names. Where a listing tells none, as those of web servers, each file of a cache is asked for its own.

    Raises:
        NotFoundError: a name that a cache has is a link to nothing, or to what may not be looked at.
    """
    sizes: dict[str, int] = {}
    for entry in entries:
        if entry.is_dir:
            continue
        size = entry.size
        if size is None and _FILE.fullmatch(entry.name):
            if transport.local_path is not None:
                raise NotFoundError(
                    "it is a link to nothing, or was deleted meanwhile",
                    where=full_url(transport, entry.path),
                    remedy="Restore the file, or remove the name if it is none of the cache.",
                )
            size = transport.size(entry.path)
        if size is not None:
            sizes[entry.name] = size
    return sizes


def entries_of(transport: Transport, path: str = "") -> Sequence[Entry]:
    """The names in a folder; none below a file.

    Raises:
        ArgumentError: the address cannot be listed.
    """
    if not isinstance(transport, Lists):
        raise ArgumentError("this address cannot be listed, so its files are not known", where=transport.url)
    try:
        return transport.list(path)
    except NotFoundError as error:
        if isinstance(error.__cause__, NotADirectoryError):
            return ()
        raise
