"""`Recorder`: outputs of the residual blocks of a vision transformer.

Each hook has its position on the layer axis, so `layers=(11, 3)` gives block 11 first and block 3 second. Appending outputs in
the order in which hooks run would exchange them.
"""

# Public arguments are checked whatever their annotation.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from saev_store._runtime.optional import need
from saev_store.errors import ArgumentError, LayerNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType
    from typing import Self

    import numpy.typing as npt
    import torch
    from torch.utils.hooks import RemovableHandle

    from saev_store.record._dump import PixelBatch


class Recorder:
    """Records activations of some residual blocks for batches of pixels; a context manager that adds hooks to the model.

    Inside the `with` block the model is in evaluation mode. On leaving, the mode of each module is restored and the hooks are
    removed.

    Args:
        model: A vision transformer of `transformers`: ViT, DINOv2 (with registers too), DINOv3, CLIP or SigLIP vision
            towers, DeiT, BEiT, and models that wrap one of them.
        layers: Labels of the blocks to record: 0 is the first block, -1 the last one. Their order is that of
            the layer axis.
        cls_token: Whether to keep the CLS token as token 0. None keeps it if the architecture has one. Register
            and distillation tokens are never kept.

    Raises:
        LayerNotFoundError: the model has no such block.
        ArgumentError: `layers` is empty or names a block twice, or the blocks of the model cannot be identified.
        MissingDependencyError: torch is not installed.

    Attributes:
        layers: The labels as given.
        depths: Index of the block of each label, from 0.
        n_blocks: Number of blocks of the model.
        d_model: Length of a vector.

    ```python
    with Recorder(model, layers=(-1, 3)) as recorder:
        acts = recorder(pixel_values)  # (batch, 2, tokens, d_model) float32
    ```
    """

    def __init__(self, model: torch.nn.Module, layers: Sequence[int], *, cls_token: bool | None = None) -> None:
        need("torch", install="saev-store[record]")
        self.model = model
        self._blocks = find_blocks(model)
        self.n_blocks = len(self._blocks)
        self.layers = tuple(layers)
        self.depths = resolve_layers(self.layers, self.n_blocks)
        self.d_model = _config_int(model, "hidden_size")
        self.cls_token = model_has_cls(model) if cls_token is None else cls_token
        if self.cls_token and not model_has_cls(model):
            raise ArgumentError(
                f"{type(model).__name__} has no CLS token", where="cls_token", remedy="Use False or None."
            )
        self._modes: list[tuple[torch.nn.Module, bool]] = []
        self._handles: list[RemovableHandle] = []
        self._out: torch.Tensor | None = None
        self._fired: set[int] = set()
        self._n_special = 0

    def __enter__(self) -> Self:
        if self._handles:
            raise ArgumentError("this recorder is already entered; it hooks its model once", where="Recorder")
        self._modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        self._handles = [
            self._blocks[depth].register_forward_hook(self._hook(slot)) for slot, depth in enumerate(self.depths)
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._out = None
        for module, is_training in self._modes:
            module.training = is_training

    def __call__(self, pixel_values: PixelBatch) -> npt.NDArray[np.float32]:
        """The activations of one batch, computed without gradients.

        Args:
            pixel_values: (batch, channels, height, width), NumPy or torch, normalised as the model requires. It is
                moved to the model's device and converted to its dtype.

        Returns:
            (batch, layer, token, d_model) float32 in the CPU's memory, whatever the model computes in. Token 0 is CLS
            if `cls_token`, then come the patches in row-major order. The array is the caller's.

        Raises:
            ArgumentError: the pixels have another shape, or the blocks did not run once each on them.
        """
        import torch

        if not self._handles:
            raise ArgumentError(
                "the hooks are not in place", where="Recorder", remedy="Call it inside `with Recorder(…) as recorder:`."
            )
        try:
            pixels = torch.as_tensor(pixel_values)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ArgumentError(f"this is no array of pixels: {error}", where="pixel_values") from error
        n_content = self.content_tokens(tuple(pixels.shape))
        parameter = next(self.model.parameters())
        pixels = pixels.to(device=parameter.device, dtype=parameter.dtype)
        self._n_special = n_special_tokens(self.model)
        n_tokens = n_content + int(self.cls_token)
        self._fired = set()
        self._out = torch.empty((len(pixels), len(self.layers), n_tokens, self.d_model), dtype=torch.float32)
        try:
            with torch.inference_mode():
                self.model(pixel_values=pixels)
            out = self._out
        except (TypeError, ValueError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(
                f"the model refuses a batch of shape {tuple(pixels.shape)}: {error}", where="pixel_values"
            ) from error
        finally:
            self._out = None
        if len(self._fired) != len(self.layers):
            silent = [self.layers[slot] for slot in range(len(self.layers)) if slot not in self._fired]
            raise ArgumentError(f"the blocks of the layers {silent} did not run in the forward pass", where="layers")
        return out.numpy()

    def content_tokens(self, shape: tuple[int, ...]) -> int:
        """How many patches an example has in a batch of this shape.

        Raises:
            ArgumentError: not (batch, channels, height, width), or smaller than one patch.
        """
        patch_height, patch_width = patch_size(self.model)
        n_channels = _config_int(self.model, "num_channels")
        if len(shape) != 4 or shape[0] < 1 or shape[1] != n_channels:
            raise ArgumentError(
                f"the shape is {shape}; it must be (batch, {n_channels}, height, width) with at least one example",
                where="pixel_values",
            )
        count = (shape[2] // patch_height) * (shape[3] // patch_width)
        if count < 1:
            raise ArgumentError(
                f"the shape is {shape}; an image must hold at least one patch of {patch_height} x {patch_width} pixels",
                where="pixel_values",
            )
        return count

    def _hook(self, slot: int) -> Callable[[torch.nn.Module, object, torch.Tensor | tuple[torch.Tensor, ...]], None]:
        def keep(_block: torch.nn.Module, _args: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
            out = self._out
            if out is None:  # the model runs outside of this recorder
                return
            hidden = output[0] if isinstance(output, tuple) else output
            n_cls = int(self.cls_token)
            expected = (out.shape[0], out.shape[2] - n_cls + self._n_special, self.d_model)
            if tuple(hidden.shape) != expected:
                raise ArgumentError(
                    f"block {self.depths[slot]} put out the shape {tuple(hidden.shape)}; patch size and special tokens "
                    f"of the configuration make {expected}",
                    where="model",
                )
            if slot in self._fired:
                raise ArgumentError(f"block {self.depths[slot]} ran twice in one forward pass", where="model")
            self._fired.add(slot)
            # Copied at once: nothing that the model does to its tensors later can reach what is recorded.
            out[:, slot, :n_cls].copy_(hidden[:, :n_cls])
            out[:, slot, n_cls:].copy_(hidden[:, self._n_special :])

        return keep


def place(model: torch.nn.Module, device: str | None) -> torch.nn.Module:
    """The model on a device; None leaves it where it is.

    Raises:
        ArgumentError: there is no such device here.
    """
    if device is None:
        return model
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArgumentError(
            f"{device!r} cannot be used: {why}", where="device", remedy="Omit it to use the CPU."
        ) from error
    return model.to(device)


def find_blocks(model: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """The residual blocks of the encoder, in depth order.

    They are the only list of modules whose length is `num_hidden_layers`. Its name differs between architectures and releases of
    `transformers`.

    Raises:
        ArgumentError: there is no such list, or more than one.
    """
    import torch

    depth = _config_int(model, "num_hidden_layers")
    modules = cast("Iterable[tuple[str, torch.nn.Module]]", model.named_modules())  # its stub has no types
    found = {
        name: module
        for name, module in modules
        if isinstance(module, torch.nn.ModuleList)
        and len(module) == depth
        and len({type(block) for block in module}) == 1
    }
    if len(found) != 1:
        raise ArgumentError(
            f"{type(model).__name__} has {len(found)} lists of {depth} modules ({', '.join(found) or 'none'}); exactly one "
            "must be the encoder's blocks",
            where="model",
            remedy="Pass the vision encoder itself, for example model.vision_model.",
        )
    return list(next(iter(found.values())))


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


def patch_size(model: torch.nn.Module) -> tuple[int, int]:
    """Height and width of a patch in pixels.

    Raises:
        ArgumentError: the configuration has no patch size.
    """
    value = getattr(getattr(model, "config", None), "patch_size", None)
    pair = cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else (value, value)
    sides = [side for side in pair if isinstance(side, int)]
    if len(sides) != 2 or min(sides) < 1:
        raise ArgumentError(
            f"model.config.patch_size is {value!r}; it must be one or two positive integers",
            where="model",
            remedy="Pass a vision transformer of transformers.",
        )
    return sides[0], sides[1]


def model_has_cls(model: torch.nn.Module) -> bool:
    """Whether the architecture has an embedding of a CLS token, which precedes the patches."""
    return any(name.rsplit(".", 1)[-1] in {"cls_token", "class_embedding"} for name, _ in model.named_parameters())


def n_special_tokens(model: torch.nn.Module) -> int:
    """Number of tokens before the patches: CLS, registers and distillation token."""
    registers = getattr(getattr(model, "config", None), "num_register_tokens", None) or 0
    distillation = any(name.endswith("distillation_token") for name, _ in model.named_parameters())
    return int(model_has_cls(model)) + int(registers) + int(distillation)


def _config_int(model: torch.nn.Module, name: str) -> int:
    value = getattr(getattr(model, "config", None), name, None)
    if not isinstance(value, int) or value < 1:
        raise ArgumentError(
            f"{type(model).__name__} has no positive integer config.{name} (it is {value!r})",
            where="model",
            remedy="Pass a vision transformer of transformers, or its vision tower (model.vision_model).",
        )
    return value
