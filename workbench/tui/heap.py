"""Arrays that come and go with each step's picture, kept from scattering the C library's heap."""

from __future__ import annotations

import ctypes

#: `M_MMAP_THRESHOLD` of malloc.h, and the bytes from which a block is to have pages of its own.
_M_MMAP_THRESHOLD, _LARGE = -3, 256 << 10


def map_large_arrays() -> bool:
    """Give every array of 256 KiB or more pages of its own, which go back when it does; whether the C library can.

    By default glibc raises that bound to the largest block that was ever freed (mallopt(3)). From then on arrays that
    grow with the text, as attention's rows do, lie in the heap and leave it in pieces: over thousands of steps it
    doubles, though little of it is in use.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, _LARGE))
