"""A foreign run as a session: rows by request and position, ranks merged, layouts and shapes those of the design."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

import msgspec

from lockstep.engine.graph import outside_of, parts_in
from lockstep.engine.taps.names import count_layers, layer_of, layer_taps
from lockstep.sessions import SequenceStep, SessionWriter, StepRecord, Tap, TensorRecord
from lockstep.sessions.meta import (
    ConfigMeta,
    ForeignMeta,
    ModelMeta,
    SamplingMeta,
    SequenceMeta,
    SessionMeta,
)
from lockstep.workbench.foreign.cache import CacheTables, cache_taps
from lockstep.workbench.foreign.heads import MergedPasses, common_passes, merged_passes
from lockstep.workbench.foreign.measuring import likeliest, statistics
from lockstep.workbench.foreign.passes import Counted, ForeignDumpError, ForeignFacts, ForeignRun, TokenText
from lockstep.workbench.foreign.placing import PlacedTensors
from lockstep.workbench.foreign.rows import PlannedSequence, RowPlan, planned
from lockstep.workbench.foreign.survey import TapSurvey

#: Taps times ranks that a session may have: each has statistics in every step.
MOST_TENSORS = 1 << 20
#: Token texts that a page of the session's meta holds.
_PAGE = 512

_FUSED = "not in the dump; an engine that computes attention in one kernel has no such tensor"
_ABSENT = {
    "attn.scores": _FUSED,
    "attn.probs": _FUSED,
    "attn.k_cache": "the dump has what each pass adds to the cache (k_rope), not the cache",
    "attn.v_cache": "the dump has what each pass adds to the cache (v_proj), not the cache",
}


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """A dump makes objects by the hundred thousand, none in cycles: to look for some as often as usual takes as long as
    the import itself."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_seldom_collected()
def write_session(
    run: ForeignRun,
    path: Path,
    *,
    form: str,
    model: ModelMeta | None = None,
    token: TokenText = lambda token: None,
    progress: Counted = lambda done, of: None,
) -> SessionMeta:
    """Write `run`, a dump of the format `form`, as a new session at `path`; what is in it, and what not. `model` counts
    more than what the dump reports on it; `token` gives the texts of tokens.

    ForeignDumpError for a dump that contradicts itself or holds no whole request; SessionWriteError where the file
    cannot grow. What was written then is no session of use: the caller removes it.
    """
    facts = run.facts if model is None else replace(run.facts, model=model)
    survey = TapSurvey(facts.model)
    merged = merged_passes(run, survey.look)
    plan = planned(merged.heads, facts.model.eos_ids)
    taps, inferred = survey.session_taps(merged.expected)
    reported = next((one.cache for one in merged.heads if one.cache is not None), None)
    taps += [] if reported is None else cache_taps(len(taps))
    facts = replace(facts, notes=run.facts.notes)  # what a reader met while it read
    if len(taps) * merged.expected > MOST_TENSORS:
        raise ForeignDumpError(
            f"{run.folder}: {len(taps)} taps on {merged.expected} ranks are more than a session holds "
            f"({MOST_TENSORS} in a step); record fewer taps"
        )
    meta = _meta(facts, merged, plan, taps, survey)
    foreign = ForeignMeta(
        format=form,
        mode=facts.mode,
        passes=len(merged.heads),
        rows=plan.rows,
        dropped=dict(plan.dropped),
        ranks=merged.ranks,
        cut=dict(merged.cut),
        inferred=inferred,
        requests_inferred=plan.inferred,
        statistics_only=survey.statistics_only,
        shared=plan.shared,
        unknown=plan.unknown,
        caches=() if reported is None else tuple(group.meta for group in reported.groups),
    )
    cache = CacheTables({one.name: seq for seq, one in enumerate(plan.sequences)}, foreign.caches)
    tensors = PlacedTensors(plan, facts.model, survey.called)
    with SessionWriter.create(
        path, taps=taps, ranks=merged.expected, meta=msgspec.structs.replace(meta, foreign=foreign)
    ) as writer:
        last, known = _last_passes(plan), set[int]()
        for number, found in enumerate(common_passes(run, merged)):
            tensors.add(number, found)
            cache.add(number, found)
            while writer.next_step(0) < len(last) and last[writer.next_step(0)] <= number:
                step = writer.next_step(0)
                held = [*tensors.take(step), *cache.take()]
                record = _step(step, plan, taps, merged.expected, held)
                record = replace(
                    record, sequences=[_cached(one, cache, meta, merged) for one in record.sequences]
                )
                known.update(*((*one.ids, *one.topk_ids) for one in record.sequences))
                writer.step(0, record)
            progress(number + 1, len(merged.heads))
        lost = tuple(f"{tap}: {why}" for tap, why in sorted(tensors.lost.items()))
        foreign = msgspec.structs.replace(foreign, lost=lost)
        writer.set_meta(foreign=foreign)
        _write_texts(writer, sorted(known), token)
    return msgspec.structs.replace(meta, foreign=foreign)


