"""Metadata values of a GGUF file: scalars, strings, arrays, typed as the file types them. Torch-free."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep.engine.checkpoint.gguf.cursor import Cursor
from lockstep.engine.text import printable

Scalar = int | float | bool | str


class ValueType(NamedTuple):
    """A fixed-size value type: its name in the format's documentation and its code for `struct`."""

    name: str
    code: str


UINT32, STRING, ARRAY = 4, 8, 9
FIXED: dict[int, ValueType] = {
    0: ValueType("UINT8", "B"),
    1: ValueType("INT8", "b"),
    2: ValueType("UINT16", "H"),
    3: ValueType("INT16", "h"),
    4: ValueType("UINT32", "I"),
    5: ValueType("INT32", "i"),
    6: ValueType("FLOAT32", "f"),
    7: ValueType("BOOL", "B"),
    10: ValueType("UINT64", "Q"),
    11: ValueType("INT64", "q"),
    12: ValueType("FLOAT64", "d"),
}


@dataclass(frozen=True, slots=True)
class MetadataArray:
    """An array as the file holds it, decoded when asked for; `element` is the type's name, `at` its offset."""

    element: str
    count: int
    at: int
    raw: bytes = field(repr=False)

    @property
    def is_integer(self) -> bool:
        """Whether the elements are whole numbers of any width."""
        return "INT" in self.element

    def texts(self) -> list[str]:
        """The elements of a STRING array; bytes that are not UTF-8 become U+FFFD."""
        unpack, raw, position = struct.Struct("<Q").unpack_from, self.raw, 0
        found: list[str] = []
        for _ in range(self.count):
            (length,) = unpack(raw, position)
            position += 8 + length
            found.append(raw[position - length : position].decode("utf-8", "replace"))
        return found

    def find(self, wanted: Iterable[str]) -> dict[str, int]:
        """The elements of a STRING array that are among `wanted`, and the index of the last such."""
        encoded = {text.encode(): text for text in wanted}
        lengths = {len(text) for text in encoded}
        unpack, raw, position = struct.Struct("<Q").unpack_from, self.raw, 0
        found: dict[str, int] = {}
        for index in range(self.count):
            (length,) = unpack(raw, position)
            position += 8 + length
            if length in lengths and (text := encoded.get(raw[position - length : position])) is not None:
                found[text] = index
        return found

    def numbers(self) -> list[int] | list[float]:
        """The elements of an array of numbers or booleans (0 and 1)."""
        code = next(kind.code for kind in FIXED.values() if kind.name == self.element)
        return list(struct.unpack(f"<{self.count}{code}", self.raw))


def type_name(kind: int) -> str:
    """A value type by its number, in the words of the format's documentation."""
    return {STRING: "STRING", ARRAY: "ARRAY"}.get(kind) or (FIXED[kind].name if kind in FIXED else str(kind))


def read_value(cursor: Cursor, key: str) -> Scalar | MetadataArray:
    """The type and value at the cursor; errors name `key`."""
    at = cursor.position
    what = f"the value of {printable(key)!r}"
    kind = cursor.u32(f"the type of {printable(key)!r}")
    if kind == STRING:
        return cursor.text(what)
    if kind == ARRAY:
        return _array(cursor, what, at)
    if kind not in FIXED:
        raise cursor.error(at, f"{what} has the unknown type {kind}")
    form = struct.Struct("<" + FIXED[kind].code)
    (value,) = form.unpack_from(cursor.data, cursor.need(form.size, what))
    if FIXED[kind].name != "BOOL":
        return value  # type: ignore[no-any-return]
    if value > 1:
        raise cursor.error(at, f"{what} is a BOOL of {value}, neither 0 nor 1")
    return bool(value)


def _array(cursor: Cursor, what: str, at: int) -> MetadataArray:
    kind = cursor.u32(f"the element type of {what}")
    count = cursor.u64(f"the length of {what}")
    if kind == ARRAY:
        raise cursor.error(at, f"{what} is an array of arrays, which no reader of GGUF supports")
    if kind != STRING and kind not in FIXED:
        raise cursor.error(at, f"{what} is an array of the unknown type {kind}")
    width = 8 if kind == STRING else struct.calcsize("<" + FIXED[kind].code)
    cursor.check_count(count, width, f"elements of {what}")
    start = cursor.position
    if kind == STRING:
        cursor.skip_texts(count, what)
    else:
        cursor.need(count * width, what)
    name = "STRING" if kind == STRING else FIXED[kind].name
    return MetadataArray(name, count, start, cursor.data[start : cursor.position])
