"""The documents of a store, and the places of its rows."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Self, cast

import numpy as np

from saev_store import ShardStore, documents, new_metadata
from saev_store.core.arguments import check_count
from saev_store.core.rows import RowSpace, Tokens, row_space
from saev_store.errors import DocumentError, SelectionError, StoreExistsError, UnsafeContentError
from saev_store.names import METADATA_NAME, WORK_FOLDER
from saev_store.store.token_arrays import MASK
from saev_store.transport import open_transport


class PixelAgg(Enum):
    """Which of its pixels' labels a token gets: the most frequent one, or that of all but the background."""

    MAJORITY = "majority"
    PREFER_FG = "prefer-fg"


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """The content of a metadata.json of any version, under the names of protocol 2.1; see `saev_store.Metadata`.

    `data` is a string: an object of an older version as its JSON text.
    """

    family: str
    ckpt: str
    layers: tuple[int, ...]
    content_tokens_per_example: int
    cls_token: bool
    d_model: int
    n_examples: int
    max_tokens_per_shard: int
    data: str
    dataset: Path
    pixel_agg: PixelAgg = PixelAgg.MAJORITY
    dtype: Literal["float32"] = "float32"
    protocol: str = "2.1"

    def __post_init__(self) -> None:
        object.__setattr__(self, "pixel_agg", PixelAgg(self.pixel_agg))  # also by its value, as documents have it

    @cached_property
    def document(self) -> documents.Metadata:
        """The document: what was read, else what is to be written.

        Raises:
            ArgumentError: a value breaks a rule of the protocol.
        """
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values["pixel_agg"] = self.pixel_agg.value
        return new_metadata(**values)

    @classmethod
    def load(cls, shards_dir: Path) -> Self:
        """The metadata of a store.

        Raises:
            NotFoundError: there is no metadata.json in the folder.
            DocumentError: it breaks a rule of the protocol, or has a `pixel_agg` that the reference project does not know.
        """
        raw = open_transport(shards_dir).read(METADATA_NAME, max_bytes=documents.METADATA_MAX_NBYTES)
        document = documents.parse_metadata(raw, where=str(Path(shards_dir) / METADATA_NAME))
        data = document.data if isinstance(document.data, str) else json.dumps(document.data, separators=(",", ":"))
        values: dict[str, Any] = {field.name: getattr(document, field.name) for field in fields(cls)}
        values |= {"data": data, "dataset": Path(document.dataset or ""), "pixel_agg": document.pixel_agg or "majority"}
        try:
            found = cls(**values)
        except ValueError as error:
            raise DocumentError(f"pixel_agg: {error}", where=str(Path(shards_dir) / METADATA_NAME)) from None
        vars(found).update(document=document)
        return found

    def dump(self, shards_root: Path) -> None:
        """Write metadata.json into `shards_root / hash`; a `ShardWriter` takes it back until all examples are there.

        Raises:
            StoreExistsError: another metadata.json is there.
        """
        folder = Path(shards_root) / self.hash
        if not (folder.parent / WORK_FOLDER / folder.name).exists():  # else a writer is at work, and will publish it
            create(folder / METADATA_NAME, self.document.raw)

    @property
    def hash(self) -> str:
        return self.document.hash

    @property
    def tokens_per_example(self) -> int:
        return self.document.layout.tokens_per_example

    @property
    def n_shards(self) -> int:
        return self.document.layout.n_shards

    @property
    def examples_per_shard(self) -> int:
        return self.document.layout.examples_per_shard

    @property
    def shard_shape(self) -> tuple[int, int, int, int]:
        return (self.examples_per_shard, *self.document.layout.shape[1:])

    def make_data_cfg(self) -> SimpleNamespace:
        """The description of the data set, its entries as attributes.

        Raises:
            UnsafeContentError: `data` is not a JSON object. The reference project pickles objects there; a pickle can run code
                when it is loaded, so it is not.
        """
        try:
            described = cast("object", json.loads(self.data))
        except (ValueError, RecursionError):
            described = None
        if not isinstance(described, dict):
            raise UnsafeContentError(
                "data is not a JSON object; a pickle can run code when it is loaded, so it is not",
                where="data",
                remedy="If you trust its author: pickle.loads(base64.b64decode(metadata.data)).",
            )
        return SimpleNamespace(**cast("dict[str, object]", described))


