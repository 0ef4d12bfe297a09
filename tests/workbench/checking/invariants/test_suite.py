"""The invariants on running engines: all hold of a right one, and a wrong one breaks just those that it must."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.engine.config import EngineConfig
from lockstep.workbench.checking.invariants.invariant import Invariant
from lockstep.workbench.checking.invariants.suite import Suite
from lockstep.workbench.models.opening import open_model
from tests.by_turns import by_turns
from tests.checkpoints import ALIKE, ALIKE_WITH_EXPERTS, EVERY_VARIANT, tiny_checkpoint
from tests.engine.test_logits import GROWING

PROMPT = [3, 17, 99, 4, 64, 5, 12]


def tried(path: Path, tp: int = 1, **rules: str) -> dict[str, Invariant]:
    opened = open_model(str(path))
    config = EngineConfig(tp=tp, max_sequences=1, max_tokens=len(PROMPT) + 4)  # as a command line asks for it
    return {one.name: one for one in Suite(path, opened.config, config, rules, PROMPT, 3).run()}


def broken(found: dict[str, Invariant]) -> dict[str, str]:
    return {name: one.summary for name, one in found.items() if one.result == "broken"}


@pytest.mark.slow
def test_positions_that_stand_still_break_decode_and_nothing_else(tmp_path: Path) -> None:
    found = tried(tiny_checkpoint(tmp_path, "qwen2"), positions="stuck")
    stuck = broken(found)
    assert stuck["prefill = decode"].startswith("layers.0.attn.q_rope, token 7: off by")
    assert set(stuck) <= {
        "prefill = decode",
        "cache as long as the sequence",
        "prefill in chunks = whole",
    } | {name for name in found if name.endswith("tokens, in chunks = whole")}
    assert sum(one.result == "holds" for one in found.values()) >= 10


#: A rule, the invariant that it must break, and where.
BREAKS: list[tuple[dict[str, str], int, str, str]] = [
    ({"mask": "additive"}, 1, "all numbers finite", "layers.0.attn.scores"),
    ({"mask": "none"}, 1, "no token sees a later one", "layers.0.attn.context"),
    ({"reduce": "missing"}, 2, "ranks hold the same bits", "layers.0.attn.o_proj"),
    ({"reduce": "twice"}, 2, "tp 1 = tp 2", "layers.0.attn.o_proj"),
    ({"load_bias": "false"}, 1, "weights as in the checkpoint", ""),
    ({"positions": "ahead"}, 1, "prefill = decode", "layers.0.attn.q_rope"),
    ({"cache_reuse": "false"}, 1, "prefill = decode", "layers.0.attn.context"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rules", "tp", "name", "tap"), BREAKS)
def test_what_a_fault_must_break_is_broken(
    rules: dict[str, str], tp: int, name: str, tap: str, tmp_path: Path
) -> None:
    found = tried(tiny_checkpoint(tmp_path, "qwen2"), tp, **rules)
    assert found[name].result == "broken", found[name].summary
    assert found[name].tap.startswith(tap)
    assert found[name].means


#: Those that are made of the parts of others are among the families whose every operation is judged.
UNLIKE = [name for name in (*EVERY_VARIANT, *GROWING) if name not in (*ALIKE, *ALIKE_WITH_EXPERTS)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp"), by_turns(UNLIKE, (2, 1)))
def test_all_hold_of_every_family(name: str, tp: int, tmp_path: Path) -> None:
    family, overrides = _variant(name)
    assert broken(tried(tiny_checkpoint(tmp_path, family, **overrides), tp)) == {}


def _variant(name: str) -> tuple[str, dict[str, Any]]:
    return GROWING[name] if name in GROWING else EVERY_VARIANT[name]


@pytest.mark.slow
def test_a_run_in_chunks_is_held_against_a_whole_one(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen2")
    config = EngineConfig(max_sequences=1, max_tokens=len(PROMPT) + 4, chunk_tokens=3)
    suite = Suite(path, open_model(str(path)).config, config, {"positions": "stuck"}, PROMPT, 3)
    found = {one.name: one for one in suite.compare_runs()}
    assert found["prefill in chunks = whole"].result == "broken"
    right = Suite(path, suite.model, config, {}, PROMPT, 3).compare_runs()
    assert not broken({one.name: one for one in right})
