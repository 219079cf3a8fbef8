"""Models, and the tokenizers and image processors that go with them, from a folder or from the hub."""

# transformers has no types for what its Auto classes make.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, cast

from saev_store._runtime.optional import need
from saev_store.errors import ArgumentError, DocumentError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

    from saev_store.record._processing import Processor


def load_language_model(
    name: str,
    *,
    tokenizer: str | None = None,
    needs_tokenizer: bool = True,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    attention: str | None = None,
    progress: bool | None = None,
) -> tuple[torch.nn.Module, object]:
    """A model without a head, and its tokenizer.

    Args:
        name: A folder, or a name on the hub. Only safetensors are read, and no code of the repository is run.
        tokenizer: Where the tokenizer is, if it is not with the model.
        needs_tokenizer: False, for token ids: the tokenizer is None where there is none with the model.
        dtype: What the model computes in; `"auto"` is the dtype of its file.
        attention: Implementation of attention, such as `"eager"`; None: the library's choice.
        progress: Show the bars of the library on stderr; default: when it is a terminal.

    Raises:
        ArgumentError: there is no such implementation of attention, it is a model of images, or a name is empty.
        NotFoundError: there is no such model or tokenizer, or its files cannot be read.
        DocumentError: the files are damaged, lack weights, or have weights of other sizes than `config.json` says.
        MissingDependencyError: transformers is not installed.
    """
    need("transformers", install="saev-store[record]")
    from transformers import AutoTokenizer

    _check_name(name)
    if tokenizer is not None:
        _check_name(tokenizer, where="tokenizer")
    _check_input(name, "input_ids")
    model = _model(name, dtype=dtype, attention=attention, progress=progress)
    try:
        with _loading(tokenizer or name, progress=progress):
            found = cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(tokenizer or name))
        # Of a folder without the files of a tokenizer, transformers makes one that knows special tokens only.
        if len(found.get_vocab()) <= len(found.get_added_vocab()):
            raise NotFoundError(
                "it has no tokenizer",
                where=tokenizer or name,
                remedy="Name the folder or the model that has it: tokenizer=…. Token ids need none with bos=None.",
            )
    except NotFoundError:
        if needs_tokenizer or tokenizer is not None:
            raise
        return model, None
    return model, found


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
        ArgumentError: there is no such implementation of attention, it is a model of texts, or the name is empty.
        NotFoundError: there is no such model, or its files cannot be read.
        DocumentError: as of `load_language_model`.
        MissingDependencyError: transformers is not installed.
    """
    need("transformers", install="saev-store[record]")
    _check_name(name)
    _check_input(name, "pixel_values")
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
        ArgumentError: it is a model of texts, or the name is empty.
        NotFoundError: there is no processor, or its files cannot be read.
        MissingDependencyError: transformers or Pillow is not installed.
    """
    need("transformers", install="saev-store[record]")
    need("PIL", install="saev-store[record]")
    from transformers import AutoImageProcessor

    _check_name(name)
    try:
        with _loading(name, progress=progress):
            return cast("Processor", AutoImageProcessor.from_pretrained(name))
    except NotFoundError as error:
        _check_input(name, "pixel_values")
        error.remedy = "Check the name; if its image processor is elsewhere, pass processor=…."
        raise


def _check_name(name: str, *, where: str = "name") -> None:
    """Refuse an empty name, which would stand for the default."""
    if not name:
        raise ArgumentError("'' is the name of no folder and of no model", where=where)


def _check_input(name: str, wanted: Literal["input_ids", "pixel_values"]) -> None:
    """Refuse a model of texts where one of images is wanted, and the other way round."""
    from transformers import MODEL_MAPPING, AutoConfig

    with _loading(name, progress=False):
        config = cast("PretrainedConfig", AutoConfig.from_pretrained(name))
    # Of a model with several towers the config does not say what is recorded.
    if type(config) not in MODEL_MAPPING or getattr(config, "sub_configs", None):
        return
    found = cast("object", MODEL_MAPPING[type(config)])
    classes = cast("tuple[object, ...]", found) if isinstance(found, tuple) else (found,)
    inputs = {getattr(each, "main_input_name", None) for each in classes}
    other, what, remedy = {
        "input_ids": ("pixel_values", "images", "Record images with it: images=…."),
        "pixel_values": ("input_ids", "texts", "Record texts with it: text=… or tokens=…."),
    }[wanted]
    if other in inputs and wanted not in inputs:
        raise ArgumentError(f"{config.model_type} is a model of {what}", where=name, remedy=remedy)


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
        # Sizes that differ are refused below, with their names.
        model, found = AutoModel.from_pretrained(
            name,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **chosen,
        )
    for key, there, wanted in sorted(cast("set[tuple[str, Sequence[int], Sequence[int]]]", found["mismatched_keys"])):
        raise DocumentError(
            f"{key} has the shape {tuple(there)} in its files, and {tuple(wanted)} according to its config.json",
            where=name,
            remedy="Check that config.json belongs to these weights.",
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
        with (
            _bars(shown=(sys.stderr is not None and sys.stderr.isatty()) if progress is None else progress),
            _without_report(),
        ):
            yield
    except MemoryError:
        raise
    except Exception as error:
        # transformers and what it calls raise many kinds of errors for damaged files.
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        if attention is not None and "attn_implementation" in str(error):
            raise ArgumentError(
                f"{attention!r} cannot be used: {lines[0]}",
                where="attention",
                remedy='Omit it, or use "eager" or "sdpa".',
            ) from error
        if not isinstance(error, (OSError, ValueError, ImportError)):
            raise DocumentError(
                f"its files are damaged, or do not belong together: {' '.join(lines[:2])}",
                where=name,
                remedy="Download or copy the model again.",
            ) from error
        remedy = "Check the name, or pass a folder that has the files."
        if "safetensors" in str(error):
            remedy = "Only safetensors are read: convert pytorch_model.bin, or choose a model that has them."
        raise NotFoundError(f"it could not be loaded: {lines[0]}", where=name, remedy=remedy) from error


@contextmanager
def _without_report() -> Generator[None]:
    """Leaves out the table of unused and missing weights: a head is not recorded, and what is missing is refused."""
    logger = logging.getLogger("transformers.modeling_utils")

    def is_no_report(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "LOAD REPORT" not in text or "CONVERSION" in text

    logger.addFilter(is_no_report)
    try:
        yield
    finally:
        logger.removeFilter(is_no_report)


@contextmanager
def _bars(*, shown: bool) -> Generator[None]:
    """Switches the progress bars of transformers off where they are not wanted, and then on again."""
    from transformers.utils import logging as bars

    if shown or not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()
    try:
        yield
    finally:
        bars.enable_progress_bar()
