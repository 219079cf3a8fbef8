"""The geometry of a store: sizing maths (section 3 of the protocol) and coordinate maths (section 4).

Pure integers: nothing here can open a file. Scalars are Python integers, so nothing overflows; the vectorised twins use
int64 and are exact because a layout refuses sizes whose byte offsets would not fit into 63 bits.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import SupportsIndex, TypeAlias, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from saev_store.core.arguments import BOOLEANS, check_choice, check_count
from saev_store.core.dtypes import ITEMSIZES
from saev_store.errors import ArgumentError, LayerNotFoundError, SelectionError, brief

MAX_INT64 = 2**63 - 1
#: Names of the axes, in storage order.
DIMS = ("example", "layer", "token", "d_model")

#: The hook point of a layer axis without hook points: the residual stream behind the block.
RESID_POST = "resid_post"

IntArray = npt.NDArray[np.int64]
#: A label, or a label with a hook point.
LayerKey: TypeAlias = int | tuple[int, str]


def is_layer_pair(layer: object) -> TypeGuard[tuple[object, str]]:
    """Return True for a pair of a label and a hook point, such as `(3, "attn_out")`."""
    return isinstance(layer, tuple) and len(layer) == 2 and isinstance(layer[1], str)  # pyright: ignore[reportUnknownArgumentType]  # any items


def layer_name(key: LayerKey) -> str:
    """An entry of the layer axis as text, such as `"5:attn_out"`."""
    return str(key) if isinstance(key, int) else f"{key[0]}:{key[1]}"


def transformer_lens_name(key: LayerKey) -> str:
    """TransformerLens's name of the place where an entry of the layer axis was taken, such as `"blocks.5.attn.hook_z"`."""
    label, hook_point = (key, RESID_POST) if isinstance(key, int) else key
    module, dot, point = hook_point.rpartition(".")
    return f"blocks.{label}.{module}{dot}hook_{point}"


