"""Recording a model: outputs of its blocks, labels of its tokens, shards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, cast

import numpy as np
import numpy.typing as npt
import torch

from saev_store import ShardStore
from saev_store.core.arguments import check_count
from saev_store.errors import ArgumentError, kind_of
from saev_store.integrations.saev._documents import Metadata, PixelAgg, create
from saev_store.names import LABELS_NAME, METADATA_NAME

Labels = npt.NDArray[np.uint8] | torch.Tensor


class Transformer(Protocol):
    """Description of a model: its name, the tokens to record, its residual blocks in the order of depth."""

    @property
    def name(self) -> str: ...
    def get_token_i(self, content_tokens_per_example: int) -> slice | torch.Tensor: ...
    def get_residuals(self) -> Sequence[torch.nn.Module]: ...


class RecordedTransformer(torch.nn.Module):
    """A model that gives its output and the outputs of the blocks `layers`, in that order."""

    def __init__(
        self, model: Transformer, content_tokens_per_example: int, cls_token: bool, layers: Sequence[int]
    ) -> None:
        super().__init__()
        self.model = cast("torch.nn.Module", model)
        self.content_tokens_per_example, self.cls_token, self.layers = content_tokens_per_example, cls_token, layers
        self.tokens_per_example = content_tokens_per_example + cls_token
        self.token_i = model.get_token_i(content_tokens_per_example)
        self.logger = logging.getLogger(f"recorder({model.name})")
        self._outputs: dict[int, torch.Tensor] = {}
        blocks = model.get_residuals()
        for position, layer in enumerate(layers):
            if not -len(blocks) <= layer < len(blocks):
                raise ArgumentError(f"block {layer} of a model of {len(blocks)} blocks", where="layers")
            blocks[layer].register_forward_hook(partial(self._keep, position))

    def _keep(self, position: int, _block: torch.nn.Module, _args: object, output: object) -> None:
        if not isinstance(output, torch.Tensor) or output.ndim != 3:
            raise ArgumentError(
                f"block {self.layers[position]} gives {kind_of(output)}, not (batch, tokens, d_model)", where="model"
            )
        found = output[:, self.token_i, :]
        if not self.cls_token and found.shape[1] == self.tokens_per_example + 1:
            found = found[:, 1:]
        if found.shape[1] != self.tokens_per_example:
            raise ArgumentError(
                f"block {self.layers[position]} gives {tuple(output.shape)}; {self.tokens_per_example} tokens are to be recorded",
                where="model",
            )
        # A copy: what runs after the block may write to its output.
        self._outputs[position] = found.detach().to(torch.float32, copy=True)

    def reset(self) -> None:
        """Drop what was recorded."""
        self._outputs.clear()

    @property
    def activations(self) -> torch.Tensor:
        """Vectors of the latest forward pass, float32 on the CPU: (batch, layers, tokens, d_model).

        Raises:
            ArgumentError: a block did not run.
        """
        if len(self._outputs) != len(self.layers):
            raise ArgumentError("not every block has run", where="layers", remedy="Call the model first.")
        return torch.stack([self._outputs[position] for position in range(len(self.layers))], dim=1).cpu()

    def forward(self, batch: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's output, and `activations`."""
        self.reset()
        run = cast("Callable[..., torch.Tensor]", self.model)
        return run(batch, **kwargs), self.activations


class LabelsWriter:
    """Collects the labels of a store that has none in `labels`, and writes labels.bin at once."""

    def __init__(self, shards_dir: Path, md: Metadata) -> None:
        self.md = md
        self.logger = logging.getLogger("labels-writer")
        self.labels_path = Path(shards_dir) / LABELS_NAME
        self.labels = np.zeros((md.n_examples, md.content_tokens_per_example), dtype=np.uint8)
        self._is_set = np.zeros(md.n_examples, dtype=np.bool_)

    def write_batch(self, batch_labels: Labels, start_idx: int) -> None:
        """Set the labels, uint8 (n, content tokens), of the examples from `start_idx` on.

        Raises:
            ArgumentError: they have another shape or dtype, or go beyond the last example.
        """
        labels = np.asarray(batch_labels.cpu() if isinstance(batch_labels, torch.Tensor) else batch_labels)
        start_idx = check_count(start_idx, name="start_idx", least=0)
        end = start_idx + len(labels)
        if labels.dtype != np.uint8 or labels.shape != self.labels[start_idx:end].shape:
            raise ArgumentError(
                f"labels of shape {labels.shape} and dtype {labels.dtype} for examples {start_idx} to {end}; the store has "
                f"uint8 labels of shape {self.labels.shape}",
                where="batch_labels",
            )
        self.labels[start_idx:end] = labels
        self._is_set[start_idx:end] = True

    @property
    def has_written(self) -> bool:
        """True if labels of an example were set."""
        return bool(self._is_set.any())

    def flush(self) -> None:
        """Write labels.bin, if any labels were set.

        Raises:
            StoreExistsError: the store has other labels.
            ArgumentError: some examples have no labels yet: 0 would be one.
        """
        if self.has_written and not self._is_set.all():
            raise ArgumentError(
                f"example {int(np.argmin(self._is_set))} has no labels; write those of all examples before flush()",
                where=str(self.labels_path),
            )
        if self.has_written:
            create(self.labels_path, self.labels.tobytes())


