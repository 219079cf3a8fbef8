"""What `-h` shows beside the options of a command: groups of commands and options, and examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Shown(Protocol):
    """The part of click's parameters that help is made of."""

    name: str | None
    opts: Sequence[str]
    help: str | None
    rich_help_panel: str | None


class Explained(Protocol):
    """The part of click's commands that help is made of."""

    params: Sequence[Shown]
    help: str | None
    short_help: str | None
    epilog: str | None
    rich_help_panel: str | None


#: Groups of commands, in the order of the main help.
_COMMANDS = {
    "Look at stores": ("info", "estimate", "ls", "head", "validate", "stats", "view"),
    "Record and import": ("record", "repair", "finalize", "import", "demo"),
    "Copy and clean": ("copy", "clean"),
    "Other formats": ("convert", "prepare"),
    "Help": ("docs",),
}
#: Groups of options by their names in Python; others are in "Options".
_OPTIONS = {
    "Source": (
        "text", "tokens", "images", "processor", "image_key", "masks", "on_bad_image", "text_key", "source", "seed",
    ),
    "Model": ("model", "tokenizer", "layers", "hook_points", "compute_dtype", "attention", "device", "batch_size"),
    "Rows of texts": ("context", "layout", "pack", "bos", "example_tokens"),
    "Result": ("to", "dtype", "max_tokens_per_shard"),
    "Writing": ("resume", "part", "verify", "overwrite", "on_nonfinite", "on_overflow"),
    "Load": ("max_mb_per_s", "max_requests_per_s", "scheduler", "num_workers"),
    "Output": ("as_json", "progress", "dry_run"),
    "File systems": ("options", "option", "dst_options", "dst_option", "out_options", "engine"),
}  # fmt: skip
#: Commands whose options are too few for groups of their own, or mean something else by these names.
_PLAIN_GROUPS = {"Output", "File systems", "Load"}
_EXAMPLES = {
    "info": ("info /scratch/shards/1a2b3c4d", "info s3://lab/shards/1a2b3c4d -o anon=true --json"),
    "estimate": ("estimate s3://lab/shards/1a2b3c4d", "estimate /scratch/shards/1a2b3c4d --dtype bfloat16"),
    "ls": ("ls /scratch/shards", "ls s3://lab/shards --json"),
    "head": ("head /scratch/shards/1a2b3c4d --layer 13 -n 3", "head URL --token-array token_ids"),
    "validate": ("validate /scratch/shards/1a2b3c4d", "validate s3://lab/shards/1a2b3c4d --deep"),
    "stats": ("stats /scratch/shards/1a2b3c4d", "stats s3://lab/shards/1a2b3c4d --sample 1000 --no-save"),
    "view": ("view /scratch/shards/1a2b3c4d --open", "view URL OTHER --tokenizer tokenizer.json"),
    "record": (
        "record --model gpt2 --text t.txt --context 64 --layers 6 --to out",
        "record --model VIT_FOLDER --images photos --layers 3,-1 --to out",
        "record --config recording.toml --part 1/4",
    ),
    "repair": ("repair /scratch/shards/1a2b3c4d --config recording.toml", "repair URL --model gpt2 --text c.jsonl --context 128"),
    "finalize": ("finalize /scratch/shards/1a2b3c4d",),
    "import": ("import cache --to /scratch/shards --family gpt2", "import hs --to out --family qwen3 --ckpt q --layer-ids 3 --context 512"),
    "demo": ("demo", "demo --out /scratch/demo --device cuda"),
    "copy": ("copy /scratch/shards/1a2b3c4d s3://lab/shards", "copy SRC DST --layers 13 --dtype bfloat16"),
    "clean": ("clean /scratch/shards --dry-run", "clean s3://lab/shards --older-than 2d --engine fsspec"),
    "convert": ("convert docs.idx docs.batch --seq-len 2048 --batch-size 8", "convert energon texts.idx --tokenizer bytes"),
    "prepare": ("prepare /data/photos --split 8,1,1 --sample-type CrudeWebdataset",),
    "docs": ("docs", "docs --no-open"),
}  # fmt: skip


def explain(commands: Mapping[str, Explained], *, is_drawn: bool) -> None:
    """Give commands their groups and examples.

    Args:
        commands: The commands by name; they are changed.
        is_drawn: Help is drawn, and takes markup: what is not meant so is escaped.
    """
    for name, command in commands.items():
        command.rich_help_panel = next(title for title, names in _COMMANDS.items() if name in names)
        examples = [f"saev-store {example}" for example in _EXAMPLES[name]]
        shared = {
            title for title in _OPTIONS if name in {"record", "repair", "import", "copy"} or title in _PLAIN_GROUPS
        }
        for parameter in command.params:
            if parameter.opts[0].startswith("-"):
                titles = (title for title in _OPTIONS if title in shared and parameter.name in _OPTIONS[title])
                parameter.rich_help_panel = next(titles, None)
        if is_drawn:
            _escape(command)
            command.epilog = "\n\n".join(["Examples:", *(f"  {_escaped(example)}" for example in examples)])
        else:
            command.epilog = "\n".join(["\b", "Examples:", *(f"  {example}" for example in examples)])


def _escape(command: Explained) -> None:
    for parameter in command.params:
        parameter.help = _escaped(parameter.help or "")
    command.help, command.short_help = _escaped(command.help or ""), _escaped(command.short_help or "")


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
