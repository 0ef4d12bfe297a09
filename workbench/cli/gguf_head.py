"""The head of a GGUF file for people and as JSON: what `gguf-dump` shows, metadata first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lockstep.engine.checkpoint.gguf.header import GgufHeader
from lockstep.engine.checkpoint.gguf.metadata import MetadataArray, Scalar
from lockstep.engine.text import bytes_text
from lockstep.sessions.text import clean

#: Elements of an array that are shown.
_FIRST = 6


def head_lines(headers: dict[Path, GgufHeader]) -> Iterator[str]:
    """Each file in a line, with its types; then the first file's metadata, a key a line."""
    for path, header in headers.items():
        types = Counter(tensor.type.name for tensor in header.tensors.values())
        listed = ", ".join(f"{count} {name}" for name, count in types.most_common())
        yield (
            f"{clean(path.name)}: GGUF version {header.version}, {bytes_text(header.size)}, alignment "
            f"{header.alignment}, data from byte {header.data_start}, {len(header.tensors)} tensors: {listed}"
        )
    metadata = next(iter(headers.values())).metadata
    longest = min(40, max(map(len, metadata), default=0))
    for key, value in metadata.items():
        yield f"  {clean(key, limit=60):{longest}}  {_text(value)}"


def metadata_fields(headers: dict[Path, GgufHeader]) -> dict[str, object]:
    """The first file's metadata as JSON; of an array its element type, its length and its first elements."""
    return {
        key: value
        if not isinstance(value, MetadataArray)
        else {"element": value.element, "count": value.count, "first": _first(value)}
        for key, value in next(iter(headers.values())).metadata.items()
    }


def _text(value: Scalar | MetadataArray) -> str:
    if isinstance(value, MetadataArray):
        first = ", ".join(clean(repr(one), limit=20) for one in _first(value))
        more = ", …" if value.count > _FIRST else ""
        return f"{value.count} {value.element}: {first}{more}"
    if isinstance(value, str):
        return clean(repr(value), limit=80)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _first(value: MetadataArray) -> list[str] | list[int] | list[float]:
    return value.texts()[:_FIRST] if value.element == "STRING" else value.numbers()[:_FIRST]
