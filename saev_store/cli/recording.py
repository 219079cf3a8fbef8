"""The commands that record: `record`, `repair`, `finalize` and `demo`; from options, a TOML file, or both."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from saev_store.cli._common import (
    AsJson,
    Options,
    Progress,
    emit,
    emit_json,
    integers,
    storage_options,
)
from saev_store.core.arguments import is_list, is_mapping
from saev_store.errors import ArgumentError, NotFoundError, ResumeError
from saev_store.transport import open_transport

if TYPE_CHECKING:
    import torch

    from saev_store.record import ExampleSource, Images, Part, RecordedPart, Texts
    from saev_store.sources import Source

Dtype = Literal["float32", "bfloat16", "float16"]
#: Options of one call, which a TOML file does not have.
_ONLY_OPTIONS = {"context_", "config", "option", "part", "dry_run", "as_json", "progress"}
_OF_TEXTS = ("context", "tokenizer", "text_key", "layout", "pack", "bos", "example_tokens")
_OF_IMAGES = ("processor", "image_key", "masks")


def _read_config(context: typer.Context, config: Path | None) -> Path | None:
    """Let the keys of a TOML file be defaults of the options."""
    if config is None:
        return None
    try:
        found = tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotFoundError(f"it cannot be read: {error.strerror}", where=str(config)) from error
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits, and tables that are too deep
        raise ArgumentError(f"it is not TOML: {error}", where=str(config)) from None
    known = sorted(inspect.signature(record).parameters.keys() - _ONLY_OPTIONS)
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ArgumentError(
                f"{name!r} is not an option", where=str(config), remedy=f"Write {near[0]}." if near else None
            )
    lists = {name: ",".join(map(str, value)) for name, value in found.items() if is_list(value)}
    context.default_map = {**found, **lists}
    return config


@dataclass(frozen=True)
class Inputs:
    """Model and data of a recording: the options that `record` and `repair` share."""

    config: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file with these options as keys; options take precedence.",
            is_eager=True,
            callback=_read_config,
        ),
    ] = None
    model: Annotated[
        str | None, typer.Option(help="The model: a folder, or a name on the hub, such as gpt2. Needed.")
    ] = None
    text: Annotated[str | None, typer.Option(metavar="URL", help="A JSONL file with a text in each line.")] = None
    tokens: Annotated[
        str | None, typer.Option(metavar="URL", help="Instead: an MMIDIDX or LLMBATCH file, or Energon with texts.")
    ] = None
    images: Annotated[
        str | None, typer.Option(metavar="URL", help="Instead, of a vision model: a folder of images, or Energon.")
    ] = None
    processor: Annotated[
        str | None,
        typer.Option(help="Processor of the images: a folder, or a name on the hub [default: that of the model]."),
    ] = None
    image_key: Annotated[
        str | None,
        typer.Option(help="The part of an Energon sample that is its image, such as jpg [default: the only one]."),
    ] = None
    masks: Annotated[
        str | None, typer.Option(metavar="URL", help="Folder of segmentation masks with the names of the images.")
    ] = None
    context: Annotated[
        int | None,
        typer.Option(help="Most tokens of a row that the model sees at once, such as 128. Needed for texts."),
    ] = None
    layout: Annotated[Literal["window", "stream"], typer.Option(help="How texts become examples.")] = "window"
    pack: Annotated[
        bool,
        typer.Option(
            "--pack/--no-pack", help="Fill windows across the ends of documents, or begin each document in a new one."
        ),
    ] = False
    bos: Annotated[str, typer.Option(metavar="ID", help="Token in front of each row: an id, tokenizer or none.")] = (
        "tokenizer"
    )
    example_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an example of --layout stream [default: that of --context].")
    ] = None
    text_key: Annotated[str, typer.Option(help="Key of the text in a JSONL file or an Energon sample.")] = "text"
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Tokenizer of the texts: a folder, or a name on the hub [default: that of the model]."),
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows that run through the model at once [default: 8; of images 32].")
    ] = None
    compute_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Dtype in which the model computes; auto is that of its file."),
    ] = "auto"
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="eager",
            help="Implementation of attention in transformers, such as eager or sdpa [default: the library's choice].",
        ),
    ] = None
    device: Annotated[str | None, typer.Option(help="Device of the model, such as cuda [default: cpu].")] = None
    on_nonfinite: Annotated[
        Literal["raise", "warn", "allow"], typer.Option(help="What to do with NaN and infinity.")
    ] = "raise"
    recheck: Annotated[
        Literal["exact", "close"],
        typer.Option(help="What may differ from examples that are there: nothing, or rounding."),
    ] = "exact"

    @classmethod
    def of(cls, context: typer.Context, values: dict[str, Any]) -> Inputs:
        """The inputs of a command.

        Raises:
            ArgumentError: the model is missing, there is not exactly one source, or an option means nothing for it.
        """
        found = cls(**values)
        if found.model is None:
            raise ArgumentError("it is missing", where="--model", remedy="Give it, or a TOML file with --config.")
        if [found.text, found.tokens, found.images].count(None) != 2:
            raise ArgumentError("exactly one of these three is needed", where="--text, --tokens, --images")
        for name in _OF_IMAGES if found.images is None else _OF_TEXTS:
            source = context.get_parameter_source(name)
            if source is not None and source.name != "DEFAULT":
                kind = "images" if found.images is None else "texts"
                option = f"--{name.replace('_', '-')}"
                raise ArgumentError(f"this is an option for {kind}", where=option, remedy="Leave it out.")
        if found.images is None and found.context is None:
            raise ArgumentError("texts need it: the most tokens that the model sees at once", where="--context")
        return found

    @property
    def dataset(self) -> str:
        """The address of the data; of a local file it is the shortest path, so `./t.jsonl` is `t.jsonl`."""
        given = self.text or self.tokens or self.images or ""
        return given if "://" in given or "::" in given else os.path.normpath(given)

    def load(self) -> tuple[torch.nn.Module, ExampleSource]:
        """The model and its source; mistakes in the options are refused before a model is loaded."""
        return self._texts() if self.images is None else self._images(self.images)

    def _texts(self) -> tuple[torch.nn.Module, Texts]:
        from saev_store.record import Texts, load_language_model
        from saev_store.sources import TextFile, open_source

        bos: Any = int(self.bos) if self.bos.isdecimal() else None if self.bos == "none" else self.bos

        def texts(documents: object, tokenizer: object) -> Texts:
            return Texts(
                documents, tokenizer, context=self.context or 0, layout=self.layout, bos=bos,
                pack=self.pack, batch_size=self.batch_size or 8, example_tokens=self.example_tokens, text_key=self.text_key,
            )  # fmt: skip

        texts([[0]], None)  # the options alone
        if self.text is not None:
            documents: Source[object] = TextFile(self.text, text_key=self.text_key)
        else:
            documents = open_source(self.tokens or "")
        model, tokenizer = load_language_model(
            self.model or "", tokenizer=self.tokenizer, needs_tokenizer=self.text is not None or bos == "tokenizer",
            dtype=self.compute_dtype, attention=self.attention,
        )  # fmt: skip
        return model, texts(documents, tokenizer)

    def _images(self, images: str) -> tuple[torch.nn.Module, Images]:
        from saev_store.record import Images, load_image_processor, load_vision_model

        name = self.model or ""
        source = Images(
            images, self.batch_size or 32, processor=load_image_processor(self.processor or name),
            masks=self.masks, image_key=self.image_key,
        )  # fmt: skip
        model = load_vision_model(name, dtype=self.compute_dtype, attention=self.attention)
        return model, source


def _with_inputs(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes `**inputs`, with the options of `Inputs` in their place."""
    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    shared = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(Inputs, eval_str=True).parameters.values()
    ]
    command.__dict__["__signature__"] = inspect.Signature([*own, *shared])
    return command


