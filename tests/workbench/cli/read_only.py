"""Commands of a user who may not write where they like: each works, or ends with one line and its exit code."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.sessions.samples import create, record
from tests.workbench.export import made
from tests.workbench.unprivileged import unprivileged

#: None of them states where files go: HOME does.
_HOME = (
    "LOCKSTEP_DATA_DIR", "LOCKSTEP_CACHE_DIR", "LOCKSTEP_STATE_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
    "XDG_CACHE_HOME", "XDG_STATE_HOME",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A command line in which {ro} is a folder that cannot be written, {rw} one that can, and what comes of it. It has
    no home that can be written either. `printed` is a pattern of the one line on stderr; none where all is well."""

    words: str
    code: int = 0
    printed: str = ""
    quick: bool = False


CASES = (
    Case("sessions list"),
    Case("sessions show {ro}/a.session"),
    Case("sessions verify {ro}/a.session"),
    Case("sessions show {ro}/killed.session", 3, r"its newest steps are in killed\.session-wal", quick=True),
    Case("sessions copy {ro}/a.session {rw}/b.session"),
    Case("sessions copy {ro}/a.session {ro}/b.session", 2, "cannot write session .*Permission denied"),
    Case("sessions pack {ro}/a.session", 2, "cannot pack session .*Permission denied"),
    Case("sessions rm --yes {ro}/a.session", 2, "cannot remove .*a.session: Permission denied"),
    Case("replay {ro}/a.session --ex where", quick=True),
    Case("replay {ro}/killed.session --ex where", 3, r"its newest steps are in killed\.session-wal"),
    Case("diff {ro}/a.session {ro}/a.session"),
    Case("export {ro}/a.session --csv {ro}/out.csv", 2, "you may not write to its directory", quick=True),
    Case("export {ro}/a.session --csv {rw}/out.csv", 0, "wrote .*out.csv"),
    Case("export {ro}/a.session --csv -"),
    Case("generate demo --max-tokens 2", 0, "2 new tokens"),
    Case("generate demo --max-tokens 2 --save {ro}/b.session", 2, "cannot write a session to .*Permission denied"),
    Case("run demo --ex next", 3, "cannot write to .*: Permission denied. Set LOCKSTEP_DATA_DIR"),
    Case("run demo --ex next --save {ro}/b.session", 2, "cannot write a session to .*Permission denied"),
    Case("check demo --steps 1", 3, "cannot write to .*: Permission denied. Set LOCKSTEP_DATA_DIR"),
    Case(
        "check demo --steps 1 --save {rw}/b.session", 3,
        "cannot write to .*: Permission denied. Set LOCKSTEP_CACHE_DIR", quick=True,
    ),
    Case("diagnose demo --steps 1", 3, "cannot write to .*: Permission denied. Set LOCKSTEP_DATA_DIR"),
    Case("attach -o {ro}/b.session -- true", 2, "cannot write a session to .*Permission denied"),
    Case("import lockstep {rw} -o {ro}/b.session", 2, "cannot write a session to .*Permission denied"),
)  # fmt: skip


def carry_out(case: Case, directory: Path) -> None:
    """Run it, and see that nothing has changed where nothing may be written."""
    ro, rw, home = directory / "ro", directory / "rw", directory / "home"
    for folder in (ro, rw, home):
        folder.mkdir()
    made.build(ro / "a.session").chmod(0o444)
    with create(growing := rw / "growing.session") as writer:
        writer.step(0, record(0))
        for suffix in ("", "-wal"):
            shutil.copy(f"{growing}{suffix}", ro / f"killed.session{suffix}")
    growing.unlink()
    before = {path.name: path.read_bytes() for path in ro.iterdir()}
    ro.chmod(0o555)
    home.chmod(0o555)
    words = case.words.format(ro=ro, rw=rw).split()
    done = unprivileged(*words, HOME=str(home), OMP_NUM_THREADS="1", **dict.fromkeys(_HOME, ""))
    assert done.returncode == case.code, done.stderr
    assert re.search(case.printed, done.stderr), done.stderr
    assert case.code == 0 or done.stderr.count("\n") == 1, done.stderr
    assert {path.name: path.read_bytes() for path in ro.iterdir()} == before
    assert list(home.iterdir()) == []
