"""What tells a recording from another one: the weights, the configuration, and what else decides the bits of a forward pass."""

# transformers and torch have no types for some of what is asked here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, cast

from saev_store.record._adapters import dtype_of, parameter_of
from saev_store.record._functions_digest import adapter_digest, hooks_of
from saev_store.record._modules_digest import modules_digest
from saev_store.record._settings import LIBRARIES
from saev_store.record._weights_digest import tensor_classes, weights_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from saev_store.record._adapters import Adapter
    from saev_store.record._recorder import Recorder

#: Packages that compute.
_PACKAGES = ("torch", "transformers", "tokenizers")
#: What a configuration says that no vector depends on, or that is said elsewhere.
_IDLE = {
    "_name_or_path", "_commit_hash", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "id2label",
    "label2id", "problem_type", "return_dict", "output_attentions", "output_hidden_states", "bos_token_id", "eos_token_id",
    # Of TransformerLens.
    "device", "n_devices", "model_name", "tokenizer_name", "init_mode", "init_weights", "seed", "default_prepend_bos",
    "tokenizer_prepends_bos",
}  # fmt: skip


#: Fields of adapters that decide how the model is called, and which tokens are recorded.
_CALL = ("keywords", "batch_axis", "patch_px", "n_special", "cls_first", "patchify")


def describe_recording(recorder: Recorder, identity: Mapping[str, object]) -> dict[str, object]:
    """What decides the vectors beside the examples, in plain JSON types: `data["recording"]` of the metadata.

    Args:
        recorder: Has the model, where it will run.
        identity: What the source adds: the size of batches, for example.
    """
    import torch

    adapter, parameter = recorder.adapter, parameter_of(recorder.adapter.model)
    model = adapter.model
    names = {id(module): name for name, module in cast("Iterable[tuple[str, torch.nn.Module]]", model.named_modules())}
    points = {name: adapter.points[name] for name in recorder.hook_points}
    config = getattr(model, "config", None) or getattr(model, "cfg", None)
    classes = {type(module) for module in model.modules()} | tensor_classes(model)
    libraries = {kind.__module__.partition(".")[0] for kind in classes}
    precision = torch.get_float32_matmul_precision()
    packages = [*_PACKAGES, *(name for library, name in LIBRARIES.items() if library in libraries)]
    return {
        "model": {
            "class": type(model).__name__,
            "weights": {"algorithm": "xxh3_128", "digest": weights_digest(model)},
            "config": config_digest(config),
            "modules": modules_digest(model),
            "hooks": hooks_of(model),
            "blocks": [names[id(adapter.blocks[depth])] for depth in recorder.depths],
            "hook_points": {name: f"{point.side} of {point.path or 'the block'}" for name, point in points.items()},
        },
        "call": describe_call(adapter),
        "computation": {
            "dtype": str(dtype_of(adapter)).removeprefix("torch."),
            "autocast": autocast_dtypes(model),
            "attention": getattr(config, "_attn_implementation", None),
            "device": parameter.device.type,
            **({} if precision == "highest" else {"float32_matmul_precision": precision}),
        },
        "source": dict(identity),
        "packages": {name: found for name in packages if (found := _version(name)) is not None},
    }


def describe_call(adapter: Adapter) -> dict[str, object]:
    """How an adapter calls its model, and which tokens it takes: fields that no other part of the metadata tells."""
    own = adapter_digest(adapter)
    chosen: dict[str, object] = {name: getattr(adapter, name) for name in _CALL if hasattr(adapter, name)}
    if "patch_px" in chosen:
        chosen["patch_px"] = list(cast("Sequence[int]", chosen["patch_px"]))
    return chosen if own is None else {**chosen, "class": type(adapter).__qualname__, "digest": own}


def autocast_dtypes(model: torch.nn.Module) -> dict[str, str]:
    """The dtype that `torch.autocast` has in this thread for each type of device that the model is on; none without it."""
    import torch

    kinds = {parameter.device.type for parameter in model.parameters()}
    return {
        kind: str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        for kind in sorted(kinds)
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    }


def config_digest(config: object) -> str | None:
    """SHA-256 of what a configuration of `transformers` says of the computation; None where there is none."""
    to_dict: Callable[[], Mapping[str, object]] | None = getattr(config, "to_dict", None)
    if to_dict is None:
        return None
    said = {key: value for key, value in to_dict().items() if key not in _IDLE}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
