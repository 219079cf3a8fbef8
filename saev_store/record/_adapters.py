"""A model as recording sees it: its blocks, its hook points, its special tokens, and how it is called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from saev_store._runtime.optional import need
from saev_store.core.arguments import check_count, check_flag
from saev_store.errors import ArgumentError, brief
from saev_store.record._architectures import RESIDUAL, HookPoint

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

    Raises:
        ArgumentError: the blocks are not different modules of the model, or a size is not positive.
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
        inside, blocks = {id(module) for module in self.model.modules()}, {id(block) for block in self.blocks}
        if not blocks or len(blocks) < len(self.blocks) or not blocks <= inside:
            raise ArgumentError(
                f"blocks are {brief(self.blocks)}; they must be different modules of the model, at least one",
                where="blocks",
                remedy="Pass list(…) of the modules in the order of depth. A module that runs several times cannot be recorded.",
            )
        check_count(self.d_model, name="d_model")

    def hooked(self, depth: int, hook_point: str) -> tuple[torch.nn.Module, Literal["input", "output"]]:
        """The module of a hook point of a block, and which of its sides is recorded; `ArgumentError` if there is none."""
        block = self.blocks[depth]
        try:
            point = self.points[hook_point]
            return block.get_submodule(point.path), point.side
        except (KeyError, AttributeError):
            raise ArgumentError(
                f"{brief(hook_point)} is not a hook point of {type(block).__name__}, which has {', '.join(sorted(self.points))}",
                where="hook_points",
                remedy="Choose one of these, or make the adapter by hand, with points=….",
            ) from None

    @abstractmethod
    def forward(self, *inputs: torch.Tensor) -> None:
        """Run the model on one batch; what it returns is not used. `ArgumentError` for a batch that is not one of this model's."""

    @abstractmethod
    def content_of(self, *inputs: torch.Tensor) -> tuple[int, int]:
        """Number of special tokens at the beginning of each row of a batch, and of tokens behind them; errors as of `forward`."""

    @property
    def has_cls(self) -> bool:
        """True if the architecture itself puts a CLS token first."""
        return False

    def keeps_cls(self, wanted: bool | None) -> bool:
        """Return True if the CLS token is recorded; None: if there is one. `ArgumentError` if it is wanted, and there is none."""
        wanted = check_flag(wanted, name="cls_token", other=None)
        if wanted and not self.has_cls:
            raise ArgumentError(f"{type(self.model).__name__} has no CLS token", where="cls_token")
        return self.has_cls if wanted is None else wanted

    def _placed(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the model's device, where it gets its dtype. From pinned memory it is copied while the host continues."""
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
        for side in self.patch_px:
            check_count(side, name="patch_px")
        check_count(self.n_special, name="n_special", least=int(self.cls_first))  # it counts the CLS token, too

    @property
    def has_cls(self) -> bool:
        return self.cls_first

    def content_tokens(self, shape: tuple[int, ...]) -> int:
        """Number of patches of an image of a batch of this shape, (batch, channels, height, width)."""
        high, wide = self.patch_px
        if len(shape) != 4 or shape[1] != self.n_channels or shape[0] < 1 or shape[2] < high or shape[3] < wide:
            raise ArgumentError(
                f"the shape is {shape}; it must be (batch, {self.n_channels}, height, width) with at least one example of one "
                f"patch of {high} x {wide} pixels",
                where="pixel_values",
            )
        return (shape[2] // high) * (shape[3] // wide)

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
        vocabulary_size: Number of token ids that the embedding has; None if that is not known.
    """

    vocabulary_size: int | None = None

    def content_of(self, *inputs: torch.Tensor) -> tuple[int, int]:
        shape = tuple(inputs[0].shape)
        if len(shape) != 2 or min(shape) < 1:
            raise ArgumentError(f"the shape is {shape}; it must be (batch, tokens), one at least", where="input_ids")
        return 0, shape[1]

    def forward(self, *inputs: torch.Tensor) -> None:
        import torch

        ids, *masks = inputs
        mask = masks[0].long() if masks else torch.ones_like(ids)
        # Both are checked before they are placed: a look at numbers on a GPU would wait for it.
        if ids.dtype.is_floating_point or ids.dtype == torch.bool or ids.dtype.is_complex:
            raise ArgumentError(f"they are {ids.dtype}; token ids are integers", where="input_ids")
        least, most, size = int(ids.min()), int(ids.max()), self.vocabulary_size
        if least < 0 or (size is not None and most >= size):
            message = f"there are token ids from {least} to {most}; the model has {size or 'others'}"
            raise ArgumentError(message, where="input_ids", remedy="Use the model's own tokenizer.")
        is_token = torch.arange(ids.size(1), device=mask.device) < mask.sum(-1, keepdim=True)
        if mask.shape != ids.shape or not torch.equal(mask.bool(), is_token) or mask.max() > 1:
            raise ArgumentError(
                f"it must have the shape {tuple(ids.shape)} of the token ids, and in each row 1 for tokens, then 0 for padding",
                where="attention_mask",
                remedy='Pad on the right: tokenizer.padding_side = "right".',
            )
        self.call(self._placed(ids, torch.long), self._placed(mask.contiguous(), torch.long))

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


def parameter_of(model: torch.nn.Module) -> torch.nn.Parameter:
    """One parameter of a model, which has its device and dtype: the first one of floating point that is not packed."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype.itemsize > 1:
            return parameter
    raise ArgumentError(f"{type(model).__name__} has no parameters of floating point", where="model")


def pixel_dtype(model: torch.nn.Module) -> torch.dtype:
    """The dtype of the pixels that a model of images takes: that of its first convolution or linear layer.

    The first parameter may be an embedding in float32 while these are of half precision, as OpenCLIP has them.
    """
    import torch

    layers = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    first = next((module for module in model.modules() if isinstance(module, layers)), model)
    return parameter_of(first).dtype


def dtype_of(adapter: Adapter) -> torch.dtype:
    """The dtype in which a model begins to compute, which a store has by default."""
    return pixel_dtype(adapter.model) if isinstance(adapter, VisionAdapter) else parameter_of(adapter.model).dtype
