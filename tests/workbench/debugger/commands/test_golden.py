"""The golden command: the branch as it is, and once more on golden inputs, which leaves the branch as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.sessions import Session
from lockstep.workbench.checking import pipeline
from lockstep.workbench.checking.forced_run import check
from lockstep.workbench.checking.pipeline import Reference
from lockstep.workbench.debugger.core.judgements import last_judgement
from lockstep.workbench.debugger.errors import Interrupted
from lockstep.workbench.debugger.events import DebuggerEvent, ProgressEvent
from lockstep.workbench.debugger.host.replay import open_replay
from lockstep.workbench.references.golden import forced_onto, record_golden
from tests.workbench.debugger.conftest import PROMPT, Live, finish, texts

PROMPTS = [PROMPT, [7, 8]]  # the same everywhere: what is recorded for one test is in the cache for the next
RULES = {"load_bias": "false", "mask": "additive"}
LEDGER = (
    "12 operations are wrong by themselves: layers.*.attn.q_proj, layers.*.attn.k_proj, layers.*.attn.v_proj,"
    " layers.*.attn.scores"
)


@pytest.mark.slow
def test_every_faulty_operation_is_reported_live_and_in_a_replay(live: Live) -> None:
    debugger = live(tp=2, rules=RULES, prompts=PROMPTS)
    debugger.execute("next 3")
    heard: list[str] = []
    debugger.events = lambda event: heard.append(event.what) if isinstance(event, ProgressEvent) else None
    reported = debugger.execute("golden")
    found = heard.index("so far layers.0.attn.q_proj: model.layers.0.self_attn.q_proj.bias is not added")
    assert found < heard.index("engine without taps, float32, tp=2"), "before the verdict"
    first, *rest = reported.to_text().splitlines()
    assert first.startswith("golden: diverged over 3 steps; first divergence layers.0.attn.q_proj at step 0")
    assert rest[0] == LEDGER
    faulty = reported.to_json()["faulty"]
    assert {one["tap"].split(".", 2)[-1] for one in faulty} == {
        "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.scores",
    }  # fmt: skip
    assert len(faulty) == 12
    rows = {row.tap: row for row in debugger.session.verdicts(branch=0, step=2)}
    residual = rows["layers.1.attn_residual"].detail
    assert residual["inherited"] is True
    assert residual["injected"] < 1e-6
    path = finish(debugger)
    with open_replay(path) as replay:
        assert LEDGER in replay.execute("golden").to_text()


@pytest.mark.slow
def test_the_branch_goes_on_as_if_nobody_had_asked(live: Live) -> None:
    alone = live(rules=RULES, prompts=PROMPTS)
    alone.execute("next 5")
    kept = [alone.timeline.record(0, step).checksums.copy() for step in range(5)]
    finish(alone)
    asked = live(rules=RULES, prompts=PROMPTS)
    texts(asked, "next 3", "golden", "next 2")
    assert asked.executor is not None
    assert not asked.executor.inferior.patched
    for step, checksums in enumerate(kept):
        assert (asked.timeline.record(0, step).checksums == checksums).all()
    asked.executor.recapture(0, 2, [0], keep=False)  # raises where a pass run again differs


@pytest.mark.slow
def test_a_patched_tap_is_a_fault_of_its_own_at_its_step(live: Live) -> None:
    debugger = live()
    texts(debugger, "next 2", "patch layers.1.mlp.act[0, :8] = 3", "next 2")
    reported = debugger.execute("golden")
    assert "1 operation is wrong by itself: layers.1.mlp.act from step 1" in reported.to_text()
    again = debugger.execute("golden")  # the user's patch is in force in every run of the branch
    assert again.to_json()["faulty"] == reported.to_json()["faulty"]
    assert debugger.timeline.line(1).patches


def test_a_match_has_no_ledger_and_reports_how_far_it_has_come(live: Live) -> None:
    debugger = live()
    debugger.execute("next 2")
    heard: list[ProgressEvent] = []
    debugger.events = lambda event: heard.append(event) if isinstance(event, ProgressEvent) else None
    reported = debugger.execute("golden")
    assert reported.to_text() == "golden: match over 2 steps"
    assert reported.to_json()["faulty"] is None
    engine = [ProgressEvent("engine, float32, tp=1", done, 2) for done in range(3)]
    untapped = [ProgressEvent("engine without taps, float32, tp=1", done, 2) for done in range(3)]
    judged = [ProgressEvent(what, 0, 0) for what in ("judging every tap", "naming causes")]
    recorded = [event for event in heard if event.what in ("loading transformers", "golden reference")]
    assert heard[len(recorded) :] == [*engine, *judged, *untapped]
    assert all(event.done <= event.of == 4 for event in recorded[1:]), "none where it was in the cache"


@pytest.mark.parametrize(
    "stage",
    [pytest.param("golden reference", marks=pytest.mark.slow), "engine, float32, tp=1", "naming causes"],
)
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.sampled(2)
def test_an_interrupt_ends_it_wherever_it_is(
    live: Live, stage: str, beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_worth_a_process", lambda session: beside)
    if stage == "golden reference":
        monkeypatch.setenv("LOCKSTEP_CACHE_DIR", str(tmp_path))
    debugger = live(prompts=PROMPTS)
    debugger.execute("next 2")
    heard: list[ProgressEvent] = []

    def interrupt(event: DebuggerEvent) -> None:
        if isinstance(event, ProgressEvent):
            heard.append(event)
            if event.what == stage:
                debugger.interrupt()

    debugger.events = interrupt
    with pytest.raises(Interrupted):
        debugger.execute("golden")
    if stage == "golden reference":
        assert heard[0] == ProgressEvent("loading transformers", 0, 0), (
            "before the first pass it states why it waits"
        )
    debugger.events = lambda event: None
    assert last_judgement(debugger) is None
    assert "step 2" in debugger.execute("next").to_text(), "the branch goes on"


@pytest.mark.slow
def test_check_leaves_the_same_event_of_the_same_run(live: Live, tmp_path: Path) -> None:
    debugger = live(tp=2, rules=RULES, prompts=PROMPTS)
    debugger.execute("next 3")
    asked = debugger.execute("golden").to_json()
    (stored,) = debugger.session.events(kind="golden")
    assert debugger.executor is not None
    inferior = debugger.executor.inferior
    path = Path(str(debugger.settings.golden))
    finish(debugger)
    floor = record_golden(inferior.path, forced_onto(path), 2, "float32")
    reference = Reference(forced_onto(path), 2, path, floor)
    result = check(inferior, reference, tmp_path / "check.session", rules=RULES)
    with Session.open(result.engine_session) as session:
        (event,) = session.events(kind="golden")
    assert (event.text, event.step, event.data) == (stored.text, stored.step, stored.data)
    assert {key: asked[key] for key in event.data} == event.data
