"""What recording asks of a source of examples: their geometry, batches for the model, and examples of the vectors that come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from saev_store.core.dtypes import ITEMSIZES, StoredDtype
from saev_store.errors import ArgumentError, brief

if TYPE_CHECKING:
    import torch

    from saev_store.record._adapters import Adapter

#: Numbers for each content token, by the name of the token array.
TokenArrays: TypeAlias = Mapping[str, npt.NDArray[np.generic]]


def _no_arrays() -> dict[str, npt.NDArray[np.generic]]:
    return {}


@dataclass(frozen=True)
class Geometry:
    """The sizes of the examples that a source makes for a model, and what the metadata says of them.

    Attributes:
        n_examples: Number of examples.
        content_tokens: Content tokens of an example.
        cls_token: Whether token 0 of an example is a special one.
        token_arrays: Name and dtype of what is recorded for each content token.
        text: How texts were cut, for the metadata; None for other data.
        identity: What else decides which vectors come out, such as the batch size; part of the metadata.
    """

    n_examples: int
    content_tokens: int
    cls_token: bool
    token_arrays: Mapping[str, str] = field(default_factory=dict[str, str])
    text: Mapping[str, object] | None = None
    identity: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True)
class Batch:
    """What the model runs at once.

    Attributes:
        inputs: The arguments of `Recorder.__call__`: arrays or tensors.
        first: The position of its first row: which example it is, or which token of the text, as the source counts.
        token_arrays: For each token of the batch that is recorded, as the source keeps it.
    """

    inputs: tuple[object, ...]
    first: int
    token_arrays: TokenArrays = field(default_factory=_no_arrays)


@dataclass(frozen=True)
class Recorded:
    """Examples with their vectors.

    Attributes:
        first: The position of the first of them in the store.
        acts: (examples, layers, tokens, d_model).
        token_arrays: (examples, content tokens) by name.
    """

    first: int
    acts: torch.Tensor
    token_arrays: TokenArrays = field(default_factory=_no_arrays)


class ExampleSource(ABC):
    """What examples are recorded from."""

    @abstractmethod
    def geometry(self, adapter: Adapter) -> Geometry:
        """The sizes of the examples for this model.

        Raises:
            ArgumentError: the source is empty, or this model cannot run it.
        """

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """The description of the source for `metadata.data`, in plain JSON types."""

    def digests(self) -> dict[str, object]:
        """Digests of data in memory that decide what is recorded, by name; part of the identity beside `Geometry.identity`.

        All of the data are read for it, so it is asked for once in a call.
        """
        return {}

    @abstractmethod
    def batches(self, start: int, end: int) -> Iterator[Batch]:
        """The batches that the examples `start` to `end - 1` need, always cut at the same places."""

    @abstractmethod
    def assemble(self, computed: Iterable[tuple[Batch, torch.Tensor]], start: int) -> Iterator[Recorded]:
        """Examples, in order and from `start` or from an earlier one on, of batches and their vectors.

        Args:
            computed: What `batches(start, …)` gave, each with (rows, layers, tokens, d_model).
            start: As of `batches`.
        """


def check_batch_size(value: object) -> int:
    """A positive integer; `ArgumentError` for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"batch_size is {brief(value)}; it must be a positive integer", where="batch_size")
    return value


def as_stored(acts: torch.Tensor, stored: StoredDtype, *, rounds: bool) -> torch.Tensor:
    """The vectors in a dtype that a writer takes, which rounds them to that of its store.

    Without `rounds` nothing is rounded that the model computes in another dtype than its parameters have.

    Raises:
        ArgumentError: a store can hold the numbers as they are, or no store can.
    """
    name = str(acts.dtype).removeprefix("torch.")
    if rounds:
        return acts.float() if name == "float64" else acts
    if name == "float64":
        raise ArgumentError(
            "the model computes in float64, which no store holds",
            where="dtype",
            remedy='Pass dtype="float32" to round them.',
        )
    if name in ITEMSIZES and stored not in {name, "float32"}:
        raise ArgumentError(
            f"the model's parameters are {stored}, but these vectors are {name}, and would be rounded",
            where="dtype",
            remedy=f'Pass dtype="{name}" to keep them, or dtype="{stored}" to round them.',
        )
    return acts
