"""Large arrays go back to the system when they are freed, however large one was that was freed before."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

#: Frees 8 MiB, which raises glibc's bound, then prints by how much a block of 1 MiB adds to the mapped bytes.
PROGRAM = """
import ctypes
from lockstep.workbench.tui.heap import map_large_arrays
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd a b c d e".split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype, libc.malloc.restype, libc.free.argtypes = Info, ctypes.c_void_p, [ctypes.c_void_p]
{call}
libc.free(libc.malloc(8 << 20))
before = libc.mallinfo2().hblkhd
block = libc.malloc(1 << 20)
print(libc.mallinfo2().hblkhd - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33 or later")
@pytest.mark.parametrize(("call", "mapped"), [("assert map_large_arrays()", True), ("", False)])
def test_a_large_array_has_pages_of_its_own(call: str, mapped: bool) -> None:
    program = [sys.executable, "-c", PROGRAM.format(call=call)]
    reported = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    assert (int(reported) >= 1 << 20) == mapped
