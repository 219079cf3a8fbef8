"""What recording knows of a model: its blocks, its hook points, its special tokens, and how it is called."""

# Public arguments are checked whatever their annotation.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from saev_store._runtime.optional import need
from saev_store.core.arguments import check_flag
from saev_store.errors import ArgumentError, LayerNotFoundError, brief
from saev_store.record._architectures import RESIDUAL, HookPoint
from saev_store.record._checks import check_blocks

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False, kw_only=True)
class Adapter(ABC):
    """A model as recording sees it. `adapt` makes one for models of `transformers`; for others make a `VisionAdapter` or `TextAdapter`.

    Attributes:
        model: The module that is called. It and everything that a call of it depends on is below it.
        blocks: The residual blocks, in the order of depth.
        d_model: Length of a vector.
        family: Name of the architecture's family, for the metadata.
        ckpt: Name of the weights, for the metadata.
        points: Hook points by name: where in a block each is.
        keywords: Whether the model is called with the keywords of `transformers`, else with one tensor.
        batch_axis: Which axis of a block's vectors counts the examples: 0 for (batch, tokens, d_model), 1 for (tokens, batch,
            d_model), as `torch.nn.TransformerEncoderLayer` has them without `batch_first=True`.
    """

    model: torch.nn.Module
    blocks: Sequence[torch.nn.Module]
    d_model: int
    family: str = ""
    ckpt: str = ""
    points: Mapping[str, HookPoint] = field(default_factory=lambda: dict(RESIDUAL))
    keywords: bool = False
    batch_axis: Literal[0, 1] = 0

    def __post_init__(self) -> None:
        need("torch", install="saev-store[record]")
        if not hasattr(self.model, "named_modules"):
            raise ArgumentError(f"{brief(self.model)} is no torch module", where="model")
        check_blocks(self.model, self.blocks)
        _check_positive(self.d_model, "d_model")
        points = cast("object", self.points)
        is_named = isinstance(points, Mapping) and all(
            isinstance(name, str) for name in cast("Mapping[object, object]", points)
        )
        if not is_named or not all(isinstance(point, HookPoint) for point in self.points.values()):
            raise ArgumentError(
                f"points is {brief(self.points)}; it must be a dict of names to HookPoint", where="points"
            )
        if self.batch_axis not in (0, 1):
            raise ArgumentError(f"batch_axis is {brief(self.batch_axis)}; it must be 0 or 1", where="batch_axis")

    def hooked(self, depth: int, hook_point: str) -> tuple[torch.nn.Module, Literal["input", "output"]]:
        """The module of a hook point of a block, and which of its sides is recorded.

        Raises:
            ArgumentError: this architecture has no such hook point.
        """
        block = self.blocks[depth]
        point = self.points.get(hook_point)
        if point is None:
            raise ArgumentError(
                f"{brief(hook_point)} is not a hook point of {type(block).__name__}, which has {', '.join(sorted(self.points))}",
                where="hook_points",
            )
        try:
            return block.get_submodule(point.path), point.side
        except AttributeError:
            raise ArgumentError(
                f"{type(block).__name__} has no module {point.path!r}, where {hook_point} should be",
                where="hook_points",
                remedy="Make the adapter by hand, with points=….",
            ) from None

    @abstractmethod
    def forward(self, *inputs: torch.Tensor) -> None:
        """Run the model on one batch; what it returns is not used.

        Raises:
            ArgumentError: the batch is not one of this model's.
        """

    @abstractmethod
    def content_of(self, *inputs: torch.Tensor) -> tuple[int, int]:
        """(special, content): how many tokens of a batch are special ones at the beginning, and how many come behind them.

        Args:
            inputs: As of `forward`.

        Raises:
            ArgumentError: the batch is not one of this model's.
        """

    @property
    def has_cls(self) -> bool:
        """Whether the architecture itself puts a CLS token first."""
        return False

    def keeps_cls(self, wanted: bool | None) -> bool:
        """Whether the CLS token is recorded; None: if there is one.

        Raises:
            ArgumentError: it is wanted, and there is none; or `wanted` is no boolean.
        """
        wanted = check_flag(wanted, name="cls_token", other=None)
        if wanted and not self.has_cls:
            raise ArgumentError(
                f"{type(self.model).__name__} has no CLS token", where="cls_token", remedy="Use False or None."
            )
        return self.has_cls if wanted is None else wanted

    def _placed(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the model's device, where it gets its dtype. From pinned memory it is copied while the host goes on."""
        device = parameter_of(self.model).device
        return tensor.to(device, non_blocking=tensor.is_pinned()).to(dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class VisionAdapter(Adapter):
    """A model of images, which is called with pixels (batch, channels, height, width).

    Attributes:
        patch_px: Height and width of a patch in pixels.
        n_channels: Channels of an image.
        n_special: Tokens before the patches: CLS, registers and distillation token.
        cls_first: Whether the first of them is CLS; the others are never recorded.
        patchify: Whether the model takes patches instead of pixels (SigLIP 2).
    """

    patch_px: tuple[int, int]
    n_channels: int = 3
    n_special: int = 0
    cls_first: bool = False
    patchify: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        pair = self.patch_px
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ArgumentError(f"patch_px is {brief(pair)}; it must be (height, width)", where="patch_px")
        for side in pair:
            _check_positive(side, "patch_px")
        _check_positive(self.n_channels, "n_channels")
        check_flag(self.cls_first, name="cls_first")
        if not isinstance(self.n_special, int) or self.n_special < int(self.cls_first):
            rule = "it counts the CLS token, too" if self.cls_first else "it must be a count"
            raise ArgumentError(f"n_special is {brief(self.n_special)}; {rule}", where="n_special")

    @property
    def has_cls(self) -> bool:
        return self.cls_first

    def content_tokens(self, shape: tuple[int, ...]) -> int:
        """How many patches an image has in a batch of this shape.

        Raises:
            ArgumentError: not (batch, channels, height, width), or smaller than one patch.
        """
        height_px, width_px = self.patch_px
        if len(shape) != 4 or shape[0] < 1 or shape[1] != self.n_channels:
            raise ArgumentError(
                f"the shape is {shape}; it must be (batch, {self.n_channels}, height, width) with at least one example",
                where="pixel_values",
            )
        count = (shape[2] // height_px) * (shape[3] // width_px)
        if count < 1:
            raise ArgumentError(
                f"the shape is {shape}; an image must hold at least one patch of {height_px} x {width_px} pixels",
                where="pixel_values",
            )
        return count

    def content_of(self, *inputs: torch.Tensor) -> tuple[int, int]:
        return self.n_special, self.content_tokens(tuple(inputs[0].shape))

    def forward(self, *inputs: torch.Tensor) -> None:
        pixels = self._placed(inputs[0], pixel_dtype(self.model))
        if not self.keywords:
            self.model(pixels)
        elif self.patchify:
            n, channels, height, width = pixels.shape
            (high, wide), rows, columns = self.patch_px, height // self.patch_px[0], width // self.patch_px[1]
            cut = pixels[:, :, : rows * high, : columns * wide].reshape(n, channels, rows, high, columns, wide)
            patches = cut.permute(0, 2, 4, 3, 5, 1).reshape(n, rows * columns, -1)
            shapes = pixels.new_tensor([[rows, columns]] * n).long()
            self.model(
                pixel_values=patches, pixel_attention_mask=shapes.new_ones(patches.shape[:2]), spatial_shapes=shapes
            )
        else:
            self.model(pixel_values=pixels)


@dataclass(frozen=True, eq=False, kw_only=True)
class TextAdapter(Adapter):
    """A model of tokens, which is called with token ids (batch, tokens) and a mask that is false for padding.

    Models that are not called with keywords get the token ids only, so they must be causal: padding is on the right.

    Attributes:
        vocabulary_size: How many token ids the embedding has; None where that is not known.
        max_tokens: The longest row that the model takes, None where there is no limit.
    """

    vocabulary_size: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("vocabulary_size", "max_tokens"):
            if getattr(self, name) is not None:
                _check_positive(getattr(self, name), name)

    def content_of(self, *inputs: torch.Tensor) -> tuple[int, int]:
        shape = tuple(inputs[0].shape)
        if len(shape) != 2 or min(shape) < 1:
            raise ArgumentError(
                f"the shape is {shape}; it must be (batch, tokens), at least one of each", where="input_ids"
            )
        return 0, shape[1]

    def forward(self, *inputs: torch.Tensor) -> None:
        import torch

        ids = inputs[0]
        if ids.dtype.is_floating_point or ids.dtype == torch.bool or ids.dtype.is_complex:
            raise ArgumentError(f"they are {ids.dtype}; token ids are integers", where="input_ids")
        # Before they are placed: a look at numbers on a GPU would wait for it.
        self.check_ids(int(ids.min()), int(ids.max()), where="input_ids")
        ids = self._placed(ids, torch.long)
        mask = torch.ones_like(ids) if len(inputs) < 2 else self._placed(inputs[1], torch.long)
        if mask.shape != ids.shape:
            raise ArgumentError(
                f"its shape is {tuple(mask.shape)}; that of the token ids is {tuple(ids.shape)}", where="attention_mask"
            )
        _check_padding(mask)
        self.call(ids, mask)

    def call(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Call the model. A subclass for a model with other arguments overrides this.

        Args:
            ids: Token ids (batch, tokens), int64, on the model's device.
            mask: Of the same shape and type: 1 for tokens, 0 for padding, which is on the right.
        """
        if self.keywords:
            self.model(input_ids=ids, attention_mask=mask, use_cache=False)
        else:
            self.model(ids)

    def check_ids(self, least: int, most: int, *, where: str) -> None:
        """Refuse token ids that have no embedding.

        Raises:
            ArgumentError: there is one, and it is named.
        """
        size = self.vocabulary_size
        if least < 0 or (size is not None and most >= size):
            rule = "they are not negative" if size is None else f"the model's embedding has those from 0 to {size - 1}"
            raise ArgumentError(
                f"there is a token id {least if least < 0 else most}; {rule}",
                where=where,
                remedy="Use the model's own tokenizer.",
            )


def _check_positive(value: object, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"{name} is {brief(value)}; it must be a positive integer", where=name)


def _check_padding(mask: torch.Tensor) -> None:
    """Refuse a mask that has padding before a token, or other numbers than 0 and 1."""
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ArgumentError("it has other numbers than 0, for padding, and 1", where="attention_mask")
    to_the_left = (mask[:, 1:] > mask[:, :-1]).any(dim=1)
    if bool(to_the_left.any()):
        row = int(to_the_left.nonzero()[0])
        raise ArgumentError(
            f"row {row} has padding before a token; a token's position would then depend on how long the other rows are",
            where="attention_mask",
            remedy='Pad on the right: tokenizer.padding_side = "right".',
        )


def place(model: torch.nn.Module, device: str | None) -> None:
    """Move a model to a device; None leaves it where it is.

    Raises:
        ArgumentError: there is no such device here.
    """
    if device is None:
        return
    import torch

    try:
        if torch.empty(0, device=device).is_meta:
            raise ArgumentError("the device 'meta' holds no numbers: the weights would be lost", where="device")
    except (RuntimeError, AssertionError, TypeError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArgumentError(
            f"{device!r} cannot be used: {why}", where="device", remedy="Omit it to use the CPU."
        ) from error
    model.to(device)


def parameter_of(model: torch.nn.Module) -> torch.nn.Parameter:
    """One parameter of a model, which tells its device and dtype: the first one of floating point.

    Raises:
        ArgumentError: it has none.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():  # packed weights are integers
            return parameter
    raise ArgumentError(f"{type(model).__name__} has no parameters of floating point", where="model")


def pixel_dtype(model: torch.nn.Module) -> torch.dtype:
    """The dtype of the pixels that a model of images takes: that of its first convolution or linear layer.

    The first parameter may be an embedding in float32 where these are of half precision, as OpenCLIP has them. Packed weights tell
    nothing.

    Raises:
        ArgumentError: the model has no parameters of floating point.
    """
    import torch

    layers = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    for module in model.modules():
        if isinstance(module, layers):
            for parameter in module.parameters():
                if parameter.is_floating_point() and parameter.dtype.itemsize > 1:
                    return parameter.dtype
    return parameter_of(model).dtype


def dtype_of(adapter: Adapter) -> torch.dtype:
    """The dtype in which a model begins to compute, which a store has by default.

    Raises:
        ArgumentError: the model has no parameters of floating point.
    """
    return pixel_dtype(adapter.model) if isinstance(adapter, VisionAdapter) else parameter_of(adapter.model).dtype


def resolve_layers(layers: Sequence[int], n_blocks: int) -> tuple[int, ...]:
    """The index of the block of each label.

    >>> resolve_layers((-1, 3, -11), 12)
    (11, 3, 1)

    Raises:
        LayerNotFoundError: a label is not an integer from -n_blocks to n_blocks - 1.
        ArgumentError: `layers` is empty, or two labels name one block.
    """
    if not layers:
        raise ArgumentError("layers is empty; it must name at least one block", where="layers")
    depths: dict[int, int] = {}
    for label in layers:
        if not isinstance(label, (int, np.integer)) or isinstance(label, bool) or not -n_blocks <= label < n_blocks:
            raise LayerNotFoundError(
                f"layer {label!r} is not a block of this model, which has {n_blocks}",
                where="layers",
                remedy=f"Use integers from 0 to {n_blocks - 1}, or from -{n_blocks} to -1, counted from the end.",
            )
        depth = int(label) % n_blocks
        if depth in depths:
            raise ArgumentError(f"the labels {depths[depth]} and {label} are the same block", where="layers")
        depths[depth] = label
    return tuple(depths)
