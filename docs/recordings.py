"""Records `sessions/recorded/`: one small session for each bug of the two teams, on the embedded model.

    python docs/recordings.py [DIRECTORY]

Each is a debugging session given by its commands: run, hold against the golden reference, walk back to the first
wrong operation, toggle the fix, hold against the reference again. A replay of the same commands comes to the same
conclusions without the model. Three notes in each state what was seen, what was wrong, and how it was pinned down.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from lockstep.engine.faults.catalogue import DEFAULTS, faults_of
from lockstep.engine.faults.fault import Fault
from lockstep.sessions import Session, SessionWriter
from lockstep.sessions.compact import compact
from lockstep.workbench.debugger.answers import Expectation
from lockstep.workbench.debugger.host.launch import start
from lockstep.workbench.debugger.host.options import Launch, target_of
from lockstep.workbench.models.opening import DEMO

#: Where the recordings are shipped.
RECORDED = Path(__file__).resolve().parents[1] / "sessions" / "recorded"
#: Steps of each recording: the prefill and a line or two of text.
STEPS = 12


@dataclass(frozen=True, slots=True)
class RecordedBug:
    """One bug: its rule, the cause that the diagnosis names, and what the team saw before anybody knew."""

    rule: str
    value: str
    cause: str
    seen: str
    tp: int = 2

    @property
    def fault(self) -> Fault:
        """The catalogue's entry."""
        return faults_of({self.rule: self.value})[0]

    @property
    def first(self) -> str:
        """The operation that goes wrong first, in the first layer."""
        return self.fault.first_tap.replace("*", "0")


BUGS = (
    RecordedBug(
        "mask",
        "additive",
        "mask_zero_times_inf",
        "Exclamation marks: every logit is NaN, and the sampler falls back to token 0.",
    ),
    RecordedBug(
        "qkv_shard_dim",
        "1",
        "sharded_on_in_features",
        "Loose words and empty lines on two ranks; nothing crashes and nothing warns.",
    ),
    RecordedBug(
        "lm_head", "missing", "head_untrained", "Pieces of random words, though every layer looks healthy."
    ),
    RecordedBug("rope", "swallowed", "rope_not_applied", "A right first token, then one syllable for ever."),
    RecordedBug(
        "rope", "interleaved", "rope_interleaved", "Single letters and empty lines from the first token on."
    ),
    RecordedBug(
        "cache_reuse",
        "false",
        "cache_not_used",
        "A right first token, then one syllable for ever: the prompt is forgotten.",
    ),
    # With one KV head a rank, as at TP=2 here, every repeated head is the right one: one rank shows the bug.
    RecordedBug(
        "cache_heads",
        "repeated",
        "cache_heads_repeated",
        "Empty lines, then words that belong to no sentence.",
        tp=1,
    ),
    RecordedBug(
        "qkv_sizes", "mixed", "pack_offsets", "Two words take turns; on one rank the same model is right."
    ),
    RecordedBug(
        "load_bias",
        "false",
        "bias_dropped",
        "Fluent at first sight, but no sentence ends and nothing answers the question.",
    ),
    RecordedBug(
        "positions",
        "stuck",
        "position_stuck",
        "Token for token the text of a cache that is not read; only the prefill is right.",
    ),
)


def commands(bug: RecordedBug) -> list[str]:
    """The session as its script."""
    judged = max(1, bug.fault.step + 1)
    # NaN is caught where it arises; what is merely wrong is found by the reference.
    begin = ["catch nan", "continue", "disable 1"] if bug.value == "additive" else []
    # What a pane can only show if it was asked for while the model ran.
    keep = ["info weights", "lens"]
    if bug.rule in ("positions", "cache_heads", "cache_reuse"):
        rows = "capture layers.*.attn.k_cache"
        keep += [f"goto {judged - 1}", rows, f"goto {judged}", rows, "capture stats"]
    return [
        *begin,
        f"goto {STEPS - 1}",
        f"goto {judged}",
        "golden",
        *keep,
        f"expect golden == diverged and cause == {bug.cause}",
        f"goto {bug.fault.step}",
        "origin",
        f"expect tap == {bug.first} and step == {bug.fault.step}",
        f"toggle {bug.rule} {DEFAULTS[bug.rule]} --stay",
        f"goto {judged}",
        "golden",
        "expect golden == match",
        "lens",
    ]


def record(bug: RecordedBug, path: Path) -> None:
    """Record one bug; RuntimeError when it does not come out as it is reported."""
    launch = Launch(
        DEMO, tp=bug.tp, rules=[f"{bug.rule}={bug.value}"], session=path, room=STEPS + 4, timeout=120.0
    )
    with start(target_of(launch)) as debugger:
        for line in commands(bug):
            result = debugger.execute(line)
            if isinstance(result, Expectation) and not result.holds:
                raise RuntimeError(f"{path.name}: {result.to_text()}")
        for text in notes(bug):
            debugger.execute(f"note {text}")
    with SessionWriter.reopen(path) as writer:
        with Session.open(path) as session:
            model = session.meta.model
        writer.set_meta(model=replace(model, path=DEMO))  # where this machine keeps it concerns nobody
    compact(path)


def notes(bug: RecordedBug) -> tuple[str, str, str]:
    """What was seen, what was wrong, how it was pinned down."""
    fault = bug.fault
    return (
        f"Seen: {bug.seen}",
        f"Wrong: {fault.title}. {fault.symptom[0].upper()}{fault.symptom[1:]}.",
        f"Pinned down: {bug.first} at step {fault.step} is the first operation that leaves the reference "
        f"while its inputs do not; {bug.rule}={DEFAULTS[bug.rule]} restores the match.",
    )


def file_name(bug: RecordedBug) -> str:
    """ "load_bias-false.session"."""
    return f"{bug.rule}-{bug.value}.session"


def readme(bugs: Sequence[RecordedBug], directory: Path) -> str:
    """The table of the recordings."""
    lines = [
        "# Recorded bugs",
        "",
        "The bugs of the two teams this debugger was built for, as its engine reproduces them on the embedded",
        "model, at TP=2 where that matters. Each file replays without the model (`lockstep replay FILE`): `export",
        "script` shows what was done, and the same commands lead to the same places. All of them are recorded by",
        "`python docs/recordings.py`.",
        "",
        "| session | seen | first wrong operation | step |",
        "| --- | --- | --- | --- |",
    ]
    for bug in bugs:
        lines.append(f"| `{file_name(bug)}` | {bug.seen} | `{bug.first}` | {bug.fault.step} |")
    lines += ["", "## Notes", ""]
    for bug in bugs:
        with Session.open(directory / file_name(bug)) as session:
            reported = [event.text for event in session.events(kind="note")]
        lines += [f"### {bug.rule}={bug.value}", "", *(f"{text}  " for text in reported), ""]
    return "\n".join(lines)


def main() -> None:
    """Record all of them."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDED
    directory.mkdir(parents=True, exist_ok=True)
    for bug in BUGS:
        path = directory / file_name(bug)
        record(bug, path)
        print(f"{path.name}: {path.stat().st_size} bytes", flush=True)
    (directory / "README.md").write_text(readme(BUGS, directory), encoding="utf-8")


if __name__ == "__main__":
    main()
