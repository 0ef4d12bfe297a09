"""pytest's plugin, in a project of somebody's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.workbench.cli import main
from lockstep.workbench.debugger import failures  # noqa: F401
from lockstep.workbench.library import judging  # noqa: F401
from tests.checkpoints import tiny_checkpoint

pytest_plugins = ["pytester"]

MATCHES = """
def test_port(lockstep_check):
    verdict = lockstep_check({model!r}, tp=2, ids=[5, 6, 7], steps=1)
    assert verdict.matches
    assert verdict.event.tp == 2
"""
FAULTY = """
def test_port(lockstep_check):
    lockstep_check({model!r}, tp=2, ids=[5, 6, 7], steps=1, faults={{"load_bias": "false"}})
    raise RuntimeError("not reached")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", num_hidden_layers=1)


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Without the plugins of this suite: some keep one state for the process, which an inner run would end."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\naddopts = -p lockstep -p no:cacheprovider")
    return pytester


def test_a_model_that_matches(project: pytest.Pytester, model: Path) -> None:
    project.makepyfile(MATCHES.format(model=str(model)))
    before = sys.path[:]
    project.runpytest_inprocess().assert_outcomes(passed=1)
    assert sys.path == before


def test_a_fault_is_named_in_the_message(project: pytest.Pytester, model: Path) -> None:
    project.makepyfile(FAULTY.format(model=str(model)))
    done = project.runpytest_inprocess()
    done.assert_outcomes(failed=1)
    shown = done.stdout.str()
    done.stdout.fnmatch_lines(
        [
            "layers.0.attn.q_proj is the first wrong operation: lockstep check * --tp 2",
            "first wrong layers.0.attn.q_proj, layer 0, prefill (step 0), both ranks",
            "how wrong   max abs *",
            "cause       *.bias is not added",
            "fix         *",
            "verdict     diverged",
            "recorded in *check-1.session",
        ]
    )
    assert "Traceback" not in shown
    assert "lockstep_check(" not in shown  # the report, not our code


@pytest.mark.slow
def test_references_are_kept_in_the_folder_of_the_option(
    project: pytest.Pytester, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = project.path / "copied"
    project.makepyfile(MATCHES.format(model=str(copied)))
    shutil.copytree(model, copied)
    project.runpytest_inprocess("--lockstep-golden", "golden").assert_outcomes(passed=1)
    kept = sorted((project.path / "golden").glob("*.session"))
    assert len(kept) == 2  # the truth, and the reference at the engine's dtype

    # On the next machine: another checkout, of another time, of the same model.
    shutil.rmtree(copied)
    shutil.copytree(model, copied, copy_function=shutil.copyfile)
    monkeypatch.setattr("lockstep.workbench.references.golden.run_recorder", None)
    project.runpytest_inprocess("--lockstep-golden", "golden").assert_outcomes(passed=1)
    assert sorted((project.path / "golden").glob("*.session")) == kept


def test_what_cannot_be_checked_is_one_line(project: pytest.Pytester) -> None:
    project.makepyfile("def test_port(lockstep_check):\n    lockstep_check('./nowhere')\n")
    done = project.runpytest_inprocess()
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["lockstep: *nowhere*"])
    assert "Traceback" not in done.stdout.str()
    assert "open_model" not in done.stdout.str()


def test_an_engines_own_recording(project: pytest.Pytester, model: Path) -> None:
    words = ["check", str(model), "--ids", "5,6,7", "--steps", "1"]
    assert main.run([*words, "--save", "right.session"]) == 0
    assert main.run([*words, "--fault", "load_bias=false", "--save", "wrong.session"]) == 1
    project.makepyfile(
        f"""
        import pytest

        @pytest.mark.parametrize("run", ["right", "wrong", "none"])
        def test_run(run, lockstep_recording):
            assert lockstep_recording(run + ".session", {str(model)!r}).matches
        """
    )
    done = project.runpytest_inprocess()
    done.assert_outcomes(passed=1, failed=2)
    done.stdout.fnmatch_lines(
        [
            "layers.0.attn.q_proj is the first wrong operation: lockstep check wrong.session --model *",
            "cause       *.bias is not added",
            "lockstep: no session at none.session*",
        ]
    )
    assert "another exception" not in done.stdout.str()


def test_unused_it_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(
        "import sys\n\ndef test_own(pytestconfig):\n"
        "    loaded = {name for name in sys.modules if name.split('.')[0] == 'lockstep'}\n"
        "    parents = {'lockstep', 'lockstep.workbench', 'lockstep.workbench.testing'}\n"
        "    assert loaded == parents | {'lockstep.workbench.testing.plugin'}, loaded\n"
        "    assert not {'numpy', 'msgspec', 'rich', 'textual', 'torch'} & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "lockstep", "-p", "no:cacheprovider", "test_own.py"],
        cwd=tmp_path, env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
