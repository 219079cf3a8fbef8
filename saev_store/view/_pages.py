"""Which views there are, and the function that answers each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from saev_store.errors import ArgumentError, SaevStoreError, SelectionError, brief
from saev_store.view._answers import Answer, broken_answer, store_answer
from saev_store.view._compare import compare_answer
from saev_store.view._examples import example_answer, token_answer
from saev_store.view._features import feature_answer, features_answer
from saev_store.view._layers import layers_answer
from saev_store.view._pictures import picture_bytes
from saev_store.view._viewed import Viewed


class Query:
    """The parameters of a request.

    Raises:
        ArgumentError: from each method, where a parameter is missing or no integer.
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def text(self, name: str) -> str | None:
        """A parameter as text; None where it is not given."""
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """A parameter as an integer."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        return integer(value, name)

    def integer_or_none(self, name: str) -> int | None:
        """A parameter as an integer; None where it is not given."""
        value = self._values.get(name)
        return None if value is None else integer(value, name)


def integer(value: str | None, name: str) -> int:
    """A number of at most 18 digits; `ArgumentError` if it is none."""
    digits = (value or "").removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
        raise ArgumentError(f"{name} is {brief(value)}; it must be an integer", where=name)
    return int(value or "")


class Pages:
    """The answers about one store.

    Args:
        viewed: The store; None for one that does not open.
        name: The name of a store that does not open.
        error: Why it does not open.
        other: A second store, to compare the first one with.
        places: Addresses that no answer may have, beside those of the stores.
    """

    def __init__(
        self,
        viewed: Viewed | None,
        *,
        name: str = "",
        error: SaevStoreError | None = None,
        other: Viewed | None = None,
        places: tuple[str, ...] = (),
    ) -> None:
        self._viewed, self._other, self._name = viewed, other, name
        self._error = error or SelectionError("there is no store", where="view")
        self._places = places
        #: By name: what answers a request for a view.
        self.views: Mapping[str, Callable[[Query], Answer]] = {
            "store": self._store,
            "layers": lambda query: layers_answer(self._opened, query.text("layer")),
            "example": lambda query: example_answer(
                self._opened,
                query.integer("example"),
                query.text("layer"),
                query.integer_or_none("first"),
                query.integer_or_none("feature"),
                query.integer("token", 0),
            ),
            "token": lambda query: token_answer(
                self._opened, query.integer("example"), query.integer("token"), query.text("layer")
            ),
            "features": lambda query: features_answer(self._opened, query.text("layer")),
            "feature": lambda query: feature_answer(self._opened, query.integer("feature"), query.text("layer")),
            "compare": self._compare,
        }

    @property
    def places(self) -> tuple[str, ...]:
        """Addresses that no answer may have."""
        opened = (one for one in (self._viewed, self._other) if one is not None)
        return (*self._places, *(place for one in opened for place in one.places))

    @property
    def _opened(self) -> Viewed:
        if self._viewed is None:
            raise self._error
        self._viewed.renew()
        return self._viewed

    def _store(self, _query: Query) -> Answer:
        if self._viewed is None:
            return broken_answer(self._name, self._error, self.places)
        sae = self._viewed.sae
        return {
            **store_answer(self._opened),
            "other": None if self._other is None else self._other.store.name,
            "sae": None if sae is None else sae.name,
        }

    def _compare(self, query: Query) -> Answer:
        if self._other is None:
            raise ArgumentError("there is no second store to compare with", where="compare")
        self._other.renew()
        example = query.integer("example", 0)
        return compare_answer(self._opened, self._other, example, query.text("layer"), query.text("layer_b"))

    def image(self, example: int) -> bytes:
        """The image of an example as a PNG; see `picture_bytes`."""
        return picture_bytes(self._opened, example)
