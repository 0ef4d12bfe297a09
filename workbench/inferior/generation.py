"""Run an inferior until its sequences have ended: what `generate` and the demo share (torch-free)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lockstep.engine.run.sampling import Sampling
from lockstep.sessions.records import SequenceStep, StepRecord
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.views.sentinels import not_finite

FinishReason = Literal["eos", "length", "nan"]

#: The likeliest tokens with their logits, best first.
Top = tuple[tuple[int, float], ...]

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class NonFiniteTap:
    """The first tap of a step, in execution order, whose tensor holds NaN or an infinity that no mask explains."""

    tap: str
    step: int


@dataclass(slots=True)
class Generated:
    """One sequence: `ids` are the new tokens, an end-of-sequence token included. It ends with "nan" where its logits
    hold NaN: no token is chosen from those, and `first_bad_tap` shows where the step went wrong."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    top: list[Top] = field(default_factory=list)  # of each new token
    finish_reason: FinishReason | None = None
    first_bad_tap: NonFiniteTap | None = None


@dataclass(slots=True)
class Speed:
    """What decoding achieved: tokens and forward passes after the prefill, and seconds of both parts."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    decode_tokens: int = 0
    bytes_per_step: int = 0  # weights that all ranks together read in one pass

    @property
    def tokens_per_second(self) -> float:
        """Of decoding; 0 where nothing was decoded."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes of weights read a second, which bounds decoding (the batch reads them once a step)."""
        return self.bytes_per_step * self.decode_steps / self.decode_seconds if self.decode_seconds else 0.0


def add_prompts(
    inferior: Inferior, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> dict[int, Generated]:
    """Add one sequence a prompt; returns them by sequence number."""
    return {inferior.add(list(prompt), sampling): Generated(list(prompt)) for prompt in prompts}


def run_to_end(
    inferior: Inferior,
    sequences: dict[int, Generated],
    max_tokens: int,
    on_token: Callable[[int, int | None, FinishReason | None], None] = lambda seq, token, finished: None,
) -> Speed:
    """Decode until every sequence has met an end-of-sequence token, `max_tokens`, the end of the context or NaN.

    `on_token(seq, token, finished)` is called as each token comes, without one at NaN. A sequence that has ended leaves
    the batch. RankError where a cache does not hold what was run.
    """
    context = inferior.loaded[0].context
    speed = Speed(bytes_per_step=_bytes_per_step(inferior))
    running = dict(sequences)
    while running:
        started = time.perf_counter()
        record = inferior.step()
        inferior.check_aligned()
        _count(speed, record, time.perf_counter() - started)
        bad = _first_bad_tap(inferior, record) if any(map(_has_nan, record.sequences)) else None
        for reported in record.sequences:
            token = None if _has_nan(reported) else reported.emitted
            if reported.emitted is None:  # inside a chunked prefill
                continue
            sequence = running[reported.seq]
            if token is None:
                sequence.finish_reason, sequence.first_bad_tap = "nan", bad
            else:
                sequence.ids.append(token)
                sequence.top.append(tuple(zip(reported.topk_ids, reported.topk_logits, strict=True)))
                if token in inferior.model.eos_ids:
                    sequence.finish_reason = "eos"
                elif len(sequence.ids) >= min(max_tokens, max(1, context - len(sequence.prompt_ids))):
                    sequence.finish_reason = "length"
            on_token(reported.seq, token, sequence.finish_reason)
            if sequence.finish_reason is not None:
                del running[reported.seq]
                inferior.remove(reported.seq)
    return speed


def _has_nan(recorded: SequenceStep) -> bool:
    """Whether the logits that a token was chosen from hold NaN: so does their normaliser then."""
    return recorded.emitted is not None and recorded.logsumexp is not None and math.isnan(recorded.logsumexp)


def _first_bad_tap(inferior: Inferior, record: StepRecord) -> NonFiniteTap | None:
    """From the statistics of the pass that is just over; without any it is run again for them."""
    stats = record.stats if record.stats is not None else inferior.measure_again(record).stats
    assert stats is not None, "statistics were asked for"
    bad = not_finite(stats).any(axis=1)
    return NonFiniteTap(inferior.specs[int(bad.argmax())].name, record.step) if bad.any() else None


def _count(speed: Speed, record: StepRecord, seconds: float) -> None:
    if record.phase == "prefill":
        speed.prefill_seconds += seconds
        return
    speed.decode_seconds += seconds
    speed.decode_steps += 1
    speed.decode_tokens += len(record.sequences)


def _bytes_per_step(inferior: Inferior) -> int:
    """Weights read in one pass over all ranks: all, but of an embedding of its own only a few rows."""
    model = inferior.model
    total = sum(report.weight_bytes for report in inferior.loaded)
    if model.tie_embeddings:
        return total
    return total - model.vocab_size * model.hidden_size * _BYTES[inferior.config.dtype]
