"""PNG: with a palette (W3C PNG, third edition), small enough for a heatmap to travel inside its page; and of an SVG."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from functools import cache

import numpy as np
import resvg_py
from numpy.typing import NDArray

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PALETTE_COLOUR, _DEPTH = 3, 8


def indexed_png(indices: NDArray[np.uint8], palette: Sequence[str], *, clear: int | None = None) -> bytes:
    """`indices[rows, columns]` into `palette` (`#rrggbb`, at most 256) as a PNG; `clear` is transparent."""
    height, width = indices.shape
    if not 0 < len(palette) <= 256 or indices.size == 0 or int(indices.max()) >= len(palette):
        raise ValueError(f"{indices.shape} indices up to {indices.max(initial=0)} in {len(palette)} colours")
    header = struct.pack(">IIBBBBB", width, height, _DEPTH, _PALETTE_COLOUR, 0, 0, 0)
    filtered = np.zeros((height, width + 1), np.uint8)  # each row begins with its filter: 0, none
    filtered[:, 1:] = indices
    chunks = [
        _chunk(b"IHDR", header),
        _chunk(b"PLTE", b"".join(bytes.fromhex(colour.removeprefix("#")) for colour in palette)),
        _chunk(b"tRNS", b"\xff" * clear + b"\0") if clear is not None else b"",
        _chunk(b"IDAT", zlib.compress(filtered.tobytes(), 9)),
        _chunk(b"IEND", b""),
    ]
    return _SIGNATURE + b"".join(chunks)


def data_uri(png: bytes) -> str:
    """The PNG as a `data:` address."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def rasterised(svg: str, zoom: float = 2.0) -> bytes:
    """An SVG of ours as PNG, `zoom` pixels a unit, with the fonts of this machine. ValueError where it has none:
    the picture would be without its words."""
    if not _letters():
        raise ValueError("this machine has no font to draw letters with: install one, or take the SVG")
    return resvg_py.svg_to_bytes(svg_string=svg, zoom=zoom, monospace_family="DejaVu Sans Mono")


@cache
def _letters() -> bool:
    """Whether a letter leaves anything on an empty picture."""
    empty = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{}</svg>'
    letter = '<text x="2" y="16" font-family="DejaVu Sans Mono, monospace" font-size="16">M</text>'
    drawn, blank = (resvg_py.svg_to_bytes(svg_string=empty.format(inside)) for inside in (letter, ""))
    return drawn != blank
