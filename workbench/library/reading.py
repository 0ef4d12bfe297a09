"""`lockstep.open`: a recording, for a script or a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions import STATISTICS, Session, SessionError
from lockstep.sessions.meta import is_companion
from lockstep.sessions.text import clean
from lockstep.workbench.judgements.golden_event import GoldenEvent, last_golden_event
from lockstep.workbench.library import html
from lockstep.workbench.library.judged_html import judged
from lockstep.workbench.library.pictures import Drawing, attention_drawing, tensor_drawing
from lockstep.workbench.paths import find_session
from lockstep.workbench.settings import session_limits
from lockstep.workbench.views.attention import attention
from lockstep.workbench.views.identity import dtype_name, model_name
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.tensor import REBUILT
from lockstep.workbench.views.tensor import tensor as tensor_view
from lockstep.workbench.views.where import Where
from lockstep.workbench.words.plain_text import plural


@dataclass(frozen=True, slots=True)
class TokensRead:
    """The tokens of a sequence: `prompt` went in before the first choice, `chosen` are the choices of all steps. `text`
    is that of the chosen, as far as the recording has the texts."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    text: str


class RecordedRun:
    """A recording, open for reading: close it, or use it as a context manager.

    A step is one forward pass (0 is the prefill), a tap a named point of the model. `session` is the reader beneath,
    which has the rest. SessionError states what is damaged or was not recorded.
    """

    def __init__(self, session: Session, branch: int = 0) -> None:
        """Use `lockstep.open`."""
        self.session, self.branch = session, branch
        self._source = SessionSource(session)
        if branch not in {one.id for one in session.branches()}:
            raise SessionError(
                f"{session.path.name} has no branch {branch} among its {len(session.branches())}."
            )

    def close(self) -> None:
        """Close the file."""
        self.session.close()

    def __enter__(self) -> RecordedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The file."""
        return self.session.path

    @property
    def ranks(self) -> int:
        """How many ranks ran."""
        return self.session.ranks

    @property
    def steps(self) -> range:
        """The steps that are recorded."""
        return self.session.steps(self.branch)

    @property
    def taps(self) -> tuple[str, ...]:
        """The names of all taps, in the order of execution."""
        return tuple(tap.name for tap in self.session.taps if not is_companion(tap.name))

    @property
    def captured(self) -> tuple[str, ...]:
        """The taps of which tensors are recorded, for some step at least."""
        there = self.session.captured_taps(self.branch)
        return tuple(name for name in self.taps if name in there)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The numbers of the sequences of the batch."""
        return tuple(sorted(self.session.sequences(self.branch)))

    @property
    def judgement(self) -> GoldenEvent | None:
        """What was found when the run was last held against a reference; None where it never was."""
        return last_golden_event(self.session, self.branch)

    def tokens(self, seq: int = 0) -> TokensRead:
        """What a sequence read and what was chosen."""
        with self.session.walk():
            prompt, chosen = list[int](), list[int]()
            for step in self.steps:
                one = next(
                    (one for one in self.session.step(step, self.branch).sequences if one.seq == seq), None
                )
                if one is None:
                    continue
                prompt += () if chosen else one.ids
                chosen += () if one.emitted is None else (one.emitted,)
        texts = self.session.meta.token_texts
        text = "".join(texts.get(token, f"<{token}>") for token in chosen)
        return TokensRead(tuple(prompt), tuple(chosen), clean(text, newlines=True))

    def statistics(self, tap: str, step: int = 0) -> dict[str, NDArray[np.float32]]:
        """The statistics of a tap at a step by their names, each an array with a value a rank."""
        with self.session.view():
            place, found = self.session.tap(tap).index, self.session.stats(step, self.branch)
        if found is None:
            raise SessionError(f"{self.path.name} has no statistics of step {step}.")
        return {name: found[place, :, i].copy() for i, name in enumerate(STATISTICS)}

    def series(
        self, tap: str, statistic: str = "absmax", rank: int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """A statistic of a tap over all steps: (steps, values)."""
        with self.session.view():
            return self.session.series(tap, statistic, rank, self.branch)

    def tensor(self, tap: str, step: int = 0, seq: int = 0) -> NDArray[Any]:
        """The tensor of a tap at a step as one rank alone would have had it, rebuilt from the parts of all ranks;
        bfloat16 widened to float32. Of a part that was captured, that part."""
        with self.session.view():
            found = self.session.rebuilt(tap, step=step, seq=seq, branch=self.branch)
        if found.array is None:
            raise SessionError(self._not_there(tap, step, found.note))
        return found.array

    def heatmap(
        self, tap: str, step: int = 0, seq: int = 0, *, index: int | tuple[int, ...] = (), view: str = REBUILT
    ) -> Drawing:
        """A tensor as a picture. `index` picks of its first axes (a head of attention); further axes than two lie under
        each other. `view` is "rebuilt", "rank N", "golden" (the reference's, if it is on this machine) or
        "difference"."""
        place, at = self.session.tap(tap).index, (index,) if isinstance(index, int) else index
        with self.session.view():
            found = tensor_view(self._source, Where(self.branch, step, seq, place), place, view)
        if found.array is None or found.step != step:
            raise SessionError(self._not_there(tap, step, found.note))
        try:
            picked = np.atleast_2d(found.array[at])
        except IndexError as error:
            raise SessionError(f"{tap} is of shape {found.array.shape}: {error}") from error
        if not picked.size:
            raise SessionError(f"{tap} at step {step} is of shape {found.array.shape}: nothing to draw")
        return tensor_drawing(found, picked.reshape(-1, picked.shape[-1]), at)

    def attention(self, layer: int, step: int = 0, seq: int = 0, *, head: int | None = None) -> Drawing:
        """What a layer attends to: the probabilities of all heads or of one, a query a row, keys by position. The rows
        of earlier steps are above those of `step`."""
        with self.session.view():
            found = attention(self._source, Where(self.branch, step, seq), layer, head=head)
        if not found.heads:
            raise SessionError(found.missing or self._not_there(f"layers.{layer}.attn.probs", step))
        return attention_drawing(found)

    def _not_there(self, tap: str, step: int, note: str = "") -> str:
        why = f": {note}" if note else ""
        return f"{self.path.name} has no tensor of {tap} at step {step}{why}; `captured` lists the taps that it has"

    def __repr__(self) -> str:
        return f"<RecordedRun {clean(str(self.path))}: {self._in_words()}>"

    def _in_words(self) -> str:
        name, dtype = model_name(self.session), dtype_name(self.session)
        reported = [clean(name), clean(dtype), plural(self.ranks, "rank"), plural(len(self.steps), "step")]
        return ", ".join(filter(None, [*reported, plural(len(self.taps), "tap")]))

    def _repr_html_(self) -> str:
        meta = self.session.meta
        rules = next(one.rules for one in self.session.branches() if one.id == self.branch)
        reported = [("recorded by", meta.source)]
        reported += (
            [("faults", ", ".join(f"{name}={value}" for name, value in rules.items()))] if rules else []
        )
        reported += [(f"sequence {seq}", self.tokens(seq).text) for seq in self.sequences[:8]]
        reported += [("tensors of", plural(len(self.captured), "tap"))]
        reported += [("damaged", one) for one in self.session.losses]
        event = self.judgement
        parts = [html.heading(self.path.name), html.paragraph(self._in_words()), html.lines(reported)]
        return html.block(*parts, *([] if event is None else judged(event)))


def open_session(path: str | Path, *, branch: int = 0) -> RecordedRun:
    """Open a recording: a file, or a name as `lockstep sessions` lists it. `branch` is the line of its history to read.

    SessionError where it is none, or would cost more memory or time than the settings allow.
    """
    session = Session.open(find_session(path), session_limits())
    try:
        return RecordedRun(session, branch)
    except BaseException:
        session.close()
        raise
