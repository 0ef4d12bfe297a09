"""The demo's story, run once for real on the embedded model: what it states is what the runs were."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.sessions import Session
from lockstep.workbench.cli.demo import Aloud
from lockstep.workbench.cli.progress import Status
from lockstep.workbench.cli.story import Chapter, run_story
from lockstep.workbench.export.json import dumps


@dataclass(frozen=True)
class Reported:
    runs: list[Chapter]
    shown: str
    directory: Path


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    directory = tmp_path_factory.mktemp("story")
    console = Console(file=io.StringIO(), width=80, highlight=False, soft_wrap=True)
    runs = run_story(Aloud(Status(), console), directory, tp=2, fast=True)
    assert isinstance(console.file, io.StringIO)
    return Reported(runs, console.file.getvalue(), directory)


def test_the_bug_breaks_text_and_match_and_the_fix_restores_both(reported: Reported) -> None:
    right, wrong, restored = reported.runs
    assert [run.right for run in reported.runs] == [True, False, True]
    assert [run.result.matches for run in reported.runs] == [True, False, True]
    assert restored.text == right.text != wrong.text
    assert right.result.judgement.max_abs_logits <= 1e-4


def test_the_first_wrong_operation_is_named_with_its_cause(reported: Reported) -> None:
    wrong = reported.runs[1].result
    first = wrong.judgement.first_divergence
    assert first is not None
    assert (first.tap, first.layer, first.step, first.ranks) == ("layers.0.attn.q_proj", 0, 0, (0, 1))
    assert wrong.causes[0].text == "model.layers.*.self_attn.{q,k,v}_proj.bias is not added"


def test_the_story_shows_what_happened(reported: Reported) -> None:
    for run in reported.runs:
        for line in run.text.strip().splitlines():
            assert line in reported.shown
    assert "layers.0.attn.q_proj, layer 0, prefill (step 0), both ranks" in reported.shown
    assert "_proj.bias is not added" in reported.shown
    assert "load_bias=false" in reported.shown
    assert "The same words as at first" in reported.shown
    assert max(len(line) for line in reported.shown.splitlines() if "replay" not in line) <= 80


def test_both_sessions_are_left_to_replay(reported: Reported) -> None:
    for run, rules, verdict in zip(
        reported.runs, ({}, {"load_bias": "false"}), ("match", "diverged"), strict=False
    ):
        path = run.result.engine_session
        assert path.parent == reported.directory
        assert f"lockstep replay {path}" in reported.shown
        with Session.open(path) as session:
            assert session.meta.rules == rules
            assert [event.data["verdict"] for event in session.events(kind="golden")] == [verdict]
            assert session.meta.model.name == "demo"
            emitted = session.step(0).sequences[0].emitted
            assert session.meta.token_texts[emitted]  # words without the model
            assert session.ranks == 2


def test_the_runs_as_json(reported: Reported) -> None:
    assert '"verdict": "diverged"' in dumps([run.to_json() for run in reported.runs])
