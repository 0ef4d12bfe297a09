"""`python -m lockstep` is the command line, its exit code included."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("word", "code"), [("--version", 0), ("no-such-command", 2)])
def test_its_exit_code_is_the_command_s(word: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-P", "-m", "lockstep", word], capture_output=True, check=False)
    assert done.returncode == code
