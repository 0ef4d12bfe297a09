"""The pipe by which a child ends with its starter."""

from __future__ import annotations

import subprocess
from pathlib import Path

from lockstep.engine.children import start_python
from lockstep.engine.lifeline import Lifeline

#: Tidies slowly. Its main thread ends by itself: as soon as the starter is gone ("gone"), or at once.
_CHILD = """
import select, sys, time
from pathlib import Path
from lockstep.engine.lifeline import end_with_starter

def tidy():
    time.sleep(0.3)
    Path(sys.argv[2]).unlink()

end_with_starter(int(sys.argv[1]), tidy)
if sys.argv[3] == "gone":
    print("waits", flush=True)
    select.select([int(sys.argv[1])], [], [])
sys.exit(3)
"""


def _child(left: Path, until: str) -> tuple[Lifeline, subprocess.Popen[bytes]]:
    left.touch()
    lifeline = Lifeline()
    child = start_python(
        "-c", _CHILD, str(lifeline.fd), str(left), until,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=(lifeline.fd,),
    )  # fmt: skip
    lifeline.handed_over()
    return lifeline, child


def test_a_child_that_ends_as_its_starter_does_tidies_first(tmp_path: Path) -> None:
    lifeline, child = _child(tmp_path / "left", "gone")
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"waits\n"
        lifeline.close()
        assert child.wait(20) == 129  # as after SIGHUP
    assert not (tmp_path / "left").exists()


def test_a_child_that_ends_by_itself_has_nothing_to_tidy(tmp_path: Path) -> None:
    lifeline, child = _child(tmp_path / "left", "done")
    with child:
        assert child.wait(20) == 3
    lifeline.close()
    assert (tmp_path / "left").exists()
