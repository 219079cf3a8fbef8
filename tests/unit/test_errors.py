"""The tree of errors: what handlers may rely on, what is printed, and what a pickled copy keeps."""

from __future__ import annotations

import copy
import pickle

import pytest

from saev_store import errors
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DeadlineError,
    DocumentError,
    LayerNotFoundError,
    NotFoundError,
    SaevStoreError,
    TransportError,
    brief,
    counted,
)
from saev_store.problems import Problem

#: Of each error its kind, its own parent in the tree, and what else it is.
TREE = {
    "SaevStoreError": ("error", None, Exception),
    "NotFoundError": ("not_found", "SaevStoreError", FileNotFoundError),
    "AccessError": ("access", "SaevStoreError", PermissionError),
    "DocumentError": ("document", "SaevStoreError", ValueError),
    "UnknownProtocolError": ("unknown_protocol", "DocumentError", ValueError),
    "UnsafeContentError": ("unsafe_content", "SaevStoreError", ValueError),
    "LayerNotFoundError": ("layer_not_found", "SaevStoreError", KeyError),
    "TokenArrayNotFoundError": ("token_array_not_found", "SaevStoreError", KeyError),
    "SelectionError": ("selection", "SaevStoreError", IndexError),
    "ArgumentError": ("argument", "SaevStoreError", ValueError),
    "CorruptShardError": ("corrupt_shard", "SaevStoreError", OSError),
    "MissingShardError": ("missing_shard", "CorruptShardError", FileNotFoundError),
    "TransportError": ("transport", "SaevStoreError", OSError),
    "DeadlineError": ("deadline", "TransportError", TimeoutError),
    "StoreExistsError": ("store_exists", "SaevStoreError", FileExistsError),
    "IncompleteStoreError": ("incomplete_store", "SaevStoreError", RuntimeError),
    "ResumeError": ("resume", "SaevStoreError", ValueError),
    "WriterConflictError": ("writer_conflict", "SaevStoreError", RuntimeError),
    "ReadOnlyError": ("read_only", "SaevStoreError", PermissionError),
    "ForkError": ("fork", "SaevStoreError", RuntimeError),
    "MissingDependencyError": ("missing_dependency", "SaevStoreError", ImportError),
}
PROBLEMS = [Problem("short_shard", "cut", where="acts000001.bin", lost=((3, 6),)), Problem("odd", "strange")]


def test_every_error_has_its_kind_and_its_parents():
    ours = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and not name.startswith("_")}
    found = {name for name, kind in ours.items() if issubclass(kind, SaevStoreError)}
    assert found == TREE.keys()
    for name, (kind, parent, other) in TREE.items():
        assert ours[name].kind == kind
        assert issubclass(ours[name], other)
        assert parent is None or issubclass(ours[name], ours[parent])
    assert len({kind for kind, _, _ in TREE.values()}) == len(TREE)


def test_warnings_are_shown_to_users_and_can_be_told_apart():
    assert issubclass(errors.SaevStoreWarning, UserWarning)
    assert issubclass(errors.BreakingProtocolWarning, errors.SaevStoreWarning)


