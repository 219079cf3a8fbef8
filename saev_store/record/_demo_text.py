"""The demo's second store: a small causal language model over twelve fables."""

# transformers has no types for models made from a configuration.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from saev_store.record._adapters import parameter_of, place
from saev_store.record._demo_steps import say_checked, say_recorded, validate
from saev_store.record._fables import load_fables
from saev_store.record._record import record
from saev_store.record._texts import Texts
from saev_store.record._weights import random_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch
    from tokenizers import Tokenizer

    from saev_store.record._report import RecordingReport
    from saev_store.store.store import ShardStore

CONTEXT = 64
BATCH_SIZE = 8
#: Not the last block: what `hidden_states` has of it went through the final norm.
LAYERS = (0, 2, 4)
VOCABULARY = 512
#: The first special token of a vocabulary has the id 0.
BOS, BOS_ID = "<bos>", 0
#: Small, so that the store has several shards.
_TOKENS_PER_SHARD = 4096


@dataclass(frozen=True)
class TextDemoResult:
    """Result of the demo's part with texts.

    Attributes:
        store: Folder of the store.
        ckpt: Name of the weights in the metadata.
        n_documents, n_tokens, n_examples, n_shards, nbytes: Sizes of the text and of the store.
        dtype: Type of the stored numbers: that of the model.
        layers: The recorded blocks.
        shape: (example, layer, token, d_model); token 0 is BOS.
        n_recorded: Examples that this run recorded; fewer than n_examples if an earlier run was interrupted.
        problems: Problems that validation found.
        text_equal: Whether the store's token ids, decoded document by document, are the fables.
        n_checked: Number of vectors compared with `hidden_states` of a fresh forward pass.
        max_abs: Largest absolute number in these vectors.
        max_abs_diff: Largest absolute difference; 0.0 means bit for bit.
    """

    store: str
    ckpt: str
    n_documents: int
    n_tokens: int
    n_examples: int
    n_shards: int
    nbytes: int
    dtype: str
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    n_recorded: int
    problems: tuple[str, ...]
    text_equal: bool
    n_checked: int
    max_abs: float
    max_abs_diff: float

    @property
    def ok(self) -> bool:
        """Whether the store has no problem, holds the text, and equals a fresh forward pass.

        A store of an earlier run may differ from today's forward pass as for images; bfloat16 rounds to about a hundredth.
        """
        return not self.problems and self.text_equal and self.max_abs_diff <= 0.05 * self.max_abs

    def to_dict(self) -> dict[str, object]:
        """The fields and `ok`, as plain JSON types."""
        return {"ok": self.ok, **asdict(self)}


def run_text(out: Path, *, device: str | None, progress: bool | None, say: Callable[[str], None]) -> TextDemoResult:
    """Record the fables below `out`, validate and compare; arguments as of `run_demo`."""
    import torch
    from transformers import GPTNeoXConfig

    texts = list(load_fables().values())
    tokenizer = tokenizer_of(texts)
    # The shape of Pythia 14M, but for the vocabulary.
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=512,
        max_position_embeddings=2 * CONTEXT,
    )  # fmt: skip
    model = random_model(config, name="gpt-neox-6-layers", reason="nothing is downloaded for it", dtype=torch.bfloat16)
    say(f"model      {type(model.model).__name__}, {model.note}")
    place(model.model, device)
    source = Texts(texts, tokenizer, context=CONTEXT, bos=BOS_ID, batch_size=BATCH_SIZE)
    n_tokens = source.documents.n_tokens
    say(
        f"text       {len(texts)} fables of Aesop, {n_tokens:,} tokens of a vocabulary of {VOCABULARY} that was made of them, "
        f"in contexts of up to {CONTEXT}"
    )
    reports: list[RecordingReport] = []
    store = record(
        model.model,
        source,
        out,
        layers=LAYERS,
        max_tokens_per_shard=_TOKENS_PER_SHARD,
        ckpt=model.ckpt,
        dataset="fables of Aesop",
        exist_ok=True,
        recheck="close",
        progress=progress,
        on_report=reports.append,
    )
    say_recorded(store, reports[-1], say)
    problems, _ = validate(store, say, progress=progress)
    n_checked, max_abs, max_abs_diff = _compare(store, model.model)
    say_checked(n_checked, max_abs_diff, "the hidden_states of a fresh forward pass", say)
    text_equal = _documents_of(store, tokenizer) == texts
    found = _text_of(store, 4, tokenizer)
    say(
        f"decoded    the store's token ids: {'the fables again' if text_equal else 'ANOTHER TEXT'}; example 4 begins {found[:48]!r}"
    )
    return TextDemoResult(
        store=store.url,
        ckpt=model.ckpt,
        n_documents=len(texts),
        n_tokens=n_tokens,
        n_examples=len(store),
        n_shards=store.layout.n_shards,
        nbytes=store.nbytes,
        dtype=store.metadata.dtype,
        layers=store.layers,
        shape=store.shape,
        n_recorded=reports[-1].n_examples,
        problems=problems,
        text_equal=text_equal,
        n_checked=n_checked,
        max_abs=max_abs,
        max_abs_diff=max_abs_diff,
    )


def tokenizer_of(texts: list[str]) -> Tokenizer:
    """Byte pairs of these texts, and BOS: every text is its tokens put together."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _compare(store: ShardStore, network: torch.nn.Module) -> tuple[int, float, float]:
    """Compare all vectors with the model's own `hidden_states`: number of vectors, largest number, largest difference.

    The token ids come from the store, in batches as they were recorded.
    """
    import torch

    n_checked, largest, worst = 0, 0.0, 0.0
    device, arrays = parameter_of(network).device, store.token_arrays
    for start in range(0, len(store), BATCH_SIZE):
        rows = slice(start, min(start + BATCH_SIZE, len(store)))
        ids, mask = np.asarray(arrays["token_ids"][rows], np.int64), np.asarray(arrays["mask"][rows], bool)
        longest = int(mask.sum(axis=1).max())
        in_front = ((0, 0), (1, 0))
        ids = np.pad(ids[:, :longest], in_front, constant_values=BOS_ID)
        mask = np.pad(mask[:, :longest], in_front, constant_values=True)
        with torch.inference_mode():
            states = network(
                input_ids=torch.from_numpy(ids).to(device),
                attention_mask=torch.from_numpy(mask).to(device).long(),
                output_hidden_states=True,
                use_cache=False,
            ).hidden_states
        kept = store[rows]
        for slot, layer in enumerate(store.layers):
            fresh = states[layer + 1].float().cpu().numpy()[mask]
            worst = max(worst, float(np.abs(fresh - kept[:, slot, : 1 + longest][mask]).max()))
            largest = max(largest, float(np.abs(fresh).max()))
            n_checked += len(fresh)
    return n_checked, largest, worst


def _documents_of(store: ShardStore, tokenizer: Tokenizer) -> list[str]:
    """The texts whose tokens the store holds."""
    arrays = store.token_arrays
    is_token = np.asarray(arrays["mask"][:], bool)
    ids, documents = arrays["token_ids"][:][is_token], arrays["document_ids"][:][is_token]
    return [tokenizer.decode(ids[documents == document].tolist()) for document in np.unique(documents)]


def _text_of(store: ShardStore, example: int, tokenizer: Tokenizer) -> str:
    """The text of an example."""
    is_token = np.asarray(store.token_arrays["mask"][example], bool)
    return tokenizer.decode(store.token_arrays["token_ids"][example][is_token].tolist())
