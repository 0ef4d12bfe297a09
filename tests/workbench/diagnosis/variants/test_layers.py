"""Layers that are skipped or run twice, told by transformers' own layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.sessions import Session
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.layers import layer_output
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.operations.sites import sites
from lockstep.workbench.diagnosis.recording import Recording
from tests.workbench.diagnosis.synthetic import Case, Place, synthetic
from tests.workbench.diagnosis.variants.made import explained

pytestmark = pytest.mark.sampled_file(2)


def wrong(session: Session, case: Case) -> dict[str, list[str]]:
    """Tap -> what was accepted there, best first."""
    recording = Recording(session)
    taps, facts = RecordedTaps(recording, Recording(case.golden)), Facts.of(case.model_dir, recording.dtype)
    found = {}
    for site in sites(taps, facts):
        if isinstance(site, Site) and site.deviation is not None:
            reported = explained(site)
            found[site.tap] = [one.variant.text for one in reported if one.accepted]
    return found


def streams(case: Case, order: list[int], seq: int) -> tuple[torch.Tensor, ...]:
    """The residual stream before and after each layer of a model whose layers run in this order."""
    model = AutoModelForCausalLM.from_pretrained(case.model_dir, dtype=torch.float64)
    model.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in order])
    model.config.num_hidden_layers = len(order)
    model.config.layer_types = [model.config.layer_types[0]] * len(order)
    ids = [token for step in case.golden.steps() for token in Recording(case.golden).sequences(step)[seq].ids]
    with torch.no_grad():
        return tuple(
            x[0]
            for x in model.model(
                torch.tensor([ids]), use_cache=False, output_hidden_states=True
            ).hidden_states
        )


def normed(case: Case, x: torch.Tensor, layer: int) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(case.model_dir, dtype=torch.float64)
    with torch.no_grad():
        return model.model.layers[layer].input_layernorm(x).numpy()


def _in_layer_1(tap: str) -> bool:
    return tap.startswith("layers.1.")


def rows_of(case: Case, at: Place) -> slice:
    counts = [len(Recording(case.golden).sequences(step)[at.seq].ids) for step in range(at.step + 1)]
    return slice(sum(counts[:-1]), sum(counts))


@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_is_transformers_own(case: Case, layer: int) -> None:
    facts, taps = Facts.of(case.model_dir, "float64"), RecordedTaps(Recording(case.golden))
    passes = range(len(taps.passes))
    entered = taps.rows("embed" if layer == 0 else f"layers.{layer - 1}.mlp_residual", 0, passes)
    left = taps.rows(f"layers.{layer}.mlp_residual", 0, passes)
    assert entered is not None
    found = layer_output(facts, layer, entered, tuple(row for one in taps.passes for row in one.rows))
    np.testing.assert_allclose(found, left, rtol=1e-5, atol=1e-7)  # its angles are of float32


def test_a_right_run_has_no_wrong_layer(case: Case, tmp_path: Path) -> None:
    assert wrong(synthetic(tmp_path / "right.session", case.floor), case) == {}


def test_a_layer_that_left_nothing_is_reported_as_skipped(case: Case, tmp_path: Path) -> None:
    def spoil(x: np.ndarray, at: Place) -> np.ndarray:
        return normed(case, streams(case, [0, 2], at.seq)[1][rows_of(case, at)], 2)

    spoils = {"layers.2.attn_norm": spoil}
    engine = synthetic(tmp_path / "a.session", case.floor, spoil=spoils, skip=_in_layer_1)
    found = wrong(engine, case)
    assert found["layers.1.mlp_residual"] == ["layer 1 is skipped: what enters layer 1 goes on unchanged"]


def test_a_layer_that_runs_twice(case: Case, tmp_path: Path) -> None:
    def spoil(x: np.ndarray, at: Place) -> np.ndarray:
        return normed(case, streams(case, [0, 1, 1, 2], at.seq)[3][rows_of(case, at)], 2)

    engine = synthetic(tmp_path / "b.session", case.floor, spoil={"layers.2.attn_norm": spoil})
    assert wrong(engine, case)["layers.2.attn_norm"][0] == "layer 1 is run twice"


def test_a_layer_that_is_not_recorded_but_ran_is_right(case: Case, tmp_path: Path) -> None:
    engine = synthetic(tmp_path / "c.session", case.floor, skip=_in_layer_1)
    assert wrong(engine, case) == {}
