"""Makes torchvision's wheel for CUDA importable beside torch for the CPU, for models that need no operator of its own.

Its compiled operators do not load there, and its import then fails at those whose results it describes. Once they are
declared, all that is written in Python works. torchvision for the CPU is in no registry that pip asks by default.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import library as operators

#: Keeps the declaration alive; None where torchvision loads by itself, or is absent.
_DECLARED: operators.Library | None = None


def declare() -> None:
    """Declare torchvision's operators where its library does not load. Repeated calls do nothing."""
    global _DECLARED  # noqa: PLW0603  # torch forgets the operators when the object goes
    found = find_spec("torchvision")
    if _DECLARED is not None or found is None or found.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(found.origin).with_name("_C.so")))
    except OSError:
        _DECLARED = operators.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _DECLARED.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
