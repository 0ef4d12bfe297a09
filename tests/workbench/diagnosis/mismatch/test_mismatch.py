"""Planted differences between a rollout and a trainer are found at their own level, and none where there is none.

The log-probabilities are held against torch's log-softmax of logits that transformers computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM

from lockstep.sessions import SequenceStep, Session, SessionWriter, StepRecord, Tap, TensorRecord
from lockstep.sessions.keeping import keeping
from lockstep.sessions.meta import ModelMeta, SamplingMeta, SequenceMeta, SessionMeta, WeightShare
from lockstep.workbench.diagnosis.mismatch.gaps import GapStatistics, TokenGap
from lockstep.workbench.diagnosis.mismatch.level import LEVELS
from lockstep.workbench.diagnosis.mismatch.logprobs import support
from lockstep.workbench.diagnosis.mismatch.report import MismatchReport, compare_runs
from lockstep.workbench.diagnosis.operations.facts import Facts
from tests.workbench.diagnosis.synthetic import Case, Place, Spoil, synthetic, tiny_case

pytestmark = pytest.mark.sampled_file(2)

Change = Callable[[SequenceStep], SequenceStep]
FRONT = 7  # a token id


def facts_of(case: Case) -> Callable[[Session], Facts]:
    return lambda session: Facts.of(case.model_dir, session.meta.config.dtype or "float32")


def response_of(session: Session, seq: int) -> list[int]:
    """Every token after the first, the last chosen one too."""
    steps = [one for step in session.steps() for one in session.step(step).sequences if one.seq == seq]
    last = steps[-1].emitted
    return [*(i for one in steps for i in one.ids), *([] if last is None else [last])][1:]


@pytest.fixture(scope="module")
def logits(case: Case) -> dict[int, torch.Tensor]:
    """[tokens, vocab] of each sequence, by an unhooked model."""
    model = AutoModelForCausalLM.from_pretrained(case.model_dir, dtype=torch.float64)
    found = {}
    for seq in (0, 1):
        steps = [
            one for step in case.floor.steps() for one in case.floor.step(step).sequences if one.seq == seq
        ]
        with torch.inference_mode():
            found[seq] = model(torch.tensor([[i for one in steps for i in one.ids]])).logits[0].double()
    return found


@pytest.fixture
def rollout(case: Case, tmp_path: Path) -> Iterator[Session]:
    session = synthetic(tmp_path / "rollout.session", case.floor)
    with keeping(session):
        yield session


def compared(rollout: Session, trainer: Session, **options: Any) -> MismatchReport:
    with keeping(trainer):
        return compare_runs(rollout, trainer, **options)


def test_equal_sides_have_no_gap_at_all(case: Case, rollout: Session, tmp_path: Path) -> None:
    found = compared(rollout, synthetic(tmp_path / "t.session", case.floor), facts=facts_of(case))
    assert found.answer is None
    assert found.proved_equal
    assert [level.name for level in found.levels] == list(LEVELS)
    assert found.statistics.tokens == len(response_of(rollout, 0)) + len(response_of(rollout, 1))
    assert all(one.gap == 0.0 for one in found.gaps)
    assert (found.statistics.k3, found.statistics.ess, found.statistics.largest) == (0.0, 1.0, 0.0)


def test_log_probabilities_are_those_of_transformers(
    case: Case, rollout: Session, tmp_path: Path, logits: Mapping[int, torch.Tensor]
) -> None:
    """Rows whose logits were not recorded are computed of final_norm by the checkpoint's head."""
    found = compared(rollout, synthetic(tmp_path / "t.session", case.floor), facts=facts_of(case))
    for seq, rows in logits.items():
        wanted = rows.log_softmax(-1)[torch.arange(len(rows)), torch.tensor(response_of(rollout, seq))]
        told = [one.rollout for one in found.gaps if one.seq == seq]
        np.testing.assert_allclose(told, wanted.numpy(), atol=2e-5)


# -- tokens -----------------------------------------------------------------------------------------------------------


