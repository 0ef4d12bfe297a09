"""transformers attached to: plain in this process, and sharded by its own plan on two ranks of torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from lockstep.sessions import Session
from lockstep.workbench.attach.inside import lockstep_report, lockstep_transformers
from lockstep.workbench.demo import MODEL_DIR
from lockstep.workbench.foreign.importing import import_run
from lockstep.workbench.foreign.readers.lockstep import LockstepDump
from tests.by_turns import by_turns
from tests.checkpoints import tiny_checkpoint, tiny_variant
from tests.preloaded import run_module
from tests.wrapped_checkpoints import wrapped_checkpoint

PROGRAM = Path(__file__).parent / "transformers_program.py"
FORKED = PROGRAM.with_name("forked_ranks.py")


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The installer has run in this process, and writes there."""
    monkeypatch.setenv("LOCKSTEP_TAP", str(tmp_path / "dump"))
    monkeypatch.setattr(lockstep_report, "_reported", set())
    for name in ("ONLY", "STEPS", "CAPTURE"):
        monkeypatch.delenv(f"LOCKSTEP_TAP_{name}", raising=False)
    monkeypatch.setattr(PreTrainedModel, "__call__", PreTrainedModel.__call__)
    installers = lockstep_transformers
    try:
        installers.transformers_models(SimpleNamespace(PreTrainedModel=PreTrainedModel))
        yield tmp_path / "dump"
    finally:
        torch.compiler.set_stance("default")


def test_generation_is_recorded_as_the_model_computes_it(dump: Path, tmp_path: Path) -> None:
    """A batch of two prompts, the shorter padded on the left, against the model's own hidden states of each alone."""
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(tmp_path, "qwen3"), dtype=torch.float32)
    prompts = [[5, 6, 7, 8], [9, 10]]
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    ids = model.generate(
        torch.tensor([prompts[0], [0, 0, *prompts[1]]]),
        attention_mask=mask,
        max_new_tokens=3,
        do_sample=False,
    )
    model.generate(torch.tensor([[11, 12]]), max_new_tokens=1, do_sample=False)
    run = LockstepDump.open(dump)
    import_run(run, tmp_path / "run.session", form="lockstep")
    with Session.open(tmp_path / "run.session") as session:
        assert session.meta.foreign is not None
        assert session.meta.foreign.dropped == {"padding rows": 2}
        assert [len(session.step(step).sequences) for step in session.steps()] == [3, 2, 2]
        for seq, tokens in enumerate([ids[0, :-1], ids[1, 2:-1], torch.tensor([11, 12])]):
            true = model(tokens[None], output_hidden_states=True, use_cache=False)
            wanted = {"embed": true.hidden_states[0], "layers.0.mlp_residual": true.hidden_states[1]}
            wanted["final_norm"] = true.hidden_states[-1]
            for tap, whole in wanted.items():
                steps = range(1 if seq == 2 else 3)
                rows = [session.rebuilt(tap, step=step, seq=seq, slice="").array for step in steps]
                seen = torch.cat([torch.from_numpy(one.copy()) for one in rows if one is not None])
                torch.testing.assert_close(seen, whole[0], rtol=1e-4, atol=1e-5)
            last = session.rebuilt("logits", step=steps[-1], seq=seq, slice="").array
            assert last is not None
            torch.testing.assert_close(
                torch.from_numpy(last.copy()), true.logits[0, -1:], rtol=1e-4, atol=1e-5
            )


def test_a_model_that_reads_images_is_recorded_by_its_text_model(dump: Path, tmp_path: Path) -> None:
    path = wrapped_checkpoint(tmp_path, "gemma3")
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    out = model.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=2, do_sample=False)
    import_run(LockstepDump.open(dump), tmp_path / "run.session", form="lockstep")
    with Session.open(tmp_path / "run.session") as session:
        assert session.meta.model.num_layers == 4
        logits = session.rebuilt("logits", step=0, seq=0, slice="").array
        assert logits is not None
        assert logits[-1].argmax() == int(out[0, 4])
        assert session.has_tap("layers.3.attn.q_norm")


def attached(
    model: str, target: Path, prompt: str, *bug: str, ranks: int = 2, plan: str = "tp", torchrun: bool = False
) -> dict[str, Any]:
    """What `lockstep attach` finds of a program: on so many ranks, by transformers' own plan."""
    program = [str(PROGRAM), model if model != "demo" else str(MODEL_DIR), prompt]
    if ranks > 1:
        start = ["-m", "torch.distributed.run", "--nproc-per-node"] if torchrun else [str(FORKED)]
        program = [*start, str(ranks), *program, plan, *bug]
    command = ["attach", "-o", str(target), "--model", model, "--json", "--", sys.executable]
    done = run_module("lockstep.workbench.cli", *command, *program, timeout=500)
    assert done.returncode in (0, 1), done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["judged"]
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_programs_are_attached_to_and_right(ranks: int, tmp_path: Path) -> None:
    target = tmp_path / "run.session"
    reported = attached("demo", target, "1,2,3,4,5", ranks=ranks, torchrun=True)
    rests = reported["coverage"]
    assert (reported["verdict"], rests["aligned"], rests["rows"], rests["ranks"]) == ("match", 8, 8, ranks)
    with Session.open(target) as session:
        layouts = {tap.name: tap.layout for tap in session.taps}
        assert layouts["layers.0.attn.q_proj"] == layouts["layers.0.mlp.act"] == "shard(1)"
        assert layouts.get("layers.0.mlp.down.partial") == ("partial" if ranks == 2 else None)


