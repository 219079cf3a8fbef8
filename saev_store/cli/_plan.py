"""What `record` and `repair` are told: flags and the keys of a TOML file as one `Plan`, checked before a model is loaded."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from saev_store.cli._common import integers
from saev_store.errors import ArgumentError, NotFoundError, brief

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Layout = Literal["window", "stream"]
Dtype = Literal["float32", "bfloat16", "float16"]
OnBadImage = Literal["raise", "skip"]
OnNonfinite = Literal["raise", "warn", "allow"]
Text = Annotated[str, StringConstraints(min_length=1)]
#: Options that are no keys of the TOML file: they belong to one call, not to what is recorded.
_ONLY_FLAGS = frozenset({"config", "storage_options", "option", "part", "dry_run", "json", "progress", "debug"})
#: What a value must be, where the type that pydantic expects does not say it.
_RULES = {
    "bos": "a token id, 'tokenizer' or 'none'",
    "layers": "a list of integers, such as [7, 14, 21]",
    "hook_points": "a list of names, such as ['resid_post']",
}
_TYPES = {
    "int_type": "an integer", "string_type": "text", "string_too_short": "text that is not empty", "bool_type": "true or false",
}  # fmt: skip


class Plan(BaseModel):
    """What is to be recorded: the flags of the command, and the keys of its TOML file."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True, extra="forbid")

    model: Text
    to: str
    layers: list[int]
    text: Text | None = None
    tokens: Text | None = None
    images: Text | None = None
    processor: Text | None = None
    image_key: Text | None = None
    masks: Text | None = None
    on_bad_image: OnBadImage = "raise"
    context: int | None = None
    tokenizer: Text | None = None
    text_key: str = "text"
    hook_points: list[str] = ["resid_post"]
    layout: Layout = "window"
    pack: bool = False
    bos: int | Literal["tokenizer", "none"] = "tokenizer"
    example_tokens: int | None = None
    batch_size: int | None = None
    dtype: Dtype | None = None
    compute_dtype: Dtype | Literal["auto"] = "auto"
    attention: Text | None = None
    device: Text | None = None
    max_tokens_per_shard: int | None = None
    on_nonfinite: OnNonfinite = "raise"
    resume: bool = True

    @property
    def dataset(self) -> str | None:
        """The address of the data; of a local file it is the shortest path, so `./t.jsonl` is `t.jsonl`."""
        given = self.text or self.tokens or self.images
        return given if not given or "://" in given or "::" in given else os.path.normpath(given)


#: Of the mistakes in a file, and of the name of an option, that an error shows.
_MOST_SHOWN, _MOST_CHARACTERS = 20, 100


def plan_of(config: Path | None, flags: Mapping[str, object], otherwise: Mapping[str, object] | None = None) -> Plan:
    """The plan of a file and flags.

    Args:
        config: The file; None: there is none.
        flags: What flags say, None where they were not given; they take precedence.
        otherwise: What holds where neither says anything.

    Raises:
        ArgumentError: an option is missing, unknown, or breaks its rule.
        NotFoundError: the file cannot be read.
    """
    said, flags = _read(config) if config is not None else {}, _parsed(flags)
    try:
        return Plan.model_validate({**(otherwise or {}), **said, **flags})
    except ValidationError as error:
        problems: dict[str, str] = {}
        for found in error.errors(include_url=False):
            name = str(found["loc"][0])
            shown = name if len(name) <= _MOST_CHARACTERS else f"{name[:_MOST_CHARACTERS]}…"
            place = f" in {config}" if name in said and name not in flags else ""
            problems.setdefault(shown, f"{shown}{place} {_broken_rule(name, {**said, **flags}.get(name), found)}")
        remedy = "Give options, or a TOML file with --config." if any(map(_is_missing, error.errors())) else None
        told = dict(islice(problems.items(), _MOST_SHOWN))
        more = [f"and {len(problems) - len(told):,} more problems"] if len(problems) > len(told) else []
        raise ArgumentError("; ".join([*told.values(), *more]), where=", ".join(told), remedy=remedy) from None


def _is_missing(found: ErrorDetails) -> bool:
    return found["type"] == "missing"


def _broken_rule(name: str, value: object, found: ErrorDetails) -> str:
    """What is wrong with an option, and what it must be."""
    if _is_missing(found):
        return "is missing"
    if found["type"] == "extra_forbidden":
        if name in _ONLY_FLAGS:
            return "is an option of the command line only"
        near = difflib.get_close_matches(name, Plan.model_fields, n=1)
        return "is no option" + (f"; {near[0]} is one" if near else "")
    expected = found.get("ctx", {}).get("expected") or _TYPES.get(found["type"]) or found["msg"]
    return f"is {brief(value)}; it must be {_RULES.get(name, expected)}"


def _parsed(flags: Mapping[str, object]) -> dict[str, object]:
    """The flags that were given, with lists and numbers instead of text."""
    said = {name: value for name, value in flags.items() if value is not None}
    layers, hook_points, bos = said.get("layers"), said.get("hook_points"), said.get("bos")
    if isinstance(layers, str):
        said["layers"] = integers(layers, where="--layers")
    if isinstance(hook_points, str):
        said["hook_points"] = hook_points.split(",")
    if isinstance(bos, str) and bos.isdecimal():
        said["bos"] = int(bos)
    return said


def _read(config: Path) -> dict[str, object]:
    try:
        return tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotFoundError(f"it cannot be read: {error.strerror}", where=str(config)) from error
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits, and tables that are too deep
        raise ArgumentError(f"{config} is no TOML: {error}", where="config") from None


@contextmanager
def naming_source(plan: Plan) -> Generator[None]:
    """Names the file or the option in errors of arguments that the library was given in their place."""
    try:
        yield
    except ArgumentError as error:
        if error.where == "inputs" and plan.images is not None:
            error.where, error.remedy = "processor", "Name the image processor of this model."
        elif error.where in {"documents", "source", "inputs"}:
            error.where = plan.text or plan.tokens or plan.images
        raise


def check_source(plan: Plan) -> None:
    """Refuse several sources, and options of another one.

    Raises:
        ArgumentError: there is no source, or more than one, or an option says nothing about this one.
    """
    if [plan.text, plan.tokens, plan.images].count(None) != 2:
        raise ArgumentError("one of the three is needed, and only one", where="text, tokens, images")
    of_texts = {"context", "tokenizer", "text_key", "layout", "pack", "bos", "example_tokens"}
    of_images = {"processor", "image_key", "masks", "on_bad_image"}
    others = sorted(plan.model_fields_set & (of_texts if plan.images is not None else of_images))
    if others:
        kind = "texts" if plan.images is not None else "images"
        raise ArgumentError(f"{others[0]} is an option for {kind}", where=", ".join(others), remedy="Leave it out.")
    if plan.text is not None and not plan.text.endswith(".jsonl") and "text_key" in plan.model_fields_set:
        raise ArgumentError(
            f"{plan.text} is one text; only the lines of a file *.jsonl have keys",
            where="text_key",
            remedy="Leave it out.",
        )
    if plan.images is None and plan.context is None:
        raise ArgumentError("texts need it: the most tokens that the model sees at once", where="context")
