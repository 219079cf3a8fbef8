"""Which version a metadata document follows, what is refused before its values are looked at, and what is odd about it."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from saev_store.documents._findings import Findings, key_list, shown
from saev_store.documents.versions import PROTOCOLS, VERSIONS, Spelling, WrittenVersion
from saev_store.errors import BreakingProtocolWarning, SaevStoreWarning, UnknownProtocolError

_VERSION = re.compile(r"(0|[1-9][0-9]{0,8})(?:\.(?:0|[1-9][0-9]{0,8})){1,3}", re.ASCII)
#: Keys that only documents from before protocol 1.0.0 have.
_UNVERSIONED_KEYS = frozenset({"n_patches_per_shard", "model", "model_org", "model_ckpt"})


def major(protocol: str) -> int | None:
    """The major version of a protocol string, None where it is no version at all.

    >>> major("2.7"), major("two")
    (2, None)
    """
    match = _VERSION.fullmatch(protocol)
    return int(match[1]) if match else None


def refuse_unversioned(document: Mapping[str, object], findings: Findings) -> None:
    """Explain documents from before June 2025, which carry no version and are not read.

    Raises:
        DocumentError: the document is such a one.
    """
    if "protocol" in document:
        return
    old = sorted(_UNVERSIONED_KEYS & document.keys())
    if not old and "dtype" in document:
        return
    if not old and "vit_family" not in document:
        return
    told_by = f" and has {key_list(old)}" if old else ""
    findings.add(
        "unversioned",
        f'it has no "protocol"{told_by}: it was written before protocol 1.0.0 (June 2025), and nothing in it says how '
        "its vectors are laid out",
        loc=("protocol",),
    )
    findings.raise_if_bad(remedy="Record the activations again; a guess could hand out wrong vectors.")


def refuse_breaking(document: Mapping[str, object], findings: Findings) -> None:
    """Refuse a newer major version, and any other dtype, with the warning that section 9 of docs/protocol.md demands.

    Raises:
        UnknownProtocolError: the bytes beside this document may mean something we do not know.
    """
    protocol, dtype = document.get("protocol"), document.get("dtype")
    known = sorted({number for name in PROTOCOLS if (number := major(name)) is not None})
    if isinstance(protocol, str) and major(protocol) not in known:
        findings.add(
            "unknown_protocol",
            f'"protocol" is {shown(protocol)}; this version of saev_store reads {", ".join(PROTOCOLS)} and other minor '
            f"versions of {' and '.join(map(str, known))}",
            loc=("protocol",),
        )
    if isinstance(dtype, str) and dtype != "float32":
        findings.add(
            "unknown_dtype", f'"dtype" is {shown(dtype)}; protocols 1.x and 2.x hold "float32" only', loc=("dtype",)
        )
    if not findings.n_errors:
        return
    with contextlib.suppress(BreakingProtocolWarning):  # Warnings may be errors; the error that says more comes out.
        warnings.warn(
            f"{findings.where}: breaking change of the protocol: protocol {shown(protocol)}, dtype {shown(dtype)}; the "
            "shards are not read",
            BreakingProtocolWarning,
            stacklevel=4,
        )
    findings.raise_if_bad(remedy="Look for a newer saev_store, or for a copy of the store.", error=UnknownProtocolError)


def choose_version(document: Mapping[str, object], findings: Findings) -> WrittenVersion:
    """The version whose keys a document has. Keys of two spellings, or of another major version, are findings."""
    spellings = tuple(dict.fromkeys(version.spelling for version in VERSIONS))
    # The later one of equals: its missing keys are what is reported.
    spelling = max(reversed(spellings), key=lambda s: sum(key in document for key in s.keys.values()))
    _find_mixture(document, spelling, spellings, findings)

    own = [version for version in VERSIONS if version.spelling == spelling]
    protocol = document.get("protocol")
    number = major(protocol) if isinstance(protocol, str) else None
    if number is not None and number not in spelling.majors:
        findings.add(
            "mixed_spellings",
            f'"protocol" is {shown(protocol)}, but the keys are those of {spelling.name}',
            loc=("protocol",),
        )
    written_as = [version for version in own if version.protocol == protocol]
    same_major = [version for version in own if major(version.protocol) == number]
    return max(written_as or same_major or own, key=lambda version: (-_n_missing(document, version), version.since))


def _n_missing(document: Mapping[str, object], version: WrittenVersion) -> int:
    return sum(key not in document for key in version.required_keys)


def _find_mixture(
    document: Mapping[str, object], spelling: Spelling, spellings: tuple[Spelling, ...], findings: Findings
) -> None:
    own = set(spelling.keys.values())
    strays = {key for other in spellings for key in other.keys.values() if key in document and key not in own}
    mine = key_list([key for key in spelling.keys.values() if key in document])
    while strays:
        # One finding for each generation that is mixed in, not for each that happens to share a key.
        other = max(reversed(spellings), key=lambda s: len(strays & set(s.keys.values())))
        theirs = [key for key in other.keys.values() if key in strays]
        strays -= set(theirs)
        findings.add(
            "mixed_spellings",
            f"keys of two generations are mixed: {mine} of {spelling.name}, and {key_list(theirs)} of {other.name}; "
            "a document uses one of them",
            loc=(theirs[0],),
        )


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


def find_oddities(values: Mapping[str, Any], version: WrittenVersion, findings: Findings) -> None:
    """Add a warning for each oddity to the findings; a minor version that is not known is also warned of aloud."""
    protocol, data = values["protocol"], values["data"]
    if protocol not in PROTOCOLS:
        message = (
            f'"protocol" is {shown(protocol)}, a minor version that is not known; it is read like {version.protocol}, '
            "which minor versions must allow"
        )
        findings.add("unknown_minor", message, loc=("protocol",), severity="warning")
    elif protocol != version.protocol:
        findings.add(
            "unusual_protocol",
            f'"protocol" is {shown(protocol)}, but no writer is known that used it with the keys of '
            f"{version.spelling.name}",
            loc=("protocol",),
            severity="warning",
        )
    kind = "string" if isinstance(data, str) else "object"
    if version.data not in {kind, "either"}:
        findings.add(
            "unusual_data",
            f'"data" is {"a string" if kind == "string" else "an object"}; writers of {version.title} make it '
            f"{'an object' if kind == 'string' else 'a string'}",
            loc=("data",),
            severity="warning",
        )
    _find_layer_order(values["layers"], findings)
    if protocol not in PROTOCOLS:
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
