"""Tokens of several branches under each other, broken into lines that fit a page."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len

from lockstep.workbench.views.sequence_tokens import SequenceTokens

#: Characters that fit beside each other, the branches' names left of them.
_WIDTH = 128


@dataclass(frozen=True, slots=True)
class Column:
    """One step: `index` into each line's choices; or a `gap` of so many steps left out."""

    step: int
    index: int
    gap: int = 0


def blocks_of(tokens: SequenceTokens) -> list[list[Column]]:
    """The columns of each line."""
    room = _WIDTH - min(22, max((cell_len(line.name) for line in tokens.lines), default=0))
    gaps = dict(tokens.gaps)
    blocks: list[list[Column]] = [[]]
    used = 0
    for index, step in enumerate(tokens.steps):
        choices = (line.choices[index] for line in tokens.lines)
        width = max([len(str(step)), *(cell_len(c.label) for c in choices if c is not None)]) + 2
        if used + width > room and blocks[-1]:
            blocks.append([])
            used = 0
        blocks[-1].append(Column(step, index))
        used += width
        if step in gaps:
            blocks[-1].append(Column(step, index, gaps[step]))
            used += 14
    return [block for block in blocks if block]
