"""Which tensors a second run keeps: a layer around the first place that statistics show."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
import pytest

from lockstep.engine.taps.names import count_layers
from lockstep.workbench.checking.closer_look import SMALL, CloserLook, first_look, further_look
from lockstep.workbench.checking.pipeline import CheckResult
from lockstep.workbench.diagnosis.by_statistics import MovedTap
from lockstep.workbench.diagnosis.judgement import Judgement
from lockstep.workbench.judgements.coverage import Coverage
from lockstep.workbench.judgements.golden_event import Divergence, GoldenEvent

LAYERS = 12
LARGE = SMALL + 1
OPS = ("attn.q_proj", "mlp_residual")
TAPS = ["embed", *(f"layers.{n}.{op}" for n in range(LAYERS) for op in OPS), "final_norm", "logits"]


def result(moved: str = "", wrong: str = "", verdict: str = "", misplaced: str = "") -> CheckResult:
    first = Divergence(wrong, reason="9 times the noise floor") if wrong else None
    stated = verdict or ("diverged" if first else "inconclusive" if moved or misplaced else "match")
    event = msgspec.convert({"verdict": stated}, GoldenEvent)
    event = msgspec.structs.replace(event, coverage=Coverage(misplaced=misplaced), first_divergence=first)
    judgement = Judgement("match", 0.0, True, first, (), 1, "floor")
    at = MovedTap(moved, 0, "max", 2.0, 1.0) if moved else None
    return CheckResult(judgement, event, Path("run.session"), Path("golden.session"), moved=at)


def kept(look: CloserLook) -> list[str]:
    return [tap for tap in TAPS if any(fnmatchcase(tap, glob) for glob in look.tensors)]


@pytest.mark.parametrize(
    ("tap", "entering", "layers"),
    [
        ("embed", "", [0, 1]),
        ("layers.0.attn.q_proj", "", [0, 1]),
        ("layers.1.mlp_residual", "", [0, 1, 2]),
        ("layers.7.attn.q_proj", "layers.5.mlp_residual", [6, 7, 8]),
        ("layers.11.mlp_residual", "layers.9.mlp_residual", [10, 11]),
        ("final_norm", "layers.9.mlp_residual", [10, 11]),
        ("logits", "layers.9.mlp_residual", [10, 11]),
    ],
)
def test_the_layers_around_are_kept_and_what_enters_them(tap: str, entering: str, layers: list[int]) -> None:
    assert count_layers(TAPS) == LAYERS
    look = first_look(result(moved=tap), LAYERS, LARGE)
    inside = [f"layers.{layer}.{op}" for layer in layers for op in OPS]
    assert look.entering == entering
    assert kept(look) == [*([entering] if entering else []), *inside, "final_norm"]
    assert tap in look.why


def test_nothing_is_looked_at_where_nothing_differs_or_no_row_is_proved() -> None:
    assert not first_look(result(), LAYERS, LARGE).tensors
    look = first_look(result(moved="layers.0.attn.q_proj", misplaced="rows are misplaced"), LAYERS, LARGE)
    assert (look.tensors, look.why) == ((), "rows are misplaced")


def test_a_match_of_statistics_is_held_against_all_tensors_where_these_are_small() -> None:
    look = first_look(result(), LAYERS, SMALL)
    assert kept(look) == TAPS
    assert further_look(result(), look).why == "nothing is wrong in it"
    assert first_look(result(moved="layers.7.attn.q_proj"), LAYERS, SMALL).layers == range(6, 9)
    assert not first_look(result(verdict="inconclusive"), LAYERS, SMALL).tensors


def test_all_is_kept_where_no_place_is_known() -> None:
    assert kept(first_look(result(wrong="logits"), LAYERS, LARGE)) == TAPS
    assert kept(first_look(replace(result(), golden_session=None), LAYERS, LARGE)) == TAPS


def test_where_what_enters_is_wrong_the_place_is_before() -> None:
    look = first_look(result(moved="layers.7.attn.q_proj"), LAYERS, LARGE)
    found = further_look(result(wrong="layers.7.attn.q_proj"), look)
    assert (found.tensors, found.why) == (
        (),
        "first wrong: layers.7.attn.q_proj at step 0: 9 times the noise floor",
    )
    before = further_look(result(wrong="layers.5.mlp_residual"), look)
    assert kept(before) == [*TAPS[1 : TAPS.index("layers.8.mlp_residual") + 1], "final_norm"]
    assert not further_look(result(wrong="layers.2.attn.q_proj"), before).tensors
    assert further_look(result(), look).why == "nothing is wrong in it"