@_with_inputs
def record(
    context_: typer.Context,
    to: Annotated[
        str, typer.Option(metavar="URL", help="Folder in which the store's folder is created: a path or URL.")
    ],
    layers: Annotated[
        str, typer.Option(metavar="3,6,-1", help="Numbers of the blocks to record, from 0; -1 is the last one.")
    ],
    hook_points: Annotated[
        str, typer.Option(metavar="resid_post,mlp_out", help="Where in each block to record.")
    ] = "resid_post",
    dtype: Annotated[Dtype | None, typer.Option(help="Dtype of the store [default: that of the computation].")] = None,
    max_tokens_per_shard: Annotated[
        int | None, typer.Option(help="The most vectors of a shard [default: at least 32 shards, each up to 1 GiB].")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue an unfinished recording, or refuse to.")
    ] = True,
    part: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Record the I-th of N parts, from 1."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what it would take; exit code 1 if it does not fit the disk.")
    ] = False,
    as_json: AsJson = False,
    option: Options = None,
    progress: Progress = None,
    **inputs: object,
) -> None:
    """Record a language model over texts, or a vision model over images; the same command continues an interrupted recording.

    A finished recording of the same options is not made again. With --part several processes record one store, each its own
    shards: 1/4 to 4/4 for four processes. The last one publishes it. Any other number of them can continue.
    """
    from saev_store.record import RecordedPart, estimate_recording
    from saev_store.record import record as record_source

    given, storage, blocks = (
        Inputs.of(context_, inputs),
        storage_options(option),
        integers(layers, where="--layers"),
    )
    of_ranks = None if part is None else _parse_part(part)
    open_transport(to, storage).close()  # a wrong address is an error before a model is loaded
    model, source = given.load()
    if dry_run:
        found = estimate_recording(
            model, source, to, layers=blocks, hook_points=hook_points.split(","), dtype=dtype, ckpt=given.model,
            dataset=given.dataset, device=given.device, max_tokens_per_shard=max_tokens_per_shard, storage_options=storage,
            part=of_ranks,
        )  # fmt: skip
        emit_json(found.to_dict()) if as_json else emit(str(found))
        raise typer.Exit(int(found.fits is False))
    store = record_source(
        model, source, to, layers=blocks, hook_points=hook_points.split(","), dtype=dtype, ckpt=given.model,
        dataset=given.dataset, device=given.device, max_tokens_per_shard=max_tokens_per_shard, storage_options=storage,
        part=of_ranks, resume=resume, exist_ok=True, recheck=given.recheck, on_nonfinite=given.on_nonfinite,
        progress=progress,
    )  # fmt: skip
    if isinstance(store, RecordedPart):
        _emit_part(store, as_json=as_json)
    elif as_json:
        emit_json({
            "url": store.url,
            "shape": store.shape,
            "dtype": store.metadata.dtype,
            "layers": store.layers,
            "nbytes": store.nbytes,
        })  # fmt: skip
    else:
        emit(store.url)


