"""The server that forks the tests' children goes on, whatever becomes of those that ask it for one."""

from __future__ import annotations

import os
import struct

import pytest

from lockstep.engine import children
from lockstep.version import __version__
from tests import preloaded
from tests.preloaded import Forking, run_module


@pytest.mark.parametrize(
    "sent", [b"", b"\x10", struct.pack("<I", 100) + b"{"], ids=["nothing", "size", "request"]
)
def test_who_is_cut_off_while_asking_takes_no_other_along(sent: bytes) -> None:
    if not isinstance(children.subprocess, Forking):
        pytest.skip("no process is forked on this system")
    with children.subprocess.server.connect() as connection:
        connection.sendall(sent)
    done = run_module("lockstep.workbench.cli", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert __version__ in done.stdout


def test_descriptors_of_any_number_are_handed_over() -> None:
    """Such as those of a process that has hundreds open, two of which change places on the way."""
    numbers = [600, 512, 513]
    first, second, third = (os.pipe() for _ in range(3))
    if not (child := os.fork()):
        nothing = [os.open(os.devnull, os.O_RDWR) for _ in range(3)]
        preloaded._take([*nothing, first[1], second[1], third[1]], numbers)
        for number in numbers:
            os.write(number, str(number).encode())
        os._exit(0)
    for _, end in (first, second, third):
        os.close(end)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [os.read(one, 9) for one, _ in (first, second, third)] == [b"600", b"512", b"513"]
    for one, _ in (first, second, third):
        os.close(one)
