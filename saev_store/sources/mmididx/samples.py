"""Samples of one length over an MMIDIDX data set: the index arrays of Megatron's GPT data sets, and a source of samples.

All documents of an epoch, in the order of `doc_idx`, are one run of tokens. Sample k is the `seq_length + 1` tokens of it from token
`k * seq_length` on. `numpy.random.RandomState(seed)` is frozen: the same arguments always give the same arrays as Megatron. A "document"
here is an entry of `sizes`, which is a sequence of the data set, as in Megatron.
"""

from __future__ import annotations

from typing import Any, NamedTuple, SupportsIndex, cast

import numpy as np
import numpy.typing as npt

from saev_store.core.arguments import check_count, check_number
from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError, DocumentError, brief
from saev_store.sources._source import DigestScope, Source, check_index, check_positions
from saev_store.sources.mmididx.reader import IndexedDataset, TokenArray

#: Below this share of a full epoch's samples, the last epoch is shuffled on its own.
SEPARATE_BELOW = 0.80
_MAX_I32 = 2**31 - 1
_Int = npt.NDArray[np.signedinteger]


class SampleIndices(NamedTuple):
    """The three index arrays: documents of all epochs in order; where samples begin; and rows of it in the order of samples."""

    doc_idx: _Int
    sample_idx: _Int
    shuffle_idx: npt.NDArray[np.integer]