def _parse_part(text: str) -> Part:
    """The part of an option `--part 3/16`, where parts count from 1."""
    number, slash, n = text.partition("/")
    if slash and number.isdecimal() and n.isdecimal() and 1 <= int(number) <= int(n):
        return int(number) - 1, int(n)
    raise ArgumentError(
        f"{text!r} is not a part",
        where="--part",
        remedy="Write 1/4 to 4/4 for four processes.",
    )


def _emit_part(done: RecordedPart, *, as_json: bool) -> None:
    """Print the state of a store that other processes have not finished: its address, and the examples that are left."""
    rank, n = done.part
    n_left = sum(end - first for first, end in done.missing)
    if as_json:
        emit_json({
            "url": done.url,
            "published": False,
            "part": f"{rank + 1}/{n}",
            "examples_left": [list(found) for found in done.missing],
        })  # fmt: skip
        return
    print(f"part {rank + 1}/{n} is recorded; {n_left} examples of others are not recorded yet", file=sys.stderr)
    emit(done.url)


@_with_inputs
def repair(
    context_: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="The folder of the store.")],
    as_json: AsJson = False,
    option: Options = None,
    progress: Progress = None,
    **inputs: object,
) -> None:
    """Record again what a recording has lost: files that are missing, short or damaged, and no others.

    Takes the options of the recording: its TOML file, or options. Layers, hook points, dtype and the size of shards are those of
    the store. Anything else than the recorded model and data is refused, and the message names what differs.
    """
    from saev_store.record import repair as repair_recording
    from saev_store.store import ShardStore

    storage = storage_options(option)
    data = ShardStore.open(url, storage, damaged_ok=True).metadata.data
    if not isinstance(data, str) and not (is_mapping(data) and "recording" in data):
        raise ResumeError(
            "only a store that `saev-store record` has made can be recorded again",
            where=url,
            remedy="Copy the lost files from another copy, or pass vectors to store.repair() in Python.",
        )
    given = Inputs.of(context_, inputs)
    model, source = given.load()
    done = repair_recording(
        model, source, url, device=given.device, storage_options=storage, recheck=given.recheck,
        on_nonfinite=given.on_nonfinite, progress=progress,
    )  # fmt: skip
    emit_json(done.to_dict()) if as_json else emit(str(done))


def finalize(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The folder of the unfinished store, as `record --part` prints it.")
    ],
    as_json: AsJson = False,
    option: Options = None,
) -> None:
    """Publish a store whose parts are all recorded; if they are not, show which examples are missing.

    The last process of `record --part` publishes by itself. This is for when it was killed just then, or could not.
    """
    from saev_store.record import finalize as publish

    store = publish(url, storage_options=storage_options(option))
    emit_json({"url": store.url, "published": True, "shape": store.shape}) if as_json else emit(store.url)


def demo(
    out: Annotated[Path, typer.Option(help="Folder in which the stores and the picture are made.")] = Path("saev-demo"),
    device: Annotated[
        str | None, typer.Option(help="Device on which the models run, such as cuda [default: cpu].")
    ] = None,
    as_json: AsJson = False,
    progress: Progress = None,
) -> None:
    """Record a vision transformer over photographs, validate the store, and plot it.

    A second run with the same --out uses what is finished, and continues an interrupted recording.
    """
    from saev_store.record import run_demo

    def say(line: str) -> None:
        print(line, file=sys.stderr) if as_json else emit(line)

    result = run_demo(out, device=device, progress=progress, say=say)
    if as_json:
        emit_json(result.to_dict())
    else:
        emit(f"finished   in {result.seconds:.0f} s; inspect them with: saev-store ls {out}")
    if not result.ok:
        raise typer.Exit(1)
