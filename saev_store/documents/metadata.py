"""metadata.json of any version, under canonical names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from saev_store.core.layout import IntArray, Layout
from saev_store.documents import _json
from saev_store.documents._choose import choose_version, find_oddities, refuse_breaking, refuse_unversioned
from saev_store.documents._findings import Findings, shown
from saev_store.documents.hashing import Recipe, content_hashes, known_names
from saev_store.documents.versions import FIELDS, WRITABLE_VERSIONS, WrittenVersion
from saev_store.errors import ArgumentError, DocumentError
from saev_store.problems import Problem

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from saev_store.documents._model import Document

#: The most bytes that a metadata.json may have. Real ones have a few hundred; `data` may hold a class list.
METADATA_MAX_NBYTES = 16 * 2**20
_GEOMETRY = (
    "n_examples", "layers", "content_tokens_per_example", "cls_token", "d_model", "max_tokens_per_shard",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Metadata:
    """What a metadata.json says, whatever the version; equal to another one when their bytes are.

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
        dtype: Always "float32".
        protocol: The protocol version, as written.
        version: Which of the written versions this is.
        raw: The exact bytes it was read from, or that are to be written.
        layout: The geometry it implies.
        problems: Warnings; a document with an error is never made.
        where: The file or URL it was read from.

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
    raw: bytes = field(repr=False)
    layout: Layout = field(repr=False)
    problems: tuple[Problem, ...] = ()
    where: str = "metadata.json"

    def __eq__(self, other: object) -> bool:
        return self.raw == other.raw if isinstance(other, Metadata) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.raw)

    @property
    def extra(self) -> dict[str, object]:
        """Keys that the version does not know, with their values."""
        known = {*FIELDS, *map(self.version.spelling.key, FIELDS)}
        return {key: value for key, value in self._contents().items() if key not in known}

    @property
    def count_key(self) -> str:
        """The key of the counts in the shards.json of this version: "n_imgs", "n_ex" or "n_examples"."""
        return self.version.spelling.count_key

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The top-level keys, as written and in that order."""
        return tuple(self._contents())

    @cached_property
    def hashes(self) -> dict[Recipe, str]:
        """The hash by each recipe, of the document as it was read, unknown keys included."""
        return content_hashes(self._contents())

    @cached_property
    def known_names(self) -> dict[str, Recipe]:
        """Every name that a writer may have given the folder, and its recipe: `hashes`, and an older spelling of floats."""
        return known_names(self._contents())

    @property
    def hash(self) -> str:
        """The name of the folder that this document belongs into, by the recipe of its version."""
        return self.hashes[self.version.recipe]

    def to_bytes(self) -> bytes:
        """The bytes of the file: those that were read, or in the form in which the version's writers format them."""
        return self.raw

    def replace(self, **changes: object) -> Metadata:
        """A document of the same version with other values; unknown keys and everything else stay.

        Args:
            changes: Canonical names (`n_examples=5`), whatever the keys in the file are called.

        Raises:
            ArgumentError: a name is not one that can be changed, or a value breaks a rule.
        """
        from saev_store.documents._write import replaced

        return _checked(replaced(self._contents(), self.version, changes), self.version)

    def _contents(self) -> dict[str, object]:
        # Parsed again rather than kept: callers can change the value of `data`, but not the bytes.
        return cast("dict[str, object]", _json.loads(self.raw, where=self.where, max_nbytes=METADATA_MAX_NBYTES))


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
    contents = _json.loads(raw, where=where, max_nbytes=METADATA_MAX_NBYTES)
    findings = Findings(where)
    if not isinstance(contents, dict):
        findings.add("wrong_type", f"it is {shown(contents)}; it must be an object")
        findings.raise_if_bad(remedy="Check that this is the metadata.json of a store.")
    document = cast("dict[str, object]", contents)
    refuse_unversioned(document, findings)
    refuse_breaking(document, findings)
    version = choose_version(document, findings)
    n_before = findings.n_errors
    values = _values(document, version, findings)
    layout = _layout(values, version, findings) if findings.n_errors == n_before else None
    findings.raise_if_bad(remedy=f"The rules are those of {version.title}.")
    if layout is None:  # Not reached: what keeps it from being made is a finding.
        raise DocumentError("it cannot be read", where=where)
    find_oddities(values, version, findings)
    return Metadata(**values, version=version, raw=raw, layout=layout, problems=findings.warnings, where=where)


def match_hash(meta: Metadata, dirname: str) -> Recipe | None:
    """The recipe by which `dirname` is the right name for this document's folder, None if none is.

    >>> meta = new_metadata(family="clip", ckpt="b", layers=[0], content_tokens_per_example=4, cls_token=False,
    ...                     d_model=8, n_examples=7, max_tokens_per_shard=50)
    >>> match_hash(meta, meta.hash), match_hash(meta, "renamed")
    ('sorted-ascii', None)
    """
    return meta.known_names.get(dirname)


