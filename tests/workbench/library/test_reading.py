"""`lockstep.open`: what a script and a notebook get of a recording, a stranger's included."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

import lockstep
from lockstep.sessions import STATISTICS
from tests.sessions.oddities import ODDITIES
from tests.sessions.strangers import usual, write
from tests.workbench.library.safe_html import Shown

pytestmark = pytest.mark.sampled_file(2)

RECORDED = Path(__file__).resolve().parents[3] / "sessions" / "recorded"
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[2J"


@pytest.fixture
def run() -> lockstep.RecordedRun:
    return lockstep.open(RECORDED / "load_bias-false.session")


def test_what_was_run(run: lockstep.RecordedRun) -> None:
    assert (run.ranks, run.steps, run.sequences) == (2, range(12), (0,))
    assert run.taps[0] == "embed"
    assert run.captured == tuple(f"layers.{i}.attn.probs" for i in range(4))
    assert "demo, float32, 2 ranks, 12 steps" in repr(run)
    reported = run.tokens()
    assert (len(reported.prompt), len(reported.chosen)) == (20, 12)
    assert reported.text.startswith("dawn\nthe kettle")
    assert run.judgement is not None
    assert run.judgement.first_divergence is not None
    assert run.judgement.first_divergence.tap == "layers.0.attn.q_proj"


def test_statistics_and_tensors_are_those_of_the_session(run: lockstep.RecordedRun) -> None:
    found = run.statistics("layers.1.mlp.act", step=3)
    assert tuple(found) == STATISTICS
    steps, values = run.series("layers.1.mlp.act", "rms", rank=1)
    assert list(steps) == list(run.steps)
    assert found["rms"][1] == values[3]
    probs = run.tensor("layers.0.attn.probs")
    halves = [run.session.tensor("layers.0.attn.probs", step=0, rank=rank) for rank in range(2)]
    assert np.array_equal(probs, np.concatenate([half for half in halves if half is not None]))


def test_pictures_are_svg_and_can_be_saved(run: lockstep.RecordedRun, tmp_path: Path) -> None:
    one = run.heatmap("layers.0.attn.probs", index=3)
    assert one.title == "layers.0.attn.probs[3], step 0, rebuilt: 20×20"
    for drawing in (
        one,
        run.heatmap("layers.0.attn.probs", 2),
        run.attention(1, 4),
        run.attention(1, head=5),
    ):
        assert ElementTree.fromstring(drawing._repr_svg_()).tag.endswith("svg")
        Shown(drawing._repr_html_())
        assert drawing.save(tmp_path / "a.svg").read_text(encoding="utf-8") == drawing._repr_svg_()


@pytest.mark.parametrize(
    ("wrong", "printed"),
    [
        (lambda run: run.tensor("layers.0.attn.q_proj"), "has no tensor of layers.0.attn.q_proj at step 0"),
        (lambda run: run.heatmap("layers.0.attn.q_proj"), "`captured` lists the taps that it has"),
        (lambda run: run.heatmap("layers.0.attn.probs", index=8), r"is of shape \(8, 20, 20\)"),
        (lambda run: run.heatmap("no such tap"), "no tap 'no such tap'"),
        (lambda run: run.attention(0, head=9), "there is no head 9"),
        (lambda run: run.statistics("embed", step=99), "99"),
        (lambda run: lockstep.open(run.path, branch=7), "no branch 7"),
        (lambda run: lockstep.open(Path(__file__)), "test_reading.py"),
    ],
)
def test_what_is_not_there_is_an_error_that_reports_it(
    run: lockstep.RecordedRun, wrong, printed: str
) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(lockstep.SessionError, match=printed):
        wrong(run)


def test_a_branch_is_read_by_itself() -> None:
    with lockstep.open(RECORDED / "load_bias-false.session", branch=1) as run:
        assert run.tokens().text != lockstep.open(run.path).tokens().text


def test_a_notebook_shows_the_run_with_its_ledger(run: lockstep.RecordedRun) -> None:
    shown = Shown(run._repr_html_())
    assert {"verdict: diverged", "layers.3.attn.v_proj", "load_bias=false"} <= set(shown.texts)
    assert "q,k,v}_proj.bias is not added" in shown.text


def test_a_stranger_puts_no_element_into_the_page(tmp_path: Path) -> None:
    made = usual()
    made.rename(lambda i, name: f"{name}{HOSTILE}{i}")
    named = msgspec.structs.replace(made.meta.model, name=HOSTILE, path=HOSTILE, dtype=HOSTILE)
    texts = dict.fromkeys(range(64), HOSTILE)
    made.meta = msgspec.structs.replace(made.meta, source=HOSTILE, model=named, token_texts=texts)
    made.forks = [replace(fork, rules={HOSTILE: HOSTILE}) for fork in made.forks]
    path = write(tmp_path / "a.session", made)
    for branch in (0, 1):
        with lockstep.open(path, branch=branch) as run:
            shown = Shown(run._repr_html_())
            assert "<script>" in shown.text
            assert "\x1b" not in shown.text + repr(run) + run.tokens().text
            for tap in run.captured:
                drawing = run.heatmap(tap)
                Shown(drawing._repr_html_())
                assert "<script" not in drawing._repr_svg_()
            Shown(lockstep.diff(run, run)._repr_html_())


# Every sixteenth: all of them take longer than they distinguish.
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*ODDITIES][::16])
def test_an_odd_session_is_shown_or_refused(name: str, tmp_path: Path) -> None:
    made = usual()
    ODDITIES[name](made)
    with suppress(lockstep.SessionError), lockstep.open(write(tmp_path / "a.session", made)) as run:
        Shown(run._repr_html_())
        for tap in run.captured:
            Shown(run.heatmap(tap)._repr_html_())
