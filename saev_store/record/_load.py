"""Models, and the tokenizers and image processors that go with them, from a folder or from the hub."""

# transformers has no types for what its Auto classes make.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, cast

from saev_store._runtime.optional import need
from saev_store.errors import ArgumentError, DocumentError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from saev_store.record._processing import Processor


Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def load_language_model(
    name: str,
    *,
    tokenizer: str | None = None,
    needs_tokenizer: bool = True,
    dtype: Dtype = "auto",
    attention: str | None = None,
) -> tuple[torch.nn.Module, object]:
    """A model without a head, and its tokenizer.

    Args:
        name: A folder, or a name on the hub. Only safetensors are read, and no code of the repository is run.
        tokenizer: The folder or name of the tokenizer, if it is not with the model.
        needs_tokenizer: False, for token ids: the tokenizer is None if there is none with the model.
        dtype: What the model computes in; `"auto"` is the dtype of its file.
        attention: Implementation of attention, such as `"eager"`; None: the library's choice.

    Raises:
        ArgumentError: a name is empty.
        NotFoundError: there is no such model, tokenizer or implementation of attention, or its files cannot be read.
        DocumentError: the files are damaged, lack weights, or have weights of other sizes than `config.json` has.
        MissingDependencyError: transformers is not installed.
    """
    model = _model(name, dtype, attention)
    from transformers import AutoTokenizer

    where = name if tokenizer is None else tokenizer
    try:
        with _loading(where):
            found = cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(where))
        # Of a folder without the files of a tokenizer, transformers makes one that knows special tokens only.
        if len(found.get_vocab()) <= len(found.get_added_vocab()):
            remedy = "Name the folder or the model that has it: tokenizer=…. Token ids need none with bos=None."
            raise NotFoundError("it has no tokenizer", where=where, remedy=remedy)
    except NotFoundError:
        if needs_tokenizer or tokenizer is not None:
            raise
        return model, None
    return model, found


def load_vision_model(name: str, *, dtype: Dtype = "auto", attention: str | None = None) -> torch.nn.Module:
    """A model of images without a head; of CLIP and the like, which have a tower for texts, too, the one for images.

    Args and errors as of `load_language_model`.
    """
    model = _model(name, dtype, attention)
    has_towers = hasattr(model, "text_model") and hasattr(model, "vision_model")
    return cast("torch.nn.Module", model.vision_model) if has_towers else model


def load_image_processor(name: str) -> Processor:
    """The image processor of a model: a folder, or a name on the hub. No code of the repository is run.

    Raises:
        ArgumentError: the name is empty.
        NotFoundError: there is no processor, or its files cannot be read.
        MissingDependencyError: transformers or Pillow is not installed.
    """
    need("transformers", install="saev-store[record]")
    need("PIL", install="saev-store[record]")
    from transformers import AutoImageProcessor

    with _loading(name):
        return cast("Processor", AutoImageProcessor.from_pretrained(name))


def _model(name: str, dtype: Dtype, attention: str | None) -> torch.nn.Module:
    """A model without a head; arguments as of `load_language_model`."""
    need("transformers", install="saev-store[record]")
    from transformers import AutoModel

    with _loading(name):
        options = {} if attention is None else {"attn_implementation": attention}
        model, found = AutoModel.from_pretrained(
            name, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
    model = cast("PreTrainedModel", model)
    for key in sorted(cast("list[str]", found["missing_keys"])):
        # transformers has filled them with random numbers; no hook point sees a pooler, and zeros have the same digest each time.
        if not {"pooler", "head"}.intersection(key.split(".")):
            raise DocumentError(f"its files have no weights for {key}, which config.json has", where=name)
        model.get_parameter(key).data.zero_()
    return model


@contextmanager
def _loading(name: str) -> Generator[None]:
    """Turns errors of transformers into those of this package."""
    if not name:  # it would be the default
        raise ArgumentError("'' is the name of no folder and of no model", where="name")
    try:
        yield
    except MemoryError:
        raise
    except (OSError, ValueError, ImportError) as error:
        remedy = "Check the name, or pass a folder that has the files. Of weights only safetensors are read."
        raise NotFoundError(f"it could not be loaded: {error}", where=name, remedy=remedy) from error
    except Exception as error:  # many kinds, for damaged files
        raise DocumentError(f"its files are damaged, or do not belong together: {error}", where=name) from error
