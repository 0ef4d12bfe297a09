"""The meta table: a JSON value for each field of `SessionMeta`, "ranks" and "recording" (see `mark`). Token texts come
in pages.

A field that does not validate (damaged, or a stranger's) is treated as unknown and listed in `MetaTable.problems`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from lockstep.sessions.format import mark, migrate
from lockstep.sessions.format.json_text import json_bytes, json_text, parse_json
from lockstep.sessions.limits import RECORD_BYTES, ReadMeter
from lockstep.sessions.meta import SessionMeta
from lockstep.sessions.records import JSON

_TYPES: Final = {field.name: field.type for field in msgspec.structs.fields(SessionMeta)}
_UNKNOWN: Final = SessionMeta()
_TEXTS: Final = "token_texts"


def rows_of(meta: SessionMeta) -> list[tuple[str, str]]:
    """The rows (key, JSON) of the fields of `meta` that are known."""
    fields = ((name, getattr(meta, name)) for name in _TYPES)
    return [row(name, value) for name, value in fields if value != getattr(_UNKNOWN, name)]


def row(field: str, value: object) -> tuple[str, str]:
    """The row of one field. ValueError for an unknown field or a value of the wrong type."""
    if field not in _TYPES:
        raise ValueError(f"a session's meta has no field {field!r}; it has {', '.join(_TYPES)}")
    plain = msgspec.to_builtins(value, str_keys=True)
    try:
        _convert(plain, _TYPES[field])
    except msgspec.ValidationError as error:
        raise ValueError(f"meta field {field!r}: {error}") from error
    return field, json_text(plain)


def page_row(page: int, texts: Mapping[int, str]) -> tuple[str, str]:
    """The row of a page of token texts."""
    key, text = row(_TEXTS, texts)
    return (f"{key}.{page}" if page else key), text


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Parsed:
    """A row's text and its value."""

    text: object
    value: JSON

    @classmethod
    def of(cls, key: str, text: object, meter: ReadMeter) -> _Parsed:
        """The row `key`; counted twice, as the value and as the typed one that is made of it."""
        where, nbytes = f"meta {key[:40]!r}", 2 * json_bytes(text) + RECORD_BYTES
        meter.room(nbytes, where)
        parsed = cls(text, parse_json(text, where))
        meter.keep(parsed, nbytes)
        return parsed


class MetaTable:
    """The table as it was last read. What has not changed is not parsed again: token texts are long."""

    def __init__(self) -> None:
        self.meta = _UNKNOWN
        self.ranks: JSON = None
        self.recording = False  # by the mark
        self.problems: list[str] = []
        self._parsed: dict[str, _Parsed] = {}  # by key
        self._fields: dict[str, tuple[JSON, Any]] = {}  # by key: the JSON value and the typed one

    def read(self, rows: Mapping[str, object], version: int, meter: ReadMeter) -> None:
        """Take the rows (key, JSON text) of a file of that version. `SessionError` for what is no JSON."""
        before, self._parsed = self._parsed, {}
        for key, text in rows.items():
            known = before.get(key)
            self._parsed[key] = known if known and known.text == text else _Parsed.of(key, text, meter)
        stored = {key: parsed.value for key, parsed in self._parsed.items()}
        if version == 1:
            stored = migrate.meta(stored)
        self.ranks, self.problems = stored.get("ranks"), []
        self.recording = stored.get(mark.RECORDING) is True
        fields: dict[str, Any] = {}
        for key in stored:
            name, _, page = key.partition(".")
            if name not in _TYPES or (page and name != _TEXTS):
                continue  # of a later version, or a stranger's
            value = self._field(key, name, stored[key])
            if name == _TEXTS:
                fields.setdefault(name, {}).update(value)
            else:
                fields[name] = value
        self.meta = SessionMeta(**fields)

    def _field(self, key: str, name: str, stored: JSON) -> Any:
        before = self._fields.get(key)
        if before is None or before[0] is not stored:
            try:
                value = _convert(stored, _TYPES[name])
            except msgspec.ValidationError as error:
                self.problems.append(f"meta {key[:40]!r}: {error}")
                return getattr(_UNKNOWN, name)
            before = self._fields[key] = stored, value
        return before[1]


def _convert(value: object, type_: Any) -> Any:
    return msgspec.convert(value, type_, str_keys=True)
