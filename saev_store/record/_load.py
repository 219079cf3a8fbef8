"""Models, and the tokenizers and image processors that go with them, from a folder or from the hub."""

# transformers has no types for what its Auto classes make.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, cast

from saev_store._runtime.optional import need
from saev_store.errors import ArgumentError, DocumentError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import torch

    from saev_store.record._processing import Processor


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
        DocumentError: the files lack weights.
        MissingDependencyError: transformers is not installed.
    """
    need("transformers", install="saev-store[record]")
    from transformers import AutoTokenizer

    model = _model(name, dtype=dtype, attention=attention, progress=progress)
    with _loading(tokenizer or name, progress=progress):
        return model, AutoTokenizer.from_pretrained(tokenizer or name)


def load_vision_model(
    name: str,
    *,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    attention: str | None = None,
    progress: bool | None = None,
) -> torch.nn.Module:
    """A model of images without a head; of CLIP and the like, which have a tower for texts, too, the one for images.

    Args:
        name: As of `load_language_model`.
        dtype: As of `load_language_model`.
        attention: As of `load_language_model`.
        progress: As of `load_language_model`.

    Raises:
        ArgumentError: there is no such implementation of attention.
        NotFoundError: there is no such model, or its files cannot be read.
        DocumentError: the files lack weights.
        MissingDependencyError: transformers is not installed.
    """
    model = _model(name, dtype=dtype, attention=attention, progress=progress)
    if hasattr(model, "text_model") and hasattr(model, "vision_model"):
        return cast("torch.nn.Module", model.vision_model)
    return model


def load_image_processor(name: str, *, progress: bool | None = None) -> Processor:
    """The image processor of a model.

    Args:
        name: A folder, or a name on the hub. No code of the repository is run.
        progress: As of `load_language_model`.

    Raises:
        NotFoundError: there is no processor, or its files cannot be read.
        MissingDependencyError: transformers or Pillow is not installed.
    """
    need("transformers", install="saev-store[record]")
    need("PIL", install="saev-store[record]")
    from transformers import AutoImageProcessor

    with _loading(name, progress=progress):
        return cast("Processor", AutoImageProcessor.from_pretrained(name))


def _model(
    name: str,
    *,
    dtype: Literal["auto", "float32", "bfloat16", "float16"],
    attention: str | None,
    progress: bool | None,
) -> torch.nn.Module:
    """A model without a head; arguments as of `load_language_model`."""
    need("transformers", install="saev-store[record]")
    from transformers import AutoModel

    chosen = {} if attention is None else {"attn_implementation": attention}
    with _loading(name, progress=progress, attention=attention):
        model, found = AutoModel.from_pretrained(
            name, dtype=dtype, use_safetensors=True, output_loading_info=True, **chosen
        )
    _fill_missing(cast("torch.nn.Module", model), sorted(cast("list[str]", found["missing_keys"])), name)
    return cast("torch.nn.Module", model)


def _fill_missing(model: torch.nn.Module, missing: Sequence[str], name: str) -> None:
    """Zeros for a pooler that the files lack, which no hook point sees; elsewhere random numbers would be recorded.

    With the random numbers of transformers, no two runs would have the same digest of weights.
    """
    for key in missing:
        if not {"pooler", "head"}.intersection(key.split(".")):
            raise DocumentError(
                f"its files have no weights for {key}" + (f" and {len(missing) - 1} others" if missing[1:] else ""),
                where=name,
                remedy="Check that config.json belongs to these weights.",
            )
        model.get_parameter(key).data.zero_()


@contextmanager
def _loading(name: str, *, progress: bool | None, attention: str | None = None) -> Generator[None]:
    """Turns errors of transformers into those of this package."""
    try:
        with _bars(shown=sys.stderr.isatty() if progress is None else progress):
            yield
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
