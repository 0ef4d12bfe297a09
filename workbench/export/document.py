"""The story as JSON for other programs: what the page shows, without its pictures."""

from __future__ import annotations

from dataclasses import asdict, replace

from lockstep.sessions.meta import WeightShare
from lockstep.workbench.judgements.golden_event import plain
from lockstep.workbench.views.attention import LayerAttention
from lockstep.workbench.views.biases import Bias
from lockstep.workbench.views.branch_sentinel import BranchSentinel
from lockstep.workbench.views.branches import BranchLine
from lockstep.workbench.views.journal import JournalEntry
from lockstep.workbench.views.rank_weights import shape_text
from lockstep.workbench.views.series import STATISTIC, TapSeries
from lockstep.workbench.views.story import Story
from lockstep.workbench.views.verdicts import BranchJudgement

#: Counts up when a field changes its meaning or goes away.
VERSION = 1


def document(story: Story) -> dict[str, object]:
    """Plain values for `workbench.export.json.dumps`, which writes NaN and the infinities as words."""
    return {
        "lockstep_export": VERSION,
        "identity": asdict(story.identity),
        "focus": {"branch": story.branch.id, "step": story.step},
        "branches": [_branch(branch) for branch in story.branches],
        "tokens": [asdict(tokens) for tokens in story.tokens],
        "judgement": _judgement(story.judgement),
        "sentinels": [_sentinel(one) for one in story.sentinels],
        "statistics": [_history(one) for one in story.histories],
        "attention": [_attention(one) for one in story.attention],
        "biases": [{"layer": layer, "biases": [_bias(b) for b in found]} for layer, found in story.biases],
        "journal": [_entry(entry) for entry in story.journal],
        "left_out": list(story.cut),
    }


def _branch(one: BranchLine) -> dict[str, object]:
    return {
        "id": one.id,
        "name": one.name,
        "parent": one.parent_name,
        "fork_step": one.fork_step,
        "steps": one.steps,
        "faults": list(one.rule_texts),
    }


def _entry(one: JournalEntry) -> dict[str, object]:
    return {
        "id": one.id,
        "branch": one.branch_name,
        "step": one.step,
        "kind": one.kind,
        "text": one.text,
    }


def _judgement(one: BranchJudgement) -> dict[str, object]:
    return asdict(replace(one, causes=())) | {"causes": plain(one.causes)}


def _sentinel(one: BranchSentinel) -> dict[str, object]:
    return {
        "branch": one.branch,
        "name": one.name,
        "step": one.step,
        "what": one.what,
        "looked": one.looked,
        "tap": one.tap,
    }


def _history(one: TapSeries) -> dict[str, object]:
    return {
        "tap": one.tap,
        "layout": one.layout,
        "statistic": STATISTIC,
        "first_step": one.steps[0],
        "last_step": one.steps[1],
        "values": one.values.tolist(),
        "not_finite": one.broken.tolist(),
        "now": list(one.now),
        "replicas_agree": one.agree,
    }


def _attention(one: LayerAttention) -> dict[str, object]:
    heads = [
        {
            "head": head.head,
            "rank": head.rank,
            "kv_head": head.kv_head,
            "row_sum": head.figures.total,
            "entropy": head.figures.entropy,
            "keys_holding_99_percent": head.figures.keys,
            "last_row": head.values[-1].tolist(),
        }
        for head in one.heads
    ]
    return {
        "layer": one.layer,
        "step": one.step,
        "seq": one.seq,
        "first_query": one.first_query,
        "missing": one.missing or None,
        "heads": heads,
    }


def _bias(one: Bias) -> dict[str, object]:
    parts = [_share(part) for part in one.parts]
    return {"name": one.name, "values": None if one.values is None else one.values.tolist(), "ranks": parts}


def _share(one: WeightShare) -> dict[str, object]:
    return {
        "rank": one.rank,
        "shape": shape_text(one.shape),
        "rms": one.statistic("rms"),
        "absmax": one.statistic("absmax"),
        "checksum": one.checksum,
        "checkpoint": one.checkpoint,
        "empty": one.empty,
    }
