"""Whether greedy tokens are the likeliest by the logits that were recorded of them, and what was taken instead.

To choose a token is an operation of whole numbers behind the last tap: argmax(logits). It is judged where the session
reports that a sequence was decoded greedily with no processor between, of tokens that were not given. What the logits
themselves are is another operation's matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from lockstep.engine.parallel import shards
from lockstep.workbench.diagnosis.recording import Array, Recording
from lockstep.workbench.diagnosis.tokens import chosen, is_greedy
from lockstep.workbench.judgements.cause import NO_CAUSE, UNNAMED, Cause, numbers_in_words
from lockstep.workbench.judgements.golden_event import Divergence
from lockstep.workbench.views.moved import ROUNDING

#: Engines pad the vocabulary to a multiple of this, or to one of their ranks, before it is cut.
_PADDINGS = (64, 1)


@dataclass(frozen=True, slots=True, eq=False)
class _GreedyToken:
    """A greedy choice: the `token`, and the logits [vocabulary] that it was chosen from; `before` are those of the step
    before. `wrong`: another is likelier by more than rounding."""

    step: int
    seq: int
    token: int
    logits: Array = field(repr=False)
    before: Array | None = field(repr=False)
    wrong: bool

    @property
    def likeliest(self) -> int:
        return int(self.logits.argmax())


@dataclass(frozen=True, slots=True)
class _Edit:
    """Another choice: what is taken in place of argmax(logits), as the tokens that it gives for each choice (None: it
    gives none), with `fitted` numbers."""

    name: str
    text: str
    tokens: Sequence[int | None]
    fitted: int = 0


@dataclass(frozen=True, slots=True)
class WrongChoices:
    """Greedy tokens that are not the likeliest: where the first came out, and why as far as that is known."""

    first: Divergence
    cause: Cause


def wrong_choices(recording: Recording) -> WrongChoices | None:
    """None where each greedy token is the likeliest, and where none is known to be greedy."""
    every = list(_choices(recording))
    wrong = [one for one in every if one.wrong]
    if not wrong:
        return None
    first, cause = wrong[0], _cause(every, wrong, recording.ranks)
    reason = (
        f"token {first.token} goes on, {first.likeliest} is the likeliest by the logits that were recorded "
        f"({first.logits[first.likeliest]:.6g} against {_logit(first):.6g}), and the run is greedy"
    )
    ranks = cause.ranks or tuple(range(recording.ranks))
    rank = ranks[0] if len(ranks) < recording.ranks else None
    return WrongChoices(
        Divergence("logits", None, first.step, first.seq, rank, ranks, math.nan, math.nan, math.nan, reason),
        cause,
    )


def _choices(recording: Recording) -> Iterator[_GreedyToken]:
    """All choices of the run that are known to be greedy, and whose logits were recorded."""
    before: dict[int, Array] = {}
    slack = ROUNDING[recording.dtype]
    for step in recording.steps:
        for seq, sequence in sorted(recording.sequences(step).items()):
            if not is_greedy(recording, sequence):
                continue
            logits = recording.whole_or_none("logits", step, seq)
            if logits is None or not np.isfinite(logits).all():
                continue
            token, row = chosen(recording, step, seq, logits), logits.reshape(-1, logits.shape[-1])[-1]
            assert token is not None, "what is greedy has come out"
            inside = 0 <= token < row.size
            wrong = not inside or bool(row.max() - row[token] > slack * np.abs(row).max())
            yield _GreedyToken(step, seq, token, row, before.get(seq), wrong)
            before[seq] = row


def _logit(one: _GreedyToken) -> float:
    return float(one.logits[one.token]) if 0 <= one.token < one.logits.size else math.nan


def _cause(every: Sequence[_GreedyToken], wrong: Sequence[_GreedyToken], ranks: int) -> Cause:
    """What gives all tokens that came out, or at least the wrong ones; unnamed where nothing does."""
    steps, seqs = ({*(one.step for one in wrong)}, {*(one.seq for one in wrong)})
    where = [f"the sampler, steps {numbers_in_words(sorted(steps))}"]
    if len(seqs) < len({one.seq for one in every}):
        where.append(f"sequence{'s' * (len(seqs) > 1)} {numbers_in_words(sorted(seqs))}")
    blank = Cause(
        name="unnamed", kind=UNNAMED, tap="logits", place=", ".join(where), ranks=tuple(range(ranks)),
        steps=tuple(sorted(steps)),
        text=f"the token that goes on is not the likeliest by the logits that were recorded, and {NO_CAUSE}",
        evidence=(
            f"{len(wrong)} of {len(every)} greedy choices are another token than the likeliest: at step "
            f"{wrong[0].step} token {wrong[0].token} instead of {wrong[0].likeliest}",
        ),
    )  # fmt: skip
    numbers = [at for at, one in enumerate(every) if one.wrong]
    fits = [
        one for one in _edits(every, wrong, ranks) if all(one.tokens[at] == every[at].token for at in numbers)
    ]
    if not fits:
        return blank
    best = min(fits, key=lambda one: (one.fitted, _missed(one, every)))
    bits = len(wrong) * math.log2(max(2, wrong[0].logits.size))
    reported = "" if not _missed(best, every) else "; the other choices are right"
    return replace(
        blank, name=best.name, kind="sampling", text=best.text + reported, residual=0.0,
        confidence=0.99 * (1 - 1 / (1 + bits / (8.0 * (1 + best.fitted)))),
    )  # fmt: skip


def _missed(edit: _Edit, every: Sequence[_GreedyToken]) -> int:
    """How many choices an edit does not give."""
    return sum(token != one.token for token, one in zip(edit.tokens, every, strict=True))


def _edits(every: Sequence[_GreedyToken], wrong: Sequence[_GreedyToken], ranks: int) -> Iterator[_Edit]:
    """Other choices from the same logits, or from others."""
    yield from _of_shards(every, ranks)
    yield _Edit("argmin", "the least likely token is taken", [int(one.logits.argmin()) for one in every])
    order = [np.argsort(-one.logits, kind="stable") for one in every]
    yield _Edit(
        "second_likeliest",
        "the second likeliest token is taken",
        [int(one[1]) for one in order if len(one) > 1],
    )
    for by in (1, -1):
        yield _Edit(
            "token_shifted", f"the token {'after' if by > 0 else 'before'} the likeliest is taken: its id {by:+d}",
            [one.likeliest + by for one in every],
        )  # fmt: skip
    yield _Edit(
        "stale_logits", "the likeliest token by the logits of the step before is taken",
        [None if one.before is None else int(one.before.argmax()) for one in every],
    )  # fmt: skip
    yield from _of_the_first(every, wrong)


def _of_shards(every: Sequence[_GreedyToken], ranks: int) -> Iterator[_Edit]:
    """Only the part of the vocabulary that one rank has, its tokens counted from 0 or from the first of the part."""
    size = every[0].logits.size
    for padding in _PADDINGS if ranks > 1 else ():
        padded = -(-size // padding) * padding
        for rank in range(ranks):
            part = shards.vocab(padded, ranks, rank)
            stop = min(part.stop, size)
            if part.start >= stop:
                continue
            best = [int(one.logits[part.start : stop].argmax()) for one in every]
            ids = f"ids {part.start}–{stop - 1}"
            reported = f"the token is the argmax of rank {rank}'s shard of the vocabulary alone ({ids})"
            yield _Edit("argmax_of_a_shard", reported, [part.start + one for one in best])
            if part.start:
                yield _Edit("argmax_of_a_shard", f"{reported}, counted from 0", [*best])


def _of_the_first(every: Sequence[_GreedyToken], wrong: Sequence[_GreedyToken]) -> Iterator[_Edit]:
    """Only the first ids, as many as all choices allow: more than each token that came out, fewer than any likelier."""
    least, most = 0, every[0].logits.size
    for one in every:
        least = max(least, one.token + 1)
        likelier = np.flatnonzero(one.logits > _logit(one))
        most = min(most, int(likelier[0]) if len(likelier) else most)
    if least <= most < every[0].logits.size:
        among = str(least) if least == most else f"{least} to {most}"
        yield _Edit(
            "first_ids_alone", f"the token is the argmax of the first ids alone: of {among}",
            [one.token for one in every], fitted=1,
        )  # fmt: skip
