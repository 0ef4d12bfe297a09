"""Operations computed from their recorded inputs, against what transformers computed in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.taps.names import local_name
from tests.checkpoints import VARIANTS
from tests.workbench.diagnosis.synthetic import Case, Place, synthetic, tiny_case
from workbench.diagnosis.recompute import recompute
from workbench.diagnosis.recording import Recording

LINEAR = {"embed", "logits", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj", "mlp.gate", "mlp.up",
          "mlp.down", "attn.k_cache", "attn.v_cache"}  # fmt: skip


@pytest.mark.parametrize("variant", ["qwen2-window", "qwen3-bias", "llama-yarn", "llama-mha"])
def test_the_golden_tensors_follow_from_each_other(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    golden = Recording(tiny_case(tmp_path, family, **overrides).golden)
    done = set()
    for step in golden.steps:
        for tap in golden.session.taps:
            found = recompute(golden, golden, tap.name, step, 0)
            if tap.name in golden.session.meta.absent:
                continue
            assert (found is None) == (local_name(tap.name) in LINEAR), tap.name
            if found is not None:
                right = golden.whole_or_none(tap.name, step, 0)
                np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-11, err_msg=tap.name)
                done.add(local_name(tap.name))
    assert done >= {"attn_norm", "attn.q_rope", "attn.k_rope", "attn.scores", "attn.probs", "attn.context",
                    "attn_residual", "mlp_norm", "mlp.act", "mlp_residual", "final_norm"}  # fmt: skip


def test_it_follows_the_engines_inputs_and_not_the_golden_ones(case: Case, tmp_path: Path) -> None:
    def spoil(x: np.ndarray, at: Place) -> np.ndarray:
        return np.where(np.isfinite(x), 0.0, x)  # all keys alike

    engine = Recording(
        synthetic(tmp_path / "engine.session", case.floor, spoil={"layers.1.attn.scores": spoil})
    )
    probs = recompute(engine, Recording(case.golden), "layers.1.attn.probs", 0, 0)
    assert probs is not None
    tokens = probs.shape[1]
    np.testing.assert_allclose(
        probs, np.broadcast_to(np.tri(tokens) / np.arange(1, tokens + 1)[:, None], probs.shape)
    )


def test_what_was_not_recorded_or_does_not_fit_is_not_recomputed(case: Case, tmp_path: Path) -> None:
    golden, tap = Recording(case.golden), "layers.0.attn.scores"
    lacking = synthetic(tmp_path / "a.session", case.floor, skip=lambda name: name.endswith("q_rope"))
    assert recompute(Recording(lacking), golden, tap, 0, 0) is None
    short = synthetic(
        tmp_path / "b.session", case.floor, spoil={"layers.0.attn.k_cache": lambda x, at: x[1:]}
    )
    assert recompute(Recording(short), golden, tap, 0, 0) is None
