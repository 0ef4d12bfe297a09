"""Draws how often causes are right against the confidence that they were reported with.

    python -m benchmarks.diagnosis --only open,controls,… --rows ROWS.jsonl
    python docs/reliability_of_causes.py ROWS.jsonl…

Of each answer of the measurement the first cause counts: on a bug it is right or not, on what is harmless it is wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.diagnosis.figures import Row, read

#: Where the drawing is shipped.
PLOT = Path(__file__).with_name("reliability_of_causes.svg")
#: Answers are drawn together between these confidences.
EDGES = (0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 1.0)


@dataclass(frozen=True, slots=True)
class Bin:
    """Answers of about the same confidence: how many, what they stated on average, how many were right."""

    count: int
    stated: float
    right: float


def bins(rows: Sequence[Row]) -> list[Bin]:
    """The answers by confidence."""
    scored = [(row.confidence, row.outcome == "named") for row in rows if row.confidence is not None]
    found = []
    for low, high in pairwise(EDGES):
        inside = [(stated, right) for stated, right in scored if low <= stated < high or stated == high == 1]
        if inside:
            stated, right = (sum(values) / len(inside) for values in zip(*inside, strict=True))
            found.append(Bin(len(inside), stated, right))
    return found


def svg(found: Sequence[Bin]) -> str:
    """The bins as circles (area: how many answers) about the diagonal on which they should lie."""
    size, edge = 360, 48
    span = size - 2 * edge

    def at(x: float, y: float) -> tuple[float, float]:
        return edge + x * span, size - edge - y * span

    (left, bottom), (right, top) = at(0, 0), at(1, 1)
    marks = "".join(
        f'<circle cx="{at(one.stated, 0)[0]:.1f}" cy="{at(0, one.right)[1]:.1f}" r="{3 + one.count**0.5:.1f}" '
        f'fill="#2b6cb0" fill-opacity="0.7"><title>{one.count} answers: said {one.stated:.2f}, right {one.right:.2f}'
        "</title></circle>"
        for one in found
    )
    ticks = "".join(
        f'<text x="{at(v, 0)[0]:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{v:g}</text>'
        f'<text x="{left - 8:.1f}" y="{at(0, v)[1] + 4:.1f}" text-anchor="end">{v:g}</text>'
        for v in (0, 0.25, 0.5, 0.75, 1)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" font-family="sans-serif" font-size="11">'
        f'<rect width="{size}" height="{size}" fill="#fff"/>'
        f'<rect x="{left}" y="{top}" width="{span}" height="{span}" fill="none" stroke="#888"/>'
        f'<line x1="{left}" y1="{bottom}" x2="{right}" y2="{top}" stroke="#888" stroke-dasharray="4 4"/>'
        f"{ticks}{marks}"
        f'<text x="{size / 2}" y="{size - 10}" text-anchor="middle">confidence that was reported</text>'
        f'<text x="14" y="{size / 2}" text-anchor="middle" transform="rotate(-90 14 {size / 2})">share that was right'
        "</text></svg>\n"
    )


def main() -> None:
    """Draw what the rows show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="+", help="what benchmarks.diagnosis has written")
    rows = [row for path in parser.parse_args().rows for row in read(path).values()]
    found = bins(rows)
    PLOT.write_text(svg(found), encoding="utf-8")
    for one in found:
        print(f"{one.count:4} answers: stated {one.stated:.2f}, right {one.right:.2f}")


if __name__ == "__main__":
    main()
