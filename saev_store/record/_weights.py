"""The demo's model: DINOv2 ViT-S/14, trained where its weights can be had, else seeded random numbers; and which it is."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from saev_store.record._need import need

if TYPE_CHECKING:
    import torch

CKPT = "facebook/dinov2-small"
SEED = 17


@dataclass(frozen=True)
class DemoModel:
    """A model and what can honestly be said about it.

    Attributes:
        model: The vision transformer, in evaluation mode.
        title: Its name for people.
        ckpt: Its name for the metadata. Random weights carry a digest of their values, so that other random weights,
            made by another release of torch for example, never share a store.
        pretrained: Whether the weights were trained.
        note: One sentence: where the weights come from.
    """

    model: torch.nn.Module
    title: str
    ckpt: str
    pretrained: bool
    note: str


def load_model(*, pretrained: bool | None = None, timeout_s: float = 4.0) -> DemoModel:
    """DINOv2 ViT-S/14 with weights from the local cache, else from the hub, else random.

    Args:
        pretrained: False goes straight to random weights.
        timeout_s: How long the hub may take to answer before it counts as unreachable.

    Raises:
        MissingDependencyError: torch or transformers is not installed.
    """
    need("torch", package="torch", extra="demo")
    need("transformers", package="transformers", extra="demo")
    from transformers import Dinov2Config, Dinov2Model
    from transformers.utils import logging

    if pretrained is False:
        reason = "as asked for"
    else:
        logging.disable_progress_bar()
        reason = ""
        for local_files_only in (True, False):
            if not local_files_only:
                reason = hub_refusal(timeout_s)
            if reason:
                break
            try:
                model = Dinov2Model.from_pretrained(CKPT, local_files_only=local_files_only, use_safetensors=True)
            except (OSError, ValueError) as error:
                reason = "" if local_files_only else f"{CKPT} could not be loaded: {str(error).splitlines()[0]}"
                continue
            return DemoModel(model.eval(), CKPT, CKPT, pretrained=True, note=f"pretrained weights of {CKPT}")
    # The same architecture as the checkpoint.
    config = Dinov2Config(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, image_size=518, patch_size=14)
    return random_model(config, name="dinov2-small", reason=reason)


def random_model(config: object, *, name: str, reason: str) -> DemoModel:
    """A model of this configuration with seeded random weights; the caller's random state stays as it is."""
    import torch
    from transformers import AutoModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModel.from_config(config).eval()
    digest = xxhash.xxh3_64()
    for value in model.state_dict().values():
        digest.update(value.contiguous().numpy())
    note = f"random weights of seed {SEED} ({reason})"
    ckpt = f"{name}-random-{digest.hexdigest()}"
    return DemoModel(model, f"{name} with random weights", ckpt, pretrained=False, note=note)


def hub_refusal(timeout_s: float) -> str:
    """Why weights cannot be downloaded, or "" when the hub answers.

    The question is asked on a thread of its own, because a name server that drops packets is not bound by any time-out
    of the client.
    """
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "the hub is switched off by HF_HUB_OFFLINE"
    answer: list[str] = []

    def ask() -> None:
        try:
            huggingface_hub.model_info(CKPT, timeout=timeout_s)
        except Exception as error:  # whatever stops it, the demo goes on without
            answer.append(f"the hub cannot be reached: {type(error).__name__}")
        else:
            answer.append("")

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout_s)
    return answer[0] if answer else f"the hub did not answer within {timeout_s:g} s"
