"""nano-vllm itself, attached to on a CPU: its own code, with stand-ins for what needs a GPU (see nano_program.py).

pip install --no-deps --target .nano nano-vllm-fork==20260210 xxhash
LOCKSTEP_NANO=.nano pytest tests/e2e/test_nano.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "workbench" / "attach" / "nano_program.py"
NANO = Path(os.environ.get("LOCKSTEP_NANO") or ROOT / ".nano").absolute()
IDS = "1,2,3,4,5,6,7,8,9,10,11,12;100,20,30,40,50"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (NANO / "nanovllm").is_dir(), reason="nano-vllm is not installed"),
]


def attached(tmp_path: Path, dtype: torch.dtype, code: int = 0) -> dict[str, Any]:
    model = tiny_checkpoint(tmp_path, "qwen3", dtype=dtype, vocab_size=132)
    command = ["attach", "-o", str(tmp_path / "run.session"), "--model", str(model), "--json"]
    program = [sys.executable, str(PROGRAM), str(model), IDS]
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.workbench.cli", *command, "--", *program],
        env={**os.environ, "PYTHONPATH": str(NANO)}, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_nano_vllm_is_right_in_bfloat16(tmp_path: Path) -> None:
    reported = attached(tmp_path, torch.bfloat16)
    rests = reported["judged"]["coverage"]
    assert reported["judged"]["verdict"] == "match"
    assert (rests["aligned"], rests["rows"], rests["by_statistics"], rests["mode"]) == (27, 27, 3, "eager")


def test_its_first_residual_in_float32_is_found(tmp_path: Path) -> None:
    """A bug of its own: `x.float()` of its norm is x itself in float32, so `mul_` changes the residual stream too."""
    reported = attached(tmp_path, torch.float32, code=1)
    judged = reported["judged"]
    (cause,) = judged["causes"]  # what the norms and the layers after them seem to do follows from it
    assert cause["text"] == "the output of the norm that reads the sum goes on in place of the sum"
    assert cause["place"] == "layers.{0,1}.{attn,mlp}_residual"
    assert judged["first_divergence"]["tap"] == "layers.0.attn_residual"
    assert [one["kept"][:10] for one in reported["passes"]] == ["statistics", "layers 0 t"]
