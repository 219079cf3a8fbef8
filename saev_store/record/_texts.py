"""`Texts`: documents of tokens as a source of examples, in windows or as a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from saev_store.core.arguments import check_choice, check_count, check_flag
from saev_store.errors import ArgumentError, brief
from saev_store.record._adapters import TextAdapter
from saev_store.record._examples import Batch, ExampleSource, Geometry, Recorded
from saev_store.record._rows import cut_documents, cut_evenly, documents_of, row_of
from saev_store.record._token_ids import TokenIds, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt
    import torch

    from saev_store.core.layout import IntArray
    from saev_store.record._adapters import Adapter
    from saev_store.record._examples import TokenArrays

TextLayout = Literal["window", "stream"]
_ARRAYS = {"token_ids": "int32", "document_ids": "int64", "positions": "int32", "mask": "bool"}
#: Positions are int32.
_MOST = 2**31 - 1
#: What stands for padding in each of them.
_PADDING = {"token_ids": 0, "document_ids": -1, "positions": -1, "mask": False}


class Texts(ExampleSource):
    """Texts, or documents of token ids, as examples for a language model.

    With the layout `"window"` an example is a context of a document as the model saw it, padded on the right with vectors of zeros; a
    BOS token in front is its special token. With `"stream"` each document is run in the same way, and then the vectors of all
    documents are laid end to end and cut into examples; BOS is not stored. Recorded with the vectors are `token_ids`, `document_ids`
    (the number of the text, array or sample), `positions` in the document, and `mask`, false for padding.

    Args:
        documents: The address of a file of JSON lines; texts, arrays of token ids or mappings with a
            text, in a list or a data set of Hugging Face; or an open source of token ids or of Energon samples with a text, see
            `saev_store.sources.open_source`. Texts are turned into ids at once and kept in memory, four bytes a token.
        tokenizer: Of `tokenizers` or `transformers`; needed for texts, and named in the metadata.
        context: Most content tokens that the model sees at once; longer documents are cut.
        layout: `"window"` or `"stream"`.
        bos: A token id that is put in front of each row; None puts none; `"tokenizer"` is the tokenizer's own, if it has one.
        pack: With windows: cut all documents laid end to end, so that a window may have several and only the last one is
            padded. A token then sees the documents before its own.
        batch_size: Rows in a batch.
        example_tokens: With a stream: tokens of an example; `context` by default.
        text_key: Key of the text in the objects of a JSONL file; the column of a data set; the field or the part of an Energon
            sample. An integer is a place in pairs such as (text, label).

    Raises:
        ArgumentError: an argument breaks a rule, or there is no token.
        NotFoundError, AccessError, DocumentError: a file cannot be read.

    >>> texts = Texts([[5, 6, 7, 8, 9], [3]], context=4, bos=1, batch_size=8)
    >>> ids, is_token = next(texts.batches(0, 1)).inputs
    >>> ids.tolist()
    [[1, 5, 6, 7, 8], [1, 9, 0, 0, 0], [1, 3, 0, 0, 0]]
    """

    def __init__(
        self,
        documents: object,
        tokenizer: object = None,
        *,
        context: int,
        layout: TextLayout = "window",
        bos: int | Literal["tokenizer"] | None = "tokenizer",
        pack: bool = False,
        batch_size: int = 8,
        example_tokens: int | None = None,
        text_key: str | int = "text",
    ) -> None:
        check_choice(layout, ("window", "stream"), name="layout")
        self.pack = check_flag(pack, name="pack")
        if pack and layout == "stream":
            raise ArgumentError("a stream is packed already", where="pack", remedy="Leave pack out.")
        if example_tokens is not None and layout == "window":
            raise ArgumentError("a window has `context` tokens", where="example_tokens", remedy="Leave it out.")
        self.tokenizer = None if tokenizer is None else Tokenizer(tokenizer)
        self.context, self.layout = check_count(context, name="context", most=_MOST), layout
        width = context if example_tokens is None else example_tokens
        self.example_tokens = check_count(width, name="example_tokens", most=_MOST)
        self.batch_size = check_count(batch_size, name="batch_size")
        self.bos = _bos(bos, self.tokenizer)
        self.documents = TokenIds(documents, self.tokenizer, text_key=text_key)
        starts = self.documents.starts
        self._row_starts = (
            cut_evenly(int(starts[-1]), self.context) if self.pack else cut_documents(starts, self.context)
        )

    def describe(self) -> dict[str, object]:
        return self.documents.describe()

    def geometry(self, adapter: Adapter) -> Geometry:
        if not isinstance(adapter, TextAdapter):
            raise ArgumentError(f"{type(adapter.model).__name__} is a model of images; these are texts", where="source")
        is_window = self.layout == "window"
        cls_token = is_window and self.bos is not None
        text = {
            "layout": self.layout,
            "bos": cls_token,
            "tokenizer": self.tokenizer and {"name": self.tokenizer.name, "digest": self.tokenizer.digest},
        }
        n_examples = len(self._row_starts) - 1 if is_window else -(-self.documents.n_tokens // self.example_tokens)
        return Geometry(n_examples, self.example_tokens, cls_token, _ARRAYS, text)

    def identity(self) -> dict[str, object]:
        return {"batch_size": self.batch_size, "context": self.context, "bos_id": self.bos, "packed": self.pack}

    def batches(self, start: int, end: int) -> Iterator[Batch]:
        """The batches from the one with the first token of example `start` to the one with the last of `end - 1`."""
        first_row, end_row = start, end
        if self.layout == "stream":
            n_tokens = self.documents.n_tokens
            first_row = row_of(self._row_starts, start * self.example_tokens)
            end_row = row_of(self._row_starts, min(end * self.example_tokens, n_tokens) - 1) + 1
        for first in range(first_row // self.batch_size * self.batch_size, end_row, self.batch_size):
            yield self._batch(self._row_starts[first : first + self.batch_size + 1])

    def assemble(self, computed: Iterable[tuple[Batch, torch.Tensor]], start: int) -> Iterator[Recorded]:
        return self._windows(computed) if self.layout == "window" else self._stream(computed, start)

    def _batch(self, starts: IntArray) -> Batch:
        """The rows between these positions."""
        first, last = int(starts[0]), int(starts[-1])
        lengths = np.diff(starts)
        # The model runs no more padding than the longest row of the batch asks for.
        is_real = np.arange(int(lengths.max())) < lengths[:, np.newaxis]
        tokens, n_bos = self.documents.tokens(first, last), int(self.bos is not None)
        ids = np.zeros((len(lengths), n_bos + is_real.shape[1]), np.int64)
        ids[:, :n_bos] = self.bos or 0
        ids[:, n_bos:][is_real] = tokens
        seen = np.concatenate([np.ones((len(lengths), n_bos), bool), is_real], axis=1)
        documents, positions = documents_of(self.documents.starts, first, last)
        arrays: TokenArrays = {
            "token_ids": tokens, "document_ids": documents, "positions": positions, "mask": np.ones(last - first, bool)
        }  # fmt: skip
        return Batch((ids, seen), first, arrays)

    def _windows(self, computed: Iterable[tuple[Batch, torch.Tensor]]) -> Iterator[Recorded]:
        """Each row is an example, padded with zeros up to the context."""
        import torch

        n_bos = int(self.bos is not None)
        for batch, computed_acts in computed:
            seen = np.asarray(batch.inputs[1])
            n_missing = n_bos + self.context - seen.shape[1]
            computed_acts.masked_fill_(~torch.as_tensor(seen)[:, None, :, None], 0)
            acts = torch.nn.functional.pad(computed_acts, (0, 0, 0, n_missing)) if n_missing else computed_acts
            del computed_acts
            is_real = np.pad(seen, ((0, 0), (0, n_missing)))[:, n_bos:]
            arrays: dict[str, npt.NDArray[np.generic]] = {}
            for name, values in batch.token_arrays.items():
                arrays[name] = np.full(is_real.shape, _PADDING[name], np.dtype(_ARRAYS[name]))
                arrays[name][is_real] = values
            yield Recorded(row_of(self._row_starts, batch.first), acts, arrays)
            del batch, acts, arrays  # not held while the next ones are waited for

    def _stream(self, computed: Iterable[tuple[Batch, torch.Tensor]], start: int) -> Iterator[Recorded]:
        """The tokens of all rows end to end, cut into examples."""
        import torch

        width, n_bos = self.example_tokens, int(self.bos is not None)
        example, n_tokens = start, self.documents.n_tokens
        left: torch.Tensor | None = None  # (tokens, layers, d_model) that fill no example yet
        arrays: TokenArrays = {}
        for batch, computed_acts in computed:
            is_real = torch.as_tensor(batch.inputs[1])[:, n_bos:]
            found = computed_acts[:, :, n_bos:].transpose(1, 2)[is_real]
            del computed_acts  # here and below: memory for no more vectors than two batches have
            skip = max(start * width - batch.first, 0)  # tokens of the example before the first one
            acts = found[skip:] if left is None else torch.cat([left, found])
            arrays = {
                name: np.concatenate([arrays[name], values]) if arrays else values[skip:]
                for name, values in batch.token_arrays.items()
            }
            padding = -n_tokens % width if batch.first + len(found) == n_tokens else 0
            del batch, found
            if padding:
                acts = torch.cat([acts, acts.new_zeros((padding, *acts.shape[1:]))])
                arrays = {
                    name: np.concatenate([values, np.full(padding, _PADDING[name], values.dtype)])
                    for name, values in arrays.items()
                }
            n = len(acts) // width
            if n:
                whole = {name: values[: n * width].reshape(n, width) for name, values in arrays.items()}
                yield Recorded(example, acts[: n * width].reshape(n, width, *acts.shape[1:]).transpose(1, 2), whole)
                example += n
                arrays = {name: values[n * width :] for name, values in arrays.items()}
            left = acts[n * width :].clone()
            del acts


def _bos(bos: object, tokenizer: Tokenizer | None) -> int | None:
    """The id of the token in front of each row."""
    if bos == "tokenizer":
        return None if tokenizer is None else tokenizer.bos
    if bos is None or (isinstance(bos, int) and not isinstance(bos, bool) and bos >= 0):
        return bos
    raise ArgumentError(f"bos is {brief(bos)}; it must be a token id, None or 'tokenizer'", where="bos")
