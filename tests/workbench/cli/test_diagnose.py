"""`lockstep diagnose`: a model on our engine, a recording with its checkpoint alone; `diff` with the golden."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from lockstep.sessions import Session, limits
from lockstep.workbench.cli.main import run
from lockstep.workbench.diagnosis import search, search_time
from tests.workbench.diagnosis.bugs.bug import Bug, Place
from tests.workbench.diagnosis.bugs.patched import Patched
from tests.workbench.diagnosis.bugs.recording import Recorded, Recordings
from tests.workbench.diagnosis.synthetic import synthetic

pytestmark = pytest.mark.sampled_file(2)

Q = "layers.1.attn.q_proj"


@dataclass(frozen=True)
class Strangers:
    """A stranger's recordings of a tiny model: right, with two independent bugs, with a harmless oddity."""

    right: Recorded
    two: Recorded
    odd: Recorded


def _two_bugs(p: Patched) -> None:
    p.bias(p.attn(1).q_proj, torch.zeros_like)
    mlp = p.mlp(2)
    mlp.forward = lambda x: mlp.down_proj(torch.nn.functional.gelu(mlp.gate_proj(x)) * mlp.up_proj(x))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Strangers:
    recordings = Recordings(tmp_path_factory.mktemp("diagnose"))

    def made(name: str, patch: Callable[[Patched], None]) -> Recorded:
        place = Place(())
        # The same seed of weights and prompts for all of them, which comes from the name.
        names = (f"{name}{number}" for number in range(99))
        bug = next(one for n in names if (one := Bug(n, "", (), "", place, patch)).seed == 0)
        return recordings.of(bug)

    right, two, odd = made("right", lambda p: None), made("two", _two_bugs), recordings.root / "odd.session"
    with Session.open(right.floor) as floor:
        # A tap that is shown three times as large: what is computed from it is right.
        synthetic(odd, floor, spoil={Q: lambda x, at: 3 * x}).close()
    return Strangers(right, two, replace(right, engine=odd))


def reported(capsys: Any, *words: str, code: int) -> dict[str, Any]:
    assert run(["diagnose", *words, "--json"]) == code
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.slow
def test_two_bugs_of_a_recording_without_a_reference_are_both_found(
    strangers: Strangers, capsys: Any
) -> None:
    words = (str(strangers.two.engine), "--model", str(strangers.two.checkpoint), "--no-reference")
    found = reported(capsys, *words, code=1)
    causes = [one for one in found["causes"] if not one["alternative"]]
    assert {(one["tap"], tuple(one["layers"])) for one in causes} >= {
        (Q, (1,)),
        ("layers.2.mlp.act", (2,)),
    }
    assert all({"class", "fault", "ranks", "heads", "steps", "transform", "residual", "confidence", "evidence",
                "ruled_out"} <= one.keys() for one in causes)  # fmt: skip
    assert causes[0]["steps"] == [0, 1, 2, 3, 4]
    assert found["golden_session"] is None
    proofs = [one["reproduction"] for one in causes]
    assert [(one["outcome"], one["held"], one["end"]) for one in proofs] == [
        ("reproduced", False, "logits")
    ] * 2


def test_with_a_golden_session_the_first_divergence_is_reported_too(
    strangers: Strangers, capsys: Any
) -> None:
    words = (
        str(strangers.two.engine),
        "--model",
        str(strangers.two.checkpoint),
        "--golden",
        str(strangers.two.golden),
    )
    found = reported(capsys, *words, "--no-reproduce", code=1)
    assert found["first_divergence"]["tap"] == Q
    assert found["causes"][0]["tap"] == Q
    assert found["causes"][0]["reproduction"] is None


