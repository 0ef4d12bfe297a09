"""Models along the axes: a right one rounds at most, a fault is named on the axis that it breaks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.engine.config import DType, EngineConfig
from lockstep.workbench.checking.axes.axis import AXES, AxisName, AxisResult
from lockstep.workbench.checking.axes.model_axes import ModelAxes
from lockstep.workbench.models.opening import open_model
from tests.checkpoints import tiny_checkpoint

PROMPT = [3, 17, 99, 4, 64, 5, 12, 33, 20]
#: A hybrid model with experts, latent attention, windows, full-width norms, softcaps, sinks.
FAMILIES = (
    "qwen2",
    "qwen3_next",
    "qwen3_5_moe_text",
    "deepseek_v3",
    "gemma3_text",
    "olmo2",
    "gemma2",
    "gpt_oss",
)


def along(
    folder: Path, family: str, axes: Sequence[AxisName], tp: int = 1, dtype: DType = "float32", **faults: str
) -> list[AxisResult]:
    opened = open_model(str(tiny_checkpoint(folder, family)))
    config = EngineConfig(tp=tp, dtype=dtype, max_sequences=1)
    sessions = folder / "sessions"
    sessions.mkdir()
    return ModelAxes(opened, config, faults, [PROMPT], 4, sessions).run(axes)


def bugs(found: Sequence[AxisResult]) -> dict[str, str]:
    return {one.variant: one.bugs[0].tap if one.bugs else one.why for one in found if one.verdict == "bug"}


#: Family, faults, ranks, the axis that it breaks, the first operation that must be named.
PLANTED: list[tuple[str, dict[str, str], int, AxisName, str]] = [
    ("qwen3_next", {"state_before": "left"}, 1, "batch", "layers.0.attn.state"),
    ("qwen3_next", {"state_before": "left"}, 1, "order", "layers.0.attn.state"),
    ("qwen3_5_text", {"state_before": "left"}, 1, "prefix", "layers.0.attn.state"),
    ("qwen3_next", {"state_before": "restarted"}, 1, "chunk", "layers.0.attn.state"),
    ("qwen3_5_text", {"state_before": "restarted"}, 1, "preempt", "layers.0.attn.state"),
    ("qwen3_next", {"conv_kept": "one_short"}, 1, "chunk", "layers.0.attn.conv_q"),
    ("qwen3_5_text", {"conv_kept": "frozen"}, 1, "preempt", "layers.0.attn.conv_q"),
    ("qwen2", {"positions": "stuck"}, 1, "chunk", "layers.0.attn.q_rope"),
    ("qwen2", {"positions": "ahead"}, 1, "preempt", "layers.0.attn.q_rope"),
    ("qwen2", {"cache_reuse": "false"}, 1, "chunk", "layers.0.attn.k_cache"),
    ("qwen2", {"cache_reuse": "first_lost"}, 1, "preempt", "layers.0.attn.k_cache"),
    ("qwen2", {"cache_layer": "shared"}, 1, "chunk", "layers.0.attn.k_cache"),
    ("qwen2", {"positions": "stuck"}, 1, "speculation", "layers.0.attn.q_rope"),
    ("qwen3_next", {"state_before": "restarted"}, 1, "speculation", "layers.0.attn.state"),
    ("qwen2", {"reduce": "missing"}, 2, "tp", "layers.0.attn.o_proj"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "faults", "tp", "axis", "tap"), PLANTED)
def test_a_fault_is_named_on_its_axis(
    family: str, faults: dict[str, str], tp: int, axis: AxisName, tap: str, tmp_path: Path
) -> None:
    found = along(tmp_path, family, [axis], tp, **faults)
    named = bugs(found)
    assert named, [one.in_words() for one in found]
    assert set(named.values()) == {tap}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_model_rounds_at_most(family: str, tmp_path: Path) -> None:
    found = along(tmp_path, family, AXES)
    assert bugs(found) == {}
    assert {one.verdict for one in found} <= {"equal", "rounding", "not tried"}
    tried = {one.axis for one in found if one.verdict != "not tried"}
    assert tried >= {"batch", "order", "preempt", "chunk", "prefix", "tp", "speculation"}
