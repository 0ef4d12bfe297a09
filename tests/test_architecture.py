"""The packages and the direction of imports: as contracts over the source, and as what a process really loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.structure import modules

ROOT = Path(__file__).resolve().parents[1]


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_import_contracts_are_kept() -> None:
    done = _python("-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


#: What must stay out of the processes that show, replay or merely help.
HEAVY = ("torch", "transformers")

LIGHT = {
    "lockstep --help": "from lockstep.workbench.cli.main import run; assert run(['--help']) == 0",
    "every subcommand's own help": (
        "from lockstep.workbench.cli.main import run\nfrom lockstep.workbench.cli.subcommands import COMMANDS\n"
        "assert COMMANDS and all(run([name, '--help']) == 0 for name in COMMANDS)"
    ),
    "a refused command line": (
        "from lockstep.workbench.cli.main import run; assert run(['generate', 'demo', '--tp', 'x']) == 2"
    ),
    "the sessions": "from lockstep.sessions import diff, session, writer",
    "the debugger": "import lockstep.workbench.inferior.inferior",
    "the engine's client": (
        "import lockstep.engine.ranks.client, lockstep.engine.config\n"
        "import lockstep.engine.faults.catalogue, lockstep.engine.parallel.shards"
    ),
}


@pytest.mark.parametrize("what", LIGHT)
def test_light_processes_load_no_torch(what: str) -> None:
    loaded = f"import sys; found = sorted({set(HEAVY)!r} & sys.modules.keys()); assert not found, found"
    done = _python("-c", f"{LIGHT[what]}\n{loaded}")
    assert done.returncode == 0, f"{what}: {done.stderr}"


def test_help_loads_no_textual_and_no_subcommand() -> None:
    code = (
        "from lockstep.workbench.cli.main import run\nfrom lockstep.workbench.cli.subcommands import COMMANDS\n"
        "run(['--help'])\n"
        "import sys; found = {'textual', 'numpy', *(m for m, _ in COMMANDS.values())} & sys.modules.keys()\n"
        "assert not found, found"
    )
    done = _python("-c", code)
    assert done.returncode == 0, done.stderr


def test_importing_any_module_runs_nothing() -> None:
    """`python -c "import x"` of every torch-free package must be silent: no output, no thread, no process."""
    done = _python(
        "-c",
        "import threading, lockstep.engine.ranks.client, lockstep.sessions, lockstep.workbench.cli.main\n"
        "import lockstep.workbench.inferior.generation, lockstep.workbench.models.tokenizer\n"
        "assert threading.active_count() == 1",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


#: What starts a process; the types and constants of `subprocess` are free to use.
_STARTS = re.compile(
    r"subprocess\.(Popen|run|call|check_\w+|get\w*output)|os\.(system|popen|exec\w+|spawn\w+|posix_spawn\w*|fork\w*)"
    r"|asyncio\.create_subprocess_\w+|multiprocessing\..*|pty\..*|(.*\.)?(ProcessPoolExecutor|subprocess_\w+)"
)
_FROM = ("subprocess", "multiprocessing", "pty")
#: One of these is in the text of whatever starts a process: what has none need not be parsed.
_MENTIONED = re.compile(
    r"subprocess|multiprocessing|pty|ProcessPoolExecutor|os\.(system|popen|exec|spawn|posix_spawn|fork)"
)


def _starts_process(node: ast.AST) -> bool:
    match node:
        case ast.Call():
            return _STARTS.fullmatch(ast.unparse(node.func)) is not None
        case ast.ImportFrom():
            return (node.module or "").split(".")[0] in _FROM
        case ast.Import():
            return any(alias.asname or alias.name in _FROM[1:] for alias in node.names if alias.name in _FROM)
    return False


def test_one_module_starts_processes() -> None:
    """Only it knows how a child is kept from importing what lies in the working directory. `attach` starts the
    user's own command as the user would; in it the tape has multiprocessing close it at the end."""
    attach = Path("workbench/attach")
    others = {str(attach / name) for name in ("group.py", "watcher.py", "inside/lockstep_tap.py")}
    found = {
        str(path)
        for path, text in modules(ROOT).values()
        if _MENTIONED.search(text)
        for node in ast.walk(ast.parse(text))
        if _starts_process(node)
    }
    assert found == {"engine/children.py"} | others


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.run([sys.executable])", "from subprocess import Popen", "import subprocess as s", "os.execv(a, b)",
        "os.fork()", "asyncio.create_subprocess_exec(a)", "import multiprocessing", "loop.subprocess_exec(a)",
    ],
)  # fmt: skip
def test_what_starts_a_process_is_noticed(line: str) -> None:
    assert any(_starts_process(node) for node in ast.walk(ast.parse(line)))
