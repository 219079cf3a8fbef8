"""Reads untrusted YAML: bounded size, depth and references, plain types only, `DocumentError` for everything else."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator
from typing import Any, cast

import yaml

from saev_store.errors import DocumentError, SaevStoreError, UnsafeContentError, brief
from saev_store.problems import Problem

#: Consecutive shards share one line, so documents are small.
MAX_NBYTES = 1 << 20
MAX_DEPTH = 32
#: Limit of the values in a document; values that references repeat are counted each time.
MAX_NODES = 1_000_000
#: Limit of the keys of a mapping that are no text: Python takes quadratic time for numbers that are chosen to collide.
MAX_OTHER_KEYS = 1_000
_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map")}
_BASE = cast("type[yaml.SafeLoader]", getattr(yaml, "CSafeLoader", yaml.SafeLoader))


#: Without numbers in base 60 (`1:30`), which take quadratic time to read: they are text.
_NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0b[0-1_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?|\.(?:inf|Inf|INF))$"
        r"|\.(?:nan|NaN|NAN)$"
    ),
}


class _Loader(_BASE):
    """The safe loader without dates and numbers in base 60; a repeated key in a mapping is an error."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML declares it without ClassVar
        first: [(tag, _NUMBERS.get(tag, pattern)) for tag, pattern in found if tag in _PLAIN_TAGS]
        for first, found in _BASE.yaml_implicit_resolvers.items()
    }


def _number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int | float:
    if ":" in node.value:  # with an explicit tag
        raise yaml.constructor.ConstructorError(None, None, "a number in base 60 is not read", node.start_mark)
    if node.tag.endswith(":int"):
        return loader.construct_yaml_int(node)
    return loader.construct_yaml_float(node)


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> Iterator[dict[Hashable, object]]:
    if not isinstance(node, yaml.MappingNode):  # pyright: ignore[reportUnnecessaryIsInstance]  # with an explicit tag
        raise yaml.constructor.ConstructorError(None, None, "something else has the tag of a mapping", node.start_mark)
    made: dict[Hashable, object] = {}
    n_others = 0
    yield made
    construct = cast("Callable[..., Any]", loader.construct_object)  # pyright: ignore[reportUnknownMemberType]  # the stubs
    for key_node, value_node in node.value:
        key = construct(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(
                None, None, "a list or mapping is used as a key", key_node.start_mark
            )
        if key in made:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {brief(key)} stands twice", key_node.start_mark
            )
        n_others += not isinstance(key, str)
        if n_others > MAX_OTHER_KEYS:
            raise yaml.constructor.ConstructorError(
                None, None, f"a mapping has more than {MAX_OTHER_KEYS:,} keys that are no text", key_node.start_mark
            )
        made[key] = construct(value_node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
for _tag in _NUMBERS:
    _Loader.add_constructor(_tag, _number)


def loads(raw: bytes, *, where: str) -> object:
    """The plain Python objects of a YAML document: dict, list, str, int, float, bool, None.

    Raises:
        UnsafeContentError: the document has tags other than those of plain types.
        DocumentError: it is not YAML, is larger or deeper than such a document is, or repeats a key.
    """
    if len(raw) > MAX_NBYTES:
        raise _error(f"it has {len(raw):,} bytes; such a document has at most {MAX_NBYTES:,}", where)
    try:
        text = raw.decode("utf-8-sig")
        _measure(text, where)
        return cast("object", yaml.load(text, Loader=_Loader))  # noqa: S506 - a safe loader with less than the usual
    except SaevStoreError:  # some of ours are ValueErrors
        raise
    except UnicodeDecodeError as error:
        raise _error(f"byte {error.start} is not UTF-8 ({error.reason})", where) from None
    except yaml.YAMLError as error:
        raise _error(f"it is not YAML: {' '.join(str(error).split())}", where) from None
    except (ValueError, LookupError, OverflowError, RecursionError) as error:  # a lookup: `!!bool maybe`, `!!int ''`
        raise _error(f"it holds a value that cannot be read: {error}", where) from None


def as_mapping(value: object) -> dict[str, object] | None:
    """`value` if it is a mapping with keys that are text, else None."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in cast("dict[object, object]", value)):
        return cast("dict[str, object]", value)
    return None


def as_list(value: object) -> list[object] | None:
    """`value` if it is a list, else None."""
    return cast("list[object]", value) if isinstance(value, list) else None


def dumps(value: object) -> bytes:
    """A document in block style, keys in the order given, as UTF-8."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=2**20).encode()


def _measure(text: str, where: str) -> None:
    """Check depth, tags and number of values on the parser's events, without recursion; references count in full."""
    open_counts: list[int] = [0]
    open_anchors: list[str | None] = [None]
    anchored: dict[str, int] = {}
    events = cast("Iterator[Any]", yaml.parse(text, Loader=_BASE))  # pyright: ignore[reportUnknownMemberType]  # the stubs
    for event in events:
        tag = getattr(event, "tag", None)
        if tag is not None and tag not in _PLAIN_TAGS:
            raise UnsafeContentError(
                f"line {event.start_mark.line + 1} has the tag {brief(tag)}; tags create objects, and the document must be plain data",
                where=where,
                remedy="Remove the tag.",
            )
        if isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent)):
            open_counts.append(1)
            open_anchors.append(event.anchor)
            if len(open_counts) > MAX_DEPTH:
                raise _error(f"it is nested more than {MAX_DEPTH} levels deep", where)
            continue
        if isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
            count, anchor = open_counts.pop(), open_anchors.pop()
        elif isinstance(event, yaml.ScalarEvent):
            count, anchor = 1, event.anchor
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchored:
                raise _error(f"*{event.anchor} refers to itself, or to nothing", where)
            count, anchor = anchored[event.anchor], None
        else:
            continue
        if anchor is not None:
            anchored[anchor] = count
        open_counts[-1] += count
        if open_counts[-1] > MAX_NODES:
            raise _error(f"it has more than {MAX_NODES:,} values", where)


def _error(message: str, where: str) -> DocumentError:
    return DocumentError(message, where=where, problems=[Problem("yaml", message, where)])