@pytest.mark.parametrize("name", TREE)
@pytest.mark.parametrize("passed_on", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_a_copy_of_an_error_keeps_everything(name: str, passed_on):
    """Workers raise copies: also attributes that a class adds, and those that somebody else set."""
    kind = getattr(errors, name)
    given = {"problems": PROBLEMS} if issubclass(kind, (DocumentError, CorruptShardError)) else {}
    given |= {"transient": True} if issubclass(kind, TransportError) else {}
    error = kind("it is gone", where="/lab/s", remedy="Look elsewhere", **given)
    error.seen_by = 3
    found = passed_on(error)
    assert type(found) is kind
    assert (found.message, found.where, found.remedy, found.seen_by) == ("it is gone", "/lab/s", "Look elsewhere", 3)
    assert str(found) == "/lab/s: it is gone. Look elsewhere"
    assert found.args == ("it is gone",)
    if "problems" in given:
        assert found.problems == tuple(PROBLEMS)
    if "transient" in given:
        assert found.transient is True


def test_what_is_not_said_is_nothing():
    for kind in (ArgumentError, NotFoundError, LayerNotFoundError):
        error = kind("no")
        assert (error.message, error.where, error.remedy, str(error)) == ("no", None, None, "no")
    assert DocumentError("no").problems == CorruptShardError("no").problems == ()
    assert DocumentError("no", problems=PROBLEMS).problems == tuple(PROBLEMS)
    assert TransportError("no").transient is DeadlineError("no").transient is False


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("it is 3", "p: it is 3. Use 4."), ("it is 3.", "p: it is 3. Use 4."), ("is it 3?", "p: is it 3? Use 4."),
        ("no!", "p: no! Use 4."), ("errors:", "p: errors: Use 4."), ("(3)", "p: (3). Use 4."),
    ],
)  # fmt: skip
def test_a_remedy_is_a_sentence_of_its_own(message: str, text: str):
    assert str(ArgumentError(message, where="p", remedy="Use 4.")) == text
    assert str(ArgumentError(message, remedy="Use 4.")) == text.removeprefix("p: ")
    assert str(ArgumentError(message, where="p")) == f"p: {message}"


def test_half_a_surrogate_pair_is_printed_escaped():
    error = ArgumentError("caf\udce9", where="\udcff", remedy="\udc80")
    assert str(error) == "\\udcff: caf\\udce9. \\udc80"
    problem = Problem("odd", "caf\udce9", where="\udcff", loc=("\udc80",))
    assert str(problem) == "error odd \\udcff['\\udc80']: caf\\udce9"


def test_a_hidden_context_stays_hidden_and_another_is_kept():
    def raised(*, hidden: bool) -> ArgumentError:
        with pytest.raises(ArgumentError) as caught:
            try:
                raise OSError("secret")
            except OSError:
                if hidden:
                    raise ArgumentError("no", where="p") from None
                raise ArgumentError("no", where="p")  # noqa: B904  # that is the point
        return caught.value

    assert raised(hidden=True).__context__ is None
    assert isinstance(raised(hidden=False).__context__, OSError)


class Verbose:
    def __repr__(self) -> str:
        return "<" + "x" * 1000 + ">"


@pytest.mark.parametrize(
    "value",
    ["a" * 1000, b"a" * 1000, Verbose(), list(range(1000)), {"a": "b" * 1000}, 10**5000],
    ids=lambda value: type(value).__name__,
)
def test_a_value_in_a_message_is_short(value: object):
    assert len(brief(value)) < 120
    assert len(brief(Verbose())) == len(brief("a" * 1000)) == 80


def test_integers_are_shown_up_to_128_bits():
    assert brief(2**128 - 1) == "340282366920938463463374607431768211455"
    assert brief(2**128) == "an integer of 129 bits"
    assert brief(-(2**128)) == "an integer of 129 bits"
    assert brief(2**63) == "9223372036854775808"
    assert brief([10**5000]) == "a list"
    assert brief((10**5000,)) == "a tuple"
    assert brief(True) == "True"


def test_things_are_counted_in_words():
    assert [counted(n, "shard") for n in (0, 1, 2, 1000)] == ["0 shards", "1 shard", "2 shards", "1,000 shards"]


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("odd", "strange"), "error odd: strange"),
        (Problem("odd", "strange", severity="info"), "info odd: strange"),
        (Problem("odd", "strange", where="metadata.json", loc=("layers", 2)), "error odd metadata.json['layers'][2]: strange"),
        (Problem("odd", "strange", loc=("layers",)), "error odd ['layers']: strange"),
        (Problem("odd", "strange", lost=((3, 6), (8, 9))), "error odd: strange (examples 3:6, 8:9 are lost)"),
    ],
)  # fmt: skip
def test_a_problem_as_text(problem: Problem, text: str):
    assert str(problem) == text
