"""The geometry of a store: sizing maths (section 3 of the protocol) and coordinate maths (section 4).

Pure integers: nothing here can open a file. Scalars are Python integers, so nothing overflows; the vectorised twins use
int64 and are exact because a layout refuses sizes whose byte offsets would not fit into 63 bits.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import SupportsIndex, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from saev_store.core.arguments import BOOLEANS
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


def is_layer_pair(layer: object) -> bool:
    """Return True for a pair of a label and a hook point, such as `(3, "attn_out")`."""
    if not isinstance(layer, tuple):
        return False
    pair = cast("tuple[object, ...]", layer)
    return len(pair) == 2 and isinstance(pair[1], str)


def layer_name(key: LayerKey) -> str:
    """An entry of the layer axis as text.

    >>> layer_name(5), layer_name((5, "attn_out"))
    ('5', '5:attn_out')
    """
    return str(key) if isinstance(key, int) else f"{key[0]}:{key[1]}"


def transformer_lens_name(key: LayerKey) -> str:
    """TransformerLens's name of the place where an entry of the layer axis was taken.

    >>> transformer_lens_name(5), transformer_lens_name((5, "attn.z"))
    ('blocks.5.hook_resid_post', 'blocks.5.attn.hook_z')
    """
    label, hook_point = (key, RESID_POST) if isinstance(key, int) else key
    module, dot, point = hook_point.rpartition(".")
    return f"blocks.{label}.{module}{dot}hook_{point}"


def shard_name(shard_idx: int) -> str:
    """The file name of a shard.

    >>> shard_name(7)
    'acts000007.bin'
    """
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
        tokens_per_example: All tokens of an example, special ones included (T of section 4.1).
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
            value: object = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_INT64:
                raise ArgumentError(f"{name} is {brief(value)}; it must be an integer from 1 to 2^63 - 1", where=name)
        if not isinstance(self.dtype, str) or self.dtype not in ITEMSIZES:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            raise ArgumentError(
                f"dtype is {brief(self.dtype)}; it must be one of {', '.join(ITEMSIZES)}", where="dtype"
            )
        for name in ("layers", "hook_points"):
            value = getattr(self, name)
            if not isinstance(value, (tuple, list)) and (name == "layers" or value is not None):
                raise ArgumentError(f"{name} is {brief(value)}; it must be a tuple", where=name)
        if self.hook_points is not None and len(self.hook_points) != len(self.layers):
            raise ArgumentError(
                f"hook_points has {len(self.hook_points)} names for {len(self.layers)} layers; it must have one for each",
                where="hook_points",
            )
        layer_keys: tuple[LayerKey, ...] = (
            self.layers if self.hook_points is None else tuple(zip(self.layers, self.hook_points, strict=True))
        )
        try:
            n_different = len(set(layer_keys))
        except TypeError:  # a list among the labels
            n_different = 0
        if not self.layers or n_different != len(self.layers):
            what = "layers" if self.hook_points is None else "pairs of layer and hook point"
            raise ArgumentError(
                f"layers is {brief(self.layers)}; it must hold at least one label, and no two equal {what}",
                where="layers",
            )
        itemsize = ITEMSIZES[self.dtype]
        n_layers, n_special_tokens = len(self.layers), 1 if self.cls_token else 0
        tokens_per_example = self.content_tokens_per_example + n_special_tokens
        vectors_per_example, vector_nbytes = n_layers * tokens_per_example, self.d_model * itemsize
        example_nbytes = vectors_per_example * vector_nbytes
        self.__dict__.update(  # frozen: fields cannot be assigned
            layer_keys=layer_keys,
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
        cls,
        *,
        n_examples: int,
        layers: Sequence[int],
        content_tokens_per_example: int,
        cls_token: bool,
        d_model: int,
        max_tokens_per_shard: int,
        dtype: str = "float32",
        hook_points: Sequence[str] | None = None,
    ) -> Layout:
        """The layout that a budget of vectors per shard implies (section 3: floor division).

        Raises:
            ArgumentError: not even one example fits into the budget.
        """
        per_example = (content_tokens_per_example + (1 if cls_token else 0)) * len(layers)
        capacity = max_tokens_per_shard // per_example if per_example > 0 else 0
        if per_example > 0 and capacity < 1:
            raise ArgumentError(
                f"max_tokens_per_shard is {max_tokens_per_shard}, but one example has {per_example} vectors "
                "(tokens x layers); a shard must hold at least one example",
                where="max_tokens_per_shard",
                remedy=f"Use at least {per_example}.",
            )
        hooks = None if hook_points is None else tuple(hook_points)
        return cls(
            n_examples, tuple(layers), content_tokens_per_example, cls_token, d_model, max(capacity, 1), dtype, hooks
        )

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
        """Position of a layer label, or of a pair (label, hook point), on the layer axis (section 4.2): literal match only.

        Raises:
            LayerNotFoundError: it is not among the recorded ones, or a label stands for several hook points.
        """
        given: object = layer
        pair = cast("tuple[object, ...]", given) if isinstance(given, tuple) else ()
        label, hook_point = pair if len(pair) == 2 and isinstance(pair[1], str) else (layer, None)
        found: list[int] = []
        hooks = self.hook_points or (RESID_POST,) * self.n_layers
        if not isinstance(label, BOOLEANS):
            try:
                wanted = operator.index(cast("SupportsIndex", label))
            except TypeError:
                wanted = None
            found = [
                position
                for position, pair in enumerate(zip(self.layers, hooks, strict=True))
                if pair[0] == wanted and hook_point in {None, pair[1]}
            ]
        if len(found) == 1:
            return found[0]
        if found:
            raise LayerNotFoundError(
                f"layer {brief(layer)} was recorded at {len(found)} hook points: {[self.layer_keys[i] for i in found]}",
                where="layer",
                remedy=f"Name one of these pairs: {' or '.join(f'{self.layers[i]}:{hooks[i]}' for i in found)}.",
            )
        raise LayerNotFoundError(
            f"layer {brief(layer)} was not recorded; the store holds the layers {list(self.layer_keys)}",
            where="layer",
            remedy="Labels match literally (-2 is a label of its own). From Python, index the store like an array for positions.",
        )

    def locate(self, example: int, layer: int, token: int) -> ByteRange:
        """The bytes of one vector (section 4.2), from a logical coordinate.

        Args:
            example: 0 <= example < n_examples.
            layer: A label out of `layers`.
            token: 0 <= token < tokens_per_example; 0 is CLS where there is one.

        Raises:
            SelectionError, LayerNotFoundError: the coordinate is outside the tensor.
        """
        global_example_idx = _position(example, self.n_examples, "example")
        token_idx = _position(token, self.tokens_per_example, "token")
        shard_idx, example_in_shard = divmod(global_example_idx, self.examples_per_shard)
        layer_idx = self.layer_index(layer)
        offset_in_vectors = (example_in_shard * self.n_layers + layer_idx) * self.tokens_per_example + token_idx
        start = offset_in_vectors * self.vector_nbytes
        return ByteRange(shard_name(shard_idx), start, start + self.vector_nbytes)

    def locate_many(
        self, example: npt.ArrayLike, layer_idx: npt.ArrayLike, token: npt.ArrayLike
    ) -> tuple[IntArray, IntArray]:
        """Shard number and first byte of many vectors, broadcast together; layers by *position*.

        The caller has checked the bounds. Exact for every layout that can be made.

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


def _position(value: object, bound: int, name: str) -> int:
    try:
        position = -1 if type(value) in {bool, np.bool_} else operator.index(cast("SupportsIndex", value))
    except TypeError:
        position = -1
    if not 0 <= position < bound:
        raise SelectionError(f"{name} is {brief(value)}; it must be an integer from 0 to {bound - 1}", where=name)
    return position
