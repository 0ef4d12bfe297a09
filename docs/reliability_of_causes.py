"""Draws how often causes are right against the confidence that they were told with.

    python docs/reliability_of_causes.py [--rows ROWS.jsonl] [--folder DIRECTORY] [--limit N]

The answers are those on the open half of the bugs in `tests/workbench/diagnosis/bugs`. ROWS keeps one line an answer:
a call with the same file goes on where the last one ended, so that fits of the calibration cost no new recordings.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import msgspec

from tests.workbench.diagnosis.bugs.all_bugs import bugs
from tests.workbench.diagnosis.bugs.recording import Recordings
from tests.workbench.diagnosis.bugs.scoring import diagnose_recorded, score

#: Where the drawing is shipped.
PLOT = Path(__file__).with_name("reliability_of_causes.svg")
#: Answers are drawn together between these confidences.
EDGES = (0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 1.0)


class ScoredAnswer(msgspec.Struct, frozen=True):
    """The first cause of one bug: what it was called, how sure it was, whether it was right."""

    bug: str
    name: str
    confidence: float
    right: bool


@dataclass(frozen=True, slots=True)
class Bin:
    """Answers of about the same confidence: how many, what they said on average, how many were right."""

    count: int
    said: float
    right: float


def answers(folder: Path, known: set[str]) -> Iterator[ScoredAnswer]:
    """The open half, as far as a cause is named."""
    recordings = Recordings(folder)
    for name, bug in sorted(bugs().items()):
        if bug.part != "open" or name in known:
            continue
        answer = diagnose_recorded(recordings.of(bug))
        first = next((cause for cause in answer.causes if cause.confidence is not None), None)
        if first is not None and first.confidence is not None:
            yield ScoredAnswer(name, first.name, first.confidence, score(bug, answer).outcome == "named")


def bins(scored: Sequence[ScoredAnswer]) -> list[Bin]:
    """The answers by confidence."""
    found = []
    for low, high in pairwise(EDGES):
        inside = [one for one in scored if low <= one.confidence < high or one.confidence == high == 1]
        if inside:
            said = sum(one.confidence for one in inside) / len(inside)
            found.append(Bin(len(inside), said, sum(one.right for one in inside) / len(inside)))
    return found


def svg(found: Sequence[Bin]) -> str:
    """The bins as circles (area: how many answers) about the diagonal on which they should lie."""
    size, edge = 360, 48
    span = size - 2 * edge

    def at(x: float, y: float) -> tuple[float, float]:
        return edge + x * span, size - edge - y * span

    (left, bottom), (right, top) = at(0, 0), at(1, 1)
    marks = "".join(
        f'<circle cx="{at(one.said, 0)[0]:.1f}" cy="{at(0, one.right)[1]:.1f}" r="{3 + one.count**0.5:.1f}" '
        f'fill="#2b6cb0" fill-opacity="0.7"><title>{one.count} answers: said {one.said:.2f}, right {one.right:.2f}'
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
        f'<text x="{size / 2}" y="{size - 10}" text-anchor="middle">confidence that was told</text>'
        f'<text x="14" y="{size / 2}" text-anchor="middle" transform="rotate(-90 14 {size / 2})">share that was right'
        "</text></svg>\n"
    )


def main() -> None:
    """Parse the options, answer what is not answered yet, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=Path, default=Path("reliability.jsonl"), help="what is known, and grows"
    )
    parser.add_argument("--folder", type=Path, help="where models and sessions are kept between calls")
    parser.add_argument("--limit", type=int, help="so many new answers at most")
    options = parser.parse_args()
    lines = options.rows.read_bytes().splitlines() if options.rows.exists() else []
    scored = [msgspec.json.decode(line, type=ScoredAnswer) for line in lines]
    with tempfile.TemporaryDirectory(prefix="reliability-") as scratch, options.rows.open("ab") as rows:
        new = answers(options.folder or Path(scratch), {one.bug for one in scored})
        for one in islice(new, options.limit):
            scored.append(one)
            rows.write(msgspec.json.encode(one) + b"\n")
            rows.flush()
    found = bins(scored)
    PLOT.write_text(svg(found), encoding="utf-8")
    for one in found:
        print(f"{one.count:4} answers: said {one.said:.2f}, right {one.right:.2f}")


if __name__ == "__main__":
    main()
