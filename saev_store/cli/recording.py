"""The command `record`: a language model over texts or a vision model over images, from flags, a TOML file, or both."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saev_store.cli._common import (
    AsJson,
    Pairs,
    Progress,
    StorageOptions,
    check_destination,
    emit,
    emit_json,
    storage_options,
)
from saev_store.cli._plan import (
    Dtype,
    Layout,
    OnBadImage,
    OnNonfinite,
    Plan,
    check_source,
    naming_source,
    plan_of,
)
from saev_store.cli.finishing import emit_part, parse_part
from saev_store.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from saev_store import ShardStore
    from saev_store.record import ExampleSource, Images, Part, RecordedPart, RecordingEstimate, RecordingReport, Texts
    from saev_store.sources import Source


def record(
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with these options as keys; flags take precedence.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model: a folder, or a name on the hub, such as gpt2. Needed.")
    ] = None,
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
        str | None,
        typer.Option(help="Processor of the images: a folder, or a name on the hub [default: that of the model]."),
    ] = None,
    image_key: Annotated[
        str | None,
        typer.Option(help="The part of an Energon sample that is its image, such as jpg [default: the only one]."),
    ] = None,
    masks: Annotated[
        str | None, typer.Option(metavar="URL", help="Folder of segmentation masks with the names of the images.")
    ] = None,
    on_bad_image: Annotated[
        OnBadImage | None, typer.Option(help="What to do with images that do not decode [default: raise].")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Folder in which the store's folder is created: a path or URL. Needed."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(metavar="3,6,-1", help="Numbers of the blocks to record, from 0; -1 is the last one. Needed."),
    ] = None,
    hook_points: Annotated[
        str | None,
        typer.Option(
            metavar="resid_post,mlp_out",
            help="Where in each block to record, such as resid_post,mlp_out [default: resid_post].",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Most tokens of a row that the model sees at once, such as 128. Needed for texts."),
    ] = None,
    layout: Annotated[Layout | None, typer.Option(help="How texts become examples [default: window].")] = None,
    pack: Annotated[
        bool | None,
        typer.Option(
            "--pack/--no-pack",
            help="Fill windows across the ends of documents, or begin each document anew [default: --no-pack].",
        ),
    ] = None,
    bos: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Token in front of each row: an id, tokenizer or none [default: tokenizer]."),
    ] = None,
    example_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an example of --layout stream [default: that of --context].")
    ] = None,
    text_key: Annotated[
        str | None, typer.Option(help="Key of the text in a JSONL file or an Energon sample [default: text].")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Tokenizer of the texts: a folder, or a name on the hub [default: that of the model]."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Rows that run through the model at once [default: 8; of images 32].")
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Dtype of the store [default: that of the computation].")] = None,
    compute_dtype: Annotated[
        Dtype | None, typer.Option(help="Dtype in which the model computes [default: that of its file].")
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="eager",
            help="Implementation of attention in transformers, such as eager or sdpa [default: the library's choice].",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device of the model, such as cuda [default: cpu].")] = None,
    max_tokens_per_shard: Annotated[
        int | None, typer.Option(help="The most vectors of a shard [default: at least 32 shards, each up to 1 GiB].")
    ] = None,
    on_nonfinite: Annotated[
        OnNonfinite | None, typer.Option(help="What to do with NaN and infinity [default: raise].")
    ] = None,
    resume: Annotated[
        bool | None,
        typer.Option("--resume/--no-resume", help="Continue an unfinished recording, or refuse to [default: resume]."),
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
    of_ranks = None if part is None else parse_part(part)
    storage, reports = storage_options(options, option), list["RecordingReport"]()
    check_destination(plan.to, storage, where="to")
    model_and_source = load(plan, progress=progress)
    if dry_run:
        with naming_source(plan):
            found = _estimate(plan, *model_and_source, storage, of_ranks)
        emit_json(found.to_dict()) if as_json else emit(str(found))
        raise typer.Exit(int(found.fits is False))
    try:
        with naming_source(plan):
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
        done, semicolon, waits = str(reports[-1]).partition(";")
        print(f"{done}, at {store.url}{semicolon}{waits}", file=sys.stderr)
        emit(store.url)


def load(plan: Plan, *, progress: bool | None) -> tuple[torch.nn.Module, ExampleSource]:
    """The model and its source; what is wrong without a model is refused before one is loaded."""
    check_source(plan)
    with naming_source(plan):
        return (_load_texts if plan.images is None else _load_images)(plan, progress=progress)


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
        plan.model, tokenizer=plan.tokenizer, needs_tokenizer=plan.text is not None or plan.bos == "tokenizer",
        dtype=plan.compute_dtype, attention=plan.attention, progress=progress,
    )  # fmt: skip
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
    plan: Plan, model: torch.nn.Module, source: ExampleSource, storage: dict[str, object] | None, part: Part | None
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
        dataset=plan.dataset,
        device=plan.device,
        max_tokens_per_shard=plan.max_tokens_per_shard,
        storage_options=storage,
        part=part,
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
        dataset=plan.dataset,
        device=plan.device,
        max_tokens_per_shard=plan.max_tokens_per_shard,
        storage_options=storage,
        part=part,
        resume=plan.resume,
        exist_ok=True,
        on_nonfinite=plan.on_nonfinite,
        progress=progress,
        on_report=on_report,
    )