def ids(change: Callable[[int, SequenceStep], dict[str, Any]]) -> Change:
    """Of sequence 0 alone."""

    def apply(sequence: SequenceStep) -> SequenceStep:
        return replace(sequence, **change(len(sequence.ids), sequence)) if sequence.seq == 0 else sequence

    return apply


def put(at: int, token: int) -> Change:
    """Another token at a place of the prefill."""

    def change(count: int, one: SequenceStep) -> dict[str, Any]:
        return {"ids": [*one.ids[:at], token, *one.ids[at + 1 :]]} if count > at else {}

    return ids(change)


TOKENS: dict[str, tuple[Change, str]] = {
    "another token": (put(4, 99), "other tokens from token 4 on"),
    "the first one": (put(0, 99), "other tokens from token 0 on"),
    "other positions": (
        ids(lambda count, one: {"positions": [p + 3 for p in one.positions]}),
        "the same tokens at other positions: the rollout's begin at 0, the trainer's at 3",
    ),
}


@pytest.mark.parametrize("name", TOKENS)
def test_other_tokens(case: Case, rollout: Session, tmp_path: Path, name: str) -> None:
    change, text = TOKENS[name]
    found = compared(rollout, synthetic(tmp_path / "t.session", case.floor, change=change))
    assert found.answer is not None
    assert found.answer.name == "tokens"
    assert text in found.answer.text


@pytest.mark.parametrize("longer", ["trainer", "rollout"])
def test_a_second_bos(case: Case, rollout: Session, tmp_path: Path, longer: str) -> None:
    full = [rollout.step(0).sequences[0].ids[0], *response_of(rollout, 0)]

    def change(_count: int, one: SequenceStep) -> dict[str, Any]:
        moved = [FRONT, *full]
        return {"ids": [moved[p] for p in one.positions], "emitted": moved[one.positions[-1] + 1]}

    other = synthetic(tmp_path / "t.session", case.floor, change=ids(change))
    with keeping(other):
        found = compare_runs(rollout, other) if longer == "trainer" else compare_runs(other, rollout)
    assert found.answer is not None
    assert found.answer.name == "tokens"
    shorter = "rollout" if longer == "trainer" else "trainer"
    assert f"the {longer} reads ‹7› (7) in front of what the {shorter} reads" in found.answer.text


def test_the_same_text_in_other_tokens(case: Case, rollout: Session, tmp_path: Path) -> None:
    """Re-tokenised history: what was one token is another spelling of the same characters."""
    steps = rollout.step(0).sequences[0]
    old = steps.ids[3]
    texts = {i: f"<{i}>" for i in range(131)} | {old: "ab", 130: "ab"}
    relabelled = copy_with(rollout, tmp_path / "r.session", token_texts=texts)
    with keeping(relabelled):
        found = compared(relabelled, synthetic(tmp_path / "t.session", case.floor, change=put(3, 130)))
    assert found.answer is not None
    assert found.answer.name == "tokens"
    assert "the same text is cut into other tokens from token 3 on" in found.answer.text


def copy_with(session: Session, path: Path, **changes: Any) -> Session:
    """The session with other metadata."""
    meta = structs.replace(session.meta, **changes)
    with SessionWriter.create(path, taps=session.taps, ranks=session.ranks, meta=meta) as writer:
        for step in session.steps():
            tensors = [
                TensorRecord(key.tap, key.rank, key.seq, array, key.dtype, key.slice)
                for key in session.captured(step)
                if (array := session.tensor(key.tap, step=step, rank=key.rank, seq=key.seq)) is not None
            ]
            writer.step(0, replace(session.step(step), tensors=tensors))
    return Session.open(path)


# -- weights ----------------------------------------------------------------------------------------------------------


def scaled(factor: float = 1.01) -> Spoil:
    return lambda x, at: x * factor


