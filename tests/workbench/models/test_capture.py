"""What `--capture` means: named policies, globs, and the byte budget that only unasked tensors have."""

from __future__ import annotations

import pytest

from lockstep.engine.errors import RequestError
from lockstep.engine.taps.names import tap_specs
from lockstep.workbench.models.capture import FULL, LAST, STATS, parse_capture

SPECS = tap_specs(2)


def test_named_policies_are_what_they_are_called() -> None:
    assert parse_capture(["stats"], SPECS) == STATS
    assert parse_capture(["last"], SPECS) == LAST
    assert parse_capture(["full"], SPECS) == FULL
    reported = FULL.resolve(SPECS)
    assert sorted([*reported.full, *reported.newest]) == list(range(len(SPECS)))


def test_attention_is_whole_whatever_the_prompt_only_where_it_is_asked_for_by_name() -> None:
    short = {SPECS[i].name.rpartition(".")[-1] for i in FULL.resolve(SPECS).newest}
    assert short == {"scores", "probs"}
    asked = parse_capture(["full", "layers.0.attn.probs"], SPECS).resolve(SPECS)
    assert SPECS[asked.full[0]].name == "embed"
    assert "layers.0.attn.probs" in [SPECS[i].name for i in asked.full]


def test_globs_are_recorded_whole_beside_the_statistics_whatever_the_budget() -> None:
    capture = parse_capture(["layers.1.attn.*_proj"], SPECS)
    names = [SPECS[i].name for i in capture.resolve(SPECS).full]
    assert names == [f"layers.1.attn.{part}_proj" for part in ("q", "k", "v", "o")]
    assert capture.statistics
    assert capture.last == STATS.last, "the attention goes on"
    assert capture.budget_bytes == STATS.budget_bytes, "of what was not asked for"


def test_a_glob_that_selects_nothing_is_refused_with_the_way_out() -> None:
    with pytest.raises(RequestError, match=r"layers\.9.*no tap matches"):
        parse_capture(["layers.9.*"], SPECS)