#: Longer than every window.
PROMPT = "3,130,17,99,4,64,5,12,77,120,31,8"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        "gemma3",
        "olmo2",
        "phi3-window",
        "granite",
        "glm4",
        "starcoder2",
        "llama4",
        "apertus",
        "phi-normed",
    ],
)
def test_every_family_under_its_own_plan_is_right(name: str, tmp_path: Path) -> None:
    reported = attached(str(tiny_variant(tmp_path, name)), tmp_path / "run.session", PROMPT)
    assert (reported["verdict"], reported["coverage"]["aligned"], reported["coverage"]["ranks"]) == (
        "match",
        15,
        2,
    )
    assert reported["causes"] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("lfm2", []),
        ("granite4", []),
        ("nemotron-h", ["attn_residual", "mlp.gate"]),  # it has neither
        ("bamba", []),
        # Its first layer has attention as well, inside whose call nothing is taken.
        ("falcon-h1", ["attn.k_cache", "attn.v_cache", "attn.scores", "attn.probs"]),
    ],
)
def test_layers_with_a_state_alone_are_right(name: str, absent: list[str], tmp_path: Path) -> None:
    """transformers' plan divides nothing of them."""
    reported = attached(str(tiny_variant(tmp_path, name)), tmp_path / "run.session", PROMPT, ranks=1)
    assert (reported["verdict"], reported["coverage"]["aligned"], reported["coverage"]["absent"]) == (
        "match",
        15,
        absent,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["gemma4", "gemma4-moe"])
def test_gemma_4_is_right(name: str, tmp_path: Path) -> None:
    """Of experts beside its MLP what the router chooses and what they give together is recorded."""
    reported = attached(str(tiny_variant(tmp_path, name)), tmp_path / "run.session", PROMPT, ranks=1)
    assert (reported["verdict"], reported["coverage"]["aligned"], reported["causes"]) == ("match", 15, [])
    assert not {"mlp.router", "mlp.topk_ids", "mlp.combine"} & set(reported["coverage"]["absent"])


EXPERTS = [
    "qwen3-moe",
    "mixtral",
    "olmoe",
    "qwen2-moe",
    "glm4-moe",
    "gpt-oss",
    "minimax-m2",
    "phimoe",
    "lfm2-moe",
    "granite4-moe",
    "nemotron-h-moe",
    "deepseek-v32",
    "glm-moe-dsa",
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "plan"), by_turns(EXPERTS, ("tp", "ep")))
def test_experts_under_either_plan_are_right(name: str, plan: str, tmp_path: Path) -> None:
    reported = attached(str(tiny_variant(tmp_path, name)), tmp_path / "run.session", PROMPT, plan=plan)
    assert (reported["verdict"], reported["coverage"]["aligned"], reported["coverage"]["ranks"]) == (
        "match",
        15,
        2,
    )
    assert "mlp.combine" not in reported["coverage"]["absent"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "plan", "bug", "cause"),
    [
        ("glm4-moe", "ep", "weights_scaled_twice", "weights_scaled_twice"),
        ("qwen2-moe", "tp", "a_rank_s_experts_are_lost", "experts_of_a_rank_missing"),
        ("mixtral", "ep", "a_rank_s_experts_are_lost", "experts_of_a_rank_missing"),
        ("qwen3-moe", "ep", "experts_of_the_other_rank", "experts_exchanged"),
        ("olmoe", "tp", "the_sum_is_doubled", "experts_summed_twice"),
        ("gpt-oss", "ep", "the_bias_of_experts_on_every_rank", "expert_bias_on_every_rank"),
    ],
)
def test_a_bug_of_divided_experts_is_named(
    name: str, plan: str, bug: str, cause: str, tmp_path: Path
) -> None:
    reported = attached(str(tiny_variant(tmp_path, name)), tmp_path / "run.session", PROMPT, bug, plan=plan)
    assert reported["verdict"] == "diverged"
    assert reported["causes"][0]["name"] == cause


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "bug", "tap"),
    [
        ("gemma2", "norm_without_one", "layers.1.mlp_norm"),
        ("gemma2", "no_cap_of_scores", "layers.1.attn.context"),
        ("granite", "no_residual_multiplier", "layers.1.attn_residual"),
        ("granite", "a_rank_s_term_is_lost", "layers.1.mlp.down.partial"),
        ("deepseek-v3", "no_norm_of_latents", "layers.1.attn.kv_a_norm"),
        ("deepseek-v3", "no_mscale", "layers.1.attn.context"),  # its keys are made of the latents
    ],
)
def test_a_bug_in_a_sharded_model_is_placed(name: str, bug: str, tap: str, tmp_path: Path) -> None:
    reported = attached(str(tiny_variant(tmp_path, name)), tmp_path / "run.session", PROMPT, bug)
    assert reported["verdict"] == "diverged"
    assert reported["first_divergence"]["tap"] == tap
    assert reported["causes"][0]["tap"] == tap


@pytest.mark.gpu
def test_a_cuda_graph_is_left_alone(tmp_path: Path) -> None:
    """What cannot be recorded ends the recording, not the engine."""
    program = [sys.executable, str(Path(__file__).parent / "cuda_graph_program.py")]
    program.append(str(tiny_checkpoint(tmp_path / "model", "qwen2")))
    alone = subprocess.run(program, check=True, capture_output=True, text=True)
    attach = [sys.executable, "-m", "lockstep", "attach", "-o", str(tmp_path / "run.session")]
    attached = subprocess.run([*attach, "--", *program], capture_output=True, text=True)
    assert attached.stdout == alone.stdout, attached.stderr
    assert "a CUDA graph is being captured: run the engine eager" in attached.stderr
    with Session.open(tmp_path / "run.session") as session:
        assert session.step(0).sequences
