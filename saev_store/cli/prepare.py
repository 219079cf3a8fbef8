"""`saev-store prepare`: makes an Energon data set of a folder of tars."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

import typer

from saev_store.cli._common import AsJson, Pairs, Progress, StorageOptions, emit, emit_json, storage_options, told
from saev_store.cli._ends import say_done
from saev_store.errors import ArgumentError, SaevStoreError

if TYPE_CHECKING:
    from saev_store.transport import Transport

_MAX_SHOWN = 12
_AnswerT = TypeVar("_AnswerT")


def prepare(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The folder of tars: a path, or any fsspec URL.")],
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            "--split-ratio",
            metavar="N,N,N",
            help="Ratio of train, val and test, such as 8,1,1. Needed, or --split-parts.",
        ),
    ] = None,
    split_parts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:REGEX",
            help="Instead of --split: tars of a split, such as 'train:shards/train_.*'; may be repeated.",
        ),
    ] = None,
    exclude: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Exclude tars whose path contains a match.")
    ] = None,
    sample_type: Annotated[
        str | None,
        typer.Option(help="Class of a sample, such as CaptioningSample or VQASample; CrudeWebdataset has raw parts."),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            "--field",
            metavar="FIELD=PART",
            help="The part that is a field, such as image=jpg or caption=json[caption]; may be repeated.",
        ),
    ] = None,
    field_map: Annotated[
        str | None, typer.Option(metavar="JSON", help='The fields as one JSON object, such as \'{"image": "jpg"}\'.')
    ] = None,
    num_workers: Annotated[
        int | None, typer.Option(min=1, help="Number of processes that read tars [default: depends on the tars].")
    ] = None,
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="Ask for options that are missing.")] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Prepare the data set again; without a split, split.yaml is kept."),
    ] = False,
    force_overwrite: Annotated[
        bool,
        typer.Option("--force-overwrite", hidden=True, help="The name that Energon's own command has for --overwrite."),
    ] = False,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
    progress: Progress = None,
) -> None:
    """Index and split tars, and write .nv-meta beside them: an Energon data set. The tars are not changed."""
    from saev_store.sources.energon.prepare import prepare as prepare_folder
    from saev_store.transport import open_transport

    transport = open_transport(path, storage_options(options, option))
    fields = _fields(field, field_map)
    if interactive:
        _show(transport, exclude)
        if split is None and not split_parts:
            split, split_parts = _ask_split()
        if sample_type is None:
            sample_type = _ask_sample_type()
        fields = fields or _ask_fields(sample_type)
    made = prepare_folder(
        path,
        transport=transport,
        split=split,
        split_parts=split_parts or (),
        exclude=exclude,
        sample_type=sample_type,
        field_map=fields,
        num_workers=num_workers,
        overwrite=overwrite or force_overwrite,
        progress=progress,
    )
    say_done("indexed", "indexing", at=made.url, as_json=as_json)
    if not as_json:
        emit(str(made))
        return
    emit_json({
        "url": made.url,
        "n_samples": made.n_samples,
        "n_parts": made.n_parts,
        "part_names": list(made.part_names),
        "shards": dict(made.shards),
        "splits": {name: list(shards) for name, shards in made.splits.items()},
        "problems": told(made.problems),
    })  # fmt: skip


def _fields(pairs: list[str] | None, text: str | None) -> dict[str, str] | None:
    fields: dict[str, str] = {}
    if text is not None:
        try:
            parsed = cast("object", json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"{text!r} is not JSON ({error})", where="--field-map") from None
        if not isinstance(parsed, dict) or any(
            not isinstance(part, str) for part in cast("dict[str, object]", parsed).values()
        ):
            raise ArgumentError(f"{text!r} is not an object of strings", where="--field-map")
        fields.update(cast("dict[str, str]", parsed))
    for pair in pairs or ():
        name, equals, part = pair.partition("=")
        if not name or not equals or not part:
            raise ArgumentError(
                f"{pair!r} is not FIELD=PART", where="--field", remedy="Write for example --field image=jpg."
            )
        fields[name] = part
    return fields or None


def _show(transport: Transport, exclude: str | None) -> None:
    """Print the tars, and the parts of the first ones' samples, to standard error."""
    from saev_store.sources.energon.prepare import find_tars
    from saev_store.sources.energon.tars import Scan

    tars, _ = find_tars(transport, exclude=exclude)
    samples = islice(Scan.of(transport, tars[0][0]).samples(), _MAX_SHOWN)
    parts = dict.fromkeys(part.name for sample in samples for part in sample.parts)
    typer.echo(f"{len(tars):,} tars, from {tars[0][0]} to {tars[-1][0]}\nparts: {', '.join(parts) or 'none'}", err=True)


def _ask(question: str, parse: Callable[[str], _AnswerT], *, default: str | None = None) -> _AnswerT:
    """Ask on standard error until `parse` accepts the answer."""
    while True:
        try:
            answer = typer.prompt(question, default=default, show_default=bool(default), err=True)
        except typer.Abort as error:  # of Ctrl-C, or of the end of standard input
            if not isinstance(error.__context__, EOFError):
                raise
            raise ArgumentError(
                "standard input has ended, and a question is left", where="--interactive", remedy="Answer by options."
            ) from None
        try:
            return parse(answer)
        except SaevStoreError as error:
            typer.echo(str(error), err=True)


def _ask_split() -> tuple[str | None, list[str]]:
    """A ratio, or patterns."""
    from saev_store.sources.energon.split import SplitPlan

    def parse(answer: str) -> tuple[str | None, list[str]]:
        ratio, patterns = (None, [answer]) if ":" in answer else (answer, [])
        SplitPlan(ratio, patterns)
        return ratio, patterns

    def parse_more(answer: str) -> list[str]:
        SplitPlan(None, more := [answer] if answer else [])
        return more

    ratio, patterns = _ask("Ratio of train, val and test (8,1,1), or NAME:REGEX for one split", parse)
    while patterns and (more := _ask("Another NAME:REGEX (empty: no more)", parse_more, default="")):
        patterns += more
    return ratio, patterns


def _ask_sample_type() -> str:
    from saev_store.sources.energon.samples import CRUDE, SAMPLE_TYPES

    kinds = [CRUDE, *SAMPLE_TYPES]

    def parse(answer: str) -> str:
        kind = kinds[int(answer)] if answer.isdecimal() and int(answer) < len(kinds) else answer
        if kind not in kinds:
            raise ArgumentError(f"{answer!r} is none of them", where="--sample-type")
        return kind

    for number, kind in enumerate(kinds):
        typer.echo(f"  {number}  {kind}", err=True)
    return _ask("Sample type, by number or name", parse, default="0")


def _ask_fields(sample_type: str) -> dict[str, str]:
    """The part of each field of a sample type; raw parts have no fields."""
    from saev_store.sources.energon.field_map import FieldPath
    from saev_store.sources.energon.samples import SAMPLE_TYPES

    def parse(answer: str) -> str:
        if answer:
            FieldPath.parse(answer, where="part")
        return answer

    fields: dict[str, str] = {}
    kind = SAMPLE_TYPES.get(sample_type)
    if kind is None:
        return fields
    for name in [*kind.required(), *kind.optional()]:
        is_required = name in kind.required()
        hint = "such as jpg,png or json[caption]" + ("" if is_required else "; empty: leave it out")
        if part := _ask(f"Part for {name} ({hint})", parse, default=None if is_required else ""):
            fields[name] = part
    return fields
