"""`make real-bugs`: puts fixed bugs back into the engines that had them, looks for each with one command, and writes
the table of docs/real-bugs.md. `ONLY=name` runs one row, or one control, `HALF=open`, `HALF=held-out`, `HALF=fresh`,
`HALF=second` or `HALF=third` a part of the rows.

Each row is `lockstep attach -o … --model CHECKPOINT -- python PROGRAM CHECKPOINT RANKS` with no option more, once with
the bug and once without.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lockstep
from lockstep.engine import children
from tests import vllm_cpu
from tests.preloaded import Forking, Server
from tests.real_bugs import page
from tests.real_bugs.bugs import HERE, Bug, Control, bugs, clean_key, controls, half_of
from tests.real_bugs.gguf_bugs import converted
from tests.real_bugs.models import checkpoint
from tests.real_bugs.programs.workload import BATCHES
from tests.real_bugs.results import Found, Results

ROOT = HERE.parents[1]
NANO = Path(os.environ.get("LOCKSTEP_NANO") or ROOT / ".nano").absolute()


def command(row: Bug | Control, model: Path, bug: str, scratch: Path) -> tuple[list[str], dict[str, str]]:
    """The program of a row, and its environment."""
    options = dict(row.options)
    programs, python = HERE / "programs", sys.executable
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    subject = str(model)
    if row.engine == "vllm":
        environment |= vllm_cpu.environment(row.ranks, HERE / "plugin")
        options |= {"dtype": row.dtype}
        python, program = str(vllm_cpu.VLLM), ["run_vllm.py"]
    elif row.engine == "nano-vllm":
        environment |= {"PYTHONPATH": str(NANO)}
        program = ["run_nano.py"]
    else:
        options |= {"dtype": row.dtype}
        program = ["run_transformers.py"]
        if options.pop("gguf", False):
            subject = str(converted(model, scratch / "model.gguf", ""))
    environment |= {"REAL_BUG": bug, "REAL_BUG_OPTIONS": json.dumps(options)}
    words = [str(programs / program[0]), subject, str(row.ranks)]
    if row.ranks > 1 and row.engine != "vllm":
        words = ["-m", "torch.distributed.run", "--nproc-per-node", str(row.ranks), *words]
    return [python, *words], environment


def attached(row: Bug | Control, bug: str, model: Path, folder: Path) -> lockstep.Verdict:
    """`lockstep attach -o SESSION --model MODEL -- CMD`."""
    words, environment = command(row, model, bug, folder)
    with surroundings(environment):
        verdict = lockstep.attach(words, model=model, output=folder / "run.session").verdict
    assert verdict is not None, "a model was given"
    return verdict


def read_from_a_file(bug: str, model: Path, folder: Path) -> lockstep.Verdict:
    """`lockstep check FILE.gguf --ids … --save SESSION`, right by the file; then `lockstep check SESSION --model M`,
    by the checkpoint that it was made of."""
    file = converted(model, folder / "model.gguf", bug)
    ids = [prompt for batch in BATCHES for prompt, _ in batch]
    assert lockstep.check(file, ids=ids, steps=6, save=folder / "run.session"), (
        "the engine reads what the file says"
    )
    return lockstep.check(folder / "run.session", model=model)


def looked_for(row: Bug | Control, bug: str, models: Path) -> Found:
    """One command, and what came of it."""
    model = checkpoint(models, row.model, row.dtype)
    with tempfile.TemporaryDirectory(prefix="real-bugs-") as name:
        folder, start = Path(name), time.monotonic()
        try:
            if row.engine == "gguf":
                verdict = read_from_a_file(bug, model, folder)
            else:
                verdict = attached(row, bug, model, folder)
        except Exception as error:  # is a row of the table too: nothing was found
            seconds = time.monotonic() - start
            reported = f"{type(error).__name__}: {error}".replace(f"{folder}/", "")
            return Found(verdict="error", seconds=seconds, error=reported)
    event, seconds = verdict.event, time.monotonic() - start
    causes = [one for one in event.causes if not one.alternative]
    first, rests = event.first_divergence, event.coverage
    return Found(
        verdict=event.verdict,
        tap=first.tap if first else "",
        places=[one.place for one in causes],
        causes=[one.text for one in causes],
        others=[one.text for one in event.causes if one.alternative],
        notes=[*event.notes],
        seconds=round(seconds, 1),
        rests=""
        if rests is None
        else f"{rests.taps}/{rests.of_taps} taps, {rests.aligned}/{rests.rows} rows",
    )


@contextmanager
def surroundings(values: dict[str, str]) -> Iterator[None]:
    """The environment of a command, which it has from this process."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def tried(row: Bug | Control, models: Path, again: bool) -> None:
    """Run a row, and what it lacks of the clean run beside it, and note both."""
    key, results = clean_key(row), Results.load()
    alone = isinstance(row, Bug) and row.released
    if (not alone and key not in results.clean) or (again and isinstance(row, Control)):
        change = row.change if isinstance(row, Control) else ""
        results = Results.noted(clean={key: looked_for(row, change, models)})
    if isinstance(row, Bug) and (again or row.name not in results.rows):
        results = Results.noted(rows={row.name: looked_for(row, row.name, models)})
    found = results.rows[row.name] if isinstance(row, Bug) else results.clean[key]
    clean = "no such run" if alone else results.clean[key].verdict
    print(f"{row.name}: {found.verdict} {found.tap} [without: {clean}] {found.seconds:.0f} s", flush=True)
    for place, cause in zip(found.places, found.causes, strict=True):
        print(f"    {place}: {cause}", flush=True)
    if found.error:
        print(f"    {found.error}", flush=True)


def chosen(only: list[str], half: str) -> list[Any]:
    """The rows to run: those named, else a half or all of them with the controls."""
    every: dict[str, Any] = {**bugs(), **controls()}
    if only:
        return [every[name] for name in only]
    if half:
        return [one for one in bugs().values() if half_of(one) == half]
    return list(every.values())


def main() -> None:
    """Run what was asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--half", choices=["", "open", "held-out", "fresh", "second", "third"], default="")
    parser.add_argument("--engine", default="")
    parser.add_argument("--missing", action="store_true", help="only what has no result yet")
    parser.add_argument(
        "--page", action="store_true", help="write the page from the results, and run nothing"
    )
    asked = parser.parse_args()
    if not asked.page:
        models = ROOT / "build" / "real-bugs"
        models.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="real-bugs-") as folder:
            server = Server(Path(folder) / "server")
            children.subprocess = Forking(server)  # type: ignore[assignment]  # recorders are forked
            for row in chosen(asked.only, asked.half):
                if not asked.engine or row.engine == asked.engine:
                    tried(row, models, again=not asked.missing)
            server.close()
    page.write(Results.load())


if __name__ == "__main__":
    main()
