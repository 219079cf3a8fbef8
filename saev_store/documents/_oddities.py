"""Warnings about a metadata.json whose vectors can all be read."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import TYPE_CHECKING

from saev_store.documents._findings import Findings, shown
from saev_store.documents.versions import PROTOCOLS, WrittenVersion
from saev_store.errors import SaevStoreWarning

if TYPE_CHECKING:
    from saev_store.documents._model import Document


def depth_order(layers: tuple[int, ...]) -> bool | None:
    """Whether layers are listed in the order in which a model runs them; None if that depends on its depth.

    Negative labels count from the end, and the depth is not in the document.

    >>> depth_order((2, 5, 11)), depth_order((11, 2)), depth_order((3, -1)), depth_order((3, -2))
    (True, False, True, None)
    """
    for part in ([layer for layer in layers if layer >= 0], [layer for layer in layers if layer < 0]):
        if any(a > b for a, b in pairwise(part)):
            return False
    certain: bool | None = True
    for a, b in pairwise(layers):
        if a == -1 and b >= 0:  # The last layer cannot come before one counted from the start.
            return False
        if (a >= 0) != (b >= 0) and b != -1:
            certain = None
    return certain


def find_oddities(model: Document, version: WrittenVersion, findings: Findings) -> None:
    """Add a warning for each oddity to the findings; a minor version that is not known is also warned of aloud."""
    if model.protocol not in PROTOCOLS:
        message = (
            f'"protocol" is {shown(model.protocol)}, a minor version that is not known; it is read like {version.protocol}, '
            "which minor versions must allow"
        )
        findings.add("unknown_minor", message, loc=("protocol",), severity="warning")
    elif model.protocol != version.protocol:
        findings.add(
            "unusual_protocol",
            f'"protocol" is {shown(model.protocol)}, but no writer is known that used it with the keys of '
            f"{version.spelling.name}",
            loc=("protocol",),
            severity="warning",
        )
    kind = "string" if isinstance(model.data, str) else "object"
    if version.data not in {kind, "either"}:
        findings.add(
            "unusual_data",
            f'"data" is {"a string" if kind == "string" else "an object"}; writers of {version.title} make it '
            f"{'an object' if kind == 'string' else 'a string'}",
            loc=("data",),
            severity="warning",
        )
    _find_layer_order(model.layers, findings)
    if model.protocol not in PROTOCOLS:
        warnings.warn(f"{findings.where}: {findings.warnings[0].message}", SaevStoreWarning, stacklevel=3)


def _find_layer_order(layers: tuple[int, ...], findings: Findings) -> None:
    in_order = depth_order(layers)
    if in_order:
        return
    some = f"{list(layers[:8])}{' and more' if len(layers) > 8 else ''}"
    doubt = (
        "which is not the order in which a model runs them"
        if in_order is False
        else "and whether that is the order in which a model runs them depends on its depth"
    )
    findings.add(
        "layer_order",
        f'"layers" is {some}, {doubt}; the reference writer stores layers in the order in which they run, so they may be '
        "mislabelled. Compare a vector with a fresh forward pass",
        loc=("layers",),
        severity="warning",
    )
