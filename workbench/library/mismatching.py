"""`lockstep.mismatch`: a rollout engine and a trainer that give the same tokens other log-probabilities."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lockstep.sessions import Session
from lockstep.sessions.keeping import keeping
from lockstep.sessions.text import clean
from lockstep.workbench.debugger.answers import JsonObject
from lockstep.workbench.debugger.commands.row_diff import difference_rows
from lockstep.workbench.diagnosis.mismatch.gaps import GapStatistics, TokenGap
from lockstep.workbench.diagnosis.mismatch.level import Level
from lockstep.workbench.diagnosis.mismatch.logprobs import Reported
from lockstep.workbench.diagnosis.mismatch.report import MismatchReport, compare_runs
from lockstep.workbench.diagnosis.mismatch.shares import GapShares
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.judgements.golden_event import plain
from lockstep.workbench.library import html
from lockstep.workbench.library.comparing import Recorded, opened
from lockstep.workbench.library.gap_table import share_lines, share_picture
from lockstep.workbench.models.opening import open_model
from lockstep.workbench.words.plain_text import plural

_MARKS = {"equal": "✓", "differs": "✗", "unknown": "?"}


@dataclass(frozen=True, slots=True, repr=False)
class Mismatch:
    """What `mismatch` found. True exactly where nothing differs and enough was recorded to know it."""

    report: MismatchReport

    def __bool__(self) -> bool:
        return self.report.proved_equal

    @property
    def levels(self) -> tuple[Level, ...]:
        """Every level in its order, with what was found there."""
        return self.report.levels

    @property
    def answer(self) -> Level | None:
        """The first level that differs; None where none does."""
        return self.report.answer

    @property
    def gaps(self) -> tuple[TokenGap, ...]:
        """The response's tokens with both log-probabilities."""
        return self.report.gaps

    @property
    def statistics(self) -> GapStatistics:
        """Of the gaps: mean, largest, k3, share beyond a factor of two, effective sample size."""
        return self.report.statistics

    @property
    def shares(self) -> GapShares:
        """What of the gap goes where one operation of the rollout gives what the trainer's does, and the other way
        round. Only with a checkpoint."""
        return self.report.shares

    @property
    def summary(self) -> str:
        """The verdict in one line."""
        if self.answer is not None:
            return f"differs at {self.answer.name}: {self.answer.text}"
        return "equal" if self else "no level differs, as far as the recordings show"

    def to_json(self) -> JsonObject:
        """Plain values: what `--json` prints."""
        verdict = "equal" if self else "differs" if self.answer is not None else "inconclusive"
        rows = self.report.rows
        return {
            "verdict": verdict,
            "answer": None if self.answer is None else self.answer.name,
            "levels": [msgspec.to_builtins(level) for level in self.levels],
            "statistics": plain(self.statistics),
            "tokens": [plain(one) | {"gap": one.gap} for one in self.gaps],
            "shares": plain(self.shares),
            "taps": [] if rows is None else difference_rows(rows).to_json()["rows"],
        }

    def __str__(self) -> str:
        width = max(len(level.name) for level in self.levels)
        lines = []
        for level in self.levels:
            lines.append(f"{_MARKS[level.result]} {level.name:<{width}}  {clean(level.text)}")
            lines += [f"  {'':<{width}}  {clean(one)}" for one in level.details]
        lines += ["", statistics_line(self.statistics), *share_lines(self.shares), ""]
        return "\n".join([*lines, f"verdict  {clean(self.summary)}"])

    def __repr__(self) -> str:
        return f"<Mismatch {clean(self.summary)}>"

    def _repr_html_(self) -> str:
        rows = [
            [_MARKS[level.result], level.name, level.text, "\n".join(level.details)] for level in self.levels
        ]
        table = html.table(["", "level", "found", "more"], rows)
        picture = share_picture(self.shares)
        more = [] if picture is None else [html.image(picture)]
        figures = html.paragraph(statistics_line(self.statistics))
        return html.block(html.heading(self.summary), table, figures, *more)


def statistics_line(found: GapStatistics) -> str:
    """The gaps in one line."""
    if not found.tokens:
        return "no token has a log-probability on both sides"
    beyond = f"{100 * found.beyond_twofold:.3g} % beyond a factor of two"
    return (
        f"{plural(found.tokens, 'token')}: mean Δ log p {found.mean:+.3g}, mean |Δ| {found.mean_abs:.3g}, largest "
        f"{found.largest:.3g}, k3 {found.k3:.3g}, {beyond}, effective sample size {100 * found.ess:.4g} %"
    )


def mismatch(
    rollout: Recorded,
    trainer: Recorded,
    *,
    model: str | Path | None = None,
    rollout_logprobs: Reported | None = None,
    trainer_logprobs: Reported | None = None,
    branches: tuple[int, int] = (0, 0),
) -> Mismatch:
    """Which is the first level at which the two differ: tokens, weights, what the log-probability is of, routing, an
    operation, the shape of the passes; and how far the log-probabilities are apart, token by token.

    `model` is the checkpoint: each side's operations are judged by it. `rollout_logprobs` and `trainer_logprobs` are
    the figures that the two frameworks reported, by sequence: of the response's tokens, or of all; without them those
    of the recorded logits are compared.

    SessionError where a file cannot be read; CheckpointError and ConfigError where the model cannot be.
    """
    checkpoint = None if model is None else open_model(str(model)).path

    def facts(session: Session) -> Facts:
        assert checkpoint is not None
        return Facts.of(checkpoint, session.meta.config.dtype or "float32")

    with ExitStack() as stack:
        first, second = (opened(stack, one) for one in (rollout, trainer))
        reported = (rollout_logprobs or {}, trainer_logprobs or {})
        stack.enter_context(keeping(first, second))
        report = compare_runs(
            first, second, branches=branches, reported=reported, facts=None if checkpoint is None else facts
        )
    return Mismatch(report)
