"""Samples of one length over an MMIDIDX data set, as a source of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, SupportsIndex, cast

import numpy as np
import numpy.typing as npt
import xxhash

from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError, DocumentError, brief
from saev_store.sources._files import ALGORITHM
from saev_store.sources._source import DigestScope, NumberedSource, Source, check_index, steps, text_card
from saev_store.sources.mmididx.reader import IndexedDataset, TokenArray
from saev_store.sources.mmididx.samples import SEPARATE_BELOW, build_indices

if TYPE_CHECKING:
    from saev_store.validation import Report


class TokenSamples(NumberedSource):
    """Samples of `seq_length + 1` tokens that run through shuffled documents, as Megatron's GPT data set makes them.

    Sample i is the i-th in shuffled order. `samples[i]` is an array in the data set's dtype, a read-only view where the
    sample lies inside one document of a mapped file, fresh memory otherwise.

    Args:
        dataset: Where the tokens are; its sequences are the documents.
        seq_length: A sample has one token more; the next one begins with it.
        num_samples: At least so many samples, over as many epochs as that takes; None makes those of one epoch.
        seed: Of the shuffles.
        documents: Sequences to use: their numbers, or a range (see `split_documents`); all by default.
        separate_below: As in `build_indices`.

    Raises:
        ArgumentError: a number is out of range, or there are no tokens.

    >>> from saev_store.sources.mmididx import IndexedDataset
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
        documents: npt.ArrayLike | range | None = None,
        separate_below: float = SEPARATE_BELOW,
    ) -> None:
        self.dataset, self.seq_length = dataset, seq_length
        self._documents = _as_documents(documents, len(dataset))
        self._settings: dict[str, object] = {
            "seq_length": seq_length,
            "num_samples": num_samples,
            "seed": seed,
            "separate_below": separate_below,
            "documents": _describe_documents(self._documents),
        }
        self.indices = build_indices(
            dataset.sizes, self._documents, seq_length=seq_length, num_samples=num_samples, seed=seed,
            separate_below=separate_below,
        )  # fmt: skip
        self.url, self.problems = dataset.url, dataset.problems

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        facts = {
            "samples": f"{len(self):,} of {self.seq_length} + 1 tokens",
            "documents": f"{len(self._documents):,} of {len(self.dataset):,}, in {self.n_epochs} epochs",
        }
        return text_card(f"token samples over {self.url}", facts, self.problems)

    @property
    def n_epochs(self) -> int:
        """How often every document is gone through."""
        return len(self.indices.doc_idx) // len(self._documents)

    # -- samples ---------------------------------------------------------------------------------------------------------

    def __getitem__(self, index: SupportsIndex) -> TokenArray:
        """A sample: shape (seq_length + 1,).

        Raises:
            SelectionError: there is no such sample.
        """
        parts = self._parts(check_index(index, len(self), what="sample"))
        if len(parts) == 1:
            return self.dataset.get(*parts[0])
        return np.concatenate(self._read(parts))

    def rows(self, indices: npt.ArrayLike | range) -> TokenArray:
        """Several samples, fetched together: shape (n, seq_length + 1), fresh memory."""
        wanted = [self._parts(check_index(index, len(self), what="sample")) for index in np.asarray(indices).tolist()]
        out = np.empty((len(wanted), self.seq_length + 1), self.dataset.dtype)
        found = iter(self._read([part for parts in wanted for part in parts]))
        for row, parts in zip(out, wanted, strict=True):
            at = 0
            for _ in parts:
                tokens = next(found)
                row[at : at + len(tokens)] = tokens
                at += len(tokens)
        return out

    def batches(self, batch_size: int, *, start: int = 0, drop_last: bool = False) -> Iterator[TokenArray]:
        """Consecutive samples in shuffled order, as fresh arrays of shape (batch_size, seq_length + 1)."""
        for first, end in steps(len(self), batch_size, start=start, drop_last=drop_last):
            yield self.rows(range(first, end))

    def locate(self, index: SupportsIndex, token: int) -> tuple[int, int]:
        """Where a token of a sample comes from: the sequence's number, and the token's position in it.

        Raises:
            SelectionError: there is no such sample, or no such token in it.
        """
        position = check_index(index, len(self), what="sample")
        token = check_index(token, self.seq_length + 1, what="token")
        parts = self._parts(position)
        ends = np.cumsum([length for _, _, length in parts])
        part = int(np.searchsorted(ends, token, side="right"))
        sequence, offset, length = parts[part]
        return sequence, offset + token - (int(ends[part]) - length)

    def _parts(self, position: int) -> list[tuple[int, int, int]]:
        """(sequence, offset, length) of the pieces that a sample is made of, empty ones left out."""
        indices = self.indices
        row = int(indices.shuffle_idx[position])
        entry, offset = indices.sample_idx[row].tolist()
        last, last_offset = indices.sample_idx[row + 1].tolist()
        if entry == last:
            return [(int(indices.doc_idx[entry]), offset, last_offset - offset + 1)]
        sequences = indices.doc_idx[entry : last + 1]
        sizes = self.dataset.sizes[sequences].tolist()
        sizes[-1] = last_offset + 1
        parts = [(sequence, 0, size) for sequence, size in zip(sequences.tolist(), sizes, strict=True)]
        parts[0] = (parts[0][0], offset, parts[0][2] - offset)
        return [part for part in parts if part[2]]

    def _read(self, parts: list[tuple[int, int, int]]) -> list[TokenArray]:
        table = np.array(parts, np.int64).reshape(-1, 3)
        return self.dataset.read_parts(table[:, 0], table[:, 1], table[:, 2])

    # -- as a source -----------------------------------------------------------------------------------------------------

    def describe(self, *, digest: DigestScope = "sampled") -> dict[str, object]:
        """What a store recorded from these samples says about them; `reopen` builds the same samples again."""
        return {
            **self.dataset.describe(digest=digest),
            "n_samples": len(self),
            "mapping": "example i is sample i, in shuffled order",
            "samples": {**self._settings, "random": "numpy.random.RandomState"},
        }

    def validate(self, *, deep: bool = False, progress: bool | None = None) -> Report:
        """What is wrong with the data set."""
        return self.dataset.validate(deep=deep, progress=progress)

    def close(self) -> None:
        """Close the data set."""
        self.dataset.close()


