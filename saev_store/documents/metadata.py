"""metadata.json of any version, under canonical names."""

from __future__ import annotations

import operator
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np

from saev_store.core.arguments import is_mapping
from saev_store.core.dtypes import ITEMSIZES, StoredDtype, dtype_name
from saev_store.core.layout import RESID_POST, IntArray, Layout
from saev_store.core.token_arrays import LABELS, TokenArray
from saev_store.documents._parse import Findings, parse_json
from saev_store.documents._rules import check_document
from saev_store.documents.versions import PROTOCOLS, WRITABLE_VERSIONS, Recipe, WrittenVersion
from saev_store.documents.writing import composed, content_hashes, replaced
from saev_store.errors import ArgumentError, DocumentError, SaevStoreWarning, brief, kind_of, outside
from saev_store.problems import Problem

#: The most bytes that a metadata.json may have. Real ones have a few hundred; `data` may hold a class list.
METADATA_MAX_NBYTES = 16 * 2**20
#: A new store has at least so many shards, of at most so many bytes, unless its budget is given.
MIN_SHARDS, MAX_SHARD_BYTES = 32, 1 << 30


@dataclass(frozen=True, eq=False)
class Metadata:
    """Content of a metadata.json of any version; equal to another one when their bytes are.

    Attributes:
        family, ckpt, layers, content_tokens_per_example, cls_token, d_model, n_examples: As in `new_metadata`.
        max_tokens_per_shard, hook_points, text: As there.
        data: The description of the data set: a dict, or a string that may be a pickle. Opaque; treat it as read-only.
        dataset: Where the data set was, as the writer saw it; None in documents without it.
        pixel_agg: How pixel labels became token labels; None where it is null or absent.
        dtype: What one number in a shard is: "float32", with protocol 3.0 also "bfloat16" or "float16".
        protocol: The protocol version, as written.
        version: Which of the written versions this is.
        count_key: The key of the counts in its shards.json: "n_imgs", "n_ex" or "n_examples".
        raw: The exact bytes it was read from, or that are to be written.
        layout: The geometry it implies.
        problems: Warnings; a document with an error is never made.
        where: The file or URL it was read from.
        token_arrays: What the document declares for each content token; `labels.bin` of older stores is not among them.

    >>> meta = new_metadata(family="clip", ckpt="ViT-B-16/openai", layers=[2, 5, 11], content_tokens_per_example=4,
    ...                     cls_token=True, d_model=8, n_examples=7, max_tokens_per_shard=50)
    >>> meta.layout.shape, meta.protocol, meta.count_key
    ((7, 3, 5, 8), '2.0', 'n_ex')
    """

    family: str
    ckpt: str
    layers: tuple[int, ...]
    content_tokens_per_example: int
    cls_token: bool
    d_model: int
    n_examples: int
    max_tokens_per_shard: int
    data: object = field(repr=False)
    dataset: str | None
    pixel_agg: str | None
    dtype: str
    protocol: str
    version: WrittenVersion = field(repr=False)
    count_key: str = field(repr=False)
    raw: bytes = field(repr=False)
    layout: Layout = field(repr=False)
    problems: tuple[Problem, ...] = ()
    where: str = "metadata.json"
    hook_points: tuple[str, ...] | None = None
    token_arrays: tuple[TokenArray, ...] = ()
    text: Mapping[str, object] | None = field(default=None, repr=False)

    def __eq__(self, other: object) -> bool:
        return self.raw == other.raw if isinstance(other, Metadata) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.raw)

    @property
    def declares_token_arrays(self) -> bool:
        """True if the version lists its token arrays (3.0); else there may be a labels.bin that no document mentions."""
        return "token_arrays" in self.version.fields

    @property
    def recordable(self) -> tuple[TokenArray, ...]:
        """Token arrays that the document declares; before protocol 3.0 labels."""
        return self.token_arrays if self.declares_token_arrays else (LABELS,)

    @property
    def extra(self) -> dict[str, object]:
        """Keys that the version does not know, with their values."""
        fields = self.version.fields
        known = {*fields, *(self.version.spelling.keys[name] for name in fields)}
        return {key: value for key, value in _contents_of(self).items() if key not in known}

    @cached_property
    def hash(self) -> str:
        """The name of the folder that this document belongs into, by the recipe of its version."""
        return content_hashes(_contents_of(self))[self.version.recipe]

    def replace(self, **changes: object) -> Metadata:
        """A document of the same version with other values; unknown keys and everything else stay.

        Args:
            changes: Canonical names (`n_examples=5`), whatever the keys in the file are called.

        Raises:
            ArgumentError: a name is not one that can be changed, or a value breaks a rule.
        """
        return _checked(replaced(_contents_of(self), self.version, changes), self.version)


