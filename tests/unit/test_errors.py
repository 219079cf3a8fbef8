"""The tree of errors: what handlers may rely on, what is printed, and what a pickled copy keeps."""

from __future__ import annotations

import copy
import pickle
import unicodedata

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
)
from saev_store.names import printable
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


def test_a_copy_of_an_error_keeps_everything() -> None:
    """Workers raise copies: also attributes that a class adds, and those that somebody else set."""
    for name in TREE:
        kind = getattr(errors, name)
        given = {"problems": PROBLEMS} if issubclass(kind, (DocumentError, CorruptShardError)) else {}
        given |= {"transient": True} if issubclass(kind, TransportError) else {}
        error = kind("it is gone", where="/lab/s", remedy="Look elsewhere", **given)
        error.seen_by = 3
        for found in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
            assert type(found) is kind
            assert vars(found) == vars(error)
            assert str(found) == "/lab/s: it is gone. Look elsewhere"


def test_what_is_not_said_is_nothing():
    for kind in (ArgumentError, NotFoundError, LayerNotFoundError):
        error = kind("no")
        assert (error.message, error.where, error.remedy, str(error)) == ("no", None, None, "no")
    assert DocumentError("no").problems == CorruptShardError("no").problems == ()
    assert DocumentError("no", problems=PROBLEMS).problems == tuple(PROBLEMS)
    assert TransportError("no").transient is DeadlineError("no").transient is False


def test_a_remedy_is_a_sentence_of_its_own() -> None:
    for message, text in (
        ("it is 3", "it is 3. Use 4."),
        ("is it 3?", "is it 3? Use 4."),
        ("errors:", "errors: Use 4."),
    ):
        assert str(ArgumentError(message, where="p", remedy="Use 4.")) == f"p: {text}"
        assert str(ArgumentError(message, remedy="Use 4.")) == text


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


def test_a_value_in_a_message_is_short() -> None:
    for value in ("a" * 1000, b"a" * 1000, list(range(1000)), {"a": "b" * 1000}, 10**5000, [10**5000]):
        assert len(brief(value)) < 120
    assert brief(2**128 - 1) == "340282366920938463463374607431768211455"
    assert brief(-(2**128)) == "an integer of 129 bits"


def test_a_problem_as_text() -> None:
    problem = Problem("odd", "strange", where="metadata.json", loc=("layers", 2), lost=((3, 6), (8, 9)))
    assert str(problem) == "error odd metadata.json['layers'][2]: strange (examples 3:6, 8:9 are lost)"
    assert str(Problem("odd", "strange", severity="info")) == "info odd: strange"


def test_printed_texts_have_no_control_characters() -> None:
    text = printable("".join(map(chr, range(0x250))) + "café 漢字 😀")
    assert not [character for character in text if unicodedata.category(character) == "Cc" and character not in "\t\n"]
    assert text.endswith("café 漢字 😀")
