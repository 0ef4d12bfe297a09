"""`lockstep weights` as a user runs it: on a program that would not end by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.workbench.demo import MODEL_DIR
from lockstep.workbench.exit_codes import Exit
from tests.checkpoints import tiny_variant

PROGRAM = Path(__file__).parents[1] / "attach" / "weights_program.py"
#: Runs a model on the ranks of torchrun, by a plan of transformers.
DIVIDED = PROGRAM.with_name("transformers_program.py")


def weights(*words: str, program: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    command = program or [sys.executable, str(PROGRAM), str(MODEL_DIR)]
    return subprocess.run(
        [
            sys.executable, "-m", "lockstep.workbench.cli", "weights", "--model", "demo", words[0], "--", *command,
            *words[1:],
        ],
        capture_output=True, text=True, check=False, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_what_is_loaded_rightly() -> None:
    done = weights("--engine=torch")
    assert done.returncode == Exit.OK, done.stderr
    engine, held, verdict = done.stdout.splitlines()
    assert engine.startswith("transformers ")
    assert held == "tensors: 50 of bfloat16 held in float32"
    assert verdict == "verdict  50 parameters on 1 rank compared bit by bit: all as in the checkpoint"
    assert "the command was ended once its ranks had written their weights" in done.stderr


@pytest.mark.slow
def test_biases_that_were_never_loaded() -> None:
    done = weights("--json", "bug")
    assert done.returncode == Exit.DIVERGED, done.stderr
    reported = json.loads(done.stdout.splitlines()[-1])
    (one,) = reported["wrong"]
    assert (one["parameter"], one["kind"]) == ("model.layers.*.self_attn.k_proj.bias", "zeros")
    assert one["layers"] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_command_that_loads_nothing() -> None:
    done = weights("--engine=auto", program=[sys.executable, "-c", "print('hello')"])
    assert done.returncode == Exit.CANNOT_LOAD
    assert "no rank wrote its weights" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("qwen2-tied", "tp"),
        ("deepseek-v3", "tp"),
        ("gpt-oss", "ep"),
        ("mixtral", "tp"),
        ("mixtral", "ep"),
        ("qwen3-moe", "ep"),
    ],
)
def test_what_transformers_divides_by_its_own_plan_is_not_accused(
    name: str, plan: str, tmp_path: Path
) -> None:
    """Matrices among two ranks, or whole experts."""
    model = tiny_variant(tmp_path, name)
    program = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(DIVIDED),
        str(model),
        "1,2,3",
        plan,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.workbench.cli", "weights", "--model", str(model), "--json", "--",
         sys.executable, *program],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    reported = json.loads(done.stdout.splitlines()[-1])
    assert (reported["verdict"], reported["ranks"], reported["wrong"]) == ("match", 2, []), done.stderr
    assert reported["compared"] > 10
