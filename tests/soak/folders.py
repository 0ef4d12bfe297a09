"""Trials of folders: links that others put there, folders that cannot be written, dumps for which there is no room."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from itertools import count
from pathlib import Path

from lockstep.engine import scratch
from lockstep.engine.scratch import ScratchFolder, sweep
from lockstep.workbench.cli.main import run
from tests.workbench.cli import full_dump, read_only
from tests.workbench.export import made

_ROUNDS = 40


def _exchange(place: Path, precious: Path, chance: random.Random) -> None:
    """For ever: whatever appears in the place is moved away, with a link or a folder of the victim's in its stead."""
    for number in count():
        for entry in list(place.iterdir()):
            if entry.name.startswith("lockstep-") and not entry.is_symlink():
                with suppress(OSError):
                    entry.rename(place.parent / f"taken{number}")
                    entry.symlink_to(precious)
        time.sleep(chance.uniform(0, 0.002))


@contextmanager
def _attacker(place: Path, precious: Path, seed: int) -> Iterator[None]:
    """Another process, as strong as this user: it may do what the modes of the folders would keep others from."""
    child = os.fork()
    if not child:
        try:
            _exchange(place, precious, random.Random(seed))
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def put_links(seed: int, directory: Path) -> None:
    """While folders are made, emptied and swept; every second time while exports are written to a folder that is open
    to all."""
    place, precious = directory / "place", directory / "precious"
    place.mkdir()
    for number in range(20):
        (precious / f"folder{number}").mkdir(parents=True)
        (precious / f"folder{number}" / "file").write_text("precious")
    before = sorted(precious.rglob("*"))
    session = made.build(directory / "a.session")
    with _attacker(place, precious, seed):
        if seed % 2:
            place.chmod(0o777)
            for number in range(_ROUNDS // 4):
                with redirect_stderr(StringIO()) as stated:
                    assert run(["export", str(session), "--csv", str(place / f"{number}.csv")]) == 0, (
                        stated.getvalue()
                    )
        else:
            for _ in range(_ROUNDS):
                with (
                    ScratchFolder.make("test", place) as folder,
                    suppress(OSError),
                ):  # its path may lead elsewhere
                    for name in ("a", "b", "c"):
                        (folder.path / name / "deep").mkdir(parents=True)
                        (folder.path / name / "deep" / "file").write_text("x")
                scratch._swept.clear()
                sweep(place)
    for path in before:
        assert path.exists(), f"{path.relative_to(precious)} is gone"


def write_nowhere(seed: int, directory: Path) -> None:
    """One of the commands where nothing may be written."""
    read_only.carry_out(read_only.CASES[seed % len(read_only.CASES)], directory)


def fill_dump(seed: int, directory: Path) -> None:
    """Files may grow to a limit, one more than the last: the dump fails, then the session, then nothing."""
    full_dump.carry_out(50_000 + 240_000 * seed, directory)
