"""Nobody has a folder emptied by what he puts in the place of a temporary one, whenever he does so."""

from __future__ import annotations

import itertools
import os
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.engine import scratch
from lockstep.engine.scratch import ScratchFolder, deliver, sweep

pytestmark = pytest.mark.sampled_file(2)

#: Another user, who need not exist.
STRANGER = 54321
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


class Ground:
    """A place with a folder in it, and a folder of the same user's that must stay as it is."""

    def __init__(self, root: Path) -> None:
        self.root, self.place, self.precious = root, root / "place", root / "precious"
        self.place.mkdir(parents=True)
        for folder in (self.precious, self.precious / "owner-less", self.precious / "sub"):
            folder.mkdir()
            (folder / "file").write_text("precious")
        self.before = self.content(self.precious)
        self.inode = self.precious.stat().st_ino

    @staticmethod
    def content(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*")}

    def folder(self) -> ScratchFolder:
        """With a folder and files in it."""
        made = ScratchFolder.make("test", self.place)
        assert made.path.parent == self.place
        (made.path / "sub" / "deep").mkdir(parents=True)
        (made.path / "sub" / "deep" / "file").write_text("x")
        (made.path / "file").write_text("x")
        return made

    def entry(self) -> Path | None:
        """What the folder is called now."""
        return next(self.place.glob("lockstep-*"), None)

    def check(self) -> None:
        """Wherever the precious folder lies by now."""
        found = [path for path in self.root.rglob("*") if path.is_dir() and path.lstat().st_ino == self.inode]
        assert len(found) == 1
        assert self.content(found[0]) == self.before


def put_link(ground: Ground) -> None:
    if entry := ground.entry():
        entry.rename(ground.root / "taken")
        entry.symlink_to(ground.precious)


def put_folder(ground: Ground) -> None:
    if entry := ground.entry():
        entry.rename(ground.root / "taken")
        ground.precious.rename(entry)


def exchange_parent(ground: Ground) -> None:
    """The same name leads to the precious folder below another parent."""
    if entry := ground.entry():
        (ground.root / "other").mkdir()
        (ground.root / "other" / entry.name).symlink_to(ground.precious)
        ground.place.rename(ground.root / "taken")
        ground.place.symlink_to(ground.root / "other")


def put_link_inside(ground: Ground) -> None:
    """In the place of a folder that lies in the temporary one."""
    if (entry := ground.entry()) and (inside := next((p for p in entry.iterdir() if p.is_dir()), None)):
        inside.rename(ground.root / "taken")
        inside.symlink_to(ground.precious)


def put_folder_inside(ground: Ground) -> None:
    if (entry := ground.entry()) and (inside := next((p for p in entry.iterdir() if p.is_dir()), None)):
        inside.rename(ground.root / "taken")
        (ground.root / "decoy").mkdir()
        (ground.root / "decoy").rename(inside)


class Striking:
    """In the place of the module `os`: before its call number `moment` somebody strikes."""

    def __init__(self, moment: int, strike: Callable[[], None]) -> None:
        self.left, self.strike = moment, strike

    def __getattr__(self, name: str) -> Any:
        value = getattr(os, name)
        if not callable(value) or isinstance(value, type):
            return value

        def called(*arguments: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                self.strike()
            return value(*arguments, **named)

        return called


def close(ground: Ground, folder: ScratchFolder) -> None:
    folder.close()


def sweep_it(ground: Ground, folder: ScratchFolder) -> None:
    folder._opened.close()
    scratch._swept.clear()
    sweep(ground.place)


STRIKES = (put_link, put_folder, exchange_parent, put_link_inside, put_folder_inside)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strike", STRIKES)
@pytest.mark.parametrize("act", [close, sweep_it])
def test_whenever_something_is_exchanged_nothing_else_is_emptied(
    act: Callable[[Ground, ScratchFolder], None],
    strike: Callable[[Ground], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for moment in itertools.count():
        ground = Ground(tmp_path / str(moment))
        folder = ground.folder()
        striking = Striking(moment, lambda ground=ground: strike(ground))  # type: ignore[misc]
        with monkeypatch.context() as patch:
            patch.setattr(scratch, "os", striking)
            act(ground, folder)
        ground.check()
        folder._opened.close()
        if striking.left >= 0:
            break
    assert moment > 10, "it was struck at every call"
    assert list(ground.place.iterdir()) == [], "undisturbed it is removed"


@pytest.mark.parametrize("strike", STRIKES[:3])
def test_whenever_something_is_exchanged_while_a_folder_is_made(
    strike: Callable[[Ground], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for moment in itertools.count():
        ground = Ground(tmp_path / str(moment))
        striking = Striking(moment, lambda ground=ground: strike(ground))  # type: ignore[misc]
        with monkeypatch.context() as patch:
            patch.setattr(scratch, "os", striking)
            ScratchFolder.make("test", ground.place).close()
        ground.check()
        if striking.left >= 0:
            break
    assert moment > 10


def as_stranger(act: Callable[[], object]) -> None:
    """Do something as another user, in a process of its own."""
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return
    try:
        os.setgroups([])
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        act()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that everybody can write to, below none that only this user can enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        os.chmod(root, 0o755)
        place = Path(root) / "shared"
        place.mkdir()
        place.chmod(0o777)
        yield place


def exchange(place: Path, precious: Path) -> None:
    """What an attacker does: every entry becomes a link."""
    for entry in list(place.iterdir()):
        entry.rename(place / "taken")
        entry.symlink_to(precious)


@needs_root
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_another_user_can_exchange_nothing_where_he_can_write(
    open_place: Path, tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output's folder is open to all: temporary folders are elsewhere."""
    ground = Ground(tmp_path / "ground")
    open_place.chmod(mode)
    folder = ScratchFolder.make("attach", open_place)
    assert list(open_place.iterdir()) == []
    as_stranger(lambda: exchange(open_place, ground.precious))
    folder.close()
    ground.check()
    monkeypatch.setattr(tempfile, "tempdir", str(open_place))
    monkeypatch.setenv("TMPDIR", str(open_place))
    with ScratchFolder.make("test") as folder:
        assert (open_place in folder.path.parents) == bool(mode & stat.S_ISVTX)
        assert folder.path.parent.stat().st_mode & 0o777 == 0o700


@needs_root
def test_a_place_that_becomes_open_to_others_is_emptied_by_its_inode_alone(
    open_place: Path, tmp_path: Path
) -> None:
    ground = Ground(tmp_path / "ground")
    open_place.chmod(0o755)
    folder = ScratchFolder.make("attach", open_place)
    (folder.path / "file").write_text("x")
    open_place.chmod(0o777)
    as_stranger(lambda: exchange(open_place, ground.precious))
    folder.close()
    ground.check()
    assert list((open_place / "taken").iterdir()) == []
    assert (open_place / folder.path.name).is_symlink()


@needs_root
def test_what_another_user_has_taken_beforehand_is_not_used(
    open_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of this user's in a directory of temporary files: as a folder of his own, or a link."""
    open_place.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(open_place))
    monkeypatch.setenv("TMPDIR", str(open_place))
    monkeypatch.setenv("LOCKSTEP_STATE_DIR", str(tmp_path / "state"))
    taken = open_place / f"lockstep-{os.getuid()}"
    for take in (taken.mkdir, lambda: taken.symlink_to(tmp_path)):
        as_stranger(take)
        with ScratchFolder.make("test") as folder:
            assert folder.path.parent == tmp_path / "state" / "scratch"
        taken.unlink() if taken.is_symlink() else taken.rmdir()


def test_where_there_is_no_place_it_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOCKSTEP_STATE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(scratch, "_temporary", list)
    with pytest.raises(OSError, match=r"no place for temporary files .*Not a directory.*: set TMPDIR to one"):
        ScratchFolder.make("test")


def test_small_things_lie_in_the_runtime_directory_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with ScratchFolder.make("store", small=True) as folder, ScratchFolder.make("golden") as other:
        assert folder.path.parent == tmp_path
        assert other.path.parent != tmp_path
    tmp_path.chmod(0o770)
    with ScratchFolder.make("store", small=True) as folder:
        assert folder.path.parent != tmp_path


def test_a_folder_of_any_depth_is_removed(tmp_path: Path) -> None:
    folder = ScratchFolder.make("test", tmp_path)
    held = os.open(folder.path, os.O_RDONLY)
    for _ in range(1000):
        os.mkdir("d", dir_fd=held)
        below = os.open("d", os.O_RDONLY, dir_fd=held)
        os.close(held)
        held = below
    os.close(held)
    folder.close()
    left = list(tmp_path.iterdir())
    subprocess.run(["rm", "-rf", folder.path], check=True)  # pytest itself could not remove it
    assert left == []


@pytest.mark.parametrize("full", [False, True])
def test_a_finished_file_comes_from_another_disk_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    finished, target, victim = tmp_path / "finished", tmp_path / "out" / "a", tmp_path / "victim"
    target.parent.mkdir()
    finished.write_text("new")
    finished.chmod(0o640)
    victim.write_text("precious")
    target.symlink_to(victim)

    def other_disk(source: Path, to: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", other_disk)
    if full:
        monkeypatch.setattr(os, "fsync", no_room)
        with pytest.raises(OSError, match="No space"):
            deliver(finished, target)
        assert target.is_symlink()
    else:
        deliver(finished, target)
        assert (target.read_text(), target.stat().st_mode & 0o777) == ("new", 0o640)
        assert not target.is_symlink()
        assert not finished.exists()
    assert victim.read_text() == "precious"
    assert list(target.parent.iterdir()) == [target]
