"""`lockstep doctor`: does this machine have what is needed? One line each, with what to do about a bad one."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from lockstep.sessions.text import clean
from lockstep.workbench.cli.health import Finding, examine
from lockstep.workbench.exit_codes import Exit
from lockstep.workbench.export.json import dumps

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

_MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}
_COLOURS = {"ok": "\x1b[32m", "note": "\x1b[33m", "bad": "\x1b[31m"}


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array on stdout.")] = False,
) -> None:
    """Check Python, torch, GPUs, communication between ranks, transformers, memory, directories and terminal."""
    findings: list[Finding] = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            print(_line(finding), flush=True)
    if as_json:
        print(dumps([asdict(finding) for finding in findings]))
    if any(finding.level == "bad" for finding in findings):
        raise typer.Exit(Exit.DIVERGED)


def _line(finding: Finding) -> str:
    mark = _MARKS[finding.level]
    if sys.stdout.isatty():
        mark = f"{_COLOURS[finding.level]}{mark}\x1b[0m"
    advice = f" -> {finding.advice}" if finding.advice else ""
    return f"{mark} {finding.what:12} {clean(finding.found)}{clean(advice)}"
