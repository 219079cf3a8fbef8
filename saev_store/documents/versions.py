"""Every spelling of metadata.json that has been written, as one table.

A new version of the protocol is one new row of `VERSIONS`. Reading, writing, hashing and the tests go through the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

#: The keys under which shards.json counts examples, oldest first.
COUNT_KEYS = ("n_imgs", "n_ex", "n_examples")
Recipe = Literal["sorted-ascii", "field-order", "field-order-8"]
#: How a folder's name was computed, in the order in which a name is compared with them.
RECIPES: tuple[Recipe, ...] = ("sorted-ascii", "field-order", "field-order-8")
#: The canonical names of all fields, in the order in which writers list them.
FIELDS = (
    "family", "ckpt", "layers", "content_tokens_per_example", "cls_token", "d_model", "n_examples",
    "max_tokens_per_shard", "data", "dataset", "pixel_agg", "dtype", "protocol",
)  # fmt: skip
#: Those that protocol 3.0 adds, in the order in which they are written, before `dtype` and `protocol`.
NEW_FIELDS = ("hook_points", "token_arrays", "text", "spec")
#: The value of `spec` in a document of ours: a version 3 without it is another project's.
SPEC = "saev_store"


@dataclass(frozen=True)
class Spelling:
    """Spelling of the keys whose names have changed, in a family of versions.

    Attributes:
        name: What messages call it.
        renamed: Canonical name to key, for the keys that differ between spellings.
        count_key: The key of the number of examples in the entries of shards.json.
        majors: Major protocol versions that documents with these keys were written under.
        keys: Canonical name to key, for all fields.
    """

    name: str
    renamed: Mapping[str, str] = field(hash=False)
    count_key: str
    majors: frozenset[int]
    keys: Mapping[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", {name: self.renamed.get(name, name) for name in (*FIELDS, *NEW_FIELDS)})


#: The renamed keys as their canonical names.
_SAME_KEYS = {
    name: name
    for name in ("family", "ckpt", "content_tokens_per_example", "d_model", "n_examples", "max_tokens_per_shard")
}
IMAGES = Spelling(
    "images and patches (protocol 1.x)",
    {
        "family": "vit_family",
        "ckpt": "vit_ckpt",
        "content_tokens_per_example": "n_patches_per_img",
        "d_model": "d_vit",
        "n_examples": "n_imgs",
        "max_tokens_per_shard": "max_patches_per_shard",
    },
    count_key="n_imgs",
    majors=frozenset({1}),
)
EXAMPLES = Spelling(
    "examples and patches (protocol 2.0, October 2025)",
    _SAME_KEYS
    | {
        "content_tokens_per_example": "patches_per_ex",
        "n_examples": "n_ex",
        "max_tokens_per_shard": "patches_per_shard",
    },
    count_key="n_ex",
    majors=frozenset({1, 2}),
)
N_CONTENT_TOKENS = Spelling(
    "examples and n_content_tokens (protocol 2.0, 7 October 2025)",
    _SAME_KEYS | {"content_tokens_per_example": "n_content_tokens_per_example"},
    count_key="n_examples",
    majors=frozenset({2}),
)
TOKENS = Spelling(
    "examples and tokens (protocol 2.x and 3.x)",
    _SAME_KEYS,
    count_key="n_examples",
    majors=frozenset({2, 3}),
)


@dataclass(frozen=True)
class WrittenVersion:
    """One way in which metadata.json has been written.

    Attributes:
        since: The day of the first writer, year first.
        protocol: What it writes as `protocol`.
        spelling: The names of its keys.
        data: Whether its `data` is an object, a string, or either.
        requires_dataset: Whether a document without `dataset` is refused.
        recipe: How its writer named the folder.
        style: How its writer formatted the file: `json.dump(indent=4)` in ASCII, or two spaces and raw UTF-8.
        writes: Canonical names of the keys of a new document, in order; empty for a version that is only read.
        fields: Canonical names of the keys that it defines.
        title: What messages and cards call it, such as "protocol 2.1 (as written since 2025-10-13)".
        required_keys: The keys that a document must have.
    """

    since: str
    protocol: str
    spelling: Spelling
    data: Literal["object", "string", "either"] = "object"
    requires_dataset: bool = False
    recipe: Recipe = "sorted-ascii"
    style: Literal["indent-4-ascii", "indent-2-utf8"] = "indent-4-ascii"
    writes: tuple[str, ...] = ()
    fields: tuple[str, ...] = FIELDS

    title: str = field(init=False)
    required_keys: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", f"protocol {self.protocol} (as written since {self.since})")
        optional = {"pixel_agg"} if self.requires_dataset else {"dataset", "pixel_agg"}
        optional |= {"hook_points", "token_arrays", "text"}
        keys = tuple(self.spelling.keys[name] for name in self.fields if name not in optional)
        object.__setattr__(self, "required_keys", keys)


def _all_but(*left_out: str) -> tuple[str, ...]:
    return tuple(name for name in FIELDS if name not in left_out)


#: All versions, oldest first.
VERSIONS = (
    # `data` was a string for the first days, an object after that.
    WrittenVersion("2025-06-19", "1.0.0", IMAGES, data="either", writes=_all_but("dataset", "pixel_agg")),
    # labels.bin beside it; `pixel_agg` from the second day on.
    WrittenVersion("2025-09-15", "1.1", IMAGES),
    # The keys of 2.0, for half a day, before the version was raised.
    WrittenVersion("2025-10-02", "1.1", EXAMPLES),
    # The first day of 2.0, without the `dataset` that its text demands.
    WrittenVersion("2025-10-02", "2.0", EXAMPLES),
    # 2.0 as its published text has it.
    WrittenVersion("2025-10-03", "2.0", EXAMPLES, requires_dataset=True, writes=_all_but("pixel_agg")),
    # One day with another name for the number of content tokens.
    WrittenVersion("2025-10-07", "2.0", N_CONTENT_TOKENS, requires_dataset=True),
    # The keys of 2.1. From 2025-10-10 on its writer hashed in field order.
    WrittenVersion("2025-10-08", "2.0", TOKENS, requires_dataset=True),
    # `data` is a string (a base64 pickle, from its writers); `pixel_agg` may be null.
    WrittenVersion(
        "2025-10-13", "2.1", TOKENS, data="string", requires_dataset=True, recipe="field-order-8",
        style="indent-2-utf8", writes=FIELDS,
    ),
    # Ours: 16 bits, hook points, token arrays. Written only if 2.0 cannot hold it.
    WrittenVersion(
        "2026-11-22", "3.0", TOKENS, requires_dataset=True,
        writes=(*_all_but("pixel_agg")[:-2], *NEW_FIELDS, *FIELDS[-2:]), fields=(*FIELDS[:-2], *NEW_FIELDS, *FIELDS[-2:]),
    ),
)  # fmt: skip
#: Every protocol version that has been written, oldest first.
PROTOCOLS = tuple(dict.fromkeys(version.protocol for version in VERSIONS))
#: The versions that new documents can be written in, by protocol.
WRITABLE_VERSIONS: Mapping[str, WrittenVersion] = {version.protocol: version for version in VERSIONS if version.writes}