def parse_metadata(raw: bytes, *, where: str) -> Metadata:
    """The metadata in a file, in any of the written versions.

    Nothing in it is decoded further, unpickled or imported.

    Args:
        raw: The whole file.
        where: Its name, for messages.

    Raises:
        UnknownProtocolError: it follows another major version, or holds another dtype; a BreakingProtocolWarning is
            given first.
        DocumentError: it breaks a rule of docs/protocol.md; all problems are in `problems`.

    Warns:
        SaevStoreWarning: a minor version that is not known; it is read like the one before.
    """
    contents, findings = parse_json(raw, where=where, max_nbytes=METADATA_MAX_NBYTES), Findings(where)
    if not is_mapping(contents):
        findings.add("wrong_type", f"it is {brief(contents)}; it must be an object")
        raise findings.error("Check that this is the metadata.json of a store.")
    values, version, layout = check_document(contents, findings)
    values.pop("spec", None)
    protocol, layers = values["protocol"], values["layers"]
    if protocol not in PROTOCOLS:
        message = (
            f'"protocol" is {brief(protocol)}, a minor version that is not known; it is read like {version.protocol}'
        )
        findings.add("unknown_minor", message, "protocol", severity="warning")
        warnings.warn(f"{where}: {message}", SaevStoreWarning, stacklevel=outside())
    if list(layers) != sorted(layers, key=lambda layer: (layer < 0, layer)):
        message = (
            f'"layers" is {brief(layers)}, which is not the order in which a model runs them; the reference writer stores them '
            "in that order, so they may be mislabelled. Compare a vector with a fresh forward pass"
        )
        findings.add("layer_order", message, "layers", severity="warning")
    return Metadata(
        **values,
        version=version,
        count_key=version.spelling.count_key,
        raw=raw,
        layout=layout,
        problems=tuple(findings.warnings),
        where=where,
    )


def match_hash(meta: Metadata, dirname: str) -> Recipe | None:
    """The recipe by which `dirname` is the right name for this document's folder, None if none is."""
    document = _contents_of(meta)
    for plus in (b"+", b""):  # writers of the field order print 1e16 as 1e+16 or as 1e16, by the age of their library
        for recipe, name in content_hashes(document, plus=plus).items():
            if name == dirname:
                return recipe
    return None


