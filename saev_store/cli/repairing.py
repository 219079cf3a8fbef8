"""The command `repair`: records again what a recording has lost, with the options of `record`."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, cast, get_args

import typer

from saev_store.cli._common import AsJson, Pairs, Progress, StorageOptions, emit, emit_json, storage_options
from saev_store.cli._ends import say_done
from saev_store.cli._plan import naming_source, plan_of
from saev_store.cli.recording import load, record

if TYPE_CHECKING:
    from collections.abc import Callable

#: Options of `record` that are about another store than the one that is there.
_LEFT_OUT = {"to", "resume", "part", "dry_run"}
#: Options of `record` that the store answers, and what their help says of it there.
_OF_THE_STORE = {"layers", "hook_points", "dtype", "max_tokens_per_shard"}
_OTHERWISE = re.compile(r"(?:\. Needed| \[default: [^]]*\])\.$")


class _Signed(Protocol):
    __signature__: inspect.Signature


def _with_options_of_record(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes `**flags`, with the options of `record` in their place: one list of them is enough."""
    own = inspect.signature(command, eval_str=True).parameters
    of_record = inspect.signature(record, eval_str=True).parameters
    shared = [
        _of_the_store(parameter) if name in _OF_THE_STORE else parameter
        for name, parameter in of_record.items()
        if name not in own and name not in _LEFT_OUT
    ]
    named = [parameter for parameter in own.values() if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    cast("_Signed", command).__signature__ = inspect.Signature([*named, *shared])
    return command


def _of_the_store(parameter: inspect.Parameter) -> inspect.Parameter:
    """An option of `record` with the help text that is true where there is a store."""
    kind, option = get_args(parameter.annotation)
    option = copy.copy(option)
    option.help = _OTHERWISE.sub(" [default: the store's].", option.help)
    return parameter.replace(annotation=Annotated[kind, option])


@_with_options_of_record
def repair(
    url: Annotated[str, typer.Argument(metavar="URL", help="The folder of the store.")],
    config: Annotated[
        Path | None, typer.Option(help="The TOML file of `record`, or one like it; flags take precedence.")
    ] = None,
    recheck: Annotated[
        Literal["exact", "close", "off"],
        typer.Option(help="What may differ from the first recording: nothing, rounding, or anything."),
    ] = "exact",
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
    progress: Progress = None,
    **flags: object,
) -> None:
    """Record again what a recording has lost: files that are missing, short or damaged, and no others.

    Takes the options of the recording: its TOML file, or flags. What the store says need not be said: layers, hook points, dtype
    and the size of shards. Anything else than what was recorded is refused, and the message names what differs.
    """
    from saev_store.record import repair as repair_recording
    from saev_store.store import ShardStore

    storage = storage_options(options, option)
    there = ShardStore.open(url, storage_options=storage, damaged_ok=True).metadata
    otherwise: dict[str, object] = {
        "layers": list(dict.fromkeys(there.layers)),
        "hook_points": list(dict.fromkeys(there.hook_points or ("resid_post",))),
        "dtype": there.layout.dtype,
        "max_tokens_per_shard": there.max_tokens_per_shard,
    }
    plan = plan_of(config, {**flags, "to": url}, otherwise)
    model, source = load(plan, progress=progress)
    with naming_source(plan):
        done = repair_recording(
            model,
            source,
            url,
            layers=plan.layers,
            hook_points=plan.hook_points,
            dtype=plan.dtype,
            max_tokens_per_shard=plan.max_tokens_per_shard,
            device=plan.device,
            storage_options=storage,
            recheck=recheck,
            on_nonfinite=plan.on_nonfinite,
            progress=progress,
        )
    say_done("repaired", "repairing", at=url, as_json=as_json, nothing="nothing is lost")
    if as_json:
        emit_json(done.to_dict())
    else:
        emit(str(done))
