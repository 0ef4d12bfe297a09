"""Prompts that go beyond the windows and original contexts of a model, and what is reported of those that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.library import checked_model
from lockstep.workbench.library.checked_model import BEYOND, DEFAULT_IDS, ModelToCheck
from lockstep.workbench.library.judging import check
from tests.checkpoints import tiny_checkpoint, tiny_variant

STEPS = 2


def prompt_of(path: Path, **given: Any) -> list[int]:
    asked = {
        "texts": None,
        "ids": None,
        "chat": False,
        "steps": STEPS,
        "faults": None,
        "tp": 1,
        "device": "cpu",
    }
    (prompt,) = ModelToCheck.of(str(path), dtype="float32", **(asked | given)).prompts
    return list(prompt)


def test_the_prompt_that_nobody_gave_goes_beyond_every_threshold(tmp_path: Path) -> None:
    window = tiny_checkpoint(tmp_path, "mistral", sliding_window=40)
    assert len(prompt_of(window)) == 1 + 40 + BEYOND  # the beginning of text is not among them
    assert len(prompt_of(window, chunk=60)) == 1 + 60 + BEYOND
    assert max(prompt_of(window)) == 130
    assert len(prompt_of(tiny_variant(tmp_path, "llama"))) == 1 + DEFAULT_IDS
    # Too near to the end of the context of 256.
    assert len(prompt_of(tiny_checkpoint(tmp_path, "mistral", sliding_window=250))) == 1 + DEFAULT_IDS


def test_a_costly_model_is_not_run_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_model, "CHEAP", 1e6)
    assert len(prompt_of(tiny_checkpoint(tmp_path, "mistral", sliding_window=40))) == 1 + DEFAULT_IDS


def test_as_many_tokens_as_were_asked_for(tmp_path: Path) -> None:
    path = tiny_variant(tmp_path, "mistral-window")
    assert [len(prompt_of(path, prompt_tokens=count)) for count in (1, 2, 5, 50)] == [1, 2, 5, 50]
    assert len(prompt_of(Path("demo"), prompt_tokens=70)) == 70
    with pytest.raises(UsageError, match="--prompt-tokens makes a prompt up"):
        prompt_of(path, prompt_tokens=5, ids=["1,2"])


@pytest.mark.slow
def test_what_was_not_reached_is_reported_and_what_was_is_not(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "olmo3", num_hidden_layers=4)
    short = check(path, ids=[3, 130, 17, 99, 4], steps=1, save=tmp_path / "short.session")
    assert short.matches
    assert [note for note in short.event.notes if "reached" in note] == [
        "with 6 tokens the window of 8 and the original context of 32 (yarn rotary scaling) are not reached: a longer "
        "prompt shows whether what is beyond is right (`check --prompt-tokens 33` makes one up)"
    ]
    long = check(path, steps=1, save=tmp_path / "long.session")
    assert long.matches
    assert not [note for note in long.event.notes if "reached" in note]
