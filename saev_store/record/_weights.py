"""The demo's models: DINOv2 ViT-S/14 with pretrained weights where available, and models with seeded random weights."""

# transformers has no types for models made from a configuration.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from saev_store._runtime.optional import need

if TYPE_CHECKING:
    import torch

CKPT = "facebook/dinov2-small"
SEED = 17


@dataclass(frozen=True)
class DemoModel:
    """A model and the description of its weights.

    Attributes:
        model: The transformer, in evaluation mode.
        title: Name for display.
        ckpt: Name for the metadata. For random weights it includes a digest of their values, so that other random weights
            (of another release of torch) have another store.
        pretrained: Whether the weights are pretrained.
        note: Origin of the weights, one sentence.
    """

    model: torch.nn.Module
    title: str
    ckpt: str
    pretrained: bool
    note: str


def load_model(*, pretrained: bool | None = None, timeout_s: float = 4.0) -> DemoModel:
    """DINOv2 ViT-S/14 with weights from the local cache, else from the hub, else random.

    Args:
        pretrained: False uses random weights without looking for others.
        timeout_s: Seconds after which the hub counts as unreachable.

    Raises:
        MissingDependencyError: torch or transformers is not installed.
    """
    need("torch", install="saev-store[demo]")
    need("transformers", install="saev-store[demo]")
    from transformers import Dinov2Config, Dinov2Model
    from transformers.utils import logging

    reason = "as requested"
    if pretrained is not False:
        logging.disable_progress_bar()
        for local_files_only in (True, False):
            reason = "" if local_files_only else hub_refusal(timeout_s)
            if reason:
                break
            try:
                model = Dinov2Model.from_pretrained(CKPT, local_files_only=local_files_only, use_safetensors=True)
            except (OSError, ValueError) as error:
                reason = f"{CKPT} could not be loaded: {str(error).splitlines()[0]}"
                continue
            return DemoModel(model.eval(), CKPT, CKPT, pretrained=True, note=f"pretrained weights of {CKPT}")
    # The same architecture as the checkpoint.
    config = Dinov2Config(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, image_size=518, patch_size=14)
    return random_model(config, name="dinov2-small", reason=reason)


def random_model(config: object, *, name: str, reason: str, dtype: torch.dtype | None = None) -> DemoModel:
    """A model of this configuration with seeded random weights, as `dtype` if given; torch's random state is not changed."""
    import torch
    from transformers import AutoModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModel.from_config(config).eval().to(dtype)
    digest = xxhash.xxh3_64()
    for value in model.state_dict().values():
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    note = f"random weights of seed {SEED} ({reason})"
    ckpt = f"{name}-random-{digest.hexdigest()}"
    return DemoModel(model, f"{name} with random weights", ckpt, pretrained=False, note=note)


def hub_refusal(timeout_s: float) -> str:
    """The reason why weights cannot be downloaded, or "" if the hub answers.

    Asks in a separate thread: the client's time-out does not cover name resolution.
    """
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    answer: list[str] = []

    def ask() -> None:
        try:
            huggingface_hub.model_info(CKPT, timeout=timeout_s)
        except Exception as error:  # the demo continues with random weights
            answer.append(f"the hub cannot be reached: {type(error).__name__}")
        else:
            answer.append("")

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout_s)
    return answer[0] if answer else f"the hub did not answer within {timeout_s:g} s"