class ShardWriter:
    """Writes a store, examples in their order; leaving its `with` block after the last one publishes the store.

    `ShardStore.create` has more options; with `resume=True` it continues where this was interrupted.

    Raises:
        StoreExistsError, IncompleteStoreError: a store is there already, or an unfinished one.
    """

    def __init__(self, shards_root: Path, md: Metadata) -> None:
        self.md = md
        self.logger = logging.getLogger("shard-writer")
        self.shards_dir = Path(shards_root) / md.hash
        if self.shards_dir.is_dir() and [path.name for path in self.shards_dir.iterdir()] == [METADATA_NAME]:
            (self.shards_dir / METADATA_NAME).unlink()  # of `Metadata.dump`: a part of a store must not open
        self._writer = ShardStore.create(shards_root, md.document, progress=False)

    def write_batch(
        self,
        activations: torch.Tensor | npt.NDArray[np.float32],
        start_idx: int,
        patch_labels: Labels | None = None,
    ) -> None:
        """Add the next examples: activations (n, layers, tokens, d_model), labels (n, content tokens) for all or for none.

        Raises:
            ArgumentError: another shape, other values, or example `start_idx` is not the next one.
        """
        if start_idx != self._writer.next_example:
            raise ArgumentError(f"example {start_idx}, not {self._writer.next_example} as expected", where="start_idx")
        self._writer.append(activations, labels=patch_labels)

    def flush(self) -> None:
        """Do nothing: each shard becomes durable when it is full."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, trace)


def pixel_to_patch_labels(
    seg: object,
    n_patches: int,
    patch_size: int,
    pixel_agg: PixelAgg = PixelAgg.MAJORITY,
    bg_label: int = 0,
    max_classes: int = 256,
) -> torch.Tensor:
    """The labels of an image's patches, row by row, uint8 (n_patches,); of equally frequent ones the smallest.

    Args:
        seg: The labels of its pixels, (height, width), an image or array.
        n_patches: How many patches it has.
        patch_size: Height and width of a patch in pixels.
        pixel_agg: Which label a patch gets.
        bg_label: The background.
        max_classes: Labels are below this.

    Raises:
        ArgumentError: the image is not a grid of so many patches, or a label is not an integer from 0 to `max_classes` - 1.
    """
    pixels, high = np.asarray(seg), check_count(patch_size, name="patch_size")
    rows, columns = (side // high for side in pixels.shape) if pixels.ndim == 2 else (0, 0)
    if pixels.shape != (rows * high, columns * high) or rows * columns != n_patches:
        raise ArgumentError(
            f"pixels of shape {pixels.shape} are not {n_patches} patches of {high} x {high}", where="seg"
        )
    most = min(max_classes, 256) - 1
    with np.errstate(invalid="ignore"):  # of infinity
        is_label = (pixels % 1 == 0) & (pixels >= 0) & (pixels <= most)
    if not is_label.all():
        raise ArgumentError(
            f"labels are from {pixels.min()} to {pixels.max()}; they must be integers from 0 to {most}",
            where="seg",
        )
    patches = pixels.astype(np.uint8).reshape(rows, high, columns, high).swapaxes(1, 2).reshape(n_patches, -1)
    counts = np.stack([np.bincount(patch, minlength=256) for patch in patches])
    if PixelAgg(pixel_agg) is PixelAgg.PREFER_FG:
        counts[counts[:, bg_label] < high**2, bg_label] = 0
    return torch.as_tensor(counts.argmax(axis=1), dtype=torch.uint8)