def shard_name(shard_idx: int) -> str:
    """The file name of a shard, such as `"acts000007.bin"`."""
    return f"acts{shard_idx:06d}.bin"


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `start` (inclusive) to `end` (exclusive) of the file `path`, relative to the store."""

    path: str
    start: int
    end: int


@dataclass(frozen=True)
class Layout:
    """The logical (example, layer, token, d_model) tensor and how it is cut into shards.

    Hashable, comparable, no IO. `layers` holds *labels*; the position of a label in it is the index on the layer axis. With
    `hook_points` an entry of that axis is a pair (layer, hook point), and a label may occur several times.

    Args:
        n_examples: Length of the example axis.
        layers: The recorded layers' labels, distinct, in the order of the layer axis.
        content_tokens_per_example: Tokens that stand for content (patches, words); excludes CLS.
        cls_token: Whether token 0 is a CLS token.
        d_model: Length of one vector.
        examples_per_shard: Capacity of a shard, in examples. Never the last shard's own count.
        dtype: What one number is: "float32", "bfloat16" or "float16".
        hook_points: Where in its layer each entry of the layer axis was taken; None where all are `RESID_POST`.

    Attributes:
        layer_keys: What names each entry of the layer axis: its label, or with `hook_points` the pair (label, hook point).
        itemsize: Bytes of one number.
        n_layers: Number of recorded layers.
        n_special_tokens: Tokens before the content: 1 with a CLS token, else 0.
        tokens_per_example: All tokens of an example, special ones included (T of section 4).
        shape: Shape of the logical tensor, in the order of `DIMS`.
        n_shards: Shards that hold at least one example.
        vectors_per_example: Vectors of one example, all layers and tokens.
        vector_nbytes: Bytes of one vector.
        example_nbytes: Bytes of one example.
        shard_nbytes: Bytes of a full shard.
        nbytes: Bytes of the logical tensor, padding excluded.

    Raises:
        ArgumentError: a number is out of range, or the tensor's bytes do not fit into 63 bits.

    >>> layout = Layout.from_budget(n_examples=7, layers=(2, 5, 11), content_tokens_per_example=4,
    ...                             cls_token=True, d_model=8, max_tokens_per_shard=50)
    >>> layout.shape, layout.examples_per_shard, layout.n_shards
    ((7, 3, 5, 8), 3, 3)
    >>> layout.locate(example=4, layer=5, token=0)
    ByteRange(path='acts000001.bin', start=640, end=672)
    """

    n_examples: int
    layers: tuple[int, ...]
    content_tokens_per_example: int
    cls_token: bool
    d_model: int
    examples_per_shard: int
    dtype: str = "float32"
    hook_points: tuple[str, ...] | None = None

    layer_keys: tuple[LayerKey, ...] = field(init=False, repr=False, compare=False)
    itemsize: int = field(init=False, repr=False, compare=False)
    n_layers: int = field(init=False, repr=False, compare=False)
    n_special_tokens: int = field(init=False, repr=False, compare=False)
    tokens_per_example: int = field(init=False, repr=False, compare=False)
    shape: tuple[int, int, int, int] = field(init=False, repr=False, compare=False)
    n_shards: int = field(init=False, repr=False, compare=False)
    vectors_per_example: int = field(init=False, repr=False, compare=False)
    vector_nbytes: int = field(init=False, repr=False, compare=False)
    example_nbytes: int = field(init=False, repr=False, compare=False)
    shard_nbytes: int = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("n_examples", "content_tokens_per_example", "d_model", "examples_per_shard"):
            self.__dict__[name] = check_count(getattr(self, name), name=name)  # frozen: fields cannot be assigned
        check_choice(self.dtype, tuple(ITEMSIZES), name="dtype")
        try:
            hooks = (RESID_POST,) * len(self.layers) if self.hook_points is None else self.hook_points
            keys = tuple(zip(self.layers, hooks, strict=True))
            n_different = 0 if isinstance(self.layers, str) else len(set(keys))
        except (TypeError, ValueError):  # a list among the labels, or another number of hook points
            keys, n_different = (), 0
        if not keys or n_different != len(keys):
            raise ArgumentError(
                f"layers is {brief(self.layers)} and hook_points {brief(self.hook_points)}; there must be at least one label, a hook "
                "point for each, and no two equal pairs",
                where="hook_points" if self.hook_points is not None and not keys else "layers",
            )
        itemsize = ITEMSIZES[self.dtype]
        n_layers, n_special_tokens = len(keys), 1 if self.cls_token else 0
        tokens_per_example = self.content_tokens_per_example + n_special_tokens
        vectors_per_example, vector_nbytes = n_layers * tokens_per_example, self.d_model * itemsize
        example_nbytes = vectors_per_example * vector_nbytes
        self.__dict__.update(
            layer_keys=self.layers if self.hook_points is None else keys,
            itemsize=itemsize,
            n_layers=n_layers,
            n_special_tokens=n_special_tokens,
            tokens_per_example=tokens_per_example,
            shape=(self.n_examples, n_layers, tokens_per_example, self.d_model),
            n_shards=-(-self.n_examples // self.examples_per_shard),
            vectors_per_example=vectors_per_example,
            vector_nbytes=vector_nbytes,
            example_nbytes=example_nbytes,
            shard_nbytes=self.examples_per_shard * example_nbytes,
            nbytes=self.n_examples * example_nbytes,
        )
        # The padded tensor: every offset into every shard, and every global row, then fits into int64.
        if self.n_shards * self.shard_nbytes > MAX_INT64:
            raise ArgumentError(
                f"shape {self.shape} in shards of {self.examples_per_shard} examples is {self.n_shards * self.shard_nbytes} "
                "bytes; it must be below 2^63",
                where="layout",
            )

    @classmethod
    def from_budget(
        cls, *, n_examples: int, layers: Sequence[int], content_tokens_per_example: int, cls_token: bool, d_model: int,
        max_tokens_per_shard: int, dtype: str = "float32", hook_points: Sequence[str] | None = None,
    ) -> Layout:  # fmt: skip
        """The layout that a budget of vectors per shard implies (section 3: floor division).

        Raises:
            ArgumentError: not even one example fits into the budget.
        """
        per_example = (content_tokens_per_example + (1 if cls_token else 0)) * len(layers)
        capacity = max_tokens_per_shard // per_example if per_example > 0 else 1
        if capacity < 1:
            raise ArgumentError(
                f"max_tokens_per_shard is {max_tokens_per_shard}, but one example has {per_example} vectors "
                "(tokens x layers); a shard must hold at least one example",
                where="max_tokens_per_shard",
                remedy=f"Use at least {per_example}.",
            )
        hooks = None if hook_points is None else tuple(hook_points)
        return cls(n_examples, tuple(layers), content_tokens_per_example, cls_token, d_model, capacity, dtype, hooks)

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def examples_in(self, shard_idx: int) -> int:
        """Number of examples in a shard: the capacity, but for the last one; 0 beyond it."""
        return max(0, min(self.examples_per_shard, self.n_examples - shard_idx * self.examples_per_shard))

    def used_nbytes(self, shard_idx: int) -> int:
        """Bytes of a shard that hold vectors; the rest of a padded file is zeros."""
        return self.examples_in(shard_idx) * self.example_nbytes

    def example_range(self, shard_idx: int) -> tuple[int, int]:
        """Half-open range of the examples in a shard."""
        start = shard_idx * self.examples_per_shard
        return start, start + self.examples_in(shard_idx)

    # -- coordinates ---------------------------------------------------------------------------------------------------

    def layer_index(self, layer: object) -> int:
        """Position of a layer label, or of a pair (label, hook point), on the layer axis (section 4): literal match only.

        Raises:
            LayerNotFoundError: it is not among the recorded ones, or a label stands for several hook points.
        """
        label, hook_point = layer if is_layer_pair(layer) else (layer, None)
        try:
            wanted = None if isinstance(label, BOOLEANS) else operator.index(cast("SupportsIndex", label))
        except TypeError:
            wanted = None
        hooks = self.hook_points or (RESID_POST,) * self.n_layers
        found = [
            position
            for position, (known, hook) in enumerate(zip(self.layers, hooks, strict=True))
            if known == wanted and hook_point in {None, hook}
        ]
        if len(found) == 1:
            return found[0]
        message = f"was recorded at {len(found)} hook points" if found else "was not recorded"
        raise LayerNotFoundError(
            f"layer {brief(layer)} {message}; the store holds the layers {list(self.layer_keys)}",
            where="layer",
            remedy="Name one of these as (label, hook point)."
            if found
            else "Labels match literally; -2 is a label of its own.",
        )

    def locate(self, example: int, layer: int, token: int) -> ByteRange:
        """The bytes of one vector (section 4), from a logical coordinate.

        Args:
            example: 0 <= example < n_examples.
            layer: A label out of `layers`.
            token: 0 <= token < tokens_per_example; 0 is CLS where there is one.

        Raises:
            SelectionError, LayerNotFoundError: the coordinate is outside the tensor.
        """
        check_position(example, self.n_examples, "example")
        check_position(token, self.tokens_per_example, "token")
        shard_idx, start = self.locate_many(example, self.layer_index(layer), token)
        return ByteRange(shard_name(int(shard_idx)), int(start), int(start) + self.vector_nbytes)

    def locate_many(
        self, example: npt.ArrayLike, layer_idx: npt.ArrayLike, token: npt.ArrayLike
    ) -> tuple[IntArray, IntArray]:
        """Shard number and first byte of many vectors, broadcast together; layers by *position*, all within bounds.

        >>> layout = Layout(7, (2, 5, 11), 4, True, 8, 3)
        >>> layout.locate_many([4, 6], [1, 0], [0, 2])
        (array([1, 2]), array([640,  64]))
        """
        ex = np.asarray(example, dtype=np.int64)
        shard_idx, in_shard = np.divmod(ex, np.int64(self.examples_per_shard))
        vectors = (in_shard * self.n_layers + np.asarray(layer_idx, dtype=np.int64)) * self.tokens_per_example
        vectors = vectors + np.asarray(token, dtype=np.int64)
        shard_idx, offset = np.broadcast_arrays(shard_idx, vectors * self.vector_nbytes)
        return shard_idx, offset


def check_position(value: object, n: int, name: str) -> int:
    """A position on an axis of length n, from 0; `SelectionError` if it is not one."""
    try:
        return check_count(value, name=name, least=0, most=n - 1)
    except ArgumentError as error:
        raise SelectionError(error.message, where=name) from None