@pytest.mark.slow
def test_weights_that_are_not_the_checkpoint_s(case: Case, rollout: Session, tmp_path: Path) -> None:
    """Every matrix has moved a little, as after a sync that did not come through."""

    def move(weights: dict[str, torch.Tensor]) -> None:
        draw = torch.Generator().manual_seed(1)
        for name, one in weights.items():
            weights[name] = one * (1 + 1e-4 * torch.randn(one.shape, generator=draw))

    other = tiny_case(tmp_path / "other", edit=move)
    with keeping(other.golden):
        found = compared(rollout, other.floor, facts=facts_of(case))
    assert found.answer is not None
    assert found.answer.name == "weights"
    assert found.answer.text.startswith("the trainer's weights are not the checkpoint's: ")
    assert found.levels[4].details == (), "no cause of one operation after the other"


def test_another_embedding_table(case: Case, rollout: Session, tmp_path: Path) -> None:
    found = compared(rollout, synthetic(tmp_path / "t.session", case.floor, spoil={"embed": scaled()}))
    assert found.answer is not None
    assert found.answer.name == "weights"
    assert "the embedding gives other bits for the same ids" in found.answer.text


def test_other_bits_in_memory(rollout: Session, tmp_path: Path) -> None:
    def share(checksum: str) -> dict[int, tuple[WeightShare, ...]]:
        return {0: (WeightShare("lm_head.weight", 0, (4, 4), "float32", (0.0,) * 8, checksum, "equal"),)}

    a = copy_with(rollout, tmp_path / "a.session", weights=share("1"))
    b = copy_with(rollout, tmp_path / "b.session", weights=share("2"))
    with keeping(a):
        found = compared(a, b)
    assert found.answer is not None
    assert (found.answer.name, found.answer.text) == ("weights", "other bits in lm_head.weight")


def test_one_checkpoint_by_its_digest(rollout: Session, tmp_path: Path) -> None:
    one = copy_with(rollout, tmp_path / "a.session", model=ModelMeta(checkpoint="f00"))
    with keeping(one):
        found = compared(one, copy_with(rollout, tmp_path / "b.session", model=ModelMeta(checkpoint="f00")))
    assert (found.levels[1].name, found.levels[1].result) == ("weights", "equal")


# -- what the log-probability is of -----------------------------------------------------------------------------------

Figures = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def chosen(values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, targets[:, None])[:, 0]


