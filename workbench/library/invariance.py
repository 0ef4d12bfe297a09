"""`lockstep.invariant`: the same requests in variants of the run, held bit by bit and against rounding."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.engine.scratch import ScratchFolder
from lockstep.sessions.text import clean
from lockstep.workbench.checking.axes.axis import AxisName, AxisResult, AxisVerdict, overall, parse_axes
from lockstep.workbench.debugger.answers import JsonObject
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.judgements.golden_event import plain
from lockstep.workbench.library import html
from lockstep.workbench.library.attached import tap_request
from lockstep.workbench.library.checked_model import ModelToCheck
from lockstep.workbench.library.command_axes import CommandAxes
from lockstep.workbench.library.engine_variants import EngineVariant
from lockstep.workbench.library.judging import FaultWords, Ids, Texts, ids_of, texts_of, words_of
from lockstep.workbench.library.listening import Listener, Warned
from lockstep.workbench.models.opening import open_to_run
from lockstep.workbench.paths import cache_directory
from lockstep.workbench.words.plain_text import plural

_MARKS: dict[AxisVerdict, str] = {
    "equal": "✓", "rounding": "≈", "bug": "✗", "inconclusive": "?", "not tried": "-",
}  # fmt: skip
#: Of each axis so many operations whose bits depend on it are listed.
_LISTED = 8


@dataclass(frozen=True, slots=True, repr=False)
class Invariance:
    """What `invariant` found of `subject`. True where something was tried, no axis shows a bug and none could not be
    decided."""

    subject: str
    results: tuple[AxisResult, ...]
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.verdict in ("equal", "rounding")

    @property
    def verdict(self) -> AxisVerdict:
        """Of all axes together."""
        return overall(self.results)

    @property
    def bugs(self) -> tuple[AxisResult, ...]:
        """The variants in which an operation is wrong."""
        return tuple(one for one in self.results if one.verdict == "bug")

    @property
    def summary(self) -> str:
        """The verdict in one line."""
        tried = [one for one in self.results if one.verdict != "not tried"]
        reported = plural(len(tried), "variant")
        if self.bugs:
            axes = dict.fromkeys(one.axis for one in self.bugs)
            return f"a bug along {', '.join(axes)}, in {len(self.bugs)} of {reported}"
        if self.verdict == "inconclusive":
            return f"no bug in {reported}, but not all could be determined"
        if self.verdict == "rounding":
            axes = dict.fromkeys(one.axis for one in tried if one.verdict == "rounding")
            return f"{reported} without a bug; bits depend, by rounding alone, on {', '.join(axes)}"
        by_bits = [one for one in tried if one.taps]
        if len(by_bits) < len(tried):
            bits = f"the same bits in {plural(len(by_bits), 'variant')}, " if by_bits else ""
            return f"{bits}the same tokens in {len(tried) - len(by_bits)}, of which no more is seen"
        return f"the same bits in {reported}" if tried else "no variant could be tried"

    def to_json(self) -> JsonObject:
        """Plain values: what `--json` prints."""
        return {
            "verdict": self.verdict,
            "subject": self.subject,
            "axes": [plain(one) | {"text": one.in_words()} for one in self.results],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        width = max((len(one.axis) for one in self.results), default=0)
        lines = [clean(self.subject)]
        for one in self.results:
            lines.append(f"{_MARKS[one.verdict]} {one.axis:<{width}}  {clean(one.variant)}: {_line(one)}")
            lines += [f"  {'':<{width}}  {clean(more)}" for more in _details(one)]
        return "\n".join([*lines, *map(clean, self.notes), f"verdict  {self.summary}"])

    def __repr__(self) -> str:
        return f"<Invariance {self.summary}>"

    def _repr_html_(self) -> str:
        rows = [
            [_MARKS[one.verdict], one.axis, one.variant, _line(one), "\n".join(_details(one))]
            for one in self.results
        ]
        table = html.table(["", "axis", "variant", "found", "operations"], rows)
        return html.block(html.heading(self.summary), table)


def invariant(
    target: str | Path | Sequence[str],
    *,
    axis: str | Sequence[str] | None = None,
    model: str | Path | None = None,
    engine: str = "auto",
    variants: Mapping[str, str | Sequence[str]] | None = None,
    prompt: Texts | None = None,
    ids: Ids | None = None,
    chat: bool = False,
    prompt_tokens: int | None = None,
    tp: int = 1,
    ep: int = 1,
    steps: int = 4,
    faults: FaultWords | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    load: str = "direct",
    weights: str = "dequantised",
    batch_invariant: bool = False,
    chunk: int | None = None,
    timeout: float = 60.0,
    start_timeout: float = 300.0,
    progress: Listener | None = None,
) -> Invariance:
    """Run the same requests in ways that must not matter, one `axis` after the other: "all" (without `variants` those
    are meant), or some of "batch" (alone
    or together), "order", "preempt" (dropped and read anew), "chunk" (of prompts), "prefix" (from kept rows), "tp" and
    "ep" (numbers of ranks), "speculation" (decoded by drafts), "graph" (a command as it is, by its tokens, against
    itself run eagerly). What depends on it by rounding alone and what is wrong
    in one of two runs are distinguished.

    A model runs on Lockstep's engine; a single prompt is joined by a longer and a shorter request. A command, a list of
    words, is another engine's own (`engine` as in `attach`): it is run as it is, and again with an argument of the
    engine changed; vLLM can be asked for "batch", "preempt", "chunk", "prefix", "tp", "ep" and "graph". Of any engine
    `variants` name by axis words that are put behind the command, as {"prefix": "--no-prefix-cache"}. With `model`, its
    checkpoint, its operations are judged on their own inputs; without, rows are held against what rounding may come to.

    EngineError, AttachError, ForeignDumpError, SessionError and UsageError state what could not be done.
    """
    named = axis or list(variants or ()) or "all"
    axes, heard = parse_axes(named if isinstance(named, str) else ",".join(named)), Warned(progress)
    own = {parse_axes(one)[0]: words for one, words in (variants or {}).items()}
    if not isinstance(target, str | Path):
        return _of_command(target, axes, model, engine, own, heard)
    if own:
        raise UsageError("variants are words behind a command: of a model on our engine there are none")
    if model is not None:
        raise UsageError("model is the checkpoint of a command: leave it out")
    asked = ModelToCheck.of(
        str(target), texts=texts_of(prompt), ids=ids_of(ids), chat=chat, prompt_tokens=prompt_tokens, steps=steps,
        faults=words_of(faults), tp=tp, ep=ep, device=device, dtype=dtype, load=load, weights=weights,
        batch_invariant=batch_invariant, chunk=chunk, timeout=timeout, start_timeout=start_timeout,
    )  # fmt: skip
    with ScratchFolder.make("invariant", cache_directory()) as scratch:
        runs = asked.axes(scratch.path, heard)
        found = runs.run(axes)
    heard.clear()
    return Invariance(
        replace(asked, prompts=runs.requests.prompts).in_words(), tuple(found), tuple(heard.warnings)
    )


def _of_command(
    command: Sequence[str],
    axes: Sequence[AxisName],
    model: str | Path | None,
    engine: str,
    variants: Mapping[AxisName, str | Sequence[str]],
    heard: Warned,
) -> Invariance:
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("invariant hands signals on to the command: call it from the main thread")
    asked = tap_request(engine, None, None, "full")
    own = {
        axis: [EngineVariant.by_words(shlex.split(words) if isinstance(words, str) else words)]
        for axis, words in variants.items()
    }
    opened = None if model is None else open_to_run(str(model), "judging a recording")
    with ScratchFolder.make("invariant", cache_directory()) as scratch:
        subject, found = CommandAxes(command, asked, scratch.path, opened, heard, own).run(axes)
    heard.clear()
    return Invariance(subject, tuple(found), tuple(heard.warnings))


def _line(one: AxisResult) -> str:
    """The verdict with what it rests on."""
    compared = f"{plural(one.taps, 'tap')} of {plural(one.rows, 'row')}"
    if one.verdict == "rounding":
        return f"rounding alone in {compared}"
    if one.verdict == "bug":
        return f"a bug{f' ({compared})' if one.rows else f': {clean(one.why)}'}"
    return clean(one.in_words() if one.verdict == "equal" else f"{one.verdict}: {one.why}")


def _details(one: AxisResult) -> list[str]:
    """The operations behind it, the first of many."""
    bugs, rounding = ([entry.in_words() for entry in found] for found in (one.bugs, one.rounding))
    reported = [f"wrong: {words}" for words in bugs[:_LISTED]]
    reported += [
        f"cache: {words}" for words in dict.fromkeys(words for bug in one.bugs for words in bug.cache)
    ][:_LISTED]
    reported += [f"wrong: {token.in_words()}" for token in one.tokens[:_LISTED]]
    reported += [f"other bits: {words}" for words in rounding[:_LISTED]]
    reported += [f"noted: {words}" for words in one.notes[:_LISTED]]
    left = sum(max(0, len(found) - _LISTED) for found in (bugs, rounding))
    return [*reported, *([f"and {plural(left, 'more operation')} (--json)"] if left else [])]
