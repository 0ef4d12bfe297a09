"""Installed from a wheel on disk into fresh environments: what a base installation does, what it lacks and reports, and
whom it lives beside. Slow: environments are made, and the package index is asked."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep.workbench.cli.subcommands import COMMANDS
from lockstep.workbench.export.kinds import KINDS
from tests.e2e.terminal import PATIENCE, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RECORDED = ROOT / "sessions" / "recorded"
ONE, OTHER = RECORDED / "mask-additive.session", RECORDED / "load_bias-false.session"
#: MiB of a base installation with its dependencies.
MOST = 165
#: What is there before anything is installed.
_PYTHONS_OWN = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
#: An engine of somebody's own, which records itself.
_ENGINE = """
import sys; sys.path.insert(0, sys.argv[1])
import lockstep_tap, torch
tape = lockstep_tap.Tape("dump", engine="toy")
tape.step([1, 5, 9], 0)
tape.tap("embed", torch.eye(3, 4), "replicate")
tape.tap("logits", torch.eye(1, 4), "replicate")
tape.close()
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment, and the folder that its programs are started in."""

    path: Path
    folder: Path

    @classmethod
    def make(cls, path: Path) -> Environment:
        """A fresh one. Skips where there is no index to install from."""
        subprocess.run([sys.executable, "-m", "venv", str(path)], check=True)
        made = cls(path, path.with_name(f"{path.name}-folder"))
        made.folder.mkdir()
        done = made.run("pip", "install", "--quiet", "--dry-run", "--no-deps", "numpy")
        if done.returncode:
            pytest.skip(f"no package index can be reached: {done.stderr.strip().splitlines()[-1]}")
        return made

    def run(self, program: str, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment."""
        data = {
            f"LOCKSTEP_{name}_DIR": str(self.folder / name.lower()) for name in ("DATA", "CACHE", "STATE")
        }
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LOCKSTEP"))
        }
        return subprocess.run(
            [str(self.path / "bin" / program), *words], cwd=self.folder, text=True, capture_output=True,
            stdin=subprocess.DEVNULL, timeout=800, check=False,
            env={**kept, **data, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **settings},
        )  # fmt: skip

    def well(self, program: str, *words: str, **settings: str) -> str:
        """The same; it must end well. What it printed."""
        done = self.run(program, *words, **settings)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    @property
    def packages(self) -> Path:
        return next(self.path.glob("lib/python*/site-packages"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    maker = Environment.make(folder / "maker")
    maker.well("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A base installation, in which no torch is."""
    environment = Environment.make(tmp_path_factory.mktemp("base") / "environment")
    environment.well("pip", "install", "--quiet", str(wheel))
    return environment


def test_a_base_installation_is_small(base: Environment) -> None:
    found = {path.name for path in base.packages.iterdir()}
    assert not found & {"torch", "transformers", "tokenizers", "gguf", "pyarrow"}
    own = [path for path in base.packages.iterdir() if path.name.partition("-")[0] not in _PYTHONS_OWN]
    files = [
        file for path in own for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()
    ]
    size = sum(file.lstat().st_blocks * 512 for file in files) / (1 << 20)
    print(f"base installation: {size:.0f} MiB")
    assert size <= MOST


@pytest.mark.parametrize("name", COMMANDS)
def test_every_subcommand_has_its_help(base: Environment, name: str) -> None:
    assert f"lockstep {name}" in base.well("lockstep", name, "--help")


def test_recordings_are_replayed_compared_and_exported(base: Environment) -> None:
    assert base.well("lockstep", "--version").startswith("lockstep ")
    base.well("lockstep", "sessions")
    shown = base.well("lockstep", "replay", str(ONE), "--batch", "--ex", "golden", "--ex", "next")
    assert "0 * -inf" in shown
    assert base.run("lockstep", "diff", str(ONE), str(OTHER)).returncode == 1
    for kind in KINDS:
        base.well("lockstep", "export", str(ONE), f"--{kind}", f"out.{kind}")
        assert (base.folder / f"out.{kind}").stat().st_size


def test_a_dump_is_imported(base: Environment) -> None:
    base.well("lockstep", "tap", "--write", ".")
    subprocess.run([sys.executable, "-P", "-c", _ENGINE, str(base.folder)], cwd=base.folder, check=True)
    assert "3 rows" in base.well(
        "lockstep", "import", "lockstep", "dump", "-o", "run.session", "--model", "demo"
    )
    base.well("lockstep", "sessions", "verify", "run.session")


@pytest.mark.parametrize(
    "line",
    ["generate demo", "check demo", "diagnose demo", "demo", "inspect demo", "run demo", "invariant demo",
     f"check {ONE}", f"diagnose {ONE} --model demo", f"replay {ONE} --verify demo", "attach --model demo -- true"],
)  # fmt: skip
def test_what_needs_an_engine_reports_how_to_install_it(base: Environment, line: str) -> None:
    done = base.run("lockstep", *line.split())
    assert done.returncode == 3, done.stderr
    assert done.stderr.splitlines()[-1].endswith(": pip install 'lockstep-llm[engine]'"), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_other_extras_are_reported_as_well(base: Environment) -> None:
    done = base.run("lockstep", "web")
    assert (done.returncode, done.stderr.splitlines()[-1][-32:]) == (
        3,
        ": pip install 'lockstep-llm[web]'"[-32:],
    )
    shown = base.well("lockstep", "doctor")
    for extra in ("engine", "llamacpp", "web"):
        assert f"pip install 'lockstep-llm[{extra}]'" in shown
    done = base.run("lockstep", "import", "msprobe", ".")
    assert (done.returncode, "pip install lockstep-msprobe" in done.stderr) == (3, True)


def _shows(words: Sequence[str], wanted: bytes, folder: Path) -> float:
    """Seconds until a program in a terminal has shown `wanted`; then it is ended."""
    began = time.monotonic()
    screen, terminal = os.openpty()
    environment = {
        **os.environ,
        "TERM": "xterm-256color",
        "COLUMNS": "120",
        "LINES": "40",
        "HOME": str(folder),
    }
    process = subprocess.Popen(
        words,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )
    os.close(terminal)
    shown = b""
    try:
        while wanted not in shown:
            assert time.monotonic() < began + 3 * PATIENCE, shown[-2000:]
            shown += os.read(screen, 65536)
        return time.monotonic() - began
    finally:
        process.kill()
        process.wait()
        os.close(screen)


def test_the_first_screen_is_shown(base: Environment) -> None:
    lockstep = str(base.path / "bin" / "lockstep")
    for words, wanted in (([lockstep], b"demo"), ([lockstep, "tui", str(ONE)], b"attn.scores")):
        print(f"{' '.join(words[1:]) or 'home'}: {_shows(words, wanted, base.folder):.1f} s")


def test_run_without_an_installation(wheel: Path, tmp_path: Path) -> None:
    """`uv tool run` and `pipx run` make an environment of their own, and keep it."""
    tools = Environment.make(tmp_path / "tools")
    tools.well("pip", "install", "--quiet", "uv", "pipx")
    settings = {
        "HOME": str(tmp_path),
        "UV_CACHE_DIR": str(tmp_path / "uv"),
        "PIPX_HOME": str(tmp_path / "pipx"),
    }
    programs: dict[str, tuple[str, ...]] = {
        "uv": ("tool", "run", "--python", sys.executable, "--from", str(wheel), "lockstep", "--version"),
        "pipx": ("run", "--spec", str(wheel), "lockstep", "--version"),
    }
    for program, words in programs.items():
        for which in ("first", "again"):
            began = time.monotonic()
            assert "lockstep " in tools.well(program, *words, **settings)
            print(f"{program}, {which}: {time.monotonic() - began:.1f} s")


_LIBRARY = """
import lockstep, lockstep.sessions, lockstep.workbench.cli, sys
from pathlib import Path
assert lockstep.__version__, lockstep.__file__
with lockstep.sessions.Session.open(Path(sys.argv[1])) as session:
    assert session.steps()
assert not {"engine", "sessions", "workbench"} & sys.modules.keys()
"""


def test_a_folder_with_the_same_names_is_left_alone(base: Environment) -> None:
    ran = base.folder / "ran"
    code = f"open({str(ran)!r}, 'w').close()\n"
    for name in ("engine", "sessions", "workbench"):
        (base.folder / name).mkdir()
        (base.folder / name / "__init__.py").write_text(code)
    (base.folder / "lockstep.py").write_text(code)
    (base.folder / "script.py").write_text(_LIBRARY)
    for name in COMMANDS:
        assert base.run("lockstep", name, "--help").returncode == 0, name
    base.well("lockstep", "replay", str(ONE), "--batch", "--ex", "next")
    base.well("python", "-P", "script.py", str(ONE))
    assert not ran.exists()


def _distribution(folder: Path) -> Path:
    """The wheel of somebody else's distribution that installs a package `engine`."""
    files = {
        "engine/__init__.py": "WHO = 'theirs'\n",
        "their_engine-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: their-engine\nVersion: 1.0\n",
        "their_engine-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / "their_engine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        record = "".join(f"{name},,\n" for name in (*files, "their_engine-1.0.dist-info/RECORD"))
        archive.writestr("their_engine-1.0.dist-info/RECORD", record)
    return path


def _is_whole(environment: Environment) -> None:
    """Every file of ours is there as it was installed."""
    (record,) = environment.packages.glob("lockstep_llm-*.dist-info/RECORD")
    with record.open(newline="") as lines:
        for name, reported, _ in csv.reader(lines):
            if reported:
                digest = hashlib.sha256((environment.packages / name).read_bytes()).digest()
                assert reported == "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode(), name


def test_another_distribution_with_a_package_engine(wheel: Path, tmp_path: Path) -> None:
    theirs = str(_distribution(tmp_path))
    environment = Environment.make(tmp_path / "both")

    def pip(*words: str) -> None:
        environment.well("pip", words[0], "--quiet", *words[1:])

    def both() -> None:
        _is_whole(environment)
        environment.well("python", "-c", "import engine, lockstep.engine; assert engine.WHO == 'theirs'")

    ours = ("install", "--no-deps", str(wheel))
    steps: list[Callable[[], None]] = [
        lambda: pip("install", theirs), lambda: pip(*ours), both,
        lambda: pip("uninstall", "--yes", "their-engine"), lambda: _is_whole(environment),
        lambda: pip("install", theirs), both,
        lambda: pip("uninstall", "--yes", "lockstep-llm"),
    ]  # fmt: skip
    for step in steps:
        step()
    environment.well("python", "-c", "import engine; assert engine.WHO == 'theirs'")
    assert not (environment.packages / "lockstep").exists()
