"""How often the diagnosis finds, places and names what is wrong, and how often it accuses what is right.

    python -m benchmarks.diagnosis [--only open,controls] [--limit 20] [--rows ROWS.jsonl] [--json] [--markdown FILE]

    catalogue   every fault of the catalogue wherever it can act: models, ranks, dtypes
    pairs       two faults at once, all pairs of a dozen classes
    open        bugs put into transformers' own modules (tests/workbench/diagnosis/bugs), recorded as sessions
    held_out    the other half of them, not to be looked at while variants are written
    controls    harmless changes of the same kind: no cause may be named
    unseen      bugs by somebody who had not seen the diagnosis, written when it was done; to be measured once
    unseen_2, … later sets, each by somebody who had not seen the diagnosis either
    …_controls  harmless changes by the same hand: unseen_controls, unseen_3_controls, …
    fused_…     any of these sets, without what engines like vLLM have inside of their attention kernel: scores,
                probabilities and the cache
    mutations   every seam of the engine with any operand or the result changed: a cause, at the right tap
    prompts     random prompts on correct engines

The causes of what was recorded are put into the reference as well: `reproduced` is the share of the first causes that
give the run's tensors and tokens there.

Every answer is a line of ROWS as soon as it is there; a call with the same file goes on where the last one ended.
`--limit` bounds the new cases of each part, `--seconds` the time of all.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from benchmarks.diagnosis import live, mutations, recorded
from benchmarks.diagnosis.figures import Row, append, lines, markdown, read

PARTS = ("catalogue", "pairs", *recorded.PARTS, mutations.PART, "prompts")


def cases(part: str, root: Path, engines: live.Engines) -> Iterator[live.Case]:
    match part:
        case "catalogue":
            return live.catalogue(engines)
        case "pairs":
            return live.pairs(engines)
        case "prompts":
            return live.prompts(engines)
        case mutations.PART:
            return mutations.cases(root)
    return recorded.cases(part, root)


def main() -> None:
    """Parse the options and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="catalogue,pairs,open,controls,prompts", help="parts, with commas")
    parser.add_argument("--match", default="", help="only cases whose name holds this")
    parser.add_argument("--limit", type=int, help="new cases of each part")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no new case after so many")
    parser.add_argument("--rows", type=Path, default=Path("diagnosis.jsonl"), help="what is known, and grows")
    parser.add_argument("--folder", type=Path, help="where models and sessions are kept between calls")
    parser.add_argument("--json", action="store_true", help="the rows to stdout")
    parser.add_argument("--markdown", type=Path, help="the table to this file")
    options = parser.parse_args()
    # With the last, what fails within the search counts as missed.
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "LOCKSTEP_DEBUG": "1"}
    with tempfile.TemporaryDirectory(prefix="diagnosis-") as scratch:
        known = _measure(options, options.folder or Path(scratch))
    rows = [row for row in known.values() if row.part in options.only.split(",")]
    if options.markdown:
        options.markdown.write_text(markdown(rows), encoding="utf-8")
    if options.json:
        sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")
    else:
        for line in lines(rows):
            print("  ".join(f"{cell:>10}" for cell in line))


def _measure(options: argparse.Namespace, root: Path) -> dict[str, Row]:
    known, until = read(options.rows), time.monotonic() + options.seconds
    root.mkdir(parents=True, exist_ok=True)
    engines = live.Engines(root)
    try:
        for part in options.only.split(","):
            if part not in PARTS:
                sys.exit(f"there is no part {part!r}: use {', '.join(PARTS)}")
            new = ((key, run) for key, run in cases(part, root, engines) if f"{part}: {key}" not in known)
            for key, run in islice((one for one in new if options.match in one[0]), options.limit):
                if time.monotonic() > until:
                    return known
                row = msgspec.structs.replace(_row(part, run), key=f"{part}: {key}")
                known[row.key] = row
                append(options.rows, row)
                print(f"{row.outcome:10} {row.key}: {row.why} {row.said}"[:200], file=sys.stderr, flush=True)
    finally:
        engines.close()
    return known


def _row(part: str, run: Callable[[], Row]) -> Row:
    """A diagnosis that ends in an exception has missed what is wrong, and the others are still measured."""
    try:
        return run()
    except Exception as error:
        traceback.print_exc()
        return Row("", part, "", "missed", why=f"ended in {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
