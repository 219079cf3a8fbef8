"""`OpenedStore`: what is known of an opened store without reading activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from saev_store.core.layout import DIMS, Layout
from saev_store.core.rows import Labels
from saev_store.documents import Metadata, ShardsIndex
from saev_store.names import LABELS_NAME
from saev_store.problems import Problem
from saev_store.store.card import card_html, card_rows, card_text
from saev_store.store.opening import Opened, find_labels, read_labels
from saev_store.transport import Transport
from saev_store.transport.fetch import map_check

if TYPE_CHECKING:
    from saev_store.validation import Report
    from saev_store.writer import RepairWriter


class OpenedStore:
    """The documents, geometry, problems and labels of an opened store; the base of `ShardStore`."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._layout = opened.metadata.layout
        self._labels: Labels | None = None
        self._has_labels = opened.has_labels

    @property
    def layout(self) -> Layout:
        """The geometry: sizes, shards, and the place of each vector."""
        return self._layout

    @property
    def metadata(self) -> Metadata:
        """The document, under canonical names whatever version wrote it; `metadata.raw` has its exact bytes."""
        return self._opened.metadata

    @property
    def transport(self) -> Transport:
        """Reads the bytes; `store.transport.name` is the engine."""
        return self._opened.transport

    @property
    def index(self) -> ShardsIndex:
        """What `shards.json` says."""
        return self._opened.index

    @property
    def readable_examples(self) -> Mapping[int, int]:
        """For shards that were damaged when the store was opened: how many leading examples can be read."""
        return self._opened.readable

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Problems found when the store was opened; `validate()` checks more."""
        return self._opened.problems

    @property
    def url(self) -> str:
        """Where the store is, without credentials."""
        return self.transport.url

    @property
    def name(self) -> str:
        """The store's folder, normally its content hash."""
        return self._opened.name

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(n_examples, n_layers, tokens_per_example, d_model)."""
        return self._layout.shape

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the axes."""
        return DIMS

    @property
    def ndim(self) -> int:
        return 4

    @property
    def dtype(self) -> np.dtype[np.float32]:
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, padding excluded."""
        return self._layout.nbytes

    @property
    def layers(self) -> tuple[int, ...]:
        """Labels of the recorded layers; the position of a label is its index on the layer axis."""
        return self._layout.layers

    @property
    def has_labels(self) -> bool:
        """Whether there is a `labels.bin`; at most its size is requested.

        Raises:
            DocumentError: it has another size than the documents imply.
        """
        if self._has_labels is None:
            self._has_labels = find_labels(self.transport, self._layout)
        return self._has_labels

    @property
    def labels(self) -> Labels | None:
        """Labels of the content tokens, uint8 (n_examples, content tokens), read-only; None where none were recorded.

        A view of the mapped file locally; a remote file is read once, when it is first needed.

        Raises:
            DocumentError: `labels.bin` has another size than the documents imply.
            CorruptShardError: the mapped file was cut since.
        """
        if self._labels is not None:
            map_check(self.transport)(LABELS_NAME, self._labels.nbytes)
        elif self.has_labels:
            self._labels = read_labels(self.transport, self._layout)
        return self._labels

    def validate(self, *, deep: bool = False, progress: bool | None = None) -> Report:
        """What is wrong with the store and which examples that costs; see `saev_store.validation.Report`.

        Args:
            deep: Read every byte: digests, all-zero rows, swapped shards. Otherwise names and sizes only.
            progress: Show a bar on stderr; default: when it is a terminal.
        """
        from saev_store.validation import validate

        return validate(self.transport, self.metadata, self.index, dirname=self.name, deep=deep, progress=progress)

    def repair(self, report: Report | None = None) -> RepairWriter:
        """A writer of exactly the examples that are lost, which puts them where they were.

        Args:
            report: What `validate` found; default: a quick look at names and sizes.
        """
        from saev_store.writer import open_repair

        return open_repair(self.transport, self.metadata, lost=(report or self.validate()).lost)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpenedStore):
            return NotImplemented
        return self.url == other.url and self.metadata.raw == other.metadata.raw

    def __hash__(self) -> int:
        return hash((self.url, self.metadata.raw))

    def _card(self) -> list[tuple[str, str]]:
        opened = self._opened
        return card_rows(opened.metadata, opened.transport, opened.problems, has_labels=self._has_labels)

    def __repr__(self) -> str:
        return card_text(self.name, self._card())

    def _repr_html_(self) -> str:
        return card_html(self.name, self._card())
