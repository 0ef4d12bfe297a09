"""expect, note, source, export: the session as a test and as a script."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from lockstep.engine.run.sampling import Sampling
from lockstep.sessions.meta import SessionMeta
from lockstep.sessions.text import clean
from lockstep.workbench.debugger.answers import Expectation, Group, Message, Result
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.registry import Argument, command
from lockstep.workbench.debugger.errors import CommandError
from lockstep.workbench.debugger.language import expressions
from lockstep.workbench.debugger.language.operands import evaluate_fact
from lockstep.workbench.debugger.language.scripts import read_script, run_script
from lockstep.workbench.models.capture import words_of
from lockstep.workbench.models.opening import DEMO
from lockstep.workbench.words.numbers import scalar


@command(
    "expect", arguments=(Argument("claim", "text", required=True),), group="checking", changes=True,
    help="claim something about where the debugger stands; a run with a claim that fails exits with 1",
    details="`expect golden == match`, `expect tokens == [12, 7]`, `expect text contains \"rain\"`, `expect"
    " nan(layers.0.attn.scores) > 0`, `expect tap == layers.0.attn.scores and reason == exception`.",
)  # fmt: skip
def expect(debugger: Debugger, claim: str) -> Result:
    """Judge a claim."""
    tree = expressions.parse(claim)
    holds = bool(evaluate_fact(debugger, tree, claim))
    result = Expectation(claim, holds, "; ".join(_operands(debugger, tree, claim)))
    debugger.journal("expect", claim, data={"holds": holds})
    return result


def _operands(debugger: Debugger, tree: Any, line: str) -> list[str]:
    """What the claim's sides were, for those that are not literal."""
    if not isinstance(tree, list) or tree[0] in ("string", "list"):
        return []
    if tree[0] in ("tap", "statistic"):
        value = evaluate_fact(debugger, tree, line)
        return [f"{expressions.show(tree)} = {scalar(value) if isinstance(value, float) else value}"]
    if tree[0] == "name":
        try:
            value = evaluate_fact(debugger, tree, line)
        except CommandError:
            return []  # the word that a fact is compared with
        shown = scalar(value) if isinstance(value, float) else clean(str(value), limit=200)
        return [f"{tree[1]} = {shown}"]
    if tree[0] in ("==", "!=", "contains") and isinstance(tree[2], list) and tree[2][0] == "name":
        return _operands(debugger, tree[1], line)
    return [words for child in tree[1:] for words in _operands(debugger, child, line)]


@command(
    "note", arguments=(Argument("text", "text", required=True),), group="session", changes=False,
    help="write a note into the session's journal",
)  # fmt: skip
def note(debugger: Debugger, text: str) -> Result:
    """A note at this step."""
    if debugger.executor is None:
        return Message("not noted: a replay only reads")
    debugger.journal("note", text)
    at = max(debugger.position.step, 0)
    if not debugger.recording:
        why = debugger.executor.inferior.recorder.trouble or "nothing is recorded"
        return Message(f"not noted yet at step {at}: it waits in memory until it can be recorded. {why}")
    return Message(f"noted at step {at}")


@command(
    "source", arguments=(Argument("file", "file", required=True),), group="session",
    help="carry out the commands of a file",
)  # fmt: skip
def source(debugger: Debugger, file: str) -> Result:
    """A script."""
    if debugger.settings.in_script:
        raise CommandError("a script cannot carry out another")
    path = Path(file)
    debugger.settings.in_script = True
    try:
        results = [result for _, result in run_script(debugger, read_script(path), path.name)]
    finally:
        debugger.settings.in_script = False
    return Group(results)


def script_of(debugger: Debugger) -> str:
    """The journalled commands. What was decided by chance is written as what it led to."""
    debugger.session.refresh()
    lines = [f"# {run_line(debugger.session.meta)}"]
    for event in debugger.session.events():
        if event.kind == "command":
            amended = event.data.get("amended") if isinstance(event.data, dict) else None
            lines.append(amended if isinstance(amended, str) else event.text)
        elif event.kind == "note":
            lines.append(f"note {event.text}")
    return "\n".join(clean(line, newlines=True) for line in lines)


def run_line(meta: SessionMeta) -> str:
    """The command line that starts the run of a session again."""
    model, config = meta.model, meta.config
    words = ["lockstep", "run", DEMO if DEMO in (model.name, model.path) else model.path or "MODEL"]
    for option, value in (
        ("tp", config.tp),
        ("dtype", config.dtype),
        ("device", config.device),
        ("chunk", config.chunk_tokens),
    ):
        if value:
            words += [f"--{option}", str(value)]
    words += [word for name, value in meta.rules.items() for word in ("--fault", f"{name}={value}")]
    sequences = [reported for _, reported in sorted(meta.sequences.items())]
    for reported in sequences:
        words += ["--ids", ",".join(map(str, reported.prompt_ids))]
    if sequences and (sampling := sequences[0].sampling) is not None:
        usual = asdict(Sampling())
        for name, chosen in msgspec.structs.asdict(sampling).items():
            if chosen != usual[name]:
                words += [f"--{name.replace('_', '-')}", str(chosen)]
    words += [word for glob in words_of(meta.capture) for word in ("--capture", glob)]
    return clean(shlex.join(words))


def journal_of(debugger: Debugger) -> str:
    """Every event, a JSON object a line."""
    debugger.session.refresh()
    return "\n".join(
        json.dumps({
            "id": event.id, "branch": event.branch, "step": event.step, "kind": event.kind,
            "text": event.text, "data": event.data,
        })
        for event in debugger.session.events()
    )  # fmt: skip