def _values(document: Mapping[str, object], version: WrittenVersion, findings: Findings) -> dict[str, Any]:
    """The values under their canonical names, checked by a pydantic model; each that breaks a rule is a finding."""
    from pydantic import ValidationError

    from saev_store.documents._model import Document, DocumentWithDataset

    model = DocumentWithDataset if version.requires_dataset else Document
    canonical = {version.spelling.key(name): name for name in FIELDS}
    # A canonical name that this version spells differently is a stray key, not an alias.
    renamed = {
        canonical.get(key, key): value for key, value in document.items() if key in canonical or key not in FIELDS
    }
    try:
        checked = model.model_validate(renamed)
    except ValidationError as exc:
        for error in exc.errors(include_url=False):
            _add_error(error, model, version, findings)
        return {}
    return {name: getattr(checked, name) for name in FIELDS}


def _add_error(error: ErrorDetails, model: type[Document], version: WrittenVersion, findings: Findings) -> None:
    if not error["loc"]:
        findings.add("wrong_type", "a key is not Unicode text (it holds half a surrogate pair)")
        return
    name = str(error["loc"][0])
    key = version.spelling.key(name)
    if error["type"] == "missing":
        why = ", for nothing else says how the vectors are laid out" if key == "protocol" else ""
        findings.add("missing_key", f'the key "{key}" is missing; {version.title} demands it{why}', loc=(key,))
    elif error["type"] == "bad_layers":
        bad = cast("list[tuple[int, object, str]]", error.get("ctx", {})["bad"])
        for i, label, rule in bad:
            findings.add("wrong_value", f'"{key}"[{i}] is {shown(label)}; {rule}', loc=(key, i))
    else:
        rule = model.model_fields[name].description
        findings.add("wrong_value", f'"{key}" is {shown(error["input"])}; it must be {rule}', loc=(key,))


def _layout(values: Mapping[str, Any], version: WrittenVersion, findings: Findings) -> Layout | None:
    try:
        return Layout.from_budget(**{name: values[name] for name in _GEOMETRY})
    except ArgumentError as exc:
        name = exc.where or ""
        key = version.spelling.key(name)
        text = exc.message.replace(name, key) if name else exc.message
        findings.add("layout", f"{text}. {exc.remedy}" if exc.remedy else text, loc=(key,) if key != "layout" else ())
    return None


def new_metadata(
    *,
    protocol: str = "2.0",
    family: str,
    ckpt: str,
    layers: Sequence[int] | IntArray,
    content_tokens_per_example: int,
    cls_token: bool,
    d_model: int,
    n_examples: int,
    max_tokens_per_shard: int = 2_400_000,
    data: Mapping[str, object] | str | None = None,
    dataset: str | os.PathLike[str] | None = None,
    pixel_agg: str | None = None,
    extra: Mapping[str, object] | None = None,
) -> Metadata:
    """The metadata of a new store, with exactly the keys that its protocol version has.

    Args:
        protocol: "2.0", "1.0.0" or "2.1", the only one that the reference project's code of today reads.
        family: The family of models, such as "clip".
        ckpt: The model.
        layers: Labels of the recorded layers, a sequence or array of distinct integers.
        content_tokens_per_example: Tokens of an example without CLS, at least 1.
        cls_token: Whether token 0 is a CLS token.
        d_model: Length of one vector, at least 1.
        n_examples: Examples in all, at least 1.
        max_tokens_per_shard: Budget of vectors per shard; at least those of one example in all layers. The default is that
            of section 3: about 10 GB per shard for d_model 1024.
        data: Describes the data set. For 1.0.0 and 2.0 an object (`{}` by default). Protocol 2.1 wants a string: an
            object is stored as its compact JSON text, a string as it is. Never pickled.
        dataset: Where the data set is, a string or path; "" by default. Not in 1.0.0.
        pixel_agg: How pixel labels became token labels. "majority" by default in 2.1, left out of 2.0 unless given, not
            in 1.0.0.
        extra: Further keys, appended after those of the protocol. They count in the hash.

    Raises:
        ArgumentError: a value breaks a rule, or the version has no such key; all problems in one message.

    >>> new_metadata(protocol="1.0.0", family="clip", ckpt="b", layers=[0], content_tokens_per_example=4, cls_token=False,
    ...              d_model=8, n_examples=7, max_tokens_per_shard=50).keys[:4]
    ('vit_family', 'vit_ckpt', 'layers', 'n_patches_per_img')
    """
    from saev_store.documents._write import composed

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
        "dtype": "float32",
        "protocol": protocol,
    }
    raw = composed(values, extra or {})
    return _checked(raw, WRITABLE_VERSIONS[protocol])


def _checked(raw: bytes, version: WrittenVersion) -> Metadata:
    """The metadata of bytes that were made from arguments; what is wrong with it is wrong with them."""
    try:
        return parse_metadata(raw, where="metadata.json")
    except DocumentError as exc:
        message = exc.message
        for name in FIELDS:  # The caller knows the canonical names.
            message = re.sub(rf'"{version.spelling.key(name)}"|^{version.spelling.key(name)}\b', name, message)
        raise ArgumentError(message, where="metadata", remedy=exc.remedy) from None
