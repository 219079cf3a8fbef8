"""From documents to samples of one length: the three index arrays of Megatron's GPT data sets, vectorised.

All documents of an epoch, in the order of `doc_idx`, are one run of tokens. Sample k is the `seq_length + 1` tokens of it
that begin at token `k * seq_length`, so neighbours share one token: the last target of one is the first input of the next.
`sample_idx[k]` says in which entry of `doc_idx` and how far into that document the sample begins; `shuffle_idx` is the
order in which samples are returned. The random streams are those of `numpy.random.RandomState(seed)`, which is frozen:
the same arguments give the same arrays as Megatron, today and later.

A "document" here is what `sizes` has an entry for: a sequence of the data set, as in Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError
from saev_store.sources._source import check_count

#: Below this share of a full epoch's samples, the last epoch is shuffled on its own.
SEPARATE_BELOW = 0.80
_MAX_I32 = 2**31 - 1
_Int = npt.NDArray[np.signedinteger]


@dataclass(frozen=True)
class SampleIndices:
    """The three arrays.

    Attributes:
        doc_idx: Documents of all epochs in order, int32.
        sample_idx: Shape (n + 1, 2): entry of `doc_idx` and offset in tokens at which each sample begins, and where the
            last one's final token lies; int32, int64 where that is too small.
        shuffle_idx: Rows of `sample_idx` in the order in which they are returned, uint32 or int64.
    """

    doc_idx: _Int
    sample_idx: _Int
    shuffle_idx: npt.NDArray[np.integer]

    def __len__(self) -> int:
        return len(self.shuffle_idx)


def build_indices(
    sizes: npt.NDArray[np.integer],
    documents: npt.NDArray[np.integer],
    *,
    seq_length: int,
    num_samples: int | None = None,
    seed: int = 1234,
    separate_below: float = SEPARATE_BELOW,
) -> SampleIndices:
    """The index arrays of at least `num_samples` samples, over as many epochs as that takes.

    Args:
        sizes: Tokens of each document of the data set.
        documents: Numbers of the documents to use, in order.
        seq_length: A sample has one token more.
        num_samples: How many samples are wanted; None makes those of one epoch. There can be more: epochs are used whole.
        seed: Of `numpy.random.RandomState`.
        separate_below: When the last of several epochs contributes less than this share of an epoch's samples, its
            documents and samples are shuffled apart from the others, so that none is seen too rarely. Megatron has
            0.80, other tools 0.95; 0 never separates.

    Raises:
        ArgumentError: a number is out of range, or the documents have no tokens.

    >>> found = build_indices(np.array([20, 50, 60, 30, 100, 5]), np.arange(6), seq_length=30, num_samples=8)
    >>> found.doc_idx.tolist(), len(found)
    ([2, 1, 5, 0, 4, 3], 8)
    """
    seq_length = check_count(seq_length, name="seq_length", most=_MAX_I32)
    seed = check_count(seed, name="seed", least=0, most=2**32 - 1)
    if not 0 <= separate_below <= 1:
        raise ArgumentError(f"separate_below is {separate_below!r}; it must be from 0 to 1", where="separate_below")
    tokens_per_epoch = int(sizes[documents].sum(dtype=np.int64)) if len(documents) else 0
    if tokens_per_epoch < 2:
        raise ArgumentError(
            f"the {len(documents):,} documents have {tokens_per_epoch} tokens; a sample needs at least 2",
            where="documents",
        )
    n_epochs = 1
    if num_samples is not None:
        num_samples = check_count(num_samples, name="num_samples", most=2**48)
        n_epochs = max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))
    if n_epochs * len(documents) > 2**40:
        raise ArgumentError(
            f"{num_samples:,} samples take {n_epochs:,} epochs of {len(documents):,} documents, which is beyond reason",
            where="num_samples",
        )
    before_last = ((n_epochs - 1) * tokens_per_epoch - 1) // seq_length if n_epochs > 1 else 0
    per_epoch = (tokens_per_epoch - 1) // seq_length
    separate = n_epochs > 1 and cast("int", num_samples) - before_last < int(separate_below * per_epoch)

    state = np.random.RandomState(seed)
    doc_idx = build_doc_idx(documents, n_epochs, state, separate_last_epoch=separate)
    sample_idx = build_sample_idx(sizes, doc_idx, seq_length, n_epochs, tokens_per_epoch)
    n = len(sample_idx) - 1
    return SampleIndices(doc_idx, sample_idx, build_shuffle_idx(before_last if separate else n, n, state))


def build_doc_idx(
    documents: npt.NDArray[np.integer],
    num_epochs: int,
    state: np.random.RandomState,
    *,
    separate_last_epoch: bool,
) -> npt.NDArray[np.int32]:
    """The documents of all epochs, shuffled together, or the last epoch's on their own behind the others'.

    Advances `state`: one shuffle, or two.

    >>> build_doc_idx(np.arange(6), 1, np.random.RandomState(0), separate_last_epoch=False).tolist()
    [5, 2, 1, 3, 0, 4]
    """
    if not separate_last_epoch or num_epochs == 1:
        return _shuffled(np.tile(np.asarray(documents, np.int64), num_epochs), state).astype(np.int32)
    first = build_doc_idx(documents, num_epochs - 1, state, separate_last_epoch=False)
    return np.concatenate((first, build_doc_idx(documents, 1, state, separate_last_epoch=False)))


def build_sample_idx(
    sizes: npt.ArrayLike,
    doc_idx: npt.ArrayLike,
    seq_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
) -> _Int:
    """Where samples begin: shape (n + 1, 2), entry of `doc_idx` and offset; int32 where that suffices.

    Args:
        sizes: Tokens of each document.
        doc_idx: Documents in order, all epochs.
        seq_length: Tokens from the beginning of one sample to that of the next; a sample has one more. Tokens at the end
            that make no whole sample are left out.
        num_epochs: Epochs that `doc_idx` has.
        tokens_per_epoch: Tokens of one epoch.

    Raises:
        ArgumentError: a number is out of range, or `doc_idx` has fewer tokens than the epochs should have.

    >>> sizes = [20, 50, 60, 30, 100, 5]
    >>> build_sample_idx(sizes, [0, 1, 2, 3, 4, 5], 30, 1, sum(sizes)).tolist()
    [[0, 0], [1, 10], [1, 40], [2, 20], [2, 50], [3, 20], [4, 20], [4, 50], [4, 80]]
    """
    lengths, entries = np.asarray(sizes), np.asarray(doc_idx)
    seq_length = check_count(seq_length, name="seq_length", most=_MAX_I32)
    total = check_count(num_epochs, name="num_epochs") * check_count(tokens_per_epoch, name="tokens_per_epoch")
    if lengths.ndim != 1 or entries.ndim != 1 or lengths.dtype.kind not in "iu" or entries.dtype.kind not in "iu":
        raise ArgumentError("sizes and doc_idx must be one-dimensional arrays of integers", where="sizes")
    if len(entries) and not (int(entries.min()) >= 0 and int(entries.max()) < len(lengths)):
        raise ArgumentError(f"doc_idx names documents outside 0 to {len(lengths) - 1}", where="doc_idx")
    if len(lengths) and int(lengths.min()) < 0:
        raise ArgumentError("a document has fewer than 0 tokens", where="sizes")
    n = (total - 1) // seq_length
    # Where each document ends in the run of tokens; a token is in the first document that ends behind it.
    ends = np.cumsum(lengths[entries], dtype=np.int64)
    n_tokens = int(ends[-1]) if len(ends) else 0
    if not len(entries) or n * seq_length > n_tokens - 1:
        raise ArgumentError(
            f"doc_idx has tokens for {max(n_tokens - 1, 0) // seq_length:,} samples; {num_epochs} epochs of "
            f"{tokens_per_epoch:,} tokens make {n:,}",
            where="doc_idx",
        )
    small = max(len(entries), int(lengths.max(initial=0))) <= _MAX_I32
    found = np.zeros((n + 1, 2), np.int32 if small else np.int64)
    targets = np.arange(1, n + 1, dtype=np.int64) * seq_length
    entry = np.searchsorted(ends, targets + 1, side="left")
    # The first row stays at the beginning, even if that document is empty.
    found[1:, 0] = entry
    found[1:, 1] = targets - ends[entry] + lengths[entries[entry]]
    return found


def build_shuffle_idx(num_samples: int, total_size: int, state: np.random.RandomState) -> npt.NDArray[np.integer]:
    """The samples 0 to `num_samples` shuffled, then those up to `total_size` shuffled on their own. Advances `state`.

    >>> build_shuffle_idx(8, 8, np.random.RandomState(0)).tolist()
    [6, 2, 1, 7, 3, 0, 5, 4]
    """
    dtype = np.int64 if total_size >= 2**32 - 2 else np.uint32
    first = _shuffled(np.arange(num_samples, dtype=np.int64), state).astype(dtype)
    if num_samples == total_size:
        return first
    return np.concatenate((first, _shuffled(np.arange(num_samples, total_size, dtype=np.int64), state).astype(dtype)))


def _shuffled(numbers: IntArray, state: np.random.RandomState) -> IntArray:
    # In 64 bits: NumPy swaps those natively, several times as fast as narrower ones, with the same random stream.
    state.shuffle(numbers)
    return numbers
