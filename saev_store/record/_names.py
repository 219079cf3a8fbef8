"""The names of models and tokenizers in the metadata. Digests tell which they are, so no name depends on where a folder lies."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from saev_store.names import METADATA_NAME, WORK_FOLDER
from saev_store.writer.work import read

if TYPE_CHECKING:
    from saev_store.documents import Metadata
    from saev_store.transport import Transport

#: What the hub's cache and a trainer call folders, which says nothing without the folders above.
_IN_CACHE = re.compile(r"models--(.+)/snapshots/[^/]+")
_OF_TRAINER = re.compile(r"[^/]+/checkpoint-[0-9]+")


def name_of(given: str) -> str:
    """The name of a folder that is there, however its path is written; anything else, such as a name on the hub, as it is given.

    That of a snapshot in the hub's cache is the name on the hub, and that of a trainer's checkpoint begins with its run.

    >>> name_of("Qwen/Qwen3-0.6B")
    'Qwen/Qwen3-0.6B'
    """
    if not given or not os.path.isdir(given):
        return given
    parts = os.path.abspath(given).replace(os.sep, "/").split("/")
    if found := _IN_CACHE.fullmatch("/".join(parts[-3:])):
        return found[1].replace("--", "/")
    last_two = "/".join(parts[-2:])
    return last_two if _OF_TRAINER.fullmatch(last_two) else parts[-1] or given


def named(
    make: Callable[..., Metadata],
    *,
    ckpt: str,
    text: Mapping[str, object] | None,
    like: Metadata | None = None,
    root: Transport | None = None,
) -> Metadata:
    """The metadata with the names of the model and of its tokenizer.

    Args:
        make: Makes them of `ckpt` and `text`.
        ckpt: The name of the weights, as it is given.
        text: How texts are cut, with the name of the tokenizer, as it is given.
        like: A store whose names are taken where they are of the same folder, or the tokenizers are equal.
        root: Where a store that was begun under the names as they are given is found.
    """
    if like is not None:
        return make(ckpt=like.ckpt if like.ckpt == name_of(ckpt) else ckpt, text=_with_name_of(text, like))
    found = make(ckpt=name_of(ckpt), text=_with_name(text, name_of(_name(text))))
    given = make(ckpt=ckpt, text=text)
    if root is None or found == given or _is_begun(root, found) or not _is_begun(root, given):
        return found
    return given


def _tokenizer(text: Mapping[str, object] | None) -> Mapping[str, object]:
    """What the metadata say of the tokenizer; empty where there is none."""
    found = None if text is None else text.get("tokenizer")
    return cast("Mapping[str, object]", found) if isinstance(found, Mapping) else {}


def _name(text: Mapping[str, object] | None) -> str:
    return str(_tokenizer(text).get("name", ""))


def _with_name(text: Mapping[str, object] | None, name: str) -> Mapping[str, object] | None:
    """`text` with another name of its tokenizer."""
    tokenizer = _tokenizer(text)
    return {**text, "tokenizer": {**tokenizer, "name": name}} if text is not None and "name" in tokenizer else text


def _with_name_of(text: Mapping[str, object] | None, like: Metadata) -> Mapping[str, object] | None:
    """`text` with the name that a store has for the tokenizer, if it is an equal one."""
    digest = _tokenizer(text).get("digest")
    return (
        text if digest is None or digest != _tokenizer(like.text).get("digest") else _with_name(text, _name(like.text))
    )


def _is_begun(root: Transport, metadata: Metadata) -> bool:
    """Whether a store of these metadata is there, published or unfinished."""
    paths = (f"{metadata.hash}/{METADATA_NAME}", f"{WORK_FOLDER}/{metadata.hash}/{METADATA_NAME}")
    return any(read(root, path) for path in paths)
