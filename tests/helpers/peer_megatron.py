"""Runs inside an interpreter that has megatron-core: what the real tool reads, writes and builds.

One JSON job a line on standard input, `[function, [arguments]]`; one JSON answer a line on standard output.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import types
import warnings

import numpy as np

warnings.simplefilter("ignore")


def read(prefix: str, multimodal: bool) -> dict:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix, multimodal=multimodal)
    items = [dataset[i] if multimodal else (dataset[i], None) for i in range(len(dataset))]
    return {
        "dtype": np.dtype(dataset.index.dtype).name,
        "sequences": [np.asarray(tokens).tobytes().hex() for tokens, _ in items],
        "modes": [None if mode is None else int(mode) for _, mode in items],
        "doc_idx": dataset.document_indices.tolist(),
    }


def write(prefix: str, dtype: str, documents: list, multimodal: bool) -> dict:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=getattr(np, dtype), multimodal=multimodal)
    for document in documents:
        for tokens, mode in document:
            builder.add_item(torch.tensor(tokens), mode) if tokens else builder.sequence_lengths.append(0)
            if not tokens and multimodal:
                builder.sequence_modes.append(mode)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return {}


def samples(prefix: str, seq_length: int, num_samples: int, seed: int, cache: str) -> dict:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    tokenizer = types.SimpleNamespace(eod=0, pad=0, vocab_size=50_000, unique_identifiers={"class": "none"})
    config = GPTDatasetConfig(
        random_seed=seed, sequence_length=seq_length, split="1,0,0", path_to_cache=cache, tokenizer=tokenizer,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        mid_level_dataset_surplus=0.0,
    )  # fmt: skip
    low = IndexedDataset(prefix)
    dataset = GPTDataset(low, prefix, np.arange(len(low), dtype=np.int32), num_samples, Split.train, config)
    tokens = [dataset._query_document_sample_shuffle_indices(i)[0].tolist() for i in range(len(dataset))]
    return {
        "doc_idx": dataset.document_index.tolist(),
        "sample_idx": dataset.sample_index.tolist(),
        "shuffle_idx": dataset.shuffle_index.tolist(),
        "samples": tokens,
    }


def three_splits(prefix: str, seq_length: int, num_samples: list, split: str, seed: int, cache: str) -> dict:
    """The training, validation and test samples that the tool's own builder makes, as a training run calls it."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    tokenizer = types.SimpleNamespace(eod=0, pad=0, vocab_size=50_000, unique_identifiers={"class": "none"})
    config = GPTDatasetConfig(
        random_seed=seed, sequence_length=seq_length, blend=([prefix], None), split=split, path_to_cache=cache,
        tokenizer=tokenizer, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False, mid_level_dataset_surplus=0.0,
    )  # fmt: skip
    built = BlendedMegatronDatasetBuilder(GPTDataset, num_samples, lambda: True, config).build()
    found = []
    for dataset in built:
        if dataset is None:
            found.append(None)
            continue
        documents = dataset.indices.tolist()
        tokens = [dataset[i]["tokens"].tolist() for i in range(0, len(dataset), 7)]
        found.append({
            "documents": [documents[0], documents[-1] + 1],
            "doc_idx": dataset.document_index.tolist(),
            "sample_idx": dataset.sample_index.tolist(),
            "shuffle_idx": dataset.shuffle_index.tolist(),
            "every_seventh": tokens,
        })  # fmt: skip
    return {"splits": found}


def cuts(cases: list) -> dict:
    """Where splits such as "969,30,1" cut so many documents."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    found = []
    for split, n in cases:
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
        # As BlendedMegatronDatasetBuilder does with them.
        found.append([None if ends is None else [round(end * float(n)) for end in ends] for ends in matrix])
    return {"cuts": found}


CALLS = {each.__name__: each for each in (read, write, samples, three_splits, cuts)}

if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the tool prints is no answer
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = CALLS[name](*arguments)
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)
