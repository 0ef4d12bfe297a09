"""All that a report has of a session, as plain values: read here, written by `html`, `json` and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.engine.errors import RequestError
from lockstep.sessions import Session, SessionError
from lockstep.workbench.views.attention import LayerAttention, attention
from lockstep.workbench.views.biases import Bias, biases
from lockstep.workbench.views.branch_sentinel import BranchSentinel, left_golden
from lockstep.workbench.views.branches import BranchLine, branch_lines
from lockstep.workbench.views.identity import CatalogueEntry, Identity, file_name, identify
from lockstep.workbench.views.journal import JournalEntry, journal_entries
from lockstep.workbench.views.request import Request
from lockstep.workbench.views.sentinel_scan import scan_steps
from lockstep.workbench.views.sequence_tokens import SequenceTokens, tokens_of
from lockstep.workbench.views.series import TapSeries, choose, history
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.trail import Trail, follow
from lockstep.workbench.views.verdicts import BranchJudgement, first_failed, judged_of, judgement
from lockstep.workbench.views.where import Where
from lockstep.workbench.words.plain_text import plural

#: Damaged steps that are named; `lockstep sessions verify` names all.
_MOST_DAMAGE = 10


@dataclass(frozen=True, slots=True, eq=False)
class Story:
    """`branch` and `step` are in focus (step None: nothing ran). `cut` states, in words, what was left out."""

    identity: Identity
    branch: BranchLine
    step: int | None
    branches: tuple[BranchLine, ...]
    tokens: tuple[SequenceTokens, ...]
    judgement: BranchJudgement
    sentinels: tuple[BranchSentinel, ...]
    histories: tuple[TapSeries, ...]
    attention: tuple[LayerAttention, ...]
    biases: tuple[tuple[int, tuple[Bias, ...]], ...]
    journal: tuple[JournalEntry, ...]
    journal_gap: int  # this many entries are left out after the first half of `journal`
    cut: tuple[str, ...]


def story_of(session: Session, request: Request, known: Sequence[CatalogueEntry] = ()) -> Story:
    """Read the session. `known` is the catalogue of faults, for the rules' titles. RequestError where the request
    names a branch or step that the session does not have."""
    return _StoryBuilder(session, request).story(known)


class _StoryBuilder:
    """Gathers the parts; `cut` grows as they are cut."""

    def __init__(self, session: Session, request: Request) -> None:
        self.session, self.request, self.limits = session, request, request.limits
        self.cut: list[str] = []
        self.name = file_name(session)
        self.lines = {line.id: line for line in branch_lines(session)}
        failure = first_failed(judged_of(session))
        self.branch = request.branch if request.branch is not None else failure.branch if failure else 0
        if self.branch not in self.lines:
            raise RequestError(f"{self.name} has no branch {self.branch}: it has 0 to {max(self.lines)}")
        self.shown = self._branches_shown()
        self.trail: Trail = follow(session, [branch.id for branch in self.shown])
        self.seqs = self._sequences()
        self.source = SessionSource(session)
        self.looked = [one for branch in self.shown for one in self._sentinels(branch)]
        hit = next((one.branch for one in self.looked if one.step is not None), None)
        if request.branch is None and failure is None and hit is not None:
            self.branch = hit  # nothing was judged: the trouble is where something fired
        self.judgement = judgement(session, self.branch, request.step, self.source.texts.label)
        left = left_golden(session, self.branch)
        if left is not None:
            self.looked.append(left)

    def story(self, known: Sequence[CatalogueEntry]) -> Story:
        """All of it."""
        step = self._focus()
        journal, gap = self._journal()
        return Story(
            identity=identify(self.session, self.trail, known),
            branch=self.lines[self.branch],
            step=step,
            branches=tuple(self.lines.values()),
            tokens=self._tokens(step),
            judgement=self.judgement,
            sentinels=tuple(self.looked),
            histories=self._histories(step),
            attention=self._attention(step),
            biases=tuple(
                (layer, tuple(biases(self.session, layer, self.branch))) for layer in self.request.biases
            ),
            journal=journal,
            journal_gap=gap,
            cut=(*self.session.losses, *list(self.trail.damaged.values())[:_MOST_DAMAGE], *self.cut),
        )

    def _sentinels(self, branch: BranchLine) -> list[BranchSentinel]:
        """Over the branch's own steps; those of a parent that is not looked at itself count as its own."""
        shared = branch.parent in {line.id for line in self.shown}
        steps = range(branch.fork_step if shared else 0, branch.steps)
        return scan_steps(
            self.session, self.trail, branch.id, steps, self.seqs, self.source.texts.label, self.limits.scan
        )

    def _branches_shown(self) -> list[BranchLine]:
        """The branch in focus beside those it came from and those that left it, main first."""
        lines = list(self.lines.values())
        if len(lines) <= self.limits.branches:
            return lines
        family = [self.branch]
        while (parent := self.lines[family[-1]].parent) is not None:
            family.append(parent)
        near = [line.id for line in lines if line.parent == self.branch]
        order = [*family, *near, *self.lines]
        kept = list(dict.fromkeys(order))[: self.limits.branches]
        self.cut.append(f"the tokens of {len(lines) - len(kept)} further branches")
        return [self.lines[branch] for branch in sorted(kept)]

    def _sequences(self) -> list[int]:
        seqs = sorted({seq for reported in self.trail.emitted.values() for seq in reported})
        if len(seqs) > self.limits.sequences:
            self.cut.append(f"the tokens of {plural(len(seqs) - self.limits.sequences, 'sequence')}")
        return seqs[: self.limits.sequences]

    def _focus(self) -> int | None:
        """The step asked for, else that of the first divergence, of the first NaN, or the last."""
        steps = self.session.steps(self.branch)
        if self.request.step is not None:
            if self.request.step not in steps:
                has = f"steps 0 to {steps.stop - 1}" if steps else "no steps"
                raise RequestError(f"branch {self.branch} of {self.name} has {has}, not {self.request.step}")
            return self.request.step
        if self.judgement.first is not None:
            return self.judgement.first.step
        own = [one.step for one in self.looked if one.branch == self.branch and one.step is not None]
        hit = min(own, default=None)
        return hit if hit is not None else steps.stop - 1 if steps else None

    def _tokens(self, step: int | None) -> tuple[SequenceTokens, ...]:
        sides = [(branch.id, branch.name) for branch in self.shown]
        marks = [] if step is None else [step]
        marks += [one.step for one in self.looked if one.step is not None]
        found = tuple(tokens_of(self.source, self.trail, seq, sides, marks, self.limits) for seq in self.seqs)
        for tokens in found:
            missing = sum(count for _, count in tokens.gaps)
            if missing:
                self.cut.append(f"the tokens of {plural(missing, 'step')} of sequence {tokens.seq}")
            if tokens.prompt_cut:
                self.cut.append(f"{plural(tokens.prompt_cut, 'prompt token')} of sequence {tokens.seq}")
        return found

    def _histories(self, step: int | None) -> tuple[TapSeries, ...]:
        also = [self.judgement.first.tap] if self.judgement.first else []
        taps, left = choose(self.session, self.request.taps, also, self.limits.series)
        if left:
            self.cut.append(f"the statistics of {plural(left, 'tap')} that --tap selects")
        points = self.limits.series_points
        return tuple(history(self.session, tap, self.branch, step, points) for tap in taps)

    def _attention(self, step: int | None) -> tuple[LayerAttention, ...]:
        if step is None:
            return ()
        seq = self.seqs[0] if self.seqs else 0
        found: list[LayerAttention] = []
        room = self.limits.heatmaps
        for layer, head in self.request.attention:
            at = Where(self.branch, step, seq)
            rows, largest = self.limits.attention_rows, self.limits.attention_elements
            try:
                one = attention(self.source, at, layer, head=head, rows=rows, largest=largest)
            except SessionError as error:  # a damaged tensor costs its figure, not the report
                one = LayerAttention(layer, step, seq, "probs", missing=str(error))
            if len(one.heads) > room:
                self.cut.append(f"the attention of {plural(len(one.heads), 'head')} of layer {layer}")
                continue
            room -= len(one.heads)
            found.append(one)
        return tuple(found)

    def _journal(self) -> tuple[tuple[JournalEntry, ...], int]:
        events = self.session.events()
        left = max(0, len(events) - self.limits.events)
        if left:
            half = self.limits.events // 2
            self.cut.append(f"{left} entries of the journal")
            events = [*events[:half], *events[-half:]]
        return journal_entries(self.session, events), left
