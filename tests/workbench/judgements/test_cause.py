"""A cause as it is read: every fact in words, and a remedy for each."""

from __future__ import annotations

import math

from lockstep.workbench.judgements.cause import Cause, cause_lines, numbers_in_words
from lockstep.workbench.judgements.remedies import remedy_of


def test_everything_known_of_a_cause_is_reported() -> None:
    cause = Cause(
        "bias_repeated", "o_proj.bias is added 2 times",
        {"times": 2, "norm": 0.12345678, "meanings": []}, 1e-6, kind="bias",
        fault="row_bias=every_rank", tap="layers.0.attn.o_proj", place="layers 0–3, both ranks", confidence=0.987,
        evidence=("seen in 4 of 4 layers",), ruled_out=("another_factor (leaves 12 %)",),
    )  # fmt: skip
    reported = dict(cause_lines(cause))
    assert reported["cause"] == "layers 0–3, both ranks: o_proj.bias is added 2 times"
    assert reported["fitted"] == "times 2, norm 0.123457"
    assert reported["confidence"] == "0.99"
    assert reported["evidence"] == "seen in 4 of 4 layers"
    assert reported["ruled out"] == "another factor (leaves 12 %)"
    assert "after the all-reduce" in reported["fix"]
    assert "Wenyueh/MinivLLM#80" in reported["seen in"]
    assert "row_bias=every_rank" in reported["catalogue"]


def test_what_is_not_known_is_not_stated() -> None:
    assert dict(cause_lines(Cause(text="odd", confidence=math.nan))) == {"cause": "odd"}
    assert dict(cause_lines(Cause(text="odd", residual=0.125, alternative=True))) == {
        "or": "odd (leaves 12 % of the error)"
    }


def test_a_cause_without_a_remedy_of_its_own_has_that_of_its_class() -> None:
    assert remedy_of("rope_theta", "rope") == remedy_of("", "rope")
    assert remedy_of("bias_dropped", "bias") != remedy_of("", "bias")
    assert remedy_of("nothing", "known").fix == ""


def test_numbers_are_drawn_together() -> None:
    assert numbers_in_words([7, 0, 1, 2, 3]) == "0–3, 7"
    assert numbers_in_words([4, 5]) == "4, 5"
    assert numbers_in_words([]) == ""


def test_the_scale_of_scores_is_the_configurations_own() -> None:
    fix = dict(cause_lines(Cause("scores_scale", "scores are scaled by 1", kind="scores")))["fix"]
    own, _, usual = fix.partition("else ")
    assert "attention_multiplier" in own
    assert "query_pre_attn_scalar" in own
    assert usual == "1/sqrt(head_dim)"
