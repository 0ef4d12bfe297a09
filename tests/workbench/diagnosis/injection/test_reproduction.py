"""Causes put into the reference: what is right reproduces the run, what is not does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.engine.taps.names import local_name
from lockstep.sessions import Session
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.diagnosis.confidence import FIRST, confidence_after
from lockstep.workbench.diagnosis.diagnose import diagnose
from lockstep.workbench.diagnosis.findings import survey
from lockstep.workbench.diagnosis.injection.graph_run import GraphRun
from lockstep.workbench.diagnosis.injection.reproduction import reproduce
from lockstep.workbench.diagnosis.merging import FindingGroup, groups
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.sites import sites
from lockstep.workbench.diagnosis.recording import Recording
from lockstep.workbench.diagnosis.search_time import SearchTime
from lockstep.workbench.judgements.reproduction import Reproduction
from lockstep.workbench.references.golden import forced_onto
from lockstep.workbench.references.request import GoldenRequest
from lockstep.workbench.references.transformers_recorder import record
from tests.checkpoints import FAMILY_VARIANTS
from tests.workbench.diagnosis.bugs import recording
from tests.workbench.diagnosis.bugs.all_bugs import bugs
from tests.workbench.diagnosis.bugs.bug import Bug, Place
from tests.workbench.diagnosis.bugs.patched import Patched
from tests.workbench.diagnosis.bugs.recording import Recorded, Recordings

pytestmark = pytest.mark.sampled_file(2)

#: Those of experts may be the same ones.
WHOLE_NUMBERS = ("mlp.topk_ids",)
#: Models of which each computes something else: attention, norms, rotations, experts, latents, states.
FAMILIES = ("gemma2", "phi3-window", "granite", "qwen3-moe", "deepseek-v2-lite", "gpt-oss", "qwen3-next")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    """One decode step."""
    return Recordings(tmp_path_factory.mktemp("injection"), steps=1)


@dataclass(frozen=True)
class Read:
    """A bug's recording as diagnosis reads it, and the golden one."""

    taps: RecordedTaps
    facts: Facts
    golden: Session

    def reproduced(self, wrong: Sequence[FindingGroup]) -> Reproduction:
        return reproduce(wrong, self.taps, self.facts, SearchTime())


@contextmanager
def read(recorded: Recorded) -> Iterator[Read]:
    with Session.open(recorded.engine, UNLIMITED) as ours, Session.open(recorded.golden, UNLIMITED) as golden:
        facts = Facts.of(recorded.checkpoint, ours.meta.config.dtype or "")
        yield Read(RecordedTaps(Recording(ours), Recording(golden)), facts, golden)


def bug(patch: Callable[[Patched], None], model: str = "llama-bias", tp: int = 1) -> Bug:
    return Bug(patch.__name__, "", (), "", Place(()), patch, model, tp=tp)