def raw(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return chosen(rows.log_softmax(-1), targets)


DEFINITIONS: dict[str, tuple[Figures, str]] = {
    "temperature": (lambda x, t: raw(x / 0.7, t), "divided by a temperature of 0.7"),
    "an odd temperature": (lambda x, t: raw(x / 1.37, t), "divided by a temperature of 1.37"),
    "the token before": (lambda x, t: raw(x, t).roll(1), "that of the token before"),
    "the token after": (lambda x, t: raw(x, t).roll(-1), "that of the token after"),
    "probability": (lambda x, t: raw(x, t).exp(), "the probability, not its logarithm"),
    "sign": (lambda x, t: -raw(x, t), "with the other sign"),
    "logit": (chosen, "the raw logit"),
    "base 2": (lambda x, t: raw(x, t) / math.log(2), "to base 2"),
}


def reported(
    logits: Mapping[int, torch.Tensor], session: Session, figures: Figures
) -> dict[int, list[float]]:
    return {
        seq: figures(rows, torch.tensor(response_of(session, seq))).tolist() for seq, rows in logits.items()
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_what_the_figures_are_of(
    case: Case, rollout: Session, tmp_path: Path, logits: Mapping[int, torch.Tensor], name: str
) -> None:
    figures, text = DEFINITIONS[name]
    sides = reported(logits, rollout, figures), reported(logits, rollout, raw)
    trainer = synthetic(tmp_path / "t.session", case.floor)
    found = compared(rollout, trainer, reported=sides, facts=facts_of(case))
    assert found.answer is not None
    assert found.answer.name == "logprob"
    assert text in found.answer.text
    assert "the trainer's log-softmax of the raw logits" in found.answer.text


@pytest.mark.parametrize("raw_support", [False, True])
def test_figures_over_a_cut_support(
    case: Case, rollout: Session, tmp_path: Path, logits: Mapping[int, torch.Tensor], raw_support: bool
) -> None:
    """Of the five likeliest tokens alone, as TRL#7269; the tokens are those that such a run would draw."""
    sampling = SamplingMeta(temperature=0.7, top_k=100)
    known = {seq: SequenceMeta(sampling=sampling) for seq in (0, 1)}
    session = copy_with(rollout, tmp_path / "r.session", sequences=known)

    def figures(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        kept = torch.where(rows >= rows.topk(100, -1).values[:, -1:], rows, -torch.inf)
        return raw(kept if raw_support else kept / 0.7, targets)

    told = {
        seq: [x if math.isfinite(x) else math.nan for x in row]
        for seq, row in reported(logits, rollout, figures).items()
    }
    sides = told, reported(logits, rollout, raw)
    with keeping(session):
        found = compared(
            session, synthetic(tmp_path / "t.session", case.floor), reported=sides, facts=facts_of(case)
        )
    assert found.answer is not None
    assert found.answer.name == "logprob"
    assert (
        "that top-k and top-p leave" in found.answer.text
        if raw_support
        else "over what top-k" in found.answer.text
    )


def test_figures_of_one_definition_are_equal_and_their_gap_is_reported(
    case: Case, rollout: Session, tmp_path: Path, logits: Mapping[int, torch.Tensor]
) -> None:
    mine, theirs = reported(logits, rollout, raw), reported(logits, rollout, raw)
    theirs[0][2] += 1e-6
    trainer = synthetic(tmp_path / "t.session", case.floor)
    found = compared(rollout, trainer, reported=(mine, theirs), facts=facts_of(case))
    assert found.levels[2].result == "equal"
    assert found.statistics.largest == pytest.approx(1e-6, rel=1e-3)


def test_figures_that_are_of_nothing_known(
    case: Case, rollout: Session, tmp_path: Path, logits: Mapping[int, torch.Tensor]
) -> None:
    mine = {seq: [x * 1.5 - 0.3 for x in row] for seq, row in reported(logits, rollout, raw).items()}
    trainer = synthetic(tmp_path / "t.session", case.floor)
    found = compared(rollout, trainer, reported=(mine, {}), facts=facts_of(case))
    assert found.levels[2].result == "unknown"
    assert "no definition that is known here" in found.levels[2].details[0]


def test_the_support_is_that_of_transformers() -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    wanted = TopPLogitsWarper(0.6)(None, TopKLogitsWarper(20)(None, rows))  # type: ignore[arg-type]
    np.testing.assert_array_equal([support(row.numpy(), 20, 0.6) for row in rows], wanted.numpy())


# -- routing ----------------------------------------------------------------------------------------------------------


def routed(path: Path, chosen_ids: list[list[int]], scores: np.ndarray) -> Session:
    """Three tokens through one router of four experts, two of which are taken."""
    taps = [Tap(0, "layers.0.mlp.router", "replicate"), Tap(1, "layers.0.mlp.topk_ids", "replicate")]
    step = SequenceStep(0, [1, 2, 3], [0, 1, 2], [[3]])
    tensors = [
        TensorRecord(taps[0].name, 0, 0, scores.astype(np.float32), "float32"),
        TensorRecord(taps[1].name, 0, 0, np.array(chosen_ids, np.int64), "int64"),
    ]
    with SessionWriter.create(path, taps=taps, ranks=1, meta=SessionMeta()) as writer:
        writer.step(0, StepRecord(0, "prefill", [step], 0.0, tensors=tensors))
    return Session.open(path)


def test_other_experts(tmp_path: Path) -> None:
    scores = np.array([[4.0, 3, 2, 1], [4, 3, 2.999, 1], [1, 2, 3, 4]])
    a = routed(tmp_path / "a.session", [[0, 1], [0, 1], [3, 2]], scores)
    moved = scores.copy()
    moved[1, 2] += 0.002
    b = routed(tmp_path / "b.session", [[1, 0], [0, 2], [3, 2]], moved)
    with keeping(a):
        found = compared(a, b)
    assert found.answer is not None
    assert found.answer.name == "routing"
    assert found.answer.text == "other experts in 1 of 3 rows, first in layer 0 at sequence 0, position 1"
    assert found.answer.details == ("1 of them by scores that are no further apart than the two sides'",)


# -- operations and shapes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tap", ["attn.q_rope", "attn.context", "mlp.act", "attn.o_proj"])
def test_an_operation(case: Case, rollout: Session, tmp_path: Path, tap: str) -> None:
    found = compared(
        rollout, synthetic(tmp_path / "t.session", case.floor, spoil={f"layers.1.{tap}": scaled(1.001)})
    )
    assert found.answer is not None
    assert found.answer.name == "operation"
    assert found.answer.text.startswith(f"layers.1.{tap} has equal inputs and another output")
    assert found.levels[-1].result == "unknown"


def test_the_cause_is_named_where_there_is_a_checkpoint(case: Case, rollout: Session, tmp_path: Path) -> None:
    trainer = synthetic(tmp_path / "t.session", case.floor, spoil={"logits": scaled(2)})
    found = compared(rollout, trainer, facts=facts_of(case))
    assert found.answer is not None
    assert found.answer.name == "operation"
    assert found.answer.text.startswith("trainer: logits")
    assert "doubled" in found.answer.text
    assert found.levels[1].result == "unknown", "a factor may be the weight's"
    assert "1 of the trainer's " in found.levels[1].text


def test_what_is_wrong_stands_before_a_difference_within_rounding(
    case: Case, rollout: Session, tmp_path: Path
) -> None:
    spoil: dict[str, Spoil] = {"layers.0.attn.q_proj": _ulp, "logits": scaled(2)}
    found = compared(
        rollout, synthetic(tmp_path / "t.session", case.floor, spoil=spoil), facts=facts_of(case)
    )
    assert found.answer is not None
    assert found.answer.text.startswith("trainer: logits: the logits are 2 times")
    assert found.answer.details[0].startswith("layers.0.attn.q_proj has equal inputs and another output")


def _ulp(x: np.ndarray, at: Place) -> np.ndarray:
    """The last bit of every seventh element."""
    x = x.astype(np.float32)
    x.reshape(-1)[::7] = np.nextafter(x.reshape(-1)[::7], np.float32(np.inf))
    return x


def test_another_number_of_ranks_within_rounding(case: Case, rollout: Session, tmp_path: Path) -> None:
    trainer = synthetic(tmp_path / "t.session", case.floor, tp=2, spoil={"layers.0.attn.o_proj": _ulp})
    found = compared(rollout, trainer)
    assert found.answer is not None
    assert found.answer.name == "shape"
    assert found.answer.text.startswith("the rollout has 1 rank, the trainer 2")
    assert found.levels[4].result == "equal"


def test_another_kernel_within_rounding(case: Case, rollout: Session, tmp_path: Path) -> None:
    """The same shapes and another last bit: no batch explains that."""
    trainer = synthetic(tmp_path / "t.session", case.floor, spoil={"layers.0.attn.o_proj": _ulp})
    found = compared(rollout, trainer)
    assert found.answer is not None
    assert found.answer.name == "operation"
    assert found.levels[-1].text == "the passes have the same shapes"


# -- figures ----------------------------------------------------------------------------------------------------------


def test_the_figures_of_the_gaps() -> None:
    gap = np.array([0.0, 0.1, -0.8, 0.3])
    found = GapStatistics.of([TokenGap(0, i, 5, -1.0, -1.0 + float(x)) for i, x in enumerate(gap)])
    ratio = torch.tensor(gap).exp()
    assert found.k3 == pytest.approx(float((ratio - 1 - ratio.log()).mean()))
    assert found.beyond_twofold == 0.25
    assert found.ess == pytest.approx(float(ratio.sum() ** 2 / (ratio**2).sum() / 4))
    assert found.mean == pytest.approx(gap.mean())
    assert math.isnan(GapStatistics.of([]).k3)
