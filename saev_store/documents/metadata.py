"""metadata.json of any version, under canonical names."""

from __future__ import annotations

import contextlib
import operator
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import cast

import numpy as np

from saev_store.core.dtypes import ITEMSIZES, StoredDtype, dtype_name
from saev_store.core.layout import RESID_POST, IntArray, Layout
from saev_store.core.token_arrays import LABELS, TokenArray
from saev_store.documents._parse import Findings, parse_json, shown
from saev_store.documents._rules import check_document
from saev_store.documents.versions import PROTOCOLS, SPEC, WRITABLE_VERSIONS, Recipe, WrittenVersion
from saev_store.documents.writing import composed, content_hashes, replaced
from saev_store.errors import ArgumentError, DocumentError, SaevStoreWarning, brief, outside
from saev_store.problems import Problem

#: The most bytes that a metadata.json may have. Real ones have a few hundred; `data` may hold a class list.
METADATA_MAX_NBYTES = 16 * 2**20
#: A new store has at least so many shards, of at most so many bytes, unless its budget is given.
MIN_SHARDS, MAX_SHARD_BYTES = 32, 1 << 30


@dataclass(frozen=True, eq=False)
class Metadata:
    """Content of a metadata.json of any version; equal to another one when their bytes are.

    Attributes:
        family: The family of models, such as "clip"; any string is accepted.
        ckpt: The model, under the name that its recorder used.
        layers: Labels of the recorded layers, in the order of the layer axis.
        content_tokens_per_example: Tokens of an example without CLS.
        cls_token: Whether token 0 is a CLS token.
        d_model: Length of one vector.
        n_examples: Examples in all shards together.
        max_tokens_per_shard: The budget of vectors per shard from which the capacity follows (docs/protocol.md, section 3).
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
        hook_points: Where in its layer each entry of the layer axis was taken; None where all are "resid_post".
        token_arrays: What the document declares for each content token; `labels.bin` of older stores is not among them.
        text: How texts were cut into examples; None for other data.

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
    def keys(self) -> tuple[str, ...]:
        """The top-level keys, as written and in that order."""
        return tuple(_contents_of(self))

    @cached_property
    def hashes(self) -> dict[Recipe, str]:
        """The hash by each recipe, of the document as it was read, unknown keys included."""
        return content_hashes(_contents_of(self))

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
    contents = parse_json(raw, where=where, max_nbytes=METADATA_MAX_NBYTES)
    findings = Findings(where)
    if not isinstance(contents, dict):
        findings.add("wrong_type", f"it is {shown(contents)}; it must be an object")
        raise findings.error(remedy="Check that this is the metadata.json of a store.")
    values, version, layout = check_document(cast("dict[str, object]", contents), findings)
    values.pop("spec", None)
    _find_oddities(values["protocol"], values["data"], values["layers"], version, findings)
    return Metadata(
        **values,
        version=version,
        count_key=version.spelling.count_key,
        raw=raw,
        layout=layout,
        problems=tuple(findings.warnings),
        where=where,
    )


def _find_oddities(
    protocol: str, data: object, layers: tuple[int, ...], version: WrittenVersion, findings: Findings
) -> None:
    """Add a warning for each oddity of a document that is right.

    Warns:
        SaevStoreWarning: a minor version that is not known.
    """
    if protocol not in PROTOCOLS:
        message = (
            f'"protocol" is {shown(protocol)}, a minor version that is not known; it is read like {version.protocol}, '
            "which minor versions must allow"
        )
        findings.add("unknown_minor", message, loc=("protocol",), severity="warning")
        warnings.warn(f"{findings.where}: {message}", SaevStoreWarning, stacklevel=outside())
    elif protocol != version.protocol:
        findings.add(
            "unusual_protocol",
            f'"protocol" is {shown(protocol)}, but no writer is known that used it with the keys of '
            f"{version.spelling.name}",
            loc=("protocol",),
            severity="warning",
        )
    kind = "string" if isinstance(data, str) else "object"
    if version.data not in {kind, "either"}:
        findings.add(
            "unusual_data",
            f'"data" is {"a string" if kind == "string" else "an object"}; writers of {version.title} make it '
            f"{'an object' if kind == 'string' else 'a string'}",
            loc=("data",),
            severity="warning",
        )
    in_order = depth_order(layers)
    if not in_order:
        some = f"{list(layers[:8])}{' and more' if len(layers) > 8 else ''}"
        doubt = (
            "which is not the order in which a model runs them"
            if in_order is False
            else "and whether that is the order in which a model runs them depends on its depth"
        )
        findings.add(
            "layer_order",
            f'"layers" is {some}, {doubt}; the reference writer stores layers in the order in which they run, so they may '
            "be mislabelled. Compare a vector with a fresh forward pass",
            loc=("layers",),
            severity="warning",
        )


def depth_order(layers: tuple[int, ...]) -> bool | None:
    """True if layers are listed in the order in which a model runs them; None if that depends on its depth.

    Negative labels count from the end, and the depth is not in the document.

    >>> depth_order((2, 5, 11)), depth_order((11, 2)), depth_order((3, -1)), depth_order((3, -2))
    (True, False, True, None)
    """
    for part in ([layer for layer in layers if layer >= 0], [layer for layer in layers if layer < 0]):
        if any(a > b for a, b in pairwise(part)):
            return False
    certain: bool | None = True
    for a, b in pairwise(layers):
        if a == -1 and b >= 0:  # the last layer cannot come before one counted from the start
            return False
        if (a >= 0) != (b >= 0) and b != -1:
            certain = None
    return certain


def match_hash(meta: Metadata, dirname: str) -> Recipe | None:
    """The recipe by which `dirname` is the right name for this document's folder, None if none is.

    >>> meta = new_metadata(family="clip", ckpt="b", layers=[0], content_tokens_per_example=4, cls_token=False,
    ...                     d_model=8, n_examples=7, max_tokens_per_shard=50)
    >>> match_hash(meta, meta.hash), match_hash(meta, "renamed")
    ('sorted-ascii', None)
    """
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
    ...              d_model=8, n_examples=7, max_tokens_per_shard=50).keys[:4]
    ('vit_family', 'vit_ckpt', 'layers', 'n_patches_per_img')
    """
    if max_tokens_per_shard is None:
        max_tokens_per_shard = _default_budget(
            n_examples, layers, content_tokens_per_example, cls_token, d_model, dtype
        )
    values: dict[str, object] = {
        "family": family,
        "ckpt": ckpt,
        "layers": layers,
        "content_tokens_per_example": content_tokens_per_example,
        "cls_token": cls_token,
        "d_model": d_model,
        "n_examples": n_examples,
        "max_tokens_per_shard": max_tokens_per_shard,
        "data": data,
        "dataset": dataset,
        "pixel_agg": pixel_agg,
    }
    # Anything but a sequence or mapping is passed as it is, to be refused like the same value in a document.
    ours: dict[str, object] = {"hook_points": hook_points, "token_arrays": token_arrays, "text": text}
    if isinstance(hook_points, (list, tuple)):
        with contextlib.suppress(TypeError):  # layers without a length are refused with the document
            are_default = [*hook_points] == [RESID_POST] * len(layers)
            ours["hook_points"] = None if are_default else [*hook_points]  # expressed by leaving them out
    if isinstance(token_arrays, Mapping):
        kinds = {name: dtype_name(kind) or kind for name, kind in token_arrays.items()}
        ours["token_arrays"] = [{"name": name, "dtype": kind} for name, kind in kinds.items()] or None
    if not isinstance(dtype, str):
        name = dtype_name(dtype)
        if name is None:
            raise ArgumentError(f"dtype is {brief(dtype)}; it must be {', '.join(ITEMSIZES)}", where="dtype")
        dtype = cast("StoredDtype", name)
    if protocol is None:
        is_ours = dtype != "float32" or any(value is not None for value in ours.values())
        protocol = "3.0" if is_ours else "2.0"
    values |= ours
    is_new = isinstance(protocol, str) and protocol == "3.0"  # pyright: ignore[reportUnnecessaryIsInstance]  # an array has no truth
    values |= {"spec": SPEC if is_new else None, "dtype": dtype, "protocol": protocol}
    raw = composed(values, {} if extra is None else extra)
    return _checked(raw, WRITABLE_VERSIONS[protocol])


def _default_budget(
    n_examples: int, layers: Sequence[int] | IntArray, content_tokens: int, cls_token: bool, d_model: int, dtype: object
) -> int:
    """The default of `max_tokens_per_shard`; a crash while a store is written repeats at most a shard.

    >>> _default_budget(1_000, [0, 1], 196, True, 768, "float32") // (197 * 2)  # examples in a shard
    31
    """
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