def _write_texts(writer: SessionWriter, tokens: Sequence[int], token: TokenText) -> None:
    texts = {one: text for one in tokens if (text := token(one)) is not None}
    ids = list(texts)
    for page, first in enumerate(range(0, len(ids), _PAGE)):
        writer.token_texts(page, {one: texts[one] for one in ids[first : first + _PAGE]})


def _last_passes(plan: RowPlan) -> list[int]:
    """By step the last pass that computes a row of it."""
    last = [0] * plan.steps
    for number, places in enumerate(plan.places):
        for place in chain.from_iterable(places.values()):
            last[place.step] = number
    return last


def _step(
    step: int, plan: RowPlan, taps: Sequence[Tap], ranks: int, tensors: Sequence[TensorRecord]
) -> StepRecord:
    order = {tap.name: tap.index for tap in taps}
    tensors = sorted(tensors, key=lambda one: (order[one.tap], one.seq, one.rank))
    stats, checksums = statistics(taps, ranks, tensors)
    layouts = {tap.name: tap.layout for tap in taps}
    logits: dict[int, dict[int, TensorRecord]] = {}
    for one in tensors:
        if one.tap == "logits":
            logits.setdefault(one.seq, {})[one.rank] = one
    sequences = [
        likeliest(_read(seq, step, one), logits.get(seq, {}), layouts.get("logits", "replicate"), ranks)
        for seq, one in enumerate(plan.sequences)
        if step < one.steps
    ]
    return StepRecord(
        step,
        "decode" if step else "prefill",
        sequences,
        0.0,
        stats=stats,
        checksums=checksums,
        tensors=tensors,
    )


def _read(seq: int, step: int, one: PlannedSequence) -> SequenceStep:
    """What a step read of a sequence, and what came next."""
    span = one.span(step)
    emitted = one.ids[span.stop] if span.stop < len(one.ids) else None
    given = bool(one.greedy) and (
        emitted is None or span.stop - 1 not in one.greedy
    )  # what the last row chose is not known
    return SequenceStep(seq, one.ids[span.start : span.stop], span, kv_lens=[], emitted=emitted, forced=given)


def _cached(one: SequenceStep, cache: CacheTables, meta: SessionMeta, merged: MergedPasses) -> SequenceStep:
    """With what the cache holds of the sequence behind the step, where all ranks report it."""
    lengths, blocks = cache.held(one.seq, one.positions[-1] + 1, meta.model.num_layers or 0)
    return replace(one, kv_lens=lengths if len(lengths) == merged.expected else [], block_table=blocks)


def _meta(
    facts: ForeignFacts, merged: MergedPasses, plan: RowPlan, taps: Sequence[Tap], survey: TapSurvey
) -> SessionMeta:
    names = {tap.name for tap in taps}
    layers = facts.model.num_layers or count_layers(names)
    model: ModelMeta = msgspec.structs.replace(facts.model, num_layers=layers or None)
    embed = survey.taps.get("embed") or next(iter(survey.taps.values()), None)
    return SessionMeta(
        source=facts.source,
        model=model,
        config=ConfigMeta(
            tp=merged.expected,
            block_size=next((one.cache.groups[0].block_size for one in merged.heads if one.cache), None),
            device=facts.device,
            dtype=facts.dtype or ("" if embed is None else embed.dtype),
        ),
        sequences={
            seq: SequenceMeta(
                prompt_ids=one.ids[: one.prompt], sampling=SamplingMeta() if one.greedy else None
            )
            for seq, one in enumerate(plan.sequences)
        },
        versions=dict(facts.versions),
        notes=facts.notes,
        absent=dict(_absent(names, layers)),
    )


def _absent(names: set[str], layers: int) -> Mapping[str, str]:
    """The taps that every decoder has and the dump has not, and why."""
    local = {name.split(".", 2)[2] for name in names if layer_of(name) is not None}
    wanted = [one.tap for one in outside_of(parts_in(local))]
    wanted += [f"layers.{layer}.{name}" for layer in range(layers) for name in layer_taps(parts_in(local))]
    return {tap: _reason(tap, local) for tap in wanted if tap not in names}


def _reason(tap: str, local: set[str]) -> str:
    name = tap if layer_of(tap) is None else tap.split(".", 2)[2]
    if name in local:
        return "not in the dump for this layer"
    if name in ("attn_residual", "mlp_residual"):
        return "not in the dump: a fused norm adds the residual, and its hook did not return it"
    return _ABSENT.get(name, "not in the dump")
