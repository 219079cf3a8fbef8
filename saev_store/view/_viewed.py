"""A store as the page looks at it: a bounded sample of its vectors, held in memory, and results computed from that."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import numpy.typing as npt

from saev_store.core.arguments import is_mapping
from saev_store.core.layout import layer_name
from saev_store.errors import CorruptShardError, LayerNotFoundError, SaevStoreError, SelectionError, brief
from saev_store.store.token_arrays import MASK
from saev_store.view._arithmetic import (
    Components,
    Floats,
    Ints,
    Singles,
    centred_gram,
    norms_of,
    principal_components,
    unit_vectors,
)

if TYPE_CHECKING:
    from saev_store.sources import Source
    from saev_store.store.store import ShardStore

T = TypeVar("T")


@dataclass(frozen=True)
class Budget:
    """Upper bounds of what the page reads for one view.

    Attributes:
        examples: Examples of the sample of a layer; each is about one request.
        whole_examples: Examples of which all layers are read, to compare layers.
        nbytes: Bytes of vectors in memory for the sample of a layer, and for those whole examples.
        array_nbytes: Bytes of a token array that is read.
    """

    examples: int
    whole_examples: int
    nbytes: int
    array_nbytes: int


LOCAL = Budget(examples=256, whole_examples=32, nbytes=32 << 20, array_nbytes=1 << 30)
REMOTE = Budget(examples=16, whole_examples=8, nbytes=16 << 20, array_nbytes=64 << 20)
#: Vectors that principal components and similarities of layers are computed from.
_MOST_FITTED, _MOST_COMPARED = 1024, 512
#: Layers whose samples are held at the same time.
_LAYERS_HELD = 4


@dataclass(frozen=True, eq=False)
class ShownSample:
    """Vectors of one layer of some examples.

    Attributes:
        acts: The vectors, float32 (n, d_model).
        example: The example of each, int64 (n,).
        token: Its token, in storage order, int64 (n,).
    """

    acts: Singles
    example: Ints
    token: Ints

    @cached_property
    def norms(self) -> Floats:
        """Their L2 norms; NaN where a number is not finite."""
        return norms_of(self.acts)

    @cached_property
    def units(self) -> Singles:
        """The vectors divided by their norms."""
        return unit_vectors(self.acts, self.norms)

    @cached_property
    def components(self) -> Components:
        """Their principal components, of evenly spread finite vectors where they are many."""
        finite = np.flatnonzero(np.isfinite(self.norms))
        return principal_components(self.acts[evenly(finite, _MOST_FITTED)])


class Viewed:
    """A store, and what its page holds in memory. Several threads may use it; one at a time computes.

    Args:
        store: An opened store; damaged ones too. It must stay open.
        source: The data set that it was recorded from; default: the one that its metadata name, if that is on this machine.
        tokenizer: Gives the text of a token id, for stores of texts.
    """

    def __init__(
        self,
        store: ShardStore,
        *,
        source: Source[object] | None = None,
        tokenizer: Callable[[int], str] | None = None,
    ) -> None:
        self.is_local = store.transport.is_local
        self.store = store.unmapped()  # a file that is cut while it is read must not end the process
        self.layout = store.layout
        self.budget = LOCAL if self.is_local else REMOTE
        self.decode = tokenizer
        self.layer_names = [layer_name(key) for key in self.layout.layer_keys]
        self.is_text = store.metadata.text is not None
        #: Names of the tokens before the content.
        self.special = (["BOS"] if self.is_text else ["CLS"]) * self.layout.n_special_tokens
        self._source, self._source_error = source, ""
        self._lock = threading.RLock()
        self._samples: OrderedDict[int, ShownSample] = OrderedDict()
        self._kept: dict[str, object] = {}

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """The result of `compute`, which is called once."""
        with self._lock:
            if name not in self._kept:
                self._kept[name] = compute()
            return cast("T", self._kept[name])

    # -- arguments -----------------------------------------------------------------------------------------------------

    def layer_at(self, name: str | None) -> int:
        """The position of a layer by its name, as in `5` or `5:attn_out`; the last one if none is given.

        Raises:
            LayerNotFoundError: it was not recorded.
        """
        if name is None:
            return len(self.layer_names) - 1
        if name not in self.layer_names:
            raise LayerNotFoundError(
                f"layer {brief(name)} was not recorded; there are {', '.join(self.layer_names)}", where="layer"
            )
        return self.layer_names.index(name)

    def check(self, *, example: int, token: int = 0) -> None:
        """Raise `SelectionError` if there is no such example or token."""
        for name, position, n in (
            ("example", example, self.layout.n_examples),
            ("token", token, self.layout.tokens_per_example),
        ):
            if not 0 <= position < n:
                raise SelectionError(f"{name} {brief(position)} does not exist; there are 0 to {n - 1}", where=name)

    # -- the sample ----------------------------------------------------------------------------------------------------

    def _most(self, examples: int, vectors_each: int) -> int:
        return max(1, min(examples, self.budget.nbytes // (vectors_each * self.layout.d_model * 4)))

    def _readable(self) -> Ints:
        """Examples that are not known to be lost; evenly spread ones where there are very many."""
        layout = self.layout
        some = evenly(layout.n_examples, 65_536)
        shard, within = np.divmod(some, layout.examples_per_shard)
        limits = np.full(layout.n_shards, layout.examples_per_shard)
        for shard_idx, n_left in self.store.readable_examples.items():
            limits[shard_idx] = n_left
        return some[within < limits[shard]]

    def sample(self, layer_idx: int) -> ShownSample:
        """The sample of a layer without tokens that the mask leaves out; read when it is first asked for.

        Raises:
            CorruptShardError: nothing of the sample can be read.
        """
        with self._lock:
            found = self._samples.get(layer_idx)
            if found is None:
                # All tokens, unless one example is larger than the budget.
                n_tokens = min(self.layout.tokens_per_example, self._most(1 << 62, 1))
                n = self._most(self.budget.examples, n_tokens)
                examples, acts = self._read(evenly(self._readable(), n), slice(layer_idx, layer_idx + 1), n_tokens)
                kept = self.kept(examples)[:, :n_tokens]
                row, token = np.nonzero(kept)
                found = ShownSample(acts[:, 0][kept], examples[row], token)
                self._samples[layer_idx] = found
                while len(self._samples) > _LAYERS_HELD:
                    self._samples.popitem(last=False)
            self._samples.move_to_end(layer_idx)
            return found

    def whole(self) -> tuple[Ints, Singles] | None:
        """Some examples and all their vectors, (example, layer, token, d_model); None where one exceeds the budget."""
        n_vectors = self.layout.vectors_per_example
        if n_vectors * self.layout.d_model * 4 > self.budget.nbytes:
            return None
        n = self._most(self.budget.whole_examples, n_vectors)
        return self.once("whole", lambda: self.read_whole(evenly(self._readable(), n)))

    def read_whole(self, examples: Ints) -> tuple[Ints, Singles]:
        """The given examples without lost ones, and all their vectors."""
        return self._read(examples, slice(None), self.layout.tokens_per_example)

    def _read(self, examples: Ints, layers: slice, n_tokens: int) -> tuple[Ints, Singles]:
        """Examples and their vectors; without those that are found to be lost."""
        tokens = slice(0, n_tokens)
        try:
            if len(examples):
                return examples, self.store.read((examples, layers, tokens))
        except CorruptShardError:
            pass  # example by example, to find those that are left
        parts: list[Singles] = []
        kept: list[int] = []
        for example in examples.tolist():
            try:
                parts.append(self.store.read((slice(example, example + 1), layers, tokens)))
                kept.append(example)
            except CorruptShardError:
                continue
        if not parts:
            raise CorruptShardError("all examples of the sample are lost", where=self.store.name)
        return np.array(kept, np.int64), np.concatenate(parts)

    def kept(self, examples: Ints) -> npt.NDArray[np.bool_]:
        """True for each token (example, token) that the mask does not leave out."""
        kept = np.ones((len(examples), self.layout.tokens_per_example), np.bool_)
        mask = self.arrays()[0].get(MASK)
        if mask is not None:
            kept[:, self.layout.n_special_tokens :] = mask[examples] != 0
        return kept

    def grams(self, acts: Singles, kept: npt.NDArray[np.bool_]) -> list[Floats]:
        """For each layer the inner products of content tokens, evenly spread where they are many.

        Args:
            acts: Vectors (example, layer, token, d_model).
            kept: The tokens that count, (example, content token).
        """
        content = acts[:, :, self.layout.n_special_tokens :].swapaxes(0, 1)
        rows = evenly(np.flatnonzero(kept), _MOST_COMPARED)
        flat = content.reshape(len(content), kept.size, -1)[:, rows]
        finite = np.isfinite(flat).all(axis=(0, 2))
        return [centred_gram(layer[finite]) for layer in flat]

    # -- beside the vectors --------------------------------------------------------------------------------------------

    @cached_property
    def described(self) -> Mapping[str, object]:
        """`metadata.data` as a mapping; empty where it is something else, such as a pickle, which is not loaded."""
        data: object = self.store.metadata.data
        if isinstance(data, str):
            try:
                data = json.loads(data)
            except (ValueError, RecursionError):
                return {}
        return data if is_mapping(data) else {}

    def arrays(self) -> tuple[dict[str, npt.NDArray[np.generic]], list[str]]:
        """The token arrays that are not too large to read, and what is wrong with the others."""
        return self.once("arrays", self._read_arrays)

    def _read_arrays(self) -> tuple[dict[str, npt.NDArray[np.generic]], list[str]]:
        found: dict[str, npt.NDArray[np.generic]] = {}
        notes: list[str] = []
        arrays = self.store.token_arrays
        try:
            names = list(arrays)
        except SaevStoreError as error:
            return {}, [f"token arrays: {error.message}"]
        for name in names:
            try:
                if arrays.declared(name).nbytes(self.layout) > self.budget.array_nbytes:
                    notes.append(f"{name} is too large to be read for this page")
                else:
                    found[name] = arrays[name]
            except SaevStoreError as error:
                notes.append(f"{name}: {error.message}")
        return found, notes

    def source(self) -> tuple[Source[object] | None, str]:
        """The data set that the store was recorded from, or None and the reason."""
        with self._lock:
            if self._source is None and not self._source_error:
                try:
                    self._source = self.store.source()
                except SaevStoreError as error:
                    self._source_error = error.message
                except Exception as error:  # a data set of another library
                    self._source_error = type(error).__name__
            return self._source, self._source_error


def evenly(of: Ints | int, most: int) -> Ints:
    """At most so many of some positions, spread evenly.

    >>> evenly(10, 4).tolist(), evenly(np.array([3, 5]), 4).tolist()
    ([0, 3, 6, 9], [3, 5])
    """
    n = of if isinstance(of, int) else len(of)
    picked = np.arange(n) if n <= most else np.round(np.linspace(0, n - 1, most)).astype(np.int64)
    return picked if isinstance(of, int) else of[picked]
