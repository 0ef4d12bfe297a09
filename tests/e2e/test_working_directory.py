"""Every subcommand, run in a folder full of a stranger's code: a model with modules beside its weights that bear the
names of all that Python, the dependencies and Lockstep itself import. None of it runs, in no process.

PYTHONPATH and PATH have empty entries here, which mean the working directory: `export PYTHONPATH=/x:$PYTHONPATH` makes
one. Python itself then imports `encodings` and `sitecustomize` from there before any line of a program, which is beyond
help (docs/security.md); no child does.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

import psutil
import pytest

from lockstep.sessions import Session, SessionError
from lockstep.workbench.attach.launch import DOOR
from lockstep.workbench.cli.subcommands import COMMANDS
from lockstep.workbench.demo import MODEL_DIR
from lockstep.workbench.exit_codes import Exit
from tests.e2e.terminal import PATIENCE, ROOT

#: Run by Python before a program's first line.
_CUSTOMIZE = ("sitecustomize", "usercustomize")
_FOLDERS = ("transformers", "torch")
_PROGRAMS = ("cc", "gcc", "git", "ldconfig", "lscpu", "ninja", "nvidia-smi", "objdump", "uname", "xdg-open")
_RECORDED = ROOT / "sessions" / "recorded" / "mask-additive.session"
_PLANTED = (
    "import os\nopen(os.path.join({ran!r}, __name__.split('.')[0] + f'.{{os.getpid()}}'), 'w').close()\n"
)
_STARTS = "import sys\nfrom lockstep.workbench.cli.main import main\nsys.exit(main())\n"  # as an installed script does


@dataclass(frozen=True, slots=True)
class Folder:
    """The stranger's folder. What runs of it leaves a file MODULE.PID in `ran`."""

    path: Path
    ran: Path
    program: Path

    def start(
        self, words: tuple[str, ...], program: str = _STARTS, **settings: str
    ) -> subprocess.Popen[bytes]:
        """`lockstep words`, or another program, in the folder."""
        self.program.write_text(program)
        environment = {
            **os.environ, "PYTHONPATH": f"{ROOT}:", "PATH": f":{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
            "LOCKSTEP_DATA_DIR": str(self.program.parent), **settings,
        }  # fmt: skip
        return subprocess.Popen(
            [sys.executable, str(self.program), *words],
            cwd=self.path, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def nothing_ran(self, *started: subprocess.Popen[bytes]) -> None:
        """What ran of the stranger's code, apart from what Python ran as the program started: nothing."""
        pids = {str(process.pid) for process in started}
        ran = {tuple(file.name.split(".")) for file in self.ran.iterdir()}
        assert {(name, pid) for name, pid in ran if name not in _CUSTOMIZE or pid not in pids} == set()


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder, made once: the demo's weights, and modules by every name that is imported."""
    root = tmp_path_factory.mktemp("stranger")
    folder = Folder(root / "model", root / "ran", root / "bin" / "lockstep")
    shutil.copytree(MODEL_DIR, folder.path)
    for made in (folder.ran, folder.program.parent):
        made.mkdir()
    code = _PLANTED.format(ran=str(folder.ran))
    names = {
        *_CUSTOMIZE,
        *sys.stdlib_module_names,
        *packages_distributions(),
        "lockstep",
        "engine",
        "sessions",
        "workbench",
    }
    for name in names:
        if name.isidentifier() and name not in (*_FOLDERS, "encodings"):  # Python would not start
            (folder.path / f"{name}.py").write_text(code)
    for name in _FOLDERS:
        (folder.path / name).mkdir()
        (folder.path / name / "__init__.py").write_text(code)
    for name in _PROGRAMS:
        (folder.path / name).write_text(f"#!/bin/sh\n: > {folder.ran}/{name}.$PPID\nexit 1\n")
        (folder.path / name).chmod(0o755)
    about = folder.path / "stranger-1.0.dist-info"  # a package that adds an engine's door, were it installed
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[lockstep.engines]\nstranger = stranger:door\n")
    (folder.path / "stranger.py").write_text(code)
    config = json.loads((folder.path / "config.json").read_bytes())
    config["auto_map"] = {"AutoConfig": "torch.Config", "AutoModelForCausalLM": "torch.Model"}
    (folder.path / "config.json").write_text(json.dumps(config))
    shutil.copy(_RECORDED, folder.path / "saved.session")
    (folder.path / "written").mkdir()
    attached = {**os.environ, "PYTHONPATH": str(DOOR), "LOCKSTEP_TAP": "dump"}
    subprocess.run([sys.executable, "-P", "-c", _ENGINE], cwd=folder.path, env=attached, check=True)
    folder.start((), "").communicate()
    # What else Python itself, or a .pth file among its packages, imports before a program.
    for file in folder.ran.iterdir():
        if file.stem not in _CUSTOMIZE:
            (folder.path / f"{file.stem}.py").unlink()
    return folder


@pytest.fixture
def folder(planted: Folder) -> Folder:
    """The folder, before anything of it ran."""
    for file in planted.ran.iterdir():
        file.unlink()
    return planted


@pytest.mark.slow
def test_the_planted_code_would_show(folder: Folder) -> None:
    subprocess.run([sys.executable, "-c", "import msgspec, transformers"], cwd=folder.path, check=True)
    assert {file.stem for file in folder.ran.iterdir()} >= {"msgspec", "transformers"}


#: An engine of somebody's own, which records itself.
_ENGINE = """
import os, lockstep_tap, torch
tape = lockstep_tap.Tape(os.environ.get("LOCKSTEP_TAP", "dump"), engine="toy")
tape.step([1, 5, 9], 0)
tape.tap("embed", torch.eye(3, 4), "replicate")
tape.tap("logits", torch.eye(1, 4), "replicate")
tape.close()
"""
#: Subcommand -> a command line of it that goes as far as it can, for those that end by themselves.
LINES: dict[str, tuple[str, ...]] = {
    "demo": ("--fast", "--tp", "1"),
    "run": (".", "--ids", "1,5,9", "--batch", "--ex", "next", "--save", "run.session"),
    "replay": ("saved.session", "--batch", "--ex", "next"),
    "sessions": ("verify", "saved.session"),
    "diff": ("saved.session", "saved.session"),
    "mismatch": ("saved.session", "saved.session", "--model", "."),
    "weights": ("--model", ".", "--", sys.executable, "-P", "-c", "pass"),
    "mcp": (".",),
    "generate": (".", "--prompt", "a", "--max-tokens", "2", "--tp", "2", "--save", "generated.session"),
    "check": (".", "--ids", "1,5,9", "--steps", "1"),
    "diagnose": (".", "--ids", "1,5,9", "--steps", "1"),
    "invariant": (".", "--axis", "batch", "--ids", "1,5,9", "--steps", "1"),
    "export": ("saved.session", "--html", "o.html", "--svg", "o.svg", "--png", "o.png", "--csv", "o.csv"),
    "inspect": (".",),
    "faults": (),
    "doctor": (),
    "bench": (".", "--quick", "--tp", "2"),
    "tap": ("--write", "written"),
    "import": ("lockstep", "dump", "-o", "imported.session"),
    "attach": ("-o", "attached.session", "--", sys.executable, "-P", "-c", _ENGINE),
    "regress": ("--baseline", "saved.session", "--", sys.executable, "-P", "-c", _ENGINE),
}
#: Exit codes other than 0: the baseline is of another model; the program loads none.
CODES = {"regress": Exit.INCONCLUSIVE, "weights": Exit.CANNOT_LOAD}
#: These start the user's own command in the user's own environment, whose empty entries are the user's word.
CLEAN = {name: {"PYTHONPATH": str(ROOT)} for name in ("attach", "regress", "weights")}
#: Subcommands that run on until they are ended: each has a test of its own below.
LASTING = ("tui", "web", "rank")
QUICK = ("diff", "faults")


def test_every_subcommand_is_tried() -> None:
    assert {*LINES, *LASTING} == set(COMMANDS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LINES]
)
def test_a_subcommand_runs_nothing_of_it(name: str, folder: Folder) -> None:
    process = folder.start((name, *LINES[name]), **CLEAN.get(name, {}))
    out, err = process.communicate(timeout=170)
    folder.nothing_ran(process)
    assert process.returncode == CODES.get(name, 0), f"{out.decode()}\n{err.decode()}"


