"""A recording read into sites: right operations are right on their own inputs, wrong ones are found and placed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.sessions import Session
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.site import Site, Unjudged
from lockstep.workbench.diagnosis.operations.sites import sites
from lockstep.workbench.diagnosis.recording import Recording
from tests.checkpoints import VARIANTS
from tests.workbench.diagnosis.synthetic import Case, Place, Spoil, synthetic, tiny_case

pytestmark = pytest.mark.sampled_file(2)


def read(session: Session, model_dir: Path) -> list[Site | Unjudged]:
    recording = Recording(session)
    return list(sites(RecordedTaps(recording), Facts.of(model_dir, recording.dtype)))


def wrong(session: Session, model_dir: Path) -> dict[str, Site]:
    found = [site for site in read(session, model_dir) if isinstance(site, Site) and site.deviation]
    return {f"{site.tap}@{site.rank}": site for site in found}


#: Rotary frequencies that change when a sequence outgrows 13 tokens: the longer one does so in decode.
GROWING: Mapping[str, dict[str, Any]] = {
    "dynamic": {
        "max_position_embeddings": 13,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    },
    "longrope": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.1, 1.3, 1.5],
            "long_factor": [1.0, 2.0, 5.0, 9.0],
            "original_max_position_embeddings": 13,
        }
    },
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "variant", ["qwen2-window", "qwen3-bias", "llama-bias", "llama-llama3", "llama-yarn", *GROWING]
)
def test_every_operation_of_transformers_is_right_on_its_own_inputs(variant: str, tmp_path: Path) -> None:
    family, overrides = ("llama", GROWING[variant]) if variant in GROWING else VARIANTS[variant]
    case = tiny_case(tmp_path, family, **overrides)
    for session in (case.golden, case.floor):
        found = read(session, case.model_dir)
        judged = {site.tap for site in found if isinstance(site, Site)}
        assert judged == {tap.name for tap in session.taps} - set(session.meta.absent)
        assert [site.tap for site in found if isinstance(site, Site) and site.deviation] == []


def spoilt(case: Case, path: Path, spoil: Mapping[str, Spoil], **options: int) -> dict[str, Site]:
    """The sites that are wrong of the reference's tensors, some of them changed. Where a tap is changed, what is
    computed from it is wrong as well: the change did not go through the model."""
    return wrong(synthetic(path / "engine.session", case.floor, spoil=spoil, **options), case.model_dir)


def test_a_wrong_operation_is_placed_by_step_row_head_and_rank(case: Case, tmp_path: Path) -> None:
    def head_3_in_decode(x: np.ndarray, at: Place) -> np.ndarray:
        x = x.copy()
        x[:, 24:32] *= 1.01 if at.step else 1.0
        return x

    site = spoilt(case, tmp_path, {"layers.1.attn.q_proj": head_3_in_decode})["layers.1.attn.q_proj@0"]
    deviation = site.deviation
    assert deviation is not None
    assert (deviation.steps, deviation.heads, deviation.columns) == ((1, 2), (3,), tuple(range(24, 32)))
    assert not deviation.every_row
    assert [row.position for row in deviation.rows] == [12, 5, 13, 6]


def test_a_replica_that_is_wrong_on_one_rank_is_that_rank_s(case: Case, tmp_path: Path) -> None:
    def second_only(x: np.ndarray, at: Place) -> dict[int, np.ndarray]:
        return {0: x, 1: x * 1.001}

    found = spoilt(case, tmp_path, {"layers.0.mlp_norm": second_only}, tp=2)
    assert {name for name in found if ".mlp_norm" in name} == {"layers.0.mlp_norm@1"}
    assert found["layers.0.mlp_norm@1"].ranks == (1,)


def test_one_element_off_by_a_thousandth_is_found(case: Case, tmp_path: Path) -> None:
    def one(x: np.ndarray, at: Place) -> np.ndarray:
        x = x.copy()
        x[0, 17] += 1e-3 * np.abs(x).max()
        return x

    deviation = spoilt(case, tmp_path, {"layers.2.mlp.up": one})["layers.2.mlp.up@0"].deviation
    assert deviation is not None
    assert deviation.columns == (17,)


def test_operations_without_their_inputs_are_reported_as_unjudged(case: Case, tmp_path: Path) -> None:
    session = synthetic(tmp_path / "a.session", case.floor, skip=lambda tap: tap == "layers.1.mlp_norm")
    found = [site for site in read(session, case.model_dir) if isinstance(site, Unjudged)]
    assert {site.tap for site in found} >= {"layers.1.mlp.gate", "layers.1.mlp.up"}
    assert all("were captured whole" in site.reason for site in found if site.tap == "layers.1.mlp.up")


def test_a_tensor_of_another_shape_is_wrong_by_itself(case: Case, tmp_path: Path) -> None:
    found = spoilt(case, tmp_path, {"layers.0.mlp.gate": lambda x, at: x[:, :48]})
    deviation = found["layers.0.mlp.gate@0"].deviation
    assert deviation is not None
    assert "instead of" in deviation.shape


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", ["qwen3-bias", "llama-bias"])
def test_what_an_engine_does_not_show_is_made_of_what_it_does(variant: str, tmp_path: Path) -> None:
    """Neither rotated queries and keys nor normalised ones, no cache, scores, probabilities, partial products and no
    residual stream: all that is left is judged, and right."""
    hidden = (
        "rope", "_norm", "_cache", "attn.scores", "attn.probs", "_residual"
    )  # fmt: skip
    family, overrides = VARIANTS[variant]
    case = tiny_case(tmp_path, family, **overrides)

    def skip(tap: str) -> bool:
        return tap.endswith(hidden) and not tap.endswith((".attn_norm", ".mlp_norm", "final_norm"))

    for tp in (1, 2):
        engine = synthetic(tmp_path / f"{tp}.session", case.floor, tp=tp, skip=skip)
        found = [site for site in read(engine, case.model_dir) if engine.captured_taps() & {site.tap}]
        assert [site for site in found if isinstance(site, Unjudged)] == []
        assert [site.tap for site in found if isinstance(site, Site) and site.deviation] == []


def test_a_norm_reads_the_stream_that_was_not_recorded(case: Case, tmp_path: Path) -> None:
    spoil: Mapping[str, Spoil] = {"layers.2.attn_norm": lambda x, at: x * 1.001}
    engine = synthetic(
        tmp_path / "a.session", case.floor, spoil=spoil, skip=lambda tap: tap.endswith("_residual")
    )
    found = wrong(engine, case.model_dir)
    assert "layers.2.attn_norm@0" in found
    assert "layers.1.attn_norm@0" not in found
