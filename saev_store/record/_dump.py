"""`record_to_store` records a model's activations of images into a published store; `Batches` can start at any example."""

# Public arguments are checked whatever their annotation.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from saev_store.documents import new_metadata
from saev_store.errors import ArgumentError
from saev_store.record._hooks import Recorder, place
from saev_store.store.store import ShardStore

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    import numpy.typing as npt
    import torch

    from saev_store.documents import Metadata
    from saev_store.writer import ShardWriter

    PixelBatch: TypeAlias = npt.NDArray[np.float32] | torch.Tensor

#: What the documents call the model types of `transformers`; others keep their own name.
FAMILIES = {
    "clip_vision_model": "clip",
    "siglip_vision_model": "siglip",
    "dinov2_with_registers": "dinov2",
    "dinov3_vit": "dinov3",
}


class Images(Protocol):
    """A map-style dataset: a list, an array, or a torch dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, example: int, /) -> npt.ArrayLike: ...


@dataclass(frozen=True)
class Batches:
    """Batches of a random-access dataset, cut at multiples of `batch_size` regardless of the start.

    A resumed recording therefore runs the same forward passes as an uninterrupted one, and loads no image of a batch that is
    already recorded.

    Args:
        images: `images[i]` is one example's pixels, (channels, height, width).
        batch_size: Examples in a batch; the last one may have fewer.

    >>> batches = Batches(np.zeros((5, 3, 8, 8)), batch_size=2)
    >>> [(first, len(pixels)) for first, pixels in batches.starting_at(3)]
    [(2, 2), (4, 1)]
    """

    images: Images
    batch_size: int

    def __post_init__(self) -> None:
        if not isinstance(self.batch_size, int) or isinstance(self.batch_size, bool) or self.batch_size < 1:
            raise ArgumentError(f"batch_size is {self.batch_size!r}; it must be a positive integer", where="batch_size")
        if len(self.images) < 1:
            raise ArgumentError("images is empty; there must be at least one example", where="images")

    @property
    def n_examples(self) -> int:
        """Number of examples in all batches together."""
        return len(self.images)

    def __iter__(self) -> Iterator[npt.NDArray[np.float32]]:
        for _, pixels in self.starting_at(0):
            yield pixels

    def starting_at(self, example: int) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yield (first example, pixels) of the batch that contains `example` and of all later batches."""
        for first in range(example // self.batch_size * self.batch_size, self.n_examples, self.batch_size):
            last = min(first + self.batch_size, self.n_examples)
            yield first, np.stack([np.asarray(self.images[i], dtype=np.float32) for i in range(first, last)])


def record_to_store(
    model: torch.nn.Module,
    batches: Batches | Iterable[PixelBatch],
    root: str | os.PathLike[str],
    *,
    layers: Sequence[int],
    data: Mapping[str, object],
    dataset: str | None,
    max_tokens_per_shard: int,
    n_examples: int | None = None,
    cls_token: bool | None = None,
    family: str | None = None,
    ckpt: str | None = None,
    protocol: str = "2.0",
    labels: npt.NDArray[np.uint8] | None = None,
    device: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    resume: bool | Literal["auto"] = False,
    exist_ok: bool = False,
    progress: bool | None = None,
) -> ShardStore:
    """Record a model's activations of some images, publish the store and open it.

    Examples are numbered in the order of the batches. With `resume=True` an interrupted call continues after the last durable
    example. The result has the same bytes as an uninterrupted one: a batch that was written in part runs through the model as a
    whole again. `Batches` are resumed without loading recorded images; any other iterable has to start from its beginning.

    Args:
        model: See `Recorder`. Put into evaluation mode while recording.
        batches: `Batches(images, batch_size)`, or any iterable of (batch, channels, height, width) pixels.
        root: Directory or URL in which the store's folder is created.
        layers: Labels of the blocks to record, see `Recorder`; written into the metadata as they are given.
        data: Description of the data set for the metadata; any JSON object.
        dataset: Address of the original images, for the metadata; None in protocol 1.0.0, which has no such key.
        max_tokens_per_shard: Upper bound on the vectors (tokens x layers x examples) of a shard.
        n_examples: Number of examples; required unless `batches` is a `Batches`.
        cls_token: Whether to record the CLS token; None: if the model has one.
        family: Name of the architecture's family for the metadata; None: from the configuration.
        ckpt: Name of the weights for the metadata; None: from the configuration.
        protocol: Version of the documents, `"1.0.0"`, `"2.0"` or `"2.1"`.
        labels: (n_examples, content tokens) uint8 for `labels.bin`; may be a memory map.
        device: Device of the computation, such as `"cuda"`; None: that of the model.
        storage_options: Options of the file system of `root`.
        resume: True continues an unfinished store of the same metadata, `"auto"` continues one or starts anew.
        exist_ok: Open a complete store of the same metadata instead of refusing it.
        progress: Show a bar on standard error; None: when it is a terminal.

    Raises:
        ArgumentError: an argument breaks a rule, or the batches have another number of examples.
        LayerNotFoundError: a label is not a block of the model.
        StoreExistsError, ResumeError, WriterConflictError: see `ShardStore.create`.
        MissingDependencyError: torch is not installed.
    """
    if n_examples is None:
        if not isinstance(batches, Batches):
            raise ArgumentError(
                "n_examples is None; it is required unless batches is a Batches",
                where="n_examples",
                remedy="Pass the number of examples that the iterable yields: the metadata is written first.",
            )
        n_examples = batches.n_examples
    recorder = Recorder(place(model, device), layers, cls_token=cls_token)
    shape, batches = first_shape(batches)
    metadata = describe(
        recorder,
        shape,
        family=family,
        ckpt=ckpt,
        protocol=protocol,
        n_examples=n_examples,
        max_tokens_per_shard=max_tokens_per_shard,
        data=data,
        dataset=dataset,
    )
    created = ShardStore.create(
        root, metadata, storage_options=storage_options, resume=resume, exist_ok=exist_ok, progress=progress
    )
    with created as writer:
        fill(writer, recorder, batches, labels=labels)
    return ShardStore.open(writer.url, storage_options)


def describe(
    recorder: Recorder,
    shape: tuple[int, ...],
    *,
    n_examples: int,
    max_tokens_per_shard: int,
    data: Mapping[str, object],
    dataset: str | None,
    family: str | None = None,
    ckpt: str | None = None,
    protocol: str = "2.0",
) -> Metadata:
    """The metadata of a recording of batches of this shape; arguments as of `record_to_store`.

    Raises:
        ArgumentError: neither the argument nor the model's configuration names the family or the weights.
    """
    config = getattr(recorder.model, "config", None)
    if family is None:
        model_type = str(getattr(config, "model_type", ""))
        family = FAMILIES.get(model_type, model_type)
    if ckpt is None:
        ckpt = str(getattr(config, "_name_or_path", ""))
    for name, value in (("family", family), ("ckpt", ckpt)):
        if not value:
            raise ArgumentError(
                f"{name} is not given, and the model's configuration does not have it",
                where=name,
                remedy=f"Pass {name}=….",
            )
    return new_metadata(
        protocol=protocol,
        family=family,
        ckpt=ckpt,
        layers=recorder.layers,
        content_tokens_per_example=recorder.content_tokens(shape),
        cls_token=recorder.cls_token,
        d_model=recorder.d_model,
        n_examples=n_examples,
        max_tokens_per_shard=max_tokens_per_shard,
        data=data,
        dataset=dataset,
    )


@dataclass(frozen=True)
class Filled:
    """Counts and times of a recording.

    Attributes:
        n_recorded: Examples that this call recorded; the others were recorded before.
        forward_s: Seconds in forward passes.
        append_s: Seconds in `ShardWriter.append`.
    """

    n_recorded: int
    forward_s: float
    append_s: float


def fill(
    writer: ShardWriter,
    recorder: Recorder,
    batches: Batches | Iterable[PixelBatch],
    *,
    labels: npt.NDArray[np.uint8] | None = None,
) -> Filled:
    """Append the missing examples to `writer`, batch by batch.

    Raises:
        ArgumentError: the number of examples differs from the metadata, or `labels` has another shape.
    """
    layout = writer.metadata.layout
    if labels is not None and labels.shape != (layout.n_examples, layout.content_tokens_per_example):
        raise ArgumentError(
            f"labels has the shape {labels.shape}; one per patch is {(layout.n_examples, layout.content_tokens_per_example)}",
            where="labels",
        )
    if writer.complete:
        return Filled(0, 0.0, 0.0)
    start = writer.next_example
    forward_s = append_s = 0.0
    end = start
    with recorder:
        for first, pixels in numbered(batches, start):
            end = first + len(pixels)
            if end > layout.n_examples:
                raise ArgumentError(
                    f"there are at least {end} examples, but n_examples is {layout.n_examples}", where="batches"
                )
            if end <= start:
                continue
            begun_s = time.perf_counter()
            acts = recorder(pixels)
            computed_s = time.perf_counter()
            skip = max(start - first, 0)
            writer.append(acts[skip:], labels=None if labels is None else labels[first + skip : end])
            forward_s += computed_s - begun_s
            append_s += time.perf_counter() - computed_s
    if end < layout.n_examples:
        raise ArgumentError(
            f"there are only {end} examples, but n_examples is {layout.n_examples}",
            where="batches",
            remedy="The store is unfinished; call again with resume=True and all of them.",
        )
    return Filled(layout.n_examples - start, forward_s, append_s)


def first_shape(batches: Batches | Iterable[PixelBatch]) -> tuple[tuple[int, ...], Batches | Iterable[PixelBatch]]:
    """The shape of the first batch, and all batches including it.

    Raises:
        ArgumentError: there is no batch.
    """
    if isinstance(batches, Batches):
        return (1, *np.shape(batches.images[0])), batches
    iterator = iter(batches)
    for pixels in iterator:
        return tuple(np.shape(pixels)), itertools.chain([pixels], iterator)
    raise ArgumentError("batches is empty; there must be at least one", where="batches")


def numbered(batches: Batches | Iterable[PixelBatch], start: int) -> Iterator[tuple[int, PixelBatch]]:
    """(number of its first example, pixels) of each batch; `Batches` begin with the one that holds example `start`."""
    if isinstance(batches, Batches):
        yield from batches.starting_at(start)
        return
    first = 0
    for pixels in batches:
        yield first, pixels
        first += len(pixels)
