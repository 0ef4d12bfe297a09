"""An engine that is started in a folder with modules of our own files' names: they do not run, and it is recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.workbench.attach.launch import DOOR
from lockstep.workbench.attach.tap_file import INSIDE

pytestmark = pytest.mark.sampled_file(2)

OURS = sorted(
    {path.stem for folder in (DOOR, INSIDE) for path in folder.glob("*.py")}
    | {"_lockstep_attached", "inside"}
)
PLANTED = "open({ran!r} + '/' + __name__, 'w').close()\nraise SystemExit(3)\n"
#: nano-vllm's module, as far as the installer needs it.
RUNNER = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(9, 4), nn.Linear(4, 9)
    def forward(self, input_ids, positions):
        return self.lm_head(self.embed_tokens(input_ids))

class ModelRunner:
    rank, world_size = 0, 1
    def __init__(self, config):
        self.config, self.model = config, Model()
    def warmup_model(self): ...
    def run(self, seqs, is_prefill):
        return self.model(torch.tensor([1, 2]), torch.tensor([0, 1]))
"""
PROGRAM = """
import sys
from types import SimpleNamespace
from nanovllm.engine.model_runner import ModelRunner
class Sequence(list):
    num_cached_tokens = 0
runner = ModelRunner(SimpleNamespace(enforce_eager=True, hf_config={}, model="m"))
runner.run([Sequence([1, 2])], True)
print("ran to its end", __spec__ is None or __spec__.loader.__class__.__name__)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`cwd`, which is planted; `site`, where the engine is installed; `ran`, what ran of the plant."""
    root = tmp_path_factory.mktemp("place")
    for folder in ("cwd", "ran", "site/nanovllm/engine"):
        (root / folder).mkdir(parents=True)
    for name in OURS:
        (root / "cwd" / f"{name}.py").write_text(PLANTED.format(ran=str(root / "ran")))
    (root / "cwd" / "start.py").write_text("import started_engine\n")
    (root / "site" / "nanovllm" / "engine" / "model_runner.py").write_text(RUNNER)
    (root / "site" / "started_engine.py").write_text(PROGRAM)
    return root


def run(place: Path, dump: Path, *words: str, door: Path = DOOR) -> subprocess.CompletedProcess[str]:
    base = {
        name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_TAP", "PYTHON"))
    }
    path = os.pathsep.join([str(door), str(place / "site")])
    return subprocess.run(
        [sys.executable, *words], cwd=place / "cwd", env={**base, "PYTHONPATH": path, "LOCKSTEP_TAP": str(dump)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("-m", "started_engine"),
        ("-c", "import started_engine"),
        ("start.py",),
        ("-P", "-m", "started_engine"),
    ],
    ids=" ".join,
)
def test_nothing_planted_runs_and_the_engine_is_recorded(
    words: tuple[str, ...], place: Path, tmp_path: Path
) -> None:
    done = run(place, tmp_path / "dump", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ran to its end")
    assert list((place / "ran").iterdir()) == []
    (line,) = (tmp_path / "dump" / "rank0" / "passes.jsonl").read_text().splitlines()
    assert [tap["name"] for tap in json.loads(line)["taps"]] == ["embed", "logits"]


def test_an_isolated_python_runs_neither_us_nor_the_plant(place: Path, tmp_path: Path) -> None:
    code = f"import sys; sys.path.append({str(place / 'site')!r}); import started_engine"
    done = run(place, tmp_path / "dump", "-I", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert list((place / "ran").iterdir()) == []
    assert not (tmp_path / "dump").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken", ["absent", "lockstep_report", pytest.param("lockstep_tap", marks=pytest.mark.slow)]
)
def test_files_of_ours_that_cannot_be_loaded_are_reported_once(
    broken: str, place: Path, tmp_path: Path
) -> None:
    """As where a Python is too old for them, or the folder is gone."""
    shim = tmp_path / "shim"
    for folder in (DOOR, INSIDE):
        (shim / folder.name).mkdir(parents=True)
        for path in folder.glob("*.py") if folder == DOOR or broken != "absent" else ():
            text = path.read_text() if path.stem != broken else "this is no Python\n"
            (shim / folder.name / path.name).write_text(text)
    done = run(place, tmp_path / "dump", "-m", "started_engine", door=shim / "door")
    assert done.returncode == 0
    assert done.stdout.startswith("ran to its end")
    (reported,) = done.stderr.splitlines()
    assert reported.startswith("lockstep attach: lockstep_nano.nano_runner on nanovllm.engine.model_runner: ")
    assert reported.endswith(" (the engine goes on)")
    assert list((place / "ran").iterdir()) == []


def test_the_engines_own_copy_of_the_tap_is_the_one_it_imports(place: Path, tmp_path: Path) -> None:
    (tmp_path / "lockstep_tap.py").write_text("print('its own')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import lockstep_tap, sitecustomize"
    assert run(place, tmp_path / "dump", "-P", "-c", code).stdout == "its own\n"
    offered = run(place, tmp_path / "dump", "-P", "-c", "import lockstep_tap; print(lockstep_tap.__file__)")
    assert offered.stdout == f"{INSIDE / 'lockstep_tap.py'}\n"