def test_the_line_under_a_cause_reports_what_came_of_it_in_the_reference(
    strangers: Strangers, capsys: Any
) -> None:
    words = ["diagnose", str(strangers.two.engine), "--model", str(strangers.two.checkpoint), "--reproduce"]
    assert run([*words, "--golden", str(strangers.two.golden)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "proof reproduced: put into the reference, it gives the run's logits within rounding (rel " in shown
    )


def test_a_right_recording_is_right(strangers: Strangers, capsys: Any) -> None:
    words = (
        str(strangers.right.engine),
        "--model",
        str(strangers.right.checkpoint),
        "--golden",
        str(strangers.two.golden),
    )
    found = reported(capsys, *words, code=0)
    assert (found["verdict"], found["causes"]) == ("match", [])


def test_what_has_no_effect_is_a_note_and_accuses_nobody(strangers: Strangers, capsys: Any) -> None:
    words = (
        str(strangers.odd.engine),
        "--model",
        str(strangers.odd.checkpoint),
        "--golden",
        str(strangers.odd.golden),
    )
    found = reported(capsys, *words, code=0)
    assert (found["verdict"], found["causes"], found["first_divergence"]) == ("match", [], None)
    assert any("has no effect here: layers.1.attn.q_proj" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        ((), "session --model MODEL"),
        (("--fault", "mask=none"), "a recording is read as it is"),
    ],
)
def test_what_is_missing_is_reported(
    strangers: Strangers, capsys: Any, words: tuple[str, ...], printed: str
) -> None:
    assert run(["diagnose", str(strangers.right.engine), *words]) == 2
    assert printed in " ".join(capsys.readouterr().err.split())


def test_the_text_names_place_fix_and_verdict(strangers: Strangers, capsys: Any) -> None:
    words = [
        "diagnose",
        str(strangers.two.engine),
        "--model",
        str(strangers.two.checkpoint),
        "--no-reference",
    ]
    assert run(words) == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "verdict     diverged"
    assert any(line.startswith("cause       layers.2.mlp.act") for line in lines)
    assert any(line.startswith("fix ") for line in lines)


@pytest.mark.slow
def test_a_model_on_our_engine_is_confirmed_by_switching_the_rule_off(
    strangers: Strangers, capsys: Any
) -> None:
    words = (str(strangers.right.checkpoint), "--ids", "5,6,7,8", "--steps", "1", "--fault", "act=swapped")
    found = reported(capsys, *words, code=1)
    (cause,) = found["causes"]
    assert (cause["fault"], cause["class"]) == ("act=swapped", "activation")
    assert "confirmed by switching it off" in cause["evidence"][-1]
    assert found["confirmed"] == ["act=swapped"]
    (agree,) = [note for note in found["notes"] if note.startswith("runs that agree: ")]
    assert (
        "prefill = decode; no token sees a later one; alone = in a batch; prefill in chunks = whole" in agree
    )


@pytest.mark.slow
def test_a_missing_sum_over_ranks_is_one_that_a_single_rank_has_not(
    strangers: Strangers, capsys: Any
) -> None:
    words = (str(strangers.right.checkpoint), "--ids", "5,6,7,8", "--steps", "1", "--tp", "2", "--fault",
             "reduce=twice")  # fmt: skip
    found = reported(capsys, *words, code=1)
    assert found["causes"][0]["fault"] == "reduce=twice"
    assert any("tp 1 = tp 2 is broken, as it must be" in line for line in found["causes"][0]["evidence"])


@pytest.mark.slow
def test_no_invariant_of_a_right_model_is_broken(strangers: Strangers, capsys: Any) -> None:
    words = ["invariant", str(strangers.right.checkpoint), "--ids", "5,6,7,8", "--steps", "2", "--json"]
    assert run(words) == 0, capsys.readouterr().out
    found = {one["name"]: one["result"] for one in json.loads(capsys.readouterr().out)["invariants"]}
    assert found["alone = in a batch"] == "holds"
    assert sum(result == "holds" for result in found.values()) >= 14