def build_indices(
    sizes: npt.NDArray[np.integer],
    documents: npt.NDArray[np.integer],
    *,
    seq_length: int,
    num_samples: int | None = None,
    seed: int = 1234,
    separate_below: float = SEPARATE_BELOW,
) -> SampleIndices:
    """The index arrays of `TokenSamples`: `sizes` are the tokens of each document of the data set, `documents` those to use, in order.

    >>> found = build_indices(np.array([20, 50, 60, 30, 100, 5]), np.arange(6), seq_length=30, num_samples=8)
    >>> found.doc_idx.tolist(), len(found.shuffle_idx)
    ([2, 1, 5, 0, 4, 3], 8)
    """
    seq_length = check_count(seq_length, name="seq_length", most=_MAX_I32)
    seed = check_count(seed, name="seed", least=0, most=2**32 - 1)
    if check_number(separate_below, name="separate_below", zero_ok=True) > 1:
        raise ArgumentError(f"separate_below is {separate_below!r}; it must be from 0 to 1", where="separate_below")
    tokens_per_epoch = int(sizes[documents].sum(dtype=np.int64))
    if tokens_per_epoch < 2:
        message = f"the {len(documents):,} documents have {tokens_per_epoch} tokens; a sample needs at least 2"
        raise ArgumentError(message, where="documents")
    wanted = 1 if num_samples is None else check_count(num_samples, name="num_samples", most=2**48)
    n_epochs = 1 if num_samples is None else -(-(wanted * seq_length + 1) // tokens_per_epoch)
    if n_epochs * len(documents) > 2**40:
        raise ArgumentError(f"{wanted:,} samples take {n_epochs:,} epochs: too many entries", where="num_samples")
    before_last = ((n_epochs - 1) * tokens_per_epoch - 1) // seq_length if n_epochs > 1 else 0
    per_epoch = (tokens_per_epoch - 1) // seq_length
    separate = n_epochs > 1 and wanted - before_last < int(separate_below * per_epoch)

    state, last = np.random.RandomState(seed), 1 if separate else 0
    epochs = [_shuffled(np.tile(documents, n), state) for n in (n_epochs - last, last) if n]
    doc_idx = np.concatenate(epochs).astype(np.int32)
    sample_idx = build_sample_idx(sizes, doc_idx, seq_length, n_epochs, tokens_per_epoch)
    n = len(sample_idx) - 1
    cut = before_last if separate else n
    shuffles = [_shuffled(np.arange(*bounds), state) for bounds in ((0, cut), (cut, n)) if bounds[0] < n]
    dtype = np.int64 if n >= 2**32 - 2 else np.uint32
    return SampleIndices(doc_idx, sample_idx, np.concatenate([np.zeros(0, np.int64), *shuffles]).astype(dtype))


def _shuffled(numbers: npt.NDArray[np.integer], state: np.random.RandomState) -> IntArray:
    # In 64 bits: NumPy swaps those natively, several times as fast as narrower ones, with the same random stream.
    wide = numbers.astype(np.int64)
    state.shuffle(wide)
    return wide


def build_sample_idx(
    sizes: npt.ArrayLike,
    doc_idx: npt.ArrayLike,
    seq_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
) -> _Int:
    """The beginnings of samples: shape (n + 1, 2), entry of `doc_idx` and offset; int32 if that suffices.

    Args:
        sizes: Tokens of each document.
        doc_idx: Documents in order, all epochs.
        seq_length: Tokens from the beginning of one sample to that of the next; a sample has one more. Tokens at the end
            that make no whole sample are left out.
        num_epochs: Epochs that `doc_idx` has.
        tokens_per_epoch: Tokens of one epoch.

    >>> sizes = [20, 50, 60, 30, 100, 5]
    >>> build_sample_idx(sizes, [0, 1, 2, 3, 4, 5], 30, 1, sum(sizes)).tolist()
    [[0, 0], [1, 10], [1, 40], [2, 20], [2, 50], [3, 20], [4, 20], [4, 50], [4, 80]]
    """
    lengths, entries = np.asarray(sizes), np.asarray(doc_idx)
    seq_length = check_count(seq_length, name="seq_length", most=_MAX_I32)
    total = check_count(num_epochs, name="num_epochs") * check_count(tokens_per_epoch, name="tokens_per_epoch")
    n = (total - 1) // seq_length
    # Where each document ends in the run of tokens; a token is in the first document that ends behind it.
    ends = np.cumsum(lengths[entries], dtype=np.int64)
    n_tokens = int(ends[-1]) if len(ends) else 0
    if not len(entries) or n * seq_length > n_tokens - 1:
        message = f"doc_idx has {n_tokens:,} tokens; {num_epochs} epochs have {total:,}"
        raise ArgumentError(message, where="doc_idx")
    small = max(len(entries), int(lengths.max(initial=0))) <= _MAX_I32
    found = np.zeros((n + 1, 2), np.int32 if small else np.int64)
    targets = np.arange(1, n + 1, dtype=np.int64) * seq_length
    entry = np.searchsorted(ends, targets + 1, side="left")
    # The first row stays at the beginning, even if that document is empty.
    found[1:, 0] = entry
    found[1:, 1] = targets - ends[entry] + lengths[entries[entry]]
    return found


class TokenSamples(Source[TokenArray]):
    """Samples of `seq_length + 1` tokens that run through shuffled documents, as Megatron's GPT data set makes them.

    `samples[i]` is the i-th in shuffled order, in the data set's dtype.

    Args:
        dataset: The tokens; its sequences are the documents.
        seq_length: A sample has one token more, with which the next one begins.
        num_samples: Smallest number of samples, over as many epochs as that takes; None makes those of one epoch.
        seed: Seed of the shuffles.
        documents: Sequences to use; all by default.
        separate_below: When the last of several epochs contributes less than this share of an epoch's samples, its documents and
            samples are shuffled apart from the others. Megatron has 0.80, other tools 0.95; 0 never separates.

    Attributes:
        indices: The index arrays.

    >>> samples = TokenSamples(IndexedDataset(TOKENS), seq_length=3, seed=1)
    >>> [sample.tolist() for sample in samples.batches(1)]
    [[[104, 105, 100, 101]], [[97, 98, 99, 104]]]
    """

    format = "mmididx"

    def __init__(
        self,
        dataset: IndexedDataset,
        seq_length: int,
        *,
        num_samples: int | None = None,
        seed: int = 1234,
        documents: range | None = None,
        separate_below: float = SEPARATE_BELOW,
    ) -> None:
        self.dataset, self.seq_length = dataset, seq_length
        chosen = range(len(dataset)) if documents is None else documents
        if type(chosen) is not range or chosen.step != 1 or chosen.start < 0 or chosen.stop > len(dataset):
            message = f"documents are {brief(documents)}; they must be a range within {len(dataset):,} sequences"
            raise ArgumentError(message, where="documents")
        options: dict[str, Any] = {"num_samples": num_samples, "seed": seed, "separate_below": separate_below}
        self._settings = {"seq_length": seq_length, **options, "documents": [chosen.start, chosen.stop]}
        self.indices = build_indices(dataset.sizes, np.asarray(chosen, np.int64), seq_length=seq_length, **options)
        self.url = dataset.url

    def __len__(self) -> int:
        return len(self.indices.shuffle_idx)

    def __getitem__(self, index: SupportsIndex) -> TokenArray:
        """A sample: shape (seq_length + 1,); `SelectionError` if there is none."""
        return self.rows([check_index(index, len(self), what="sample")])[0]

    def rows(self, indices: npt.ArrayLike | slice) -> TokenArray:
        """Several samples, fetched together: shape (n, seq_length + 1), fresh memory."""
        rows = self.indices.shuffle_idx[check_positions(indices, len(self), what="sample")].astype(np.int64)
        doc_idx, sizes = self.indices.doc_idx, self.dataset.sizes
        (first, offset), (last, end) = self.indices.sample_idx[rows].T, self.indices.sample_idx[rows + 1].T
        n = last.astype(np.int64) - first + 1  # documents that a sample touches
        ends = np.cumsum(n)
        entries: IntArray = np.repeat(first - ends + n, n) + np.arange(ends[-1] if len(ends) else 0, dtype=np.int64)
        sequences = doc_idx[entries].astype(np.int64)
        starts, stops = np.zeros(len(entries), np.int64), sizes[sequences].astype(np.int64)
        starts[ends - n], stops[ends - 1] = offset, end + 1
        found = self.dataset.read_parts(sequences, starts, stops - starts)
        return np.concatenate([np.zeros(0, self.dataset.dtype), *found]).reshape(len(rows), self.seq_length + 1)

    def describe(self, *, digest: DigestScope = "sampled") -> dict[str, object]:
        """Describe the samples for `metadata.data` of a store; `reopen` builds the same samples again."""
        return {
            **self.dataset.describe(digest=digest),
            "n_samples": len(self),
            "mapping": "example i is sample i, in shuffled order",
            "samples": {**self._settings, "random": "numpy.random.RandomState"},
        }

    def close(self) -> None:
        """Close the data set."""
        self.dataset.close()


def from_description(source: Source[object], samples: object) -> TokenSamples:
    """The samples that `TokenSamples.describe` described, over the data set opened again."""
    settings = cast("dict[str, Any]", samples)
    try:
        options = {name: settings[name] for name in ("seq_length", "num_samples", "seed", "separate_below")}
        return TokenSamples(cast("IndexedDataset", source), documents=range(*settings["documents"]), **options)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DocumentError(f"{brief(samples)} describes no samples: {error}", where="description") from None
