"""Typed access to a JSON object that somebody else wrote: every error names the place, key and value."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lockstep.engine.errors import ConfigError
from lockstep.engine.text import printable

#: No size of a model is larger; keeps arithmetic and allocations sane on a hostile config.
LARGEST = 2**31 - 1

_REQUIRED: Any = object()


#: Of each object (`where`) the keys that were asked for; None: nobody wants to know.
_ASKED: ContextVar[set[tuple[str, str]] | None] = ContextVar("asked", default=None)


class _Noted(dict[str, object]):
    """An object that notes which of its keys are asked for, not those of which it is copied."""

    def __init__(self, data: Mapping[str, object], where: str, asked: set[tuple[str, str]]) -> None:
        super().__init__(data)
        self._where, self._asked = where, asked

    def __getitem__(self, key: str) -> object:
        self._asked.add((self._where, key))
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._asked.add((self._where, str(key)))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._asked.add((self._where, key))
        return super().get(key, default)


@contextmanager
def noting_keys() -> Iterator[set[tuple[str, str]]]:
    """Inside, (where, key) of all that is asked of a configuration's objects."""
    asked = set[tuple[str, str]]()
    token = _ASKED.set(asked)
    try:
        yield asked
    finally:
        _ASKED.reset(token)


class Fields:
    """A read-only view of one JSON object. `where` opens each message, e.g. `config.json`.

    A key whose value is null counts as absent: that is how transformers writes "not set".
    Without a default, an absent key raises ConfigError.
    """

    def __init__(self, data: Mapping[str, object], where: str) -> None:
        if not isinstance(data, Mapping):
            raise ConfigError(f"{where}: expected a JSON object, found {_kind(data)}")
        asked = _ASKED.get()
        self.data = data if asked is None else _Noted(data, where, asked)
        self.where = where

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None

    def error(self, key: str, problem: str) -> ConfigError:
        """A ConfigError that names the place, the key and its value."""
        value = printable(repr(self.data.get(key)))
        return ConfigError(f"{self.where}: {key} is {value}: {problem}")

    def _value(self, key: str, default: Any, wanted: str) -> Any:
        if key in self:
            return self.data[key]
        if default is _REQUIRED:
            raise ConfigError(f"{self.where}: {key} is missing (expected {wanted})")
        return default

    def size(self, key: str, default: int = _REQUIRED, *, least: int = 1, most: int = LARGEST) -> int:
        """A whole number from `least` to `most`."""
        value = self._value(key, default, "a positive whole number")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(key, f"expected a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float = _REQUIRED, *, above: float = -math.inf) -> float:
        """A finite number greater than `above`."""
        value = self._value(key, default, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"expected a number, not {_kind(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number <= above:
            raise self.error(
                key, "expected a finite number" + (f" above {above:g}" if above > -math.inf else "")
            )
        return number

    def optional_number(
        self, key: str, *, default: float | None = None, above: float = -math.inf
    ) -> float | None:
        """Like `number`, None where the value is null, `default` where the key is absent."""
        if key not in self.data:
            return default
        return self.number(key, above=above) if key in self else None

    def numbers(self, key: str, count: int, *, above: float = -math.inf) -> tuple[float, ...]:
        """A list of so many finite numbers, each greater than `above`."""
        value = self._value(key, _REQUIRED, f"a list of {count} numbers")
        if not isinstance(value, list) or len(value) != count:
            raise self.error(key, f"expected a list of {count} numbers")
        items = Fields({f"{key}[{i}]": item for i, item in enumerate(value)}, self.where)
        return tuple(items.number(name, above=above) for name in items.data)

    def flag(self, key: str, default: bool = _REQUIRED) -> bool:
        """true or false."""
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, not {_kind(value)}")
        return value

    def word(self, key: str, default: str = _REQUIRED) -> str:
        """A string."""
        value = self._value(key, default, "a string")
        if not isinstance(value, str):
            raise self.error(key, f"expected a string, not {_kind(value)}")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids: one whole number or a list of them; empty where the key is absent."""
        value = self.data.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= LARGEST for i in ids):
            raise self.error(key, "expected a token id (a whole number ≥ 0) or a list of them")
        return tuple(dict.fromkeys(ids))

    def words(self, key: str) -> list[str] | None:
        """A list of strings, None where the key is absent."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "expected a list of strings")
        return value

    def object(self, key: str) -> Fields | None:
        """A nested JSON object, None where the key is absent."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, f"expected a JSON object, not {_kind(value)}")
        return Fields(value, f"{self.where}: {key}")


def _kind(value: object) -> str:
    """What JSON calls the type of `value`."""
    names = {bool: "true/false", int: "a number", float: "a number", str: "a string", list: "a list"}
    return "null" if value is None else names.get(type(value), "an object")