def from_description(source: Source[object], samples: object) -> TokenSamples:
    """The samples that `TokenSamples.describe` described, over the data set opened again.

    Raises:
        DocumentError: this is no such description.
    """
    if not isinstance(source, IndexedDataset) or not isinstance(samples, dict):
        raise DocumentError(f"{brief(samples)} describes no samples of an MMIDIDX data set", where="description")
    given = cast("dict[str, object]", samples)
    documents = given.get("documents")
    bounds = cast("list[object]", documents) if isinstance(documents, list) else []
    if len(bounds) != 2 or not all(type(bound) is int for bound in bounds):
        raise DocumentError(
            f"the samples are of documents {brief(given.get('documents'))}, which only the program that chose them knows",
            where="description",
            remedy="Make TokenSamples with documents= as then.",
        )
    try:
        return TokenSamples(
            source,
            cast("int", given.get("seq_length")),
            num_samples=cast("int | None", given.get("num_samples")),
            seed=cast("int", given.get("seed")),
            documents=range(*cast("list[int]", bounds)),
            separate_below=cast("float", given.get("separate_below")),
        )
    except (ArgumentError, TypeError) as error:
        raise DocumentError(f"{brief(given)} describes no samples: {error}", where="description") from None


def _as_documents(documents: npt.ArrayLike | range | None, n: int) -> IntArray:
    if documents is None:
        return np.arange(n, dtype=np.int64)
    found = np.asarray(documents)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ArgumentError(f"{brief(documents)} is no list of sequences: pass integers", where="documents")
    if found.size and not (int(found.min()) >= 0 and int(found.max()) < n):
        raise ArgumentError(f"documents must be from 0 to {n - 1}", where="documents")
    return found.astype(np.int64)


def _describe_documents(documents: IntArray) -> object:
    """Bounds of a run of documents, or a digest of another choice."""
    if not len(documents) or np.array_equal(documents, documents[0] + np.arange(len(documents))):
        first = int(documents[0]) if len(documents) else 0
        return [first, first + len(documents)]
    return {ALGORITHM: xxhash.xxh3_128_hexdigest(np.ascontiguousarray(documents, "<i8"))}
