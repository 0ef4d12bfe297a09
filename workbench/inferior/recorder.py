"""From the ranks' answers to what a session holds: pure translation, no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.ranks.client import Answer
from engine.ranks.wire import unpack_array
from engine.taps.names import TapSpec
from sessions.records import STATISTICS, SequenceStep, StepRecord, Tap, TensorRecord
from workbench.views.cached_lengths import in_words, odd_lengths

#: What the policy "last" keeps of a tensor [T, …], and of scores and probs [heads, T, K].
LAST_ROW, LAST_ATTENTION_ROW = "-1:", ":,-1:"
ATTENTION = (".attn.scores", ".attn.probs")


def taps_of(specs: Sequence[TapSpec]) -> list[Tap]:
    """The engine's taps as a session declares them."""
    return [Tap(i, spec.name, str(spec.layout)) for i, spec in enumerate(specs)]


def step_record(step: int, answers: Sequence[Answer], specs: Sequence[TapSpec]) -> StepRecord:
    """One forward pass, as all ranks told it."""
    first = answers[0]
    stats = checksums = None
    if "stats" in first:
        shape = (len(specs), len(STATISTICS))
        per_rank = [np.frombuffer(a["stats"], dtype=np.float32).reshape(shape) for a in answers]
        stats = np.stack(per_rank, axis=1)  # [taps, ranks, statistics]
        checksums = np.stack([np.frombuffer(a["checksums"], dtype=np.uint64) for a in answers], axis=1)
    return StepRecord(
        step=step,
        phase=first["phase"],
        sequences=[_sequence(i, answers) for i in range(len(first["sequences"]))],
        wall_seconds=max(answer["seconds"] for answer in answers),
        stats=stats,
        checksums=checksums,
        tensors=[
            _tensor(one, rank, specs) for rank, answer in enumerate(answers) for one in answer["tensors"]
        ],
        free_blocks=first["free"],
        used_blocks=first["used"],
    )


def misaligned(answers: Sequence[Answer], record: StepRecord) -> str:
    """Where a layer of a rank has not cached just what was run, in words; empty: nowhere."""
    for told, sequence in zip(answers[0]["sequences"], record.sequences, strict=True):
        odd = odd_lengths(sequence, told["expected_kv_len"])
        if odd:
            run = told["expected_kv_len"]
            return f"sequence {told['seq']}, step {record.step}: {run} tokens were run, the cache holds {in_words(odd)}"
    return ""


def _sequence(index: int, answers: Sequence[Answer]) -> SequenceStep:
    told = answers[0]["sequences"][index]
    return SequenceStep(
        seq=told["seq"],
        ids=told["ids"],
        positions=told["positions"],
        kv_lens=[answer["sequences"][index]["held"] for answer in answers],
        block_table=told["block_table"],
        emitted=told["emitted"],
        forced=told["forced"],
        topk_ids=told["top_ids"],
        topk_logits=told["top_logits"],
        logsumexp=told["logsumexp"],
        entropy=told["entropy"],
    )


def _tensor(one: dict[str, Any], rank: int, specs: Sequence[TapSpec]) -> TensorRecord:
    array, dtype = unpack_array(one)
    name = specs[one["tap"]].name
    whole = one["cut"] == "full"
    part = "" if whole else LAST_ATTENTION_ROW if name.endswith(ATTENTION) else LAST_ROW
    return TensorRecord(name, rank, one["seq"], array, dtype, part)
