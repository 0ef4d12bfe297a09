"""`lockstep invariant` without an axis: the table of what holds, and where to look for what does not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from lockstep.sessions.text import clean
from lockstep.workbench.checking.invariants.invariant import Invariant
from lockstep.workbench.cli.progress import Status
from lockstep.workbench.cli.reports import write_report
from lockstep.workbench.cli.terminal import report_line
from lockstep.workbench.exit_codes import Exit
from lockstep.workbench.export import junit
from lockstep.workbench.export.check_text import print_field
from lockstep.workbench.export.json import dumps
from lockstep.workbench.library.checked_model import ModelToCheck
from lockstep.workbench.words.plain_text import plural

_MARKS = {"holds": ("✓", "green"), "broken": ("✗", "bold red"), "not tried": ("-", "dim")}
_RESULTS: dict[str, junit.Result] = {"holds": "pass", "broken": "fail", "not tried": "absent"}


def check_invariants(asked: ModelToCheck, junit_file: Path | None, as_json: bool) -> Exit:
    """Try them all on the first prompt, and report."""
    with Status() as status:
        found = asked.suite(status).run()
    broken = [one for one in found if one.result == "broken"]
    if as_json:
        verdict = "broken" if broken else "hold"
        print(dumps({"verdict": verdict, "invariants": [msgspec.to_builtins(one) for one in found]}))
    else:
        _render(asked, found)
    lost = write_report(junit_file, lambda out: out.write(_junit(asked, found)))
    for words in lost:
        report_line(f"error: {words}")
    return Exit.DIVERGED if broken else Exit.NOT_SAVED if lost else Exit.OK


def _render(asked: ModelToCheck, found: Sequence[Invariant]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(clean(asked.in_words()), markup=False)
    width = max(len(one.name) for one in found)
    for one in found:
        mark, style = _MARKS[one.result]
        console.print(f"{mark} {one.name:<{width}}  {clean(one.summary)}", style=style, markup=False)
    broken = [one for one in found if one.result == "broken"]
    if broken:
        console.print()
    for one in broken:
        print_field(console, "look at", f"{one.name}: {one.means}")
    tried = [one for one in found if one.result != "not tried"]
    reported = (
        f"{len(broken)} of {plural(len(tried), 'invariant')} broken"
        if broken
        else f"{plural(len(tried), 'invariant')} hold"
    )
    print_field(console, "verdict", reported, "bold red" if broken else "bold green")


def _junit(asked: ModelToCheck, found: Sequence[Invariant]) -> str:
    cases = [
        junit.JUnitCase("invariants", "invariants", one.name, _RESULTS[one.result], one.summary, one.means)
        for one in found
    ]
    return junit.junit(f"lockstep invariant {asked.opened.name} --tp {asked.config.tp}", cases)
