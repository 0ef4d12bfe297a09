"""Routing flips: models of many experts in bfloat16 whose tokens go elsewhere by rounding are not accused, and each
flip has its figures."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lockstep.engine.config import EngineConfig
from lockstep.sessions import Session
from lockstep.workbench.checking.forced_run import check, record_reference
from lockstep.workbench.checking.pipeline import CheckResult
from lockstep.workbench.checking.routing_replay import Forced, replay_routing
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.judgements.golden_event import RoutingFlip, golden_events
from lockstep.workbench.models.capture import FULL
from lockstep.workbench.models.opening import open_model
from tests.checkpoints import tiny_checkpoint

#: Family -> what makes its tiny model flip: many experts, many layers.
_MANY = {"num_experts_per_tok": 8, "num_hidden_layers": 8}
MODELS = {
    "qwen3_moe": {"num_experts": 64, "mlp_only_layers": [], **_MANY},
    "olmoe": {"num_experts": 64, **_MANY},
    "glm4_moe": {"n_routed_experts": 64, **_MANY},
    "gpt_oss": {"num_local_experts": 64, **_MANY},
    "minimax_m2": {"num_local_experts": 64, **_MANY},
    "deepseek_v32": {"index_topk": 12, "num_hidden_layers": 4},  # keys flip as well
}


def prompts(seed: int, count: int, tokens: int) -> list[list[int]]:
    """Random ones."""
    chance = random.Random(seed)
    return [[chance.randrange(3, 131) for _ in range(tokens)] for _ in range(count)]


def checked(
    folder: Path, family: str, seed: int, count: int, tokens: int = 24, steps: int = 2
) -> CheckResult:
    """One run of that many sequences in bfloat16."""
    model = open_model(str(tiny_checkpoint(folder, family, seed=seed, **MODELS[family])))
    config = EngineConfig(dtype="bfloat16", max_tokens=count * (tokens + steps + 16), threads=1)
    with Inferior(model.path, model.config, config, capture=FULL) as inferior:
        reference = record_reference(model.path, prompts(seed, count, tokens), steps, "bfloat16")
        return check(inferior, reference, folder / "run.session")


def complete(flip: RoutingFlip) -> bool:
    """Whether it has all of its figures, and rounding is what explains it."""
    traced = flip.origin != "" or ".attn." in flip.tap
    figures = flip.margin is not None and flip.rounding is not None and traced
    return figures and len(flip.taken) == len(flip.lost) > 0 and (flip.margin or 0.0) >= 0


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_flips_are_reported_with_their_figures_and_nothing_is_accused(family: str, tmp_path: Path) -> None:
    result = checked(tmp_path, family, 1, 6)
    assert result.judgement.verdict == "match"
    assert result.judgement.flips, "a model of so many experts flips"
    assert all(complete(flip) for flip in result.judgement.flips)
    with Session.open(tmp_path / "run.session") as session:
        (event,) = golden_events(session, 0)
    assert event.flips == result.judgement.flips
    assert "roundings" in event.flips[0].in_words()
    assert event.flips_in_words()[0] in event.remarks


@pytest.mark.slow
def test_of_a_run_with_other_experts_the_replay_reports_how_much_they_account_for(tmp_path: Path) -> None:
    """With the worst experts chosen in the engine, all of the difference comes of routing: nothing is left of it under
    the reference's ids. Of wrong weights most is left then, as they choose otherwise in later layers alone, and nothing
    when weights are forced as well."""
    model = open_model(str(tiny_checkpoint(tmp_path, "qwen3_moe")))
    config = EngineConfig(tp=2, ep=2, max_tokens=96, threads=1)
    with Inferior(model.path, model.config, config, capture=FULL) as inferior:
        reference = record_reference(model.path, prompts(3, 2, 8), 2, "float32")

        def left(rule: str, forced: Forced) -> float:
            result = check(inferior, reference, tmp_path / "run.session", rules=dict([rule.split("=")]))
            event = replay_routing(inferior, reference, result, forced).event
            assert event.replay is not None
            assert event.replay.before is not None
            assert event.replay.after is not None
            assert event.replay.in_words() in event.remarks
            return event.replay.after / event.replay.before

        assert left("choice=worst", "ids") < 1e-6
        assert 0.5 < left("choice_weights=as_they_are", "ids") < 1.5
        assert left("choice_weights=as_they_are", "weights") < 1e-6
