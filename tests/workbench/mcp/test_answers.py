"""Answers are small, state what they rest on, and hold nothing that a terminal acts on."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from lockstep.workbench.mcp.answers import LIMIT, answer

RESTS = {"session": "a.session", "step": 3}


def test_what_is_too_long_loses_data_first_and_then_its_end() -> None:
    found = json.loads(answer("short", RESTS, rows=["x" * 100] * 1000))
    assert found == {"text": "short", "rests_on": RESTS, "cut": "left out: rows"}
    text = "\n".join(f"line {i}" for i in range(20_000))
    whole = answer(text, RESTS)
    assert LIMIT // 2 < len(whole.encode()) <= LIMIT
    assert text.startswith(json.loads(whole)["text"])
    assert "cut" in json.loads(whole)


@given(st.text(max_size=60_000), st.dictionaries(st.text(max_size=20), st.text(max_size=5000), max_size=8))
def test_an_answer_is_small_and_clean_whatever_it_holds(text: str, data: dict[str, str]) -> None:
    written = answer(text + "\x1b[31mred\x9b2J", RESTS, data=data)
    assert len(written.encode()) <= LIMIT
    assert json.loads(written)["rests_on"] == RESTS
    assert not {"\x1b", "\x9b", "\u202e"} & set(json.loads(written)["text"])


def test_numbers_that_json_lacks_are_words() -> None:
    assert json.loads(answer("", {}, value=math.nan))["value"] == "NaN"
