"""`kill`, and a terminal that is closed: what a command records is folded, its processes end, and it reports it."""

from __future__ import annotations

import fcntl
import os
import pty
import random
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lockstep.sessions import Session, SessionError
from lockstep.sessions.verify import verify
from tests.checkpoints import tiny_checkpoint

ROOT = Path(__file__).resolve().parents[3]
_IDS = ["--ids", "1,5,9,12"]
#: Seconds after which a process hangs.
_PATIENCE = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 whose context no run fills before it is ended."""
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", max_position_embeddings=4096)


class Command:
    """A command that runs in a folder of its own, its output in files."""

    def __init__(self, directory: Path, *words: str, terminal: int | None = None) -> None:
        directory.mkdir()
        self.directory, self.session = directory, directory / "kept.session"
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self.out, self.err = directory / "out", directory / "err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockstep.workbench.cli", *words, "--save", str(self.session)],
                cwd=directory, stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=out if terminal is None else terminal, stderr=err if terminal is None else terminal,
                start_new_session=True, preexec_fn=None if terminal is None else _take_terminal,
                env={
                    **os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary),
                    "LOCKSTEP_CACHE_DIR": str(directory / "cache"),
                },
            )  # fmt: skip
        self.children: list[psutil.Process] = []

    def wait(self, met: Callable[[], object]) -> None:
        """Until it has come somewhere; its processes then are known."""
        deadline = time.monotonic() + _PATIENCE
        while not met():
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < deadline, self.err.read_text()
            time.sleep(0.02)
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def steps(self) -> int:
        """How many are recorded."""
        try:
            with Session.open(self.session) as session:
                return len(session.steps())
        except SessionError:
            return 0

    def runs(self, module: str) -> bool:
        """Whether a child runs that module."""
        return any(module in child.cmdline() for child in psutil.Process(self.process.pid).children(True))

    def ended(self) -> int:
        """Wait for it and its children to end, leaving no temporary file; the exit code."""
        code = self.process.wait(_PATIENCE)
        _, alive = psutil.wait_procs(self.children, timeout=20)
        assert alive == []
        assert [*self.temporary.iterdir()] == []
        return code

    def folded(self) -> int:
        """The last step of the session, which must be one whole file."""
        assert [path.name for path in self.directory.glob("kept.session*")] == ["kept.session"]
        assert verify(self.session) == []
        return self.steps() - 1


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts commands; none is left running."""
    started: list[Command] = []

    def start(name: str, *words: str, terminal: int | None = None) -> Command:
        started.append(Command(tmp_path / name, *words, terminal=terminal))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_signal_folds_the_session_and_reports_where_it_is(
    model: Path, commands: Callable[..., Command]
) -> None:
    endless = ["--max-tokens", "4000", "--temperature", "1"]
    generate = commands("generate", "generate", str(model), *_IDS, *endless)
    run = commands("run", "run", str(model), *_IDS, "--ex", "until 100000")
    for one, number in ((generate, signal.SIGTERM), (run, signal.SIGHUP)):
        one.wait(lambda one=one: one.steps() > 3)
        one.process.send_signal(number)
        assert one.ended() == 128 + number, one.err.read_text()
        stated = one.err.read_text().splitlines()[-1]
        assert (
            stated == f"lockstep: ended by {number.name}; {one.session} is recorded up to step {one.folded()}"
        )


def test_a_reference_that_is_being_recorded_ends_with_its_command(
    model: Path, commands: Callable[..., Command]
) -> None:
    check = commands("check", "check", str(model), *_IDS)
    check.wait(lambda: check.runs("lockstep.workbench.references.record"))
    check.process.terminate()
    assert check.ended() == 128 + signal.SIGTERM, check.err.read_text()
    assert check.err.read_text() == "lockstep: ended by SIGTERM\n"
    assert [path for path in (check.directory / "cache").rglob("*") if path.is_file()] == []


@pytest.mark.slow
def test_a_terminal_that_is_closed_takes_no_session_along(
    model: Path, commands: Callable[..., Command]
) -> None:
    """SIGHUP comes, and whatever is written to the terminal fails."""
    ours, theirs = pty.openpty()
    generate = commands(
        "closed", "generate", str(model), *_IDS, "--max-tokens", "4000", "--temperature", "1", terminal=theirs
    )
    os.close(theirs)
    generate.wait(lambda: os.read(ours, 4096) and generate.steps() > 3)
    os.close(ours)
    assert generate.ended() == 128 + signal.SIGHUP
    assert generate.folded() > 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_signal_at_any_moment_thirty_times(model: Path, commands: Callable[..., Command]) -> None:
    """While Python starts, the ranks start, the model loads, steps are recorded."""
    chance = random.Random(0)
    for turn in range(30):
        number = chance.choice([signal.SIGTERM, signal.SIGHUP])
        words = chance.choice(
            [["generate", "--max-tokens", "4000", "--temperature", "1"], ["run", "--ex", "until 100000"]]
        )
        one = commands(f"turn{turn}", words[0], str(model), *_IDS, *words[1:])
        time.sleep(chance.uniform(0.0, 9.0))
        one.children = psutil.Process(one.process.pid).children(recursive=True)
        one.process.send_signal(number)
        code = one.ended()
        assert code in (128 + number, -number), one.err.read_text()  # the latter before its first line
        assert "Traceback" not in one.err.read_text(), one.err.read_text()
        if one.session.exists():
            assert one.folded() == one.steps() - 1
            assert f"{one.session} is recorded" in one.err.read_text()


def test_a_rank_ends_at_once_wherever_it_is() -> None:
    """It waits for a host that sends nothing."""
    with (
        socket.create_server(("127.0.0.1", 0)) as host,
        subprocess.Popen(
            [
                sys.executable, "-P", "-m", "lockstep.workbench.cli", "rank", f"127.0.0.1:{host.getsockname()[1]}",
            ],
            stderr=subprocess.PIPE, text=True,
            env={
                **os.environ, "PYTHONPATH": str(ROOT), "LOCKSTEP_KEY": "0123456789abcdef" * 4, "RANK": "1",
                "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
            },
        ) as rank,
    ):  # fmt: skip
        host.settimeout(_PATIENCE)
        with host.accept()[0]:
            rank.terminate()
            _, stated = rank.communicate(timeout=_PATIENCE)
    assert (rank.returncode, stated) == (128 + signal.SIGTERM, "lockstep: rank 1: ended by SIGTERM\n")
