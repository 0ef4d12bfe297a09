"""Greedy tokens against the logits that were recorded of them: what was taken in place of the likeliest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lockstep.sessions import SequenceStep, Session, SessionWriter, StepRecord, Tap, TensorRecord
from lockstep.sessions.meta import ConfigMeta, SamplingMeta, SequenceMeta, SessionMeta
from lockstep.workbench.diagnosis.greedy_choice import WrongChoices, wrong_choices
from lockstep.workbench.diagnosis.recording import Recording

STEPS, RANKS, SIZE = 8, 2, 132  # which is padded to 192, and so cut at 96

GREEDY = SamplingMeta()

#: Of the logits up to now, the newest last: the token that goes on.
Choose = Callable[[list[np.ndarray]], int]


def found(
    path: Path, choose: Choose, sampling: SamplingMeta | None = GREEDY, *, forced: bool = False
) -> WrongChoices | None:
    """What is said of a run of one sequence whose tokens are chosen so."""
    generator = np.random.default_rng(5)
    meta = SessionMeta(config=ConfigMeta(dtype="float32"), sequences={0: SequenceMeta(sampling=sampling)})
    logits: list[np.ndarray] = []
    with SessionWriter.create(path, taps=[Tap(0, "logits", "replicate")], ranks=RANKS, meta=meta) as writer:
        for step in range(STEPS):
            logits.append(generator.normal(size=SIZE).astype(np.float32))
            read = SequenceStep(0, [1], [step], [], emitted=choose(logits), forced=forced)
            tensors = [TensorRecord("logits", rank, 0, logits[-1][None], "float32") for rank in range(RANKS)]
            writer.step(0, StepRecord(step, "decode", [read], 0.0, tensors=tensors))
    with Session.open(path) as session:
        return wrong_choices(Recording(session))


def second(logits: list[np.ndarray]) -> int:
    return int(np.argsort(-logits[-1])[1])


WRONG: dict[str, tuple[Choose, str, str]] = {
    "rank 0's shard": (
        lambda x: int(x[-1][:96].argmax()), "argmax_of_a_shard", "rank 0's shard of the vocabulary alone (ids 0–95)"
    ),
    "rank 1's shard, from 0": (
        lambda x: int(x[-1][96:].argmax()), "argmax_of_a_shard", "(ids 96–131), counted from 0"
    ),
    "the least likely": (lambda x: int(x[-1].argmin()), "argmin", "the least likely token"),
    "the second": (second, "second_likeliest", "the second likeliest token"),
    "the next id": (lambda x: int(x[-1].argmax()) + 1, "token_shifted", "the token after the likeliest"),
    "those of the step before": (
        lambda x: int(x[-2 if len(x) > 1 else -1].argmax()), "stale_logits", "the step before"
    ),
    "the first 50 ids": (lambda x: int(x[-1][:50].argmax()), "first_ids_alone", "of the first ids alone"),
    "no rule": (lambda x: (37 * len(x)) % SIZE, "unnamed", "no known cause fits"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_taken_in_place_of_the_likeliest_is_named(wrong: str, tmp_path: Path) -> None:
    choose, name, words = WRONG[wrong]
    stated = found(tmp_path / "run.session", choose)
    assert stated is not None
    assert (stated.cause.name, stated.first.tap) == (name, "logits")
    assert words in stated.cause.text


def within_rounding(logits: list[np.ndarray]) -> int:
    """The second, which is made as likely as the first but for less than float32 tells apart behind a product."""
    logits[-1][second(logits)] = logits[-1].max() * np.float32(1 - 1e-6)
    return second(logits)


@pytest.mark.parametrize(
    ("choose", "sampling", "forced"),
    [
        (lambda x: int(x[-1].argmax()), SamplingMeta(), False),
        (within_rounding, SamplingMeta(), False),
        (second, SamplingMeta(temperature=1.0), False),
        (second, None, False),
        (second, SamplingMeta(), True),
    ],
    ids=["the likeliest", "within rounding", "sampled", "not known", "given"],
)
def test_nothing_is_reported_of(
    choose: Choose, sampling: SamplingMeta | None, forced: bool, tmp_path: Path
) -> None:
    assert found(tmp_path / "run.session", choose, sampling, forced=forced) is None