#: A host, its ranks and its golden recorder, as the screens start them.
_CLIENT = """
import lockstep.workbench.cli
from lockstep.workbench.debugger.host.client import HostClient
client = HostClient.start([".", "--ids", "1,5,9"], program="lockstep.workbench.cli.host")
client.ready.result()
client.command("next").result()
print(client.command("golden").result().text)
client.close()
"""


@pytest.mark.slow
def test_host_ranks_and_golden_recorder_run_nothing_of_it(folder: Folder) -> None:
    process = folder.start((), _CLIENT)
    out, err = process.communicate(timeout=170)
    folder.nothing_ran(process)
    assert process.returncode == 0, err.decode()
    assert "golden" in out.decode()


_SCREENS = {"TEXTUAL_DRIVER": "textual.drivers.headless_driver:HeadlessDriver"}


@contextmanager
def _running(process: subprocess.Popen[bytes]) -> Iterator[psutil.Process]:
    """A program that is ended at the end, with all that it started."""
    top = psutil.Process(process.pid)
    try:
        yield top
    finally:
        with suppress(psutil.NoSuchProcess):  # it has ended
            for one in (*top.children(recursive=True), top):
                one.kill()
        process.communicate()


def _until(met: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not met():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _children(program: psutil.Process, word: str) -> list[psutil.Process]:
    """The descendants with this word in their command lines."""
    found = []
    for process in program.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if word in process.cmdline():
                found.append(process)
    return found


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _steps(session: Path) -> int:
    with suppress(SessionError), Session.open(session) as opened:
        return len(opened.steps())
    return 0


@pytest.mark.slow
def test_the_screens_of_a_live_model_run_nothing_of_it(folder: Folder) -> None:
    process = folder.start(("tui", ".", "--ids", "1,5,9", "--save", "live.session"), **_SCREENS)
    with _running(process):
        _until(lambda: _steps(folder.path / "live.session"), process)
        folder.nothing_ran(process)


@pytest.mark.slow
def test_home_and_its_look_at_the_machine_run_nothing_of_it(folder: Folder) -> None:
    process = folder.start((), **_SCREENS)
    with _running(process) as program:
        _until(lambda: _children(program, "doctor"), process)
        _until(lambda: not _children(program, "doctor"), process)
        folder.nothing_ran(process)


@pytest.mark.slow
async def test_the_screens_in_a_browser_run_nothing_of_it(folder: Folder) -> None:
    aiohttp = pytest.importorskip("aiohttp", reason="the extra `web` is not installed")
    process = folder.start(("web", "--port", str(_free_port())))
    assert process.stdout is not None
    with _running(process):
        address = (await asyncio.to_thread(process.stdout.readline)).decode().strip()
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
            async with http.get(address) as answer:
                path = answer.cookies["lockstep"]["path"]
            async with http.ws_connect(address.split("/?")[0] + path + "ws") as screens:
                shown = b""
                while b"haiku" not in shown:
                    shown += await screens.receive_bytes(timeout=PATIENCE)
        folder.nothing_ran(process)


@pytest.mark.slow
def test_a_replay_on_screen_runs_nothing_of_it(folder: Folder) -> None:
    process = folder.start(("tui", "saved.session"), **_SCREENS)
    with _running(process) as program:
        _until(lambda: any(file.path.endswith("saved.session") for file in program.open_files()), process)
        time.sleep(3)  # for whatever is imported after it
        folder.nothing_ran(process)


@pytest.mark.slow
def test_a_rank_of_a_host_that_listens_runs_nothing_of_it(folder: Folder) -> None:
    listen = f"127.0.0.1:{_free_port()}"
    key = {"LOCKSTEP_KEY": "0123456789abcdef" * 4}
    group = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    host = folder.start(("generate", ".", "--ids", "1,5", "--max-tokens", "2", "--listen", listen), **key)
    with _running(host):
        rank = folder.start(("rank", listen), **key, **group, **meeting)
        with _running(rank):
            _, stated = host.communicate(timeout=PATIENCE)
            assert (host.returncode, rank.wait(PATIENCE)) == (0, 0), stated
            folder.nothing_ran(host, rank)
