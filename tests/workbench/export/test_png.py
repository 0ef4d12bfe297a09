"""PNG: decoded again by the letter of the specification."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from lockstep.workbench.export.png import data_uri, indexed_png

PALETTE = ["#000000", "#ff8000", "#12ab34"]


def _chunks(png: bytes) -> dict[bytes, bytes]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    found, at = {}, 8
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", png, at + 8 + length)[0] == zlib.crc32(kind + data)
        found[kind] = data
        at += 12 + length
    return found


@given(arrays(np.uint8, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=st.integers(0, 2)))
def test_pixels_come_back(indices: np.ndarray) -> None:
    chunks = _chunks(indexed_png(indices, PALETTE, clear=2))
    width, height, depth, colour = struct.unpack_from(">IIBB", chunks[b"IHDR"])
    assert (height, width, depth, colour) == (*indices.shape, 8, 3)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not rows[:, 0].any()
    assert np.array_equal(rows[:, 1:], indices)
    assert chunks[b"PLTE"][3:6] == b"\xff\x80\x00"
    assert chunks[b"tRNS"] == b"\xff\xff\x00"


def test_an_index_without_a_colour_is_refused() -> None:
    with pytest.raises(ValueError, match="3 colours"):
        indexed_png(np.full((2, 2), 3, np.uint8), PALETTE)


def test_data_uri_is_one_ascii_word() -> None:
    uri = data_uri(indexed_png(np.zeros((1, 1), np.uint8), PALETTE))
    assert uri.startswith("data:image/png;base64,")
    assert uri.isascii()
    assert " " not in uri
