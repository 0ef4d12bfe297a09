"""vLLM itself, attached to: right without a bug, and with one its place and cause. `make vllm` makes what is needed.

The bugs are planted by a plugin of this test (`vllm_plugin`), which vLLM loads in every worker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.sessions import Session
from lockstep.workbench.demo import MODEL_DIR
from lockstep.workbench.views.provenance.findings import cache_audit
from lockstep.workbench.views.provenance.ledger import Misuse
from tests import vllm_cpu
from tests.checkpoints import tiny_checkpoint
from tests.workbench.diagnosis.loaded.ranks import whole_of
from tests.workbench.diagnosis.loaded.test_adapted import RANK, saved

HERE = Path(__file__).resolve().parents[1] / "workbench" / "attach"
VLLM = vllm_cpu.VLLM
#: Two requests, so that rows of both are in one pass.
IDS = "1,2,3,4,5,6,7,8,9,10,11,12;100,200,300,400,500"

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not installed: `make vllm`"),
]


@pytest.fixture(autouse=True)
def shared_memory() -> Iterator[None]:
    """Removes what vLLM leaves in shared memory: it kills its ranks at the end, with a tap and without."""
    shared = Path("/dev/shm")
    before = set(shared.glob("vllm_dist_*"))
    yield
    for left in set(shared.glob("vllm_dist_*")) - before:
        left.unlink(missing_ok=True)


def program(tp: int) -> list[str]:
    return [str(VLLM), str(HERE / "vllm_program.py"), str(MODEL_DIR), str(tp), IDS]


def environment(tp: int, bug: str) -> dict[str, str]:
    return {
        **os.environ, "VLLM_CPU_OMP_THREADS_BIND": vllm_cpu.binding(tp),
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(HERE / "vllm_plugin"), "PLANTED": bug,
    }  # fmt: skip


def attached(tmp_path: Path, tp: int, bug: str = "") -> tuple[dict[str, Any], list[str]]:
    """The report of an attached run, judged against the checkpoint; and the tokens that vLLM printed."""
    command = ["attach", "-o", str(tmp_path / "run.session"), "--model", "demo", "--json", "--", *program(tp)]
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.workbench.cli", *command],
        env=environment(tp, bug), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == (1 if bug else 0), done.stdout[-2000:] + done.stderr[-4000:]
    *_, last = done.stdout.splitlines()
    return json.loads(last), tokens(done.stdout)


def tokens(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("tokens ")]


@pytest.mark.parametrize("tp", [1, 2])
def test_vllm_is_right(tp: int, tmp_path: Path) -> None:
    reported, text = attached(tmp_path, tp)
    rests = reported["judged"]["coverage"]
    assert reported["judged"]["verdict"] == "match"
    assert (rests["aligned"], rests["rows"], rests["ranks"], rests["mode"]) == (27, 27, tp, "eager")
    assert rests["absent"] == ["attn.k_cache", "attn.v_cache", "attn.scores", "attn.probs"]
    assert reported["notes"][1:] == [
        "changed for the recording: vLLM runs with enforce_eager=True",
    ]
    if tp == 1:  # the run without a tap is compiled where there is a compiler: the text is the same
        alone = subprocess.run(
            program(tp), env=environment(tp, ""), capture_output=True, text=True, check=True
        )
        assert text == 2 * tokens(alone.stdout)  # recorded as statistics first, then as tensors


@pytest.mark.parametrize("bug", ["", "chunks_from_zero"])
def test_vllm_along_axes(bug: str) -> None:
    """The bug shows where a prompt comes in chunks, and nowhere else."""
    command = ["invariant", "--axis", "batch,chunk,order", "--model", "demo", "--json", "--", *program(1)]
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.workbench.cli", *command],
        env=environment(1, bug), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == (1 if bug else 0), done.stdout[-2000:] + done.stderr[-4000:]
    found = {one["axis"]: one for one in json.loads(done.stdout.splitlines()[-1])["axes"]}
    assert found["batch"]["verdict"] in ("equal", "rounding")
    assert (found["batch"]["rows"], found["order"]["verdict"]) == (27, "not tried")
    if bug:
        assert found["chunk"]["bugs"][0]["tap"] == "layers.0.attn.q_rope"
        assert found["chunk"]["bugs"][0]["side"] == "variant"
    else:
        assert found["chunk"]["verdict"] in ("equal", "rounding")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("bug", ["", "biases_dropped"])
def test_what_vllm_has_loaded(bug: str, tp: int) -> None:
    """The biases of that bug are dropped when the model runs: in memory they are right."""
    command = ["weights", "--model", "demo", "--json", "--", *program(tp)]
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.workbench.cli", *command],
        env=environment(tp, bug), capture_output=True, text=True, check=False,
    )  # fmt: skip
    reported = json.loads(done.stdout.splitlines()[-1])
    assert (reported["verdict"], reported["ranks"], reported["compared"], reported["wrong"]) == (
        "match",
        tp,
        50,
        [],
    )


@pytest.mark.parametrize(
    ("tp", "bug", "words"),
    [
        (1, "", ""),
        (2, "", ""),
        (1, "adapter_not_scaled", "by 1 instead of 2, which its alpha and rank make"),
        (2, "adapter_by_the_first_shard", "rank 0's part of the adapter"),
        (1, "no request", "the checkpoint's alone"),
    ],
)
def test_what_vllm_has_loaded_of_an_adapter(tp: int, bug: str, words: str, tmp_path: Path) -> None:
    path, adapter = adapted(tmp_path)
    command = ["weights", "--model", str(path), "--adapter", str(adapter), "--json", "--"]
    start = [str(VLLM), str(HERE / "vllm_lora_program.py"), str(path), str(tp), "3,17,99"]
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.workbench.cli", *command, *start, *[str(adapter)] * (bug != "no request")],
        env=environment(tp, bug if "_" in bug else ""), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == (1 if bug else 0), done.stdout[-2000:] + done.stderr[-4000:]
    reported = json.loads(done.stdout.splitlines()[-1])
    assert reported["ranks"] == tp
    assert bool(reported["wrong"]) == bool(bug)
    assert all(words in one["text"] for one in reported["wrong"])


def adapted(folder: Path) -> tuple[Path, Path]:
    """A tiny model and an adapter of it."""
    path, random, factors = tiny_checkpoint(folder, "qwen2"), torch.Generator().manual_seed(3), {}
    for name, weight in whole_of(path).items():
        if "q_proj.weight" in name or "up_proj.weight" in name or "down_proj.weight" in name:
            module, (rows, columns) = f"base_model.model.{name.removesuffix('.weight')}", weight.shape
            factors[f"{module}.lora_A.weight"] = torch.randn(RANK, columns, generator=random) * 0.05
            factors[f"{module}.lora_B.weight"] = torch.randn(rows, RANK, generator=random) * 0.05
    (folder / "adapter").mkdir()
    targets = ["q_proj", "up_proj", "down_proj"]
    return path, saved(folder / "adapter", factors, target_modules=targets, bias="none")


@pytest.mark.parametrize(
    ("bug", "tp", "tap", "cause"),
    [
        ("biases_dropped", 1, "layers.0.attn.q_proj", "q,k,v}_proj.bias is not added"),
        ("biases_dropped", 2, "layers.0.attn.q_proj", "q,k,v}_proj.bias is not added"),
        ("rope_theta", 1, "layers.0.attn.q_rope", "rope_theta is 10000 instead of 1e+06"),
        ("rope_theta", 2, "layers.0.attn.q_rope", "rope_theta is 10000 instead of 1e+06"),
        ("all_reduce_missing", 2, "layers.2.mlp.down", "no sum over the ranks"),
        ("kv_heads_exchanged", 2, "layers.0.attn.k_proj", "computes with rank 0's shard of model.layers.*.self_attn"),
        ("kv_heads_exchanged", 1, "layers.0.attn.k_proj", "self_attn.{k,v}_proj"),
        ("residual_twice", 1, "layers.1.attn_residual", "the residual stream is added 2 times"),
        ("residual_twice", 2, "layers.1.attn_residual", "the residual stream is added 2 times"),
    ],
)  # fmt: skip
def test_a_planted_bug_is_found_where_it_is(bug: str, tp: int, tap: str, cause: str, tmp_path: Path) -> None:
    reported, _ = attached(tmp_path, tp, bug)
    judged = reported["judged"]
    assert judged["verdict"] == "diverged"
    assert judged["first_divergence"]["tap"] == tap
    (reported_first,) = [one for one in judged["causes"] if not one["alternative"]]
    assert cause in reported_first["text"]


def reused(tmp_path: Path, bug: str, *more: str) -> tuple[dict[str, Any], list[str], int]:
    """The report of an attached run that reuses vLLM's prefix cache, the tokens that it printed, and its exit code."""
    program = [str(VLLM), str(HERE / "vllm_cache_program.py"), str(MODEL_DIR), "1"]
    command = ["attach", "-o", str(tmp_path / "run.session"), "--json", *more, "--", *program]
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.workbench.cli", *command],
        env=environment(1, bug), capture_output=True, text=True, check=False,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1]), tokens(done.stdout), done.returncode