def create(path: Path, data: bytes) -> None:
    """Create a small file; one with the same bytes may be there already.

    Raises:
        StoreExistsError: another one is there.
    """
    try:
        open_transport(path.parent).create(path.name, data)
    except StoreExistsError:
        if path.read_bytes() != data:
            raise


@dataclass(frozen=True)
class Shard:
    """A file of vectors, and how many examples it holds."""

    name: str
    n_examples: int


class ShardInfo(list[Shard]):
    """The shards that a shards.json lists."""

    @classmethod
    def load(cls, shards_dir: Path) -> Self:
        """The shards of a store.

        Raises:
            NotFoundError, DocumentError: see `ShardStore.open`.
        """
        index = ShardStore.open(shards_dir, damaged_ok=True).index
        return cls(Shard(name, int(count)) for name, count in zip(index.names, index.counts, strict=True))

    @property
    def shards(self) -> list[Shard]:
        return list(self)

    @staticmethod
    def validate(shards_dir: Path | str) -> None:
        """Check the names and sizes of a store's files.

        Raises:
            MissingShardError, CorruptShardError: shards are missing, or short. The first is a FileNotFoundError, too.
        """
        ShardStore.open(shards_dir).close()


@dataclass(frozen=True, kw_only=True)
class Index:
    """Place of a row: its number, its example, its content token (-1 for the special one), positions in its shard."""

    idx: int
    example_idx: int
    content_token_idx: int
    shard_idx: int
    example_idx_in_shard: int
    layer_idx_in_shard: int
    token_idx_in_shard: int


class IndexMap:
    """Places of the rows of a choice of layers and tokens.

    Args:
        md: The document.
        tokens: As in the configs.
        layer: As in the configs.
        rows: The rows, where they are known. Of a store whose mask hides tokens the document alone does not name them.

    Raises:
        LayerNotFoundError, SelectionError: the store does not hold that, or its mask hides tokens.
    """

    def __init__(
        self, md: Metadata, tokens: Tokens, layer: int | Literal["all"], *, rows: RowSpace | None = None
    ) -> None:
        self.md, self.tokens, self.layer = md, tokens, layer
        self.layer_idx_lookup = {label: position for position, label in enumerate(md.layers)}
        is_masked = any(array.name == MASK for array in md.document.token_arrays or ())
        if rows is None and is_masked and tokens != "special":
            raise SelectionError(
                "the store has a mask, which hides tokens; the document does not name them",
                where="md",
                remedy="Use the index_map of an IndexedDataset.",
            )
        self._rows = row_space(md.document.layout, layer=layer, tokens=tokens) if rows is None else rows

    def __len__(self) -> int:
        return len(self._rows)

    def from_global(self, idx: int | np.int_) -> Index:
        """Return the place of a row.

        Raises:
            SelectionError: there is no such row. It is an IndexError, too.
        """
        number = check_count(idx, name="idx", least=-(2**63))
        if not 0 <= number < len(self):
            raise SelectionError(f"row {number} of {len(self)}", where="idx")
        example, layer_idx, token = (int(position) for position in self._rows.locate(number))
        shard_idx, in_shard = divmod(example, self.md.examples_per_shard)
        return Index(
            idx=number,
            example_idx=example,
            content_token_idx=max(token - self.md.cls_token, -1),
            shard_idx=shard_idx,
            example_idx_in_shard=in_shard,
            layer_idx_in_shard=layer_idx,
            token_idx_in_shard=token,
        )
