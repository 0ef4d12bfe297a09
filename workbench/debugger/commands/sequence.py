"""`sequence`: the one of a batch that every command and every pane means."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.workbench.debugger.answers import Message, Result, TableResult
from lockstep.workbench.debugger.core.batch import batch_of, check_sequence
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.registry import Argument, command
from lockstep.workbench.debugger.core.step_end import eos_ids
from lockstep.workbench.debugger.errors import DebuggerError
from lockstep.workbench.views.cached_lengths import span
from lockstep.workbench.views.sequences import Sequences


@command(
    "sequence", "seq", arguments=(Argument("number", "int", help="none: list them"),),
    group="inspection", changes=True,
    help="choose one sequence of a batch of prompts: every command and pane means it",
    details="A batch has a sequence for each `--prompt`, numbered from 0. `print`, `x`, `topk`, `attn` and `lens` also"
    " take `seq N` at their end, for another one just once. Statistics are of the whole batch. A breakpoint's `token`,"
    " `position` and `kv_len` are those of the sequence that was chosen when it was set.",
)  # fmt: skip
def sequence(debugger: Debugger, number: int | None) -> Result:
    """Choose, or show which there are."""
    batch = batch_of(debugger)
    if number is None:
        return _listed(debugger, batch)
    debugger.sequence = check_sequence(debugger, number)
    label = batch.label(number) or "the only sequence"
    return Message(f"{label}: {_reads(debugger, number)}", {"sequence": number})


def _listed(debugger: Debugger, batch: Sequences) -> TableResult:
    """A sequence a row, the chosen one marked."""
    ends = eos_ids(debugger)
    rows = [
        [
            "▸" if seq == debugger.sequence else "",
            seq,
            _prompt_length(debugger, seq),
            span(steps.start, steps.stop - 1) if steps else None,
            _ended(debugger, seq, ends),
            _reads(debugger, seq),
        ]
        for seq, steps in batch.fed.items()
    ]
    columns = ["", "sequence", "prompt tokens", "steps", "ended at", "now"]
    return TableResult("", columns, rows, empty="the session names no sequence")


def _ended(debugger: Debugger, seq: int, ends: Sequence[int]) -> int | None:
    """The step that emitted the end of its text, as far as the branch goes."""
    branch = debugger.position.branch
    for step in range(debugger.timeline.last(branch) + 1 if ends else 0):
        reported = debugger.timeline.sequence(branch, step, seq)
        if reported is not None and reported.emitted in ends:
            return step
    return None


def _prompt_length(debugger: Debugger, seq: int) -> int | None:
    try:
        return len(debugger.timeline.prompt(seq))
    except DebuggerError:  # it joined later, or a stranger recorded it
        return None


def _reads(debugger: Debugger, seq: int) -> str:
    """What the present step reads of a sequence and emits, in words."""
    at = debugger.position
    if at.step < 0:
        return "nothing was run yet"
    reported = debugger.step_tokens(seq)
    if reported is None:
        return batch_of(debugger).why_absent(seq, at.step)
    emits = "" if reported.emitted is None else f', emits "{debugger.texts.label(reported.emitted)}"'
    return f'reads "{debugger.texts.label(reported.read)}" at position {reported.position}{emits}'
