"""The one place where LLMBATCH meets torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from saev_store.errors import MissingDependencyError

if TYPE_CHECKING:
    import torch

    from saev_store.sources.llmbatch.reader import TokenArray


def as_tensor(tokens: TokenArray) -> torch.Tensor:
    """Token ids as int64 in a tensor that owns its memory: torch's embeddings take no uint32."""
    try:
        import torch
    except ImportError:
        raise MissingDependencyError(
            "tensors need torch", remedy="pip install 'saev-store[torch]', or read NumPy arrays."
        ) from None
    return torch.from_numpy(tokens.astype(np.int64))