def new_metadata(
    *,
    protocol: str | None = None,
    family: str,
    ckpt: str,
    layers: Sequence[int] | IntArray,
    content_tokens_per_example: int,
    cls_token: bool,
    d_model: int,
    n_examples: int,
    max_tokens_per_shard: int | None = None,
    data: Mapping[str, object] | str | None = None,
    dataset: str | os.PathLike[str] | None = None,
    pixel_agg: str | None = None,
    dtype: StoredDtype | np.dtype[np.generic] | type[np.generic] = "float32",
    hook_points: Sequence[str] | None = None,
    token_arrays: Mapping[str, type[np.generic | bool] | str | np.dtype[np.generic]] | None = None,
    text: Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
) -> Metadata:
    """The metadata of a new store, with exactly the keys that its protocol version has.

    Args:
        protocol: "2.0", "1.0.0", "2.1", the only one that the reference project's code of today reads, or "3.0". By default
            2.0 if it can hold everything, else 3.0, which only this package reads.
        family: The family of models, such as "clip".
        ckpt: The model.
        layers: Labels of the recorded layers, a sequence or array of distinct integers.
        content_tokens_per_example: Tokens of an example without CLS, at least 1.
        cls_token: Whether token 0 is a CLS token.
        d_model: Length of one vector, at least 1.
        n_examples: Examples in all, at least 1.
        max_tokens_per_shard: Budget of vectors per shard; at least those of one example in all layers. None chooses one with which
            a store has at least 32 shards, or one for each example, and none of them is larger than 1 GiB if an example is not.
        data: Describes the data set. For 1.0.0 and 2.0 an object (`{}` by default). Protocol 2.1 takes a string: an
            object is stored as its compact JSON text, a string as it is. Never pickled.
        dataset: Where the data set is, a string or path; "" by default. Not in 1.0.0.
        pixel_agg: How pixel labels became token labels. "majority" by default in 2.1, left out of 2.0 unless given, not
            in 1.0.0.
        dtype: "float32", or with protocol 3.0 "bfloat16" or "float16"; or such a dtype of NumPy, `ml_dtypes` or torch.
        hook_points: Protocol 3.0: where in its layer each of `layers` is taken, such as "resid_mid"; a layer may then occur
            with several. None is "resid_post" for all.
        token_arrays: Protocol 3.0: what is recorded for each content token, name to dtype, such as {"token_ids": "int32",
            "mask": "bool"}, or dtypes of NumPy or torch; see `saev_store.core.token_arrays`.
        text: Protocol 3.0: how texts were cut into examples: {"layout": "window" or "stream", "tokenizer": …, "bos": …}.
        extra: Further keys, appended after those of the protocol. They count in the hash.

    Raises:
        ArgumentError: a value breaks a rule, or the version has no such key; all problems in one message.

    >>> new_metadata(protocol="1.0.0", family="clip", ckpt="b", layers=[0], content_tokens_per_example=4, cls_token=False,
    ...              d_model=8, n_examples=7, max_tokens_per_shard=50).count_key
    'n_imgs'
    """
    if max_tokens_per_shard is None:
        max_tokens_per_shard = _default_budget(
            n_examples, layers, content_tokens_per_example, cls_token, d_model, dtype
        )
    if isinstance(hook_points, (list, tuple)) and hook_points and all(point == RESID_POST for point in hook_points):
        hook_points = None  # expressed by leaving them out
    arrays: object = token_arrays
    if isinstance(token_arrays, Mapping):
        kinds = {name: dtype_name(kind) or kind for name, kind in token_arrays.items()}
        arrays = [{"name": name, "dtype": kind} for name, kind in kinds.items()] or None
    name = dtype_name(dtype)
    if name is None:
        raise ArgumentError(f"dtype is {brief(dtype)}; it must be {', '.join(ITEMSIZES)}", where="dtype")
    if protocol is None:
        is_ours = name != "float32" or any(value is not None for value in (hook_points, arrays, text))
        protocol = "3.0" if is_ours else "2.0"
    values: dict[str, object] = {
        "family": family, "ckpt": ckpt, "layers": layers, "content_tokens_per_example": content_tokens_per_example,
        "cls_token": cls_token, "d_model": d_model, "n_examples": n_examples, "max_tokens_per_shard": max_tokens_per_shard,
        "data": data, "dataset": dataset, "pixel_agg": pixel_agg, "hook_points": hook_points, "token_arrays": arrays,
        "text": text, "spec": None, "dtype": name, "protocol": protocol,
    }  # fmt: skip
    return _checked(composed(values, {} if extra is None else extra), WRITABLE_VERSIONS[protocol])


def as_metadata(metadata: object) -> Metadata:
    """The metadata of a new store, from a document or from a mapping of arguments of `new_metadata`, else `ArgumentError`."""
    if isinstance(metadata, Metadata):
        return metadata
    if not is_mapping(metadata):
        raise ArgumentError(f"is {kind_of(metadata)}; it must come from saev_store.new_metadata(...)", where="metadata")
    try:
        return new_metadata(**cast("dict[str, Any]", metadata))
    except TypeError as error:  # a name that new_metadata does not know, or one that it needs
        raise ArgumentError(str(error).replace("new_metadata()", "it"), where="metadata") from error


def _default_budget(
    n_examples: int, layers: Sequence[int] | IntArray, content_tokens: int, cls_token: bool, d_model: int, dtype: object
) -> int:
    """The default of `max_tokens_per_shard`; a crash while a store is written repeats at most a shard."""
    try:
        n_vectors = (operator.index(content_tokens) + bool(cls_token)) * len(layers)
        nbytes = n_vectors * operator.index(d_model) * ITEMSIZES[cast("StoredDtype", dtype_name(dtype))]
        return max(1, min(operator.index(n_examples) // MIN_SHARDS, MAX_SHARD_BYTES // nbytes)) * n_vectors
    except (TypeError, KeyError, ZeroDivisionError):  # refused with the document
        return 1


def _contents_of(meta: Metadata) -> dict[str, object]:
    """The document, parsed again: callers can change the value of `data`, but not the bytes."""
    return cast("dict[str, object]", parse_json(meta.raw, where=meta.where, max_nbytes=METADATA_MAX_NBYTES))


def _checked(raw: bytes, version: WrittenVersion) -> Metadata:
    """The metadata of bytes that were made from arguments; what is wrong with it is wrong with them."""
    try:
        return parse_metadata(raw, where="metadata.json")
    except DocumentError as exc:
        message = exc.message
        for name in version.fields:  # The caller knows the canonical names.
            key = version.spelling.keys[name]
            message = re.sub(rf'"{key}"|^{key}\b', name, message)
        raise ArgumentError(message, where="metadata", remedy=exc.remedy) from None
