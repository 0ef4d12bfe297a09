"""The server that forks the tests' children goes on, whatever becomes of those that ask it for one."""

from __future__ import annotations

import struct

import pytest

from lockstep.engine import children
from lockstep.version import __version__
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
