"""Level 1: both read the same tokens at the same positions. Special tokens, templates and re-tokenised text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from lockstep.workbench.diagnosis.mismatch.level import Level
from lockstep.workbench.diagnosis.row_sides import RowSide
from lockstep.workbench.views.token_texts import TokenTexts
from lockstep.workbench.words.plain_text import plural

#: Tokens by which two sequences may be displaced and still are the same one.
_DISPLACED = 16
#: Tokens of a sequence by which its counterpart is found.
_MATCHED = 2048


@dataclass(frozen=True, slots=True)
class Line:
    """The tokens of one sequence, from position `start` on, of which the last may have been chosen and not read; the
    first `prompt` of them are the prompt (0: not known)."""

    seq: int
    ids: tuple[int, ...]
    start: int
    prompt: int = 0

    def common(self, other: Line) -> int:
        """How many tokens are the same from the first on."""
        pairs = enumerate(zip(self.ids, other.ids, strict=False))
        return next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(self.ids), len(other.ids)))

    def agrees(self, other: Line) -> bool:
        """Whether one is the other, or its beginning, at the same positions."""
        return self.start == other.start and self.common(other) == min(len(self.ids), len(other.ids))


@dataclass(frozen=True, slots=True)
class Pair:
    """A sequence of the rollout and the trainer's."""

    rollout: Line
    trainer: Line

    @property
    def prompt(self) -> int:
        """Tokens of the prompt, as the rollout knows it: a trainer reads prompt and response alike."""
        return self.rollout.prompt or self.trainer.prompt


def lines(side: RowSide) -> list[Line]:
    """Every sequence with what it read and, last, the token that it chose."""
    found = []
    for seq, rows in sorted(side.sequences.items()):
        positions = sorted(rows)
        ids = [rows[position].token for position in positions]
        last = side.ended_by(seq, positions[-1])
        chosen = None if last is None else last.emitted
        known = side.session.meta.sequences.get(seq)
        prompt = len(known.prompt_ids) if known is not None else 0
        found.append(Line(seq, (*ids, *([] if chosen is None else [chosen])), positions[0], prompt))
    return found


def paired_lines(rollout: Sequence[Line], trainer: Sequence[Line]) -> list[Pair]:
    """Each of the rollout's with the one of the trainer's that is most like it, of equals the one of its number."""
    left, found = list(trainer), []
    for mine in rollout:
        best = max(left, key=lambda other: (_likeness(mine, other), other.seq == mine.seq), default=None)
        if best is not None and _likeness(mine, best) > 0:
            found.append(Pair(mine, best))
            left.remove(best)
    return found


def _likeness(a: Line, b: Line) -> float:
    """The share of the shorter one's tokens that the other has in the same order."""
    shorter = min(len(a.ids), len(b.ids))
    if a.common(b) == shorter:
        return 1.0
    left, right = a.ids[:_MATCHED], b.ids[:_MATCHED]
    blocks = SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / min(len(left), len(right))


def compare_tokens(
    rollout: Sequence[Line], trainer: Sequence[Line], texts: TokenTexts
) -> tuple[Level, list[Pair]]:
    """The level, and the pairs of sequences."""
    pairs = paired_lines(rollout, trainer)
    if not pairs:
        return Level("tokens", "differs", "no sequence of the two has a token in common"), []
    details = [
        f"sequence {pair.rollout.seq}: {_difference(pair, texts)}"
        for pair in pairs
        if not pair.rollout.agrees(pair.trainer)
    ]
    for name, lines_, used in (
        ("rollout", rollout, {pair.rollout.seq for pair in pairs}),
        ("trainer", trainer, {pair.trainer.seq for pair in pairs}),
    ):
        missing = [line.seq for line in lines_ if line.seq not in used]
        if missing:
            details.append(f"only the {name} has sequence {', '.join(map(str, missing))}")
    if details:
        return Level("tokens", "differs", details[0], tuple(details[1:])), pairs
    count = sum(min(len(pair.rollout.ids), len(pair.trainer.ids)) for pair in pairs)
    text = f"{plural(count, 'token')} of {plural(len(pairs), 'sequence')} are the same, at the same positions"
    return Level("tokens", "equal", text), pairs


def _difference(pair: Pair, texts: TokenTexts) -> str:
    a, b = pair.rollout, pair.trainer
    if a.common(b) == min(len(a.ids), len(b.ids)):
        return f"the same tokens at other positions: the rollout's begin at {a.start}, the trainer's at {b.start}"
    for name, other, longer, shorter in (("trainer", "rollout", b, a), ("rollout", "trainer", a, b)):
        if extra := _in_front(longer, shorter):
            return f"the {name} reads {_named(longer.ids[:extra], texts)} in front of what the {other} reads"
    at = a.common(b)
    where = f"from token {at} on"
    if pair.prompt:
        where += ", inside the prompt" if at < pair.prompt else ", in the response"
    if _same_text(a, b, texts):
        return f"the same text is cut into other tokens {where}: {_around(a, b, at, texts)}"
    return f"other tokens {where}: {_around(a, b, at, texts)}"


def _in_front(longer: Line, shorter: Line) -> int:
    """How many tokens the one has before those of the other; 0 where that is not all."""
    for extra in range(1, min(_DISPLACED, len(longer.ids))):
        rest = longer.ids[extra:]
        count = min(len(rest), len(shorter.ids))
        if count > 1 and rest[:count] == shorter.ids[:count]:
            return extra
    return 0


def _same_text(a: Line, b: Line, texts: TokenTexts) -> bool:
    """As far as both go on."""
    left, right = ("".join(texts.text(token) or "\0" for token in line.ids) for line in (a, b))
    shorter = min(len(left), len(right))
    return "\0" not in left + right and left[:shorter] == right[:shorter]


def _around(a: Line, b: Line, at: int, texts: TokenTexts) -> str:
    sides = []
    for name, line in (("rollout", a), ("trainer", b)):
        there = line.ids[at : at + 3]
        sides.append(f"the {name} reads {_named(there, texts) if there else 'nothing more'}")
    return ", ".join(sides)


def _named(ids: Sequence[int], texts: TokenTexts) -> str:
    shown = " ".join(f"{texts.label(token)} ({token})" for token in ids[:4])
    return shown + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