@pytest.mark.slow
def test_diff_with_the_golden_is_judged_and_bitwise_on_demand(strangers: Strangers, capsys: Any) -> None:
    golden = str(strangers.two.golden)
    assert run(["diff", str(strangers.right.engine), golden]) == 0
    assert "every tap is within its noise" in capsys.readouterr().out
    assert run(["diff", golden, str(strangers.two.engine), "--json"]) == 1
    table = json.loads(capsys.readouterr().out)
    assert table["rows"][0][:2] == [Q, "fail"]
    assert run(["diff", str(strangers.right.engine), golden, "--bitwise"]) == 1


def test_diff_reports_what_it_needs_to_look_for_a_cause(strangers: Strangers, capsys: Any) -> None:
    assert run(["diff", str(strangers.two.golden), str(strangers.two.engine)]) == 1
    stated = " ".join(capsys.readouterr().out.split())
    assert "no cause is looked for: which checkpoint" in stated
    assert "lockstep diagnose" in stated


def test_when_the_time_for_the_search_is_over_what_was_found_is_reported(
    strangers: Strangers, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place of what is wrong is known without a cause: it is a verdict."""
    tried: list[str] = []
    fit = search.fit

    def slowly(site: Any, variant: Any) -> Any:
        tried.append(site.tap)
        if tried[0] != site.tap:  # all hypotheses of the first, and one of the second
            monkeypatch.setattr(search_time.time, "monotonic", lambda: 1e9)
        return fit(site, variant)

    monkeypatch.setattr(search, "fit", slowly)
    words = (str(strangers.two.engine), "--model", str(strangers.two.checkpoint), "--no-reference")
    found = reported(capsys, *words, "--search-seconds", "3000", code=1)
    assert [one["tap"] for one in found["causes"]][:1] == [Q]
    assert found["first_divergence"]["tap"] == Q
    assert found["untried"] == ["layers.2.mlp.act"]
    notes = " ".join(found["notes"])
    assert "not all hypotheses were tried at layers.2.mlp.act: the search for causes has ended" in notes
    assert "operations after these were not judged" in notes  # not even twice that time is left


def test_without_any_time_for_the_search_the_place_is_reported(strangers: Strangers, capsys: Any) -> None:
    words = [str(strangers.two.engine), "--model", str(strangers.two.checkpoint), "--golden"]
    words += [str(strangers.two.golden), "--search-seconds", "0"]
    found = reported(capsys, *words, code=1)
    assert found["first_divergence"]["tap"] == Q
    assert run(["diagnose", *words]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "first wrong layers.1.attn.q_proj" in shown
    assert "the search for causes has ended after 0 s (`--search-seconds` gives it more)" in shown


def test_the_search_is_not_charged_to_reading(
    strangers: Strangers, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search takes more than a session may cost; reading it does not."""
    clock, fit = [0.0], search.fit

    def slowly(site: Any, variant: Any) -> Any:
        clock[0] += 100
        return fit(site, variant)

    monkeypatch.setattr(limits.time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(search, "fit", slowly)
    words = (str(strangers.two.engine), "--model", str(strangers.two.checkpoint), "--no-reference")
    found = reported(capsys, *words, code=1)
    assert Q in {one["tap"] for one in found["causes"]}
    assert found["untried"] == []


def test_when_reading_costs_too_much_what_was_found_is_reported(
    strangers: Strangers, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recording is read up to the wrong operation, and then no more."""
    clock, fit = [0.0], search.fit

    def over(site: Any, variant: Any) -> Any:
        monkeypatch.setattr(
            limits.time, "thread_time", lambda: clock.append(clock[-1] + 100) or clock[-1]
        )  # 100 s each time that it is asked for
        return fit(site, variant)

    monkeypatch.setattr(search, "fit", over)
    words = [str(strangers.two.engine), "--model", str(strangers.two.checkpoint), "--golden"]
    found = reported(capsys, *words, str(strangers.two.golden), code=1)
    assert found["first_divergence"]["tap"] == Q
    notes = " ".join(found["notes"])
    assert "operations after these were not judged" in notes
    assert "not held against the reference to the end" in notes
    assert "session_seconds" in notes
