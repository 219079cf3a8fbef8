"""The command `record`: a language model over texts or a vision model over images, from flags, a TOML file, or both."""

from __future__ import annotations

import difflib
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer
from pydantic import BaseModel, ConfigDict, ValidationError

from saev_store.cli._common import AsJson, Pairs, Progress, StorageOptions, emit, emit_json, integers, storage_options
from saev_store.cli.finishing import emit_part, parse_part
from saev_store.errors import ArgumentError, NotFoundError, brief

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from pydantic_core import ErrorDetails

    from saev_store import ShardStore
    from saev_store.record import ExampleSource, Images, Part, RecordedPart, RecordingEstimate, RecordingReport, Texts
    from saev_store.sources import Source

Layout = Literal["window", "stream"]
Dtype = Literal["float32", "bfloat16", "float16"]
Resume = Literal["auto", "strict", "never"]
OnBadImage = Literal["raise", "skip"]
OnNonfinite = Literal["raise", "warn", "allow"]
_RESUME: dict[Resume, bool | Literal["auto"]] = {"auto": "auto", "strict": True, "never": False}
#: Options that are no keys of the TOML file: they belong to one call, not to what is recorded.
_ONLY_FLAGS = frozenset({"config", "storage_options", "option", "part", "dry_run", "json", "progress", "debug"})
#: What a value must be, where the type that pydantic expects does not say it.
_RULES = {
    "bos": "a token id, 'tokenizer' or 'none'",
    "layers": "a list of integers, such as [7, 14, 21]",
    "hook_points": "a list of names, such as ['resid_post']",
}
_TYPES = {"int_type": "an integer", "string_type": "text", "bool_type": "true or false"}


