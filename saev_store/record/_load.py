"""`load_language_model`: a model and its tokenizer from a folder or from the hub."""

# transformers has no types for what its Auto classes make.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, cast

from saev_store._runtime.optional import need
from saev_store.errors import ArgumentError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch


def load_language_model(
    name: str,
    *,
    tokenizer: str | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    attention: str | None = None,
    progress: bool | None = None,
) -> tuple[torch.nn.Module, object]:
    """A model without a head, and its tokenizer.

    Args:
        name: A folder, or a name on the hub. Only safetensors are read, and no code of the repository is run.
        tokenizer: Where the tokenizer is, if it is not with the model.
        dtype: What the model computes in; `"auto"` is the dtype of its file.
        attention: Implementation of attention, such as `"eager"`; None: the library's choice.
        progress: Show the bars of the library on stderr; default: when it is a terminal.

    Raises:
        ArgumentError: there is no such implementation of attention.
        NotFoundError: there is no such model or tokenizer, or its files cannot be read.
        MissingDependencyError: transformers is not installed.
    """
    need("transformers", install="saev-store[record]")
    from transformers import AutoModel, AutoTokenizer

    try:
        with _bars(shown=sys.stderr.isatty() if progress is None else progress):
            model = AutoModel.from_pretrained(
                name,
                dtype=dtype,
                use_safetensors=True,
                **({} if attention is None else {"attn_implementation": attention}),
            )
            found = AutoTokenizer.from_pretrained(tokenizer or name)
    except (OSError, ValueError, ImportError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        if attention is not None and "attn_implementation" in str(error):
            raise ArgumentError(
                f"{attention!r} cannot be used: {lines[0]}",
                where="attention",
                remedy='Omit it, or use "eager" or "sdpa".',
            ) from error
        raise NotFoundError(
            f"it could not be loaded: {lines[0]}",
            where=name,
            remedy="Check the name, or pass a folder that has the files.",
        ) from error
    return cast("torch.nn.Module", model), found


@contextmanager
def _bars(*, shown: bool) -> Generator[None]:
    """Switches the progress bars of transformers off where they are not wanted, and then on again."""
    from transformers.utils import logging

    if shown or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