def test_rows_of_the_prefix_cache_are_judged(tmp_path: Path) -> None:
    reported, text, code = reused(tmp_path, "", "--model", "demo")
    assert (code, reported["judged"]["verdict"]) == (0, "match")
    rests = reported["judged"]["coverage"]
    assert (rests["aligned"], rests["rows"], rests["shared"]) == (450, 450, 96)
    assert text[0] == text[-1]  # the same prompt, first computed and then from the cache
    with Session.open(tmp_path / "run.session") as session:
        audit = cache_audit(session)
    assert audit is not None
    assert (audit.findings, audit.rows, audit.lacking) == ((), 354, "")


@pytest.mark.parametrize(
    ("bug", "kind", "words"),
    [
        (
            "prefix_hash_collides",
            Misuse.COLLISION,
            "sequence 3 takes block 1 from the prefix cache (positions 20–31)",
        ),
        ("evicted_block_stays_known", Misuse.EVICTED, "sequence 6 takes block 2 from the prefix cache"),
        (
            "last_row_of_a_block_one_too_far",
            Misuse.MISPLACED,
            "written 1 slot too far: slot 64 instead of 63",
        ),
    ],
)
def test_a_planted_bug_of_the_cache_is_named(bug: str, kind: Misuse, words: str, tmp_path: Path) -> None:
    """By the integers alone: no model is given."""
    reused(tmp_path, bug)
    with Session.open(tmp_path / "run.session") as session:
        audit = cache_audit(session)
    assert audit is not None
    assert audit.findings[0].kind == kind
    assert words in audit.findings[0].in_words()
