"""The golden reference: a session recorded from Hugging Face transformers, teacher-forced, tap by tap.

Every sequence runs on its own, as a batch of one with a cache of its own, so that no padding and no other
sequence can touch its numbers; the steps of all sequences are merged into the records of one session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from sessions.meta import HUGGING_FACE, ConfigMeta, ModelMeta, SequenceMeta, SessionMeta
from sessions.records import STATISTICS, SequenceStep, StepRecord, Tap, TensorRecord
from sessions.writer import SessionWriter
from workbench.references.arrays import array, dtype_name, statistics
from workbench.references.doubles import DoubleWhereFloat
from workbench.references.hooks import absent_taps, golden_taps, tapped
from workbench.references.loading import load_golden
from workbench.references.request import GoldenRequest, GoldenSequence, ReferenceFailure, model_directory

#: How many of the largest logits a step keeps by themselves.
TOP_K = 20


@dataclass(slots=True)
class _SequenceRun:
    """One sequence on its way: the tokens it reads next, and all it has read."""

    seq: int
    plan: GoldenSequence
    # Without a config every layer of the cache is complete; sliding-window layers would drop old keys.
    cache: DynamicCache = field(default_factory=DynamicCache)
    read: int = 0
    next_ids: tuple[int, ...] = ()


def record(
    request: GoldenRequest, path: Path, *, checkpoint: str = "", progress: Callable[[], None] | None = None
) -> None:
    """Record the session that `request` asks for at `path`. `checkpoint` is the checkpoint's digest.

    `progress` is called after every step. ReferenceFailure where the model cannot be loaded or the
    ids do not fit it.
    """
    directory = model_directory(request.model_dir)
    torch.set_num_threads(request.threads)
    model = load_golden(directory, request.dtype, request.device)
    _check_ids(request, model.config)
    taps = [Tap(i, spec.name, str(spec.layout)) for i, spec in enumerate(golden_taps(model))]
    with SessionWriter.create(path, taps=taps, ranks=1, meta=_meta(request, model, checkpoint)) as writer:
        for step in golden_steps(model, request.sequences, request.steps, taps):
            writer.step(0, step)
            if progress:
                progress()


def golden_steps(
    model: Any, sequences: Sequence[GoldenSequence], steps: int, taps: Sequence[Tap]
) -> Iterator[StepRecord]:
    """Run `model` step by step: the prefill, then `steps` decode steps of one token a sequence."""
    runs = [_SequenceRun(seq, plan, next_ids=plan.prompt) for seq, plan in enumerate(sequences)]
    for step in range(steps + 1):
        active = [run for run in runs if run.plan.runs(step)]
        if not active:
            return
        yield _step(model, active, step, taps)


def _step(model: Any, runs: Sequence[_SequenceRun], step: int, taps: Sequence[Tap]) -> StepRecord:
    started = time.perf_counter()
    tensors: list[TensorRecord] = []
    done: list[SequenceStep] = []
    seen: dict[str, list[Tensor]] = {tap.name: [] for tap in taps}
    for run in runs:

        def see(tap: str, tensor: Tensor, seq: int = run.seq) -> None:
            tensor = tensor.detach().clone()  # the model may overwrite its own later in the pass
            seen[tap].append(tensor)
            tensors.append(TensorRecord(tap, 0, seq, array(tensor), dtype_name(tensor)))

        done.append(_forward(model, run, step, see))
    elapsed = time.perf_counter() - started
    stats = np.full((len(taps), 1, len(STATISTICS)), np.nan, dtype=np.float32)
    for tap in taps:
        if seen[tap.name]:
            stats[tap.index, 0] = statistics(seen[tap.name], masked=tap.name.endswith(".scores"))
    phase = "decode" if step else "prefill"
    return StepRecord(step, phase, done, elapsed, stats=stats, tensors=tensors)


def _forward(model: Any, run: _SequenceRun, step: int, see: Callable[[str, Tensor], None]) -> SequenceStep:
    """One forward pass of one sequence: reads `run.next_ids`, decides what the next step reads."""
    ids = run.next_ids
    wide = DoubleWhereFloat() if model.dtype is torch.float64 else nullcontext()
    with torch.inference_mode(), tapped(model, see), wide:
        out = model(
            input_ids=torch.tensor([ids], device=model.device),
            past_key_values=run.cache,
            use_cache=True,
            logits_to_keep=1,
        )
    logits = out.logits[0, -1].double()
    forced = run.plan.forced is not None and step < len(run.plan.forced)
    top = logits.argsort(descending=True, stable=True)[:TOP_K]  # of equals the lowest id, on every device
    emitted = run.plan.forced[step] if run.plan.forced and forced else int(top[0])
    log_probs = logits.log_softmax(-1)
    positions = range(run.read, run.read + len(ids))
    run.read += len(ids)
    run.next_ids = (emitted,)
    return SequenceStep(
        run.seq,
        ids,
        positions,
        kv_lens=[[run.cache.get_seq_length(layer) for layer in range(len(run.cache.layers))]],
        emitted=emitted,
        forced=forced,
        topk_ids=top.tolist(),
        topk_logits=logits[top].tolist(),
        logsumexp=logits.logsumexp(-1).item(),
        entropy=-(log_probs.exp() * log_probs).nansum().item(),
    )


def _check_ids(request: GoldenRequest, config: Any) -> None:
    vocab, context = config.vocab_size, config.max_position_embeddings
    for seq, plan in enumerate(request.sequences):
        highest = max((*plan.prompt, *(plan.forced or ())))
        if highest >= vocab:
            raise ReferenceFailure(
                f"sequence {seq}: token id {highest} is outside the vocabulary of {vocab}", 2
            )
        decoded = request.steps if plan.forced is None else min(request.steps, len(plan.forced))
        if len(plan.prompt) + decoded > context:
            raise ReferenceFailure(
                f"sequence {seq}: {len(plan.prompt)} prompt tokens and {decoded} steps exceed the context of {context}",
                2,
            )


def _meta(request: GoldenRequest, model: Any, checkpoint: str) -> SessionMeta:
    config = model.config.to_dict()
    shape = {ours: config[theirs] for theirs, ours in HUGGING_FACE.items() if config.get(theirs) is not None}
    return SessionMeta(
        source="transformers",
        model=ModelMeta(name=Path(request.model_dir).name, checkpoint=checkpoint, **shape),
        config=ConfigMeta(tp=1, device=request.device, dtype=request.dtype),
        sequences={
            seq: SequenceMeta(prompt_ids=plan.prompt, forced=plan.forced)
            for seq, plan in enumerate(request.sequences)
        },
        versions={"torch": str(torch.__version__), "transformers": transformers.__version__},
        notes=(
            "eager attention; the cache is complete, sliding windows act through the mask alone",
            "each sequence ran on its own",
        ),
        absent=absent_taps(model),
        biases=_biases(model),
    )


def _biases(model: Any) -> dict[str, bytes]:
    """Checkpoint name -> the bias as little-endian float64: what a dropped bias is recognised by."""
    return {
        name: parameter.detach().double().cpu().numpy().astype("<f8").tobytes()
        for name, parameter in model.named_parameters()
        if name.endswith(".bias")
    }
