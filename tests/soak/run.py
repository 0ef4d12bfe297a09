"""`make soak`: every trial of the catalogue, two at a time, and the table of them in docs/reliability.md.

`make soak ONLY=rank` runs one trial and renews its row, `make soak ONLY=rank SEED=7` runs one try of it. The exit code
is 1 where anything was lost.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from tests.soak.trial import Trial, attempt

_WORKERS = 2
_HEAD = """# Reliability: what was tried, and what was lost

`make soak` makes this table, in about an hour on two cores; `make test` has about a tenth of it. A try has
*survived* where nothing that was committed is lost or wrong, nothing hangs, no process and no temporary file is left
behind, and the message names the cause. Anything else is *lost*. Tries are numbered from 0 and chance comes from the
number alone: `make soak ONLY=rank SEED=7` runs one again, `make soak ONLY=rank` renews a row. After 90 minutes no try
is begun any more: "17 of 30" are 17 that were made of 30 that were planned.

| `ONLY=` | what is done | survived where | tries | survived | lost | seconds |
| --- | --- | --- | ---: | ---: | ---: | ---: |
"""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """A module with TRIALS (and, where its tries share something that takes long, `prepare()`), the page that reports
    on them, how it opens, and for how long tries are begun."""

    module: str
    page: Path
    head: str
    seconds: float

    @property
    def trials(self) -> Sequence[Trial]:
        return cast(Sequence[Trial], importlib.import_module(self.module).TRIALS)


SOAK = Catalogue(
    "tests.soak.catalogue", Path(__file__).parents[2] / "docs" / "reliability.md", _HEAD, seconds=5400
)


@dataclass(slots=True)
class Tally:
    """What became of one trial. `seconds`: of all its tries, which run beside others."""

    trial: Trial
    tries: int = 0
    seconds: float = 0.0
    lost: dict[int, str] = field(default_factory=dict)  # seed -> what

    def row(self) -> str:
        """A line of the table."""
        trial, planned = self.trial, "" if self.tries >= self.trial.tries else f" of {self.trial.tries}"
        figures = (
            f"{self.tries}{planned} | {self.tries - len(self.lost)} | {len(self.lost)} | {self.seconds:.0f}"
        )
        return f"| {trial.name} | {trial.done} | {trial.survived} | {figures} |"


def _try(catalogue: Catalogue, name: str, seed: int) -> tuple[str, float]:
    """In a worker: what was lost, and the seconds it took."""
    trial = next(one for one in catalogue.trials if one.name == name)
    begun = time.monotonic()
    return attempt(trial, seed), time.monotonic() - begun


def _prepare(catalogue: Catalogue) -> None:
    """In a worker: what all tries need, so that none is charged for it."""
    getattr(importlib.import_module(catalogue.module), "prepare", lambda: None)()


def run(catalogue: Catalogue, work: list[tuple[Trial, int]], seconds: float) -> list[Tally]:
    """Run these tries, and begin none after so many seconds: where they do not suffice all trials have a part."""
    tallies = {trial.name: Tally(trial) for trial, _ in work}
    deadline, running = time.monotonic() + seconds, dict[Future[tuple[str, float]], tuple[Trial, int]]()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_WORKERS, context, initializer=_prepare, initargs=(catalogue,)) as pool:
        waiting = iter(sorted(work, key=lambda one: (one[1] + 0.5) / one[0].tries))
        while True:
            while len(running) < _WORKERS and time.monotonic() < deadline and (one := next(waiting, None)):
                running[pool.submit(_try, catalogue, one[0].name, one[1])] = one
            if not running:
                return list(tallies.values())
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                trial, seed = running.pop(done)
                try:
                    _count(tallies[trial.name], seed, *done.result())
                except BrokenProcessPool as error:  # no more can be tried
                    _count(tallies[trial.name], seed, f"the process that tried it ended: {error}", 0.0)
                    deadline = 0.0


def _count(tally: Tally, seed: int, lost: str, seconds: float) -> None:
    tally.tries += 1
    tally.seconds += seconds
    if lost:
        tally.lost[seed] = lost
        print(f"lost: ONLY={tally.trial.name} SEED={seed}: {lost}", flush=True)
    if tally.tries % max(1, tally.trial.tries // 5) == 0:
        print(f"{tally.trial.name}: {tally.tries} of {tally.trial.tries}, {len(tally.lost)} lost", flush=True)


def table(tallies: list[Tally], head: str = _HEAD) -> str:
    """The page."""
    rows = [tally.row() for tally in tallies]
    lost = [
        f"- `ONLY={one.trial.name} SEED={seed}`: {what}" for one in tallies for seed, what in one.lost.items()
    ]
    page = head + "\n".join(rows) + "\n"
    return page + ("\n## Lost\n\n" + "\n".join(lost) + "\n" if lost else "")


def renewed(page: str, tally: Tally, catalogue: Catalogue) -> str:
    """The page with the row of one trial, and what it has lost, as they are now."""
    own = table([tally], catalogue.head).removeprefix(catalogue.head).splitlines()
    kept = [
        line
        for line in page.splitlines()
        if line.startswith(("| ", "- `ONLY="))
        and not line.startswith((f"| {tally.trial.name} |", f"- `ONLY={tally.trial.name} "))
    ]
    places = {trial.name: i for i, trial in enumerate(catalogue.trials)}
    lines = [line for line in (*kept, *own) if line]
    rows = [line for line in lines if line.startswith("| ") and line.split(" ")[1] in places]
    lost = [line for line in lines if line.startswith("- `ONLY=")]
    rows.sort(key=lambda line: places[line.split(" ")[1]])
    made = catalogue.head + "\n".join(rows) + "\n"
    return made + ("\n## Lost\n\n" + "\n".join(lost) + "\n" if lost else "")


def main(catalogue: Catalogue, description: str | None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", choices=[trial.name for trial in catalogue.trials])
    parser.add_argument("--seed", type=int)
    parser.add_argument("--most", type=int, default=sys.maxsize, help="tries of each trial, at most")
    parser.add_argument("--seconds", type=float, default=catalogue.seconds, help="begin no try after so many")
    given = parser.parse_args()
    work = [
        (trial, seed)
        for trial in catalogue.trials
        if given.only in (None, trial.name)
        for seed in (range(min(trial.tries, given.most)) if given.seed is None else [given.seed])
    ]
    tallies = run(catalogue, work, given.seconds)
    print(page := table(tallies, catalogue.head))
    if given.seed is None and given.most == sys.maxsize:
        if given.only is not None:
            page = renewed(catalogue.page.read_text(encoding="utf-8"), tallies[0], catalogue)
        catalogue.page.write_text(page, encoding="utf-8")
    return any(tally.lost for tally in tallies)


if __name__ == "__main__":
    sys.exit(main(SOAK, __doc__))