class Plan(BaseModel):
    """What is to be recorded: the flags of the command, and the keys of its TOML file."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True, extra="forbid")

    model: str
    to: str
    layers: list[int]
    text: str | None = None
    tokens: str | None = None
    images: str | None = None
    processor: str | None = None
    image_key: str | None = None
    masks: str | None = None
    on_bad_image: OnBadImage = "raise"
    context: int | None = None
    tokenizer: str | None = None
    text_key: str = "text"
    hook_points: list[str] = ["resid_post"]
    layout: Layout = "window"
    pack: bool = False
    bos: int | Literal["tokenizer", "none"] = "tokenizer"
    example_tokens: int | None = None
    batch_size: int | None = None
    dtype: Dtype | None = None
    compute_dtype: Dtype | Literal["auto"] = "auto"
    attention: str | None = None
    device: str | None = None
    max_tokens_per_shard: int = 2_400_000
    on_nonfinite: OnNonfinite = "raise"
    resume: Resume = "auto"


def record(
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with options as keys; flags take precedence.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model: a folder, or a name on the hub.")] = None,
    text: Annotated[
        str | None, typer.Option(metavar="URL", help="A text file, or a JSONL file with a text in each line.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="URL", help="Instead: an MMIDIDX or LLMBATCH file, or Energon with texts.")
    ] = None,
    images: Annotated[
        str | None, typer.Option(metavar="URL", help="Instead, of a vision model: a folder of images, or Energon.")
    ] = None,
    processor: Annotated[
        str | None, typer.Option(help="Of images: folder or name [default: that of the model].")
    ] = None,
    image_key: Annotated[str | None, typer.Option(help="The part of an Energon sample that is its image.")] = None,
    masks: Annotated[
        str | None, typer.Option(metavar="URL", help="Folder of segmentation masks with the names of the images.")
    ] = None,
    on_bad_image: Annotated[
        OnBadImage | None, typer.Option(help="What to do with images that do not decode [default: raise].")
    ] = None,
    to: Annotated[
        str | None, typer.Option(metavar="URL", help="Folder in which the store's folder is created.")
    ] = None,
    layers: Annotated[str | None, typer.Option(metavar="3,6,-1", help="Numbers of blocks; -1 is the last one.")] = None,
    hook_points: Annotated[
        str | None, typer.Option(metavar="resid_post,mlp_out", help="Where in each block [default: resid_post].")
    ] = None,
    context: Annotated[int | None, typer.Option(help="Most tokens that the model sees at once.")] = None,
    layout: Annotated[Layout | None, typer.Option(help="How texts become examples [default: window].")] = None,
    pack: Annotated[bool | None, typer.Option("--pack/--no-pack", help="Windows across documents.")] = None,
    bos: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Token in front of each row: an id, tokenizer or none [default: tokenizer]."),
    ] = None,
    example_tokens: Annotated[int | None, typer.Option(help="Tokens of an example of a stream.")] = None,
    text_key: Annotated[
        str | None, typer.Option(help="Key of the text in a JSONL file or an Energon sample [default: text].")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or name [default: that of the model].")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows that run at once [default: 8; of images 32].")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the store [default: that of the computation].")] = None,
    compute_dtype: Annotated[Dtype | None, typer.Option(help="Of the model [default: that of its file].")] = None,
    attention: Annotated[str | None, typer.Option(metavar="eager", help="Implementation of attention.")] = None,
    device: Annotated[str | None, typer.Option(help="Device of the model, such as cuda [default: cpu].")] = None,
    max_tokens_per_shard: Annotated[int | None, typer.Option(help="Vectors of a shard [default: 2400000].")] = None,
    on_nonfinite: Annotated[
        OnNonfinite | None, typer.Option(help="What to do with NaN and infinity [default: raise].")
    ] = None,
    resume: Annotated[
        Resume | None,
        typer.Option(help="strict: never beside unfinished stores of other options [default: auto]."),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Record the I-th of N parts, from 1; auto: as torchrun or Slurm says."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would take; exit code 1 if it does not fit the disk.")
    ] = False,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
    progress: Progress = None,
) -> None:
    """Record a language model over texts, or a vision model over images; the same command continues an interrupted recording.

    A finished recording of the same options is not made again. With --part several processes record one store, each its own
    shards: 1/4 to 4/4 for four processes. The last one publishes it. Any other number of them can go on.
    """
    flags: dict[str, object] = {
        "model": model, "text": text, "tokens": tokens, "images": images, "processor": processor, "image_key": image_key,
        "masks": masks, "on_bad_image": on_bad_image, "to": to, "context": context, "layout": layout, "pack": pack,
        "bos": bos, "example_tokens": example_tokens, "text_key": text_key, "tokenizer": tokenizer, "batch_size": batch_size,
        "dtype": dtype, "compute_dtype": compute_dtype, "attention": attention, "device": device,
        "max_tokens_per_shard": max_tokens_per_shard, "on_nonfinite": on_nonfinite, "resume": resume, "layers": layers,
        "hook_points": hook_points,
    }  # fmt: skip
    plan = plan_of(config, flags)
    _check_address(plan)
    of_ranks = None if part is None else parse_part(part)
    storage, reports = storage_options(options, option), list["RecordingReport"]()
    model_and_source = load(plan, progress=progress)
    if dry_run:
        found = _estimate(plan, *model_and_source, storage)
        emit_json(found.to_dict()) if as_json else emit(str(found))
        raise typer.Exit(int(found.fits is False))
    try:
        store = _run(plan, *model_and_source, storage, of_ranks, on_report=reports.append, progress=progress)
    except KeyboardInterrupt:
        print(
            f"\nRecorded examples are kept; continue with: {shlex.join(['saev-store', *sys.argv[1:]])}", file=sys.stderr
        )
        raise typer.Exit(130) from None
    from saev_store.record import RecordedPart

    if isinstance(store, RecordedPart):
        emit_part(store, as_json=as_json)
    elif as_json:
        emit_json(
            {
                "url": store.url,
                "shape": store.shape,
                "dtype": store.metadata.dtype,
                "layers": store.layers,
                "nbytes": store.nbytes,
                "report": reports[-1].to_dict(),
            }
        )
    else:
        print(reports[-1], file=sys.stderr)
        emit(store.url)


def load(plan: Plan, *, progress: bool | None) -> tuple[torch.nn.Module, ExampleSource]:
    """The model and its source; what is wrong without a model is refused before one is loaded."""
    _check_source(plan)
    return (_load_texts if plan.images is None else _load_images)(plan, progress=progress)


def _check_source(plan: Plan) -> None:
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


def _check_address(plan: Plan) -> None:
    """Refuse an address of the stores that is none, before a model is loaded.

    Raises:
        ArgumentError: it is empty, a file, or a URL with one slash, which would be the name of a local folder.
    """
    if not plan.to:
        raise ArgumentError("it is empty; it must be a folder or a bucket", where="to")
    scheme = re.match(r"([a-z][a-z0-9+.-]+):/(?!/)", plan.to)
    if scheme is not None and scheme[1] not in {"file", "local"}:
        raise ArgumentError(
            f"{plan.to!r} is no URL: two slashes follow the colon", where="to", remedy=f"Write {scheme[1]}://…."
        )
    if Path(plan.to).is_file():
        raise ArgumentError(f"{plan.to!r} is a file; it must be a folder or a bucket", where="to")


def _load_texts(plan: Plan, *, progress: bool | None) -> tuple[torch.nn.Module, Texts]:
    from saev_store.record import Texts, load_language_model
    from saev_store.sources import TextFile, open_source

    def texts(documents: object, tokenizer: object) -> Texts:
        return Texts(
            documents,
            tokenizer,
            context=plan.context or 0,
            layout=plan.layout,
            bos=None if plan.bos == "none" else plan.bos,
            pack=plan.pack,
            batch_size=8 if plan.batch_size is None else plan.batch_size,
            example_tokens=plan.example_tokens,
            text_key=plan.text_key,
        )

    texts([[0]], None)  # the options alone
    if plan.text is not None:
        documents: Source[object] = TextFile(plan.text, text_key=plan.text_key)
    else:
        documents = open_source(plan.tokens or "")
    model, tokenizer = load_language_model(
        plan.model, tokenizer=plan.tokenizer, dtype=plan.compute_dtype, attention=plan.attention, progress=progress
    )
    return model, texts(documents, tokenizer)


def _load_images(plan: Plan, *, progress: bool | None) -> tuple[torch.nn.Module, Images]:
    from saev_store.record import Images, load_image_processor, load_vision_model

    images = Images(
        plan.images or "",
        32 if plan.batch_size is None else plan.batch_size,
        processor=load_image_processor(plan.processor or plan.model, progress=progress),
        masks=plan.masks,
        image_key=plan.image_key,
        on_bad_image=plan.on_bad_image,
    )
    if plan.image_key is not None and images.source.format == "images":
        raise ArgumentError(
            f"{plan.images} is a folder of images; only samples of Energon have parts",
            where="image_key",
            remedy="Leave it out.",
        )
    model = load_vision_model(plan.model, dtype=plan.compute_dtype, attention=plan.attention, progress=progress)
    return model, images


def _estimate(
    plan: Plan, model: torch.nn.Module, source: ExampleSource, storage: dict[str, object] | None
) -> RecordingEstimate:
    """What recording would take."""
    from saev_store.record import estimate_recording

    return estimate_recording(
        model,
        source,
        plan.to,
        layers=plan.layers,
        hook_points=plan.hook_points,
        dtype=plan.dtype,
        ckpt=plan.model,
        dataset=plan.text or plan.tokens or plan.images,
        device=plan.device,
        max_tokens_per_shard=plan.max_tokens_per_shard,
        storage_options=storage,
    )


def _run(
    plan: Plan,
    model: torch.nn.Module,
    source: ExampleSource,
    storage: dict[str, object] | None,
    part: Part | None,
    *,
    on_report: Callable[[RecordingReport], object],
    progress: bool | None,
) -> ShardStore | RecordedPart:
    """Record, open."""
    from saev_store.record import record as record_source

    return record_source(
        model,
        source,
        plan.to,
        layers=plan.layers,
        hook_points=plan.hook_points,
        dtype=plan.dtype,
        ckpt=plan.model,
        dataset=plan.text or plan.tokens or plan.images,
        device=plan.device,
        max_tokens_per_shard=plan.max_tokens_per_shard,
        storage_options=storage,
        part=part,
        resume=_RESUME[plan.resume],
        exist_ok=True,
        on_nonfinite=plan.on_nonfinite,
        progress=progress,
        on_report=on_report,
    )


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
            place = f" in {config}" if name in said and name not in flags else ""
            problems.setdefault(name, f"{name}{place} {_broken_rule(name, {**said, **flags}.get(name), found)}")
        raise ArgumentError("; ".join(problems.values()), where=", ".join(problems)) from None


def _broken_rule(name: str, value: object, found: ErrorDetails) -> str:
    """What is wrong with an option, and what it must be."""
    if found["type"] == "missing":
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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{config} is no TOML: {error}", where="config") from None