# --- the graph is the reference ------------------------------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.parametrize("model", ["llama-bias", "qwen3", *FAMILIES])
def test_without_a_change_the_graph_is_transformers_in_float64(
    model: str, short: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the recording holds: here that of a model with other weights, of which every tensor is another."""
    if model in FAMILY_VARIANTS:
        family, overrides = FAMILY_VARIANTS[model]
        monkeypatch.setitem(recording.MODELS, model, (family, overrides, lambda weights: None))
    checkpoint, golden = short.reference(model, 0)
    stranger, _ = short.reference(model, 1)
    engine = golden.with_name("stranger.session")
    record(GoldenRequest(str(stranger), forced_onto(golden), 1, "float64"), engine)
    with read(Recorded(engine, golden, golden, checkpoint)) as run:
        graph, compared = GraphRun(run.taps, run.facts), set[str]()
        for tap in (one.name for one in run.golden.taps if run.taps.captured(one.name)):
            computed = graph.compute(tap)
            assert not computed.error() <= 1e-2 * computed.size or local_name(tap) in WHOLE_NUMBERS, tap
            for i, one in enumerate(run.taps.passes):
                theirs = run.golden.rebuilt(tap, step=one.step, seq=one.seq).array
                ours = graph.taps.tensors(tap, 0)[i]
                assert ours is not None, tap
                finite = np.isfinite(ours)
                scale = np.abs(ours[finite]).max(initial=1e-300)
                assert np.abs(ours[finite] - theirs[finite]).max(initial=0.0) <= 1e-6 * scale, (tap, one.step)
            compared.add(local_name(tap))
    assert {"embed", "attn_residual", "mlp_residual", "logits"} <= compared


# --- what is right -------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    [
        "cache_of_the_layer_before",
        "epsilon_of_the_final_norm",
        "kv_heads_tiled",
        "o_never_reduced",
        "positions_one_too_far",
        "residual_missing_after_attention",
    ],
)
def test_a_cause_that_is_right_gives_the_run(name: str, short: Recordings) -> None:
    recorded = short.of(bugs()[name])
    with (
        Session.open(recorded.engine, UNLIMITED) as ours,
        Session.open(recorded.golden, UNLIMITED) as golden,
        Session.open(recorded.floor, UNLIMITED) as floor,
    ):
        facts = Facts.of(recorded.checkpoint, "float32")
        asked = diagnose(ours, facts, golden=golden, floor=floor, reproducing=True).causes[0]
        alone = diagnose(ours, facts, golden=golden, floor=floor).causes[0]
    found = asked.reproduction
    assert found is not None, found
    assert found.outcome == "reproduced", found
    assert found.end == "logits"
    assert found.within == found.taps
    assert found.tokens == found.of_tokens == 4  # two sequences, two steps
    assert found.before is not None
    assert found.after is not None
    assert found.before > 1e-5 > 1e-6 > found.after
    assert alone.reproduction is None
    assert alone.confidence is not None
    assert asked.confidence is not None
    assert alone.confidence < asked.confidence < 1


def one_head_in_decode(p: Patched) -> None:
    """Head 1 of layer 1 attends to values that are twice as large, in decode."""

    def context(probs: Tensor, values: Tensor) -> Tensor:
        found = probs @ values
        if p.decode:
            found = torch.cat([found[:, :1], 2 * found[:, 1:2], found[:, 2:]], dim=1)
        return found

    p.attention((1,), context=context)


def test_a_cause_of_one_head_in_decode_is_put_there_alone(short: Recordings) -> None:
    with read(short.of(bug(one_head_in_decode))) as run:
        (wrong,) = groups(survey(sites(run.taps, run.facts), run.taps).findings)
        assert wrong.first.heads == (1,)
        assert wrong.first.steps == (1,)
        found = run.reproduced([wrong])
    assert found.outcome == "reproduced"
    assert found.tokens == found.of_tokens


# --- what is not ---------------------------------------------------------------------------------------------


def two_norms_scaled(p: Patched) -> None:
    for i in (0, 2):
        p.output(p.decoder.layers[i].post_attention_layernorm, lambda x: 1.5 * x)


def test_what_is_put_into_one_of_two_layers_does_not_give_the_run(short: Recordings) -> None:
    with read(short.of(bug(two_norms_scaled))) as run:
        (wrong,) = groups(survey(sites(run.taps, run.facts), run.taps).findings)
        assert {one.layer for one in wrong.findings} == {0, 2}
        one = FindingGroup(wrong.findings[:1], wrong.chosen[:1])
        assert run.reproduced([wrong]).outcome == "reproduced"
        found = run.reproduced([one])
    assert found.outcome in ("partly", "not reproduced")
    assert found.first_off == "layers.2.mlp_norm"
    assert found.after is not None
    assert found.after > 1e-3


def test_another_number_does_not_give_the_run(short: Recordings) -> None:
    with read(short.of(bugs()["epsilon_of_the_final_norm"])) as run:
        (wrong,) = groups(survey(sites(run.taps, run.facts), run.taps).findings)
        (chosen,) = wrong.chosen
        (edit,) = chosen.edits
        assert edit.detail == (1e-3,)
        other = replace(chosen, edits=(replace(edit, detail=(1e-1,)),))
        found = run.reproduced([FindingGroup(wrong.findings, (other,))])
    assert found.outcome == "not reproduced"
    assert found.first_off == "final_norm"


def test_what_is_not_explained_is_not_tried(short: Recordings) -> None:
    with read(short.of(bugs()["epsilon_of_the_final_norm"])) as run:
        (wrong,) = groups(survey(sites(run.taps, run.facts), run.taps).findings)
        found = run.reproduced([FindingGroup(wrong.findings, ())])
    assert found.outcome == "not tried"
    assert found.in_words() == "not tried: what is wrong at final_norm is not explained"


# --- words, and what follows for the confidence --------------------------------------------------------------


def test_in_words() -> None:
    whole = Reproduction("reproduced", "", "logits", 0.21, 3e-7, 2e-7, 34, 34, "", 12, 5, 12)
    assert whole.in_words() == (
        "reproduced: put into the reference, it gives the run's logits within rounding (rel 3.0e-7; without it 0.210),"
        " 12 of 12 tokens"
    )
    part = Reproduction("partly", "", "logits", 0.2, 0.05, 2e-7, 3, 34, "layers.2.mlp_norm", 9, 5, 12)
    assert "it takes away 75 % of what the run's logits are off by" in part.in_words()
    assert part.in_words().endswith("9 of 12 tokens; first off at layers.2.mlp_norm")


def test_confidence_follows_and_rivals_stay_in_doubt() -> None:
    assert confidence_after(0.8, "reproduced", 0) == pytest.approx(0.9)
    assert confidence_after(0.8, "reproduced", 1) == pytest.approx((0.8 + FIRST) / 2)
    assert confidence_after(0.8, "not reproduced", 0) < 0.5
    assert confidence_after(0.8, "not tried", 0) == confidence_after(0.8, "partly", 0) == 0.8
