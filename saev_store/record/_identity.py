"""Identity of a recording: the weights, the configuration, the names of foreign hooks, and the source."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeGuard, cast

import xxhash

from saev_store.errors import ArgumentError, kind_of
from saev_store.record._adapters import dtype_of, parameter_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from saev_store.record._recorder import Recorder

#: Packages that compute.
_PACKAGES = ("torch", "transformers", "tokenizers")
#: Folders of the hub's cache and of a trainer, whose names are ambiguous without the folders above.
_IN_CACHE = re.compile(r"models--(.+)/snapshots/[^/]+")
_OF_TRAINER = re.compile(r"[^/]+/checkpoint-[0-9]+")
#: Hooks of these packages only look on, or place weights.
_LOOKING_ON = {"transformers", "saev_store", "accelerate"}
#: Keys of a configuration that no vector depends on, or that are recorded elsewhere.
_IDLE = {
    "_name_or_path", "_commit_hash", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "id2label",
    "label2id", "problem_type", "return_dict", "output_attentions", "output_hidden_states", "bos_token_id", "eos_token_id",
    # Of TransformerLens.
    "device", "n_devices", "model_name", "tokenizer_name", "init_mode", "init_weights", "seed", "default_prepend_bos",
    "tokenizer_prepends_bos",
}  # fmt: skip


def describe_recording(recorder: Recorder, source: Mapping[str, object]) -> dict[str, object]:
    """Identity of a recording in plain JSON types: `data["recording"]` of the metadata."""
    adapter = recorder.adapter
    model = adapter.model
    names = {id(module): name for name, module in _modules(model)}
    points = {name: adapter.points[name] for name in recorder.hook_points}
    config = getattr(model, "config", None) or getattr(model, "cfg", None)
    return {
        "model": {
            "class": type(model).__name__,
            "weights": {"algorithm": "xxh3_128", "digest": weights_digest(model)},
            "config": config_digest(config),
            "hooks": _foreign_hooks(model),
            "blocks": [names[id(adapter.blocks[depth])] for depth in recorder.depths],
            "hook_points": {name: f"{point.side} of {point.path or 'the block'}" for name, point in points.items()},
        },
        "computation": {
            "dtype": str(dtype_of(adapter)).removeprefix("torch."),
            "attention": getattr(config, "_attn_implementation", None),
            "device": parameter_of(model).device.type,
        },
        "source": dict(source),
        "packages": {name: version(name) for name in _PACKAGES if find_spec(name)},
    }


def repairable(there: Mapping[str, object], here: Mapping[str, object]) -> dict[str, object]:
    """The identity that a store has, with the weights, the configuration, the hook points and the source of this call."""
    # The rest, which other releases wrote in other ways, is left to the vectors that are computed again.
    models, sources = ([cast("Mapping[str, object]", found.get(key) or {}) for found in (there, here)] for key in ("model", "source"))  # fmt: skip
    compared = {name: models[1][name] for name in ("weights", "config", "hook_points")}
    return {**there, "model": {**models[0], **compared}, "source": {**sources[0], **sources[1]}}


def config_digest(config: object) -> str | None:
    """SHA-256 of the keys of a configuration of `transformers` that the computation depends on; None if there is none."""
    to_dict: Callable[[], Mapping[str, object]] | None = getattr(config, "to_dict", None)
    if to_dict is None:
        return None
    kept = {key: value for key, value in to_dict().items() if key not in _IDLE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def weights_digest(model: torch.nn.Module) -> str:
    """xxh3_128 over names, dtypes, shapes and bytes of all tensors of a model, also of buffers that are not saved and of attributes."""
    import torch

    attributes = {
        f"{path}.{name} (attribute)": value
        for path, module in _modules(model)
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and not (name.startswith("_") or "cache" in name or name == "rope_deltas")
    }
    state = cast("Mapping[str, object]", model.state_dict())
    digest = xxhash.xxh3_128()
    for name, value in sorted({**attributes, **dict(model.named_buffers()), **state}.items()):
        if not _is_plain(value):
            remedy = "Record the model before it was packed, or append what it gives: ShardStore.create."
            raise ArgumentError(f"{name} is {kind_of(value)}, which has no plain numbers", where="model", remedy=remedy)
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(cast("npt.NDArray[np.uint8]", flat.view(torch.uint8).numpy()).data)
    return digest.hexdigest()


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Return True for a tensor that is its numbers: strided, in memory, not quantised, and not made of other tensors."""
    import torch

    if not isinstance(value, torch.Tensor) or hasattr(value, "__tensor_flatten__"):
        return False
    return value.layout == torch.strided and not (value.is_quantized or value.is_meta)


def _foreign_hooks(model: torch.nn.Module) -> dict[str, list[str]]:
    """Names of the forward hooks that a user has added, by the path of the module."""
    found: dict[str, list[str]] = {}
    for path, module in _modules(model):
        for kind in ("forward_pre_hook", "forward_hook"):
            for hook in cast("Mapping[int, object]", getattr(module, f"_{kind}s")).values():
                if str(getattr(hook, "__module__", "")).partition(".")[0] not in _LOOKING_ON:
                    name = getattr(hook, "__qualname__", type(hook).__qualname__)
                    found.setdefault(path or "the model", []).append(f"{kind} {name}")
    return found


def _modules(model: torch.nn.Module) -> Iterable[tuple[str, torch.nn.Module]]:
    return cast("Iterable[tuple[str, torch.nn.Module]]", model.named_modules())


def name_of(given: str) -> str:
    """The name of a folder that is there, however its path is written; anything else, such as a name on the hub, as it is given."""
    if not given or not os.path.isdir(given):
        return given
    parts = os.path.abspath(given).replace(os.sep, "/").split("/")
    if found := _IN_CACHE.fullmatch("/".join(parts[-3:])):
        return found[1].replace("--", "/")
    last_two = "/".join(parts[-2:])
    return last_two if _OF_TRAINER.fullmatch(last_two) else parts[-1] or given
