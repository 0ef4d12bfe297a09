"""transformers' own modules under tensor parallelism, all ranks as threads of one process, recorded as one session.

Each rank has a copy of the model, its weights cut as Megatron cuts them (the plan of transformers' `_tp_plan`, with a
split vocabulary): query and KV heads, columns of gate and up, input columns of o and down, rows of the embedding and of
the head. Sums over the ranks go through a `Ring`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from lockstep.engine.taps.names import tap_specs
from lockstep.sessions import SequenceStep, SessionWriter, StepRecord, Tap, TensorRecord
from lockstep.sessions.meta import ConfigMeta, SequenceMeta
from lockstep.workbench.references.arrays import array, dtype_name
from lockstep.workbench.references.request import GoldenRequest
from lockstep.workbench.references.transformers_recorder import _TransformersModel

#: Seconds after which a rank that waits for the others gives up.
PATIENCE = 60.0


class Ring:
    """Tensors handed among the ranks, each of which calls the same methods in the same order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._slots: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def gather(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in the order of ranks."""
        self._slots[rank] = tensor
        self._barrier.wait(PATIENCE)
        found = list(self._slots)
        self._barrier.wait(PATIENCE)
        return found

    def sum(self, rank: int, tensor: Tensor) -> Tensor:
        return torch.stack(self.gather(rank, tensor)).sum(0)

    def abort(self) -> None:
        self._barrier.abort()


def bounds(size: int, tp: int, rank: int) -> slice:
    """Rank's rows of `size`, the last ranks' fewer where it does not divide."""
    rows = -(-size // tp)
    return slice(min(rank * rows, size), min((rank + 1) * rows, size))


def shard(model: Any, rank: int, ring: Ring) -> None:
    """Cut `model` down to what `rank` holds, and make its sums go through the ring."""
    tp, decoder = ring.size, model.model
    for layer in decoder.layers:
        attn, mlp = layer.self_attn, layer.mlp
        heads, kv_heads = (side.out_features // attn.head_dim for side in (attn.q_proj, attn.k_proj))
        replicas = max(1, tp // kv_heads)
        kv = bounds(kv_heads, tp // replicas, rank // replicas)
        attn.num_key_value_groups = (heads // tp) // (kv.stop - kv.start)
        _rows(attn.q_proj, _times(bounds(heads, tp, rank), attn.head_dim))
        _rows(attn.k_proj, _times(kv, attn.head_dim))
        _rows(attn.v_proj, _times(kv, attn.head_dim))
        for side in (mlp.gate_proj, mlp.up_proj):
            _rows(side, bounds(side.out_features, tp, rank))
        for side in (attn.o_proj, mlp.down_proj):
            _columns(side, bounds(side.in_features, tp, rank), rank, ring)
    vocabulary = bounds(model.lm_head.out_features, tp, rank)
    head = model.lm_head.weight.detach()
    _rows(decoder.embed_tokens, vocabulary)
    model.lm_head.weight = nn.Parameter(head[vocabulary].clone(), requires_grad=False)
    _split_embedding(decoder.embed_tokens, vocabulary, rank, ring)


def _times(span: slice, factor: int) -> slice:
    return slice(span.start * factor, span.stop * factor)


def _rows(module: Any, span: slice) -> None:
    module.weight = nn.Parameter(module.weight.detach()[span].clone(), requires_grad=False)
    if getattr(module, "bias", None) is not None:
        module.bias = nn.Parameter(module.bias.detach()[span].clone(), requires_grad=False)


def _columns(module: Any, span: slice, rank: int, ring: Ring) -> None:
    """A row-parallel linear layer: `module.reduce(partial)` makes the sum, then the bias is added once."""
    module.weight = nn.Parameter(module.weight.detach()[:, span].clone(), requires_grad=False)
    module.reduce = lambda partial: ring.sum(rank, partial)

    def forward(x: Tensor) -> Tensor:
        partial = nn.functional.linear(x, module.weight)
        module.see(partial)
        whole = module.reduce(partial)
        return whole if module.bias is None else whole + module.bias

    module.forward = forward


def _split_embedding(module: Any, span: slice, rank: int, ring: Ring) -> None:
    """`module.first` is the id of its first row; ids of other ranks give zeros, and the sum joins them."""
    module.first = span.start

    def forward(ids: Tensor) -> Tensor:
        local = ids - module.first
        mine = (local >= 0) & (local < module.weight.shape[0])
        rows = nn.functional.embedding(local.where(mine, 0), module.weight)
        return ring.sum(rank, rows * mine[..., None].to(rows.dtype))

    module.forward = forward


def record_ranks(models: Sequence[Any], ring: Ring, request: GoldenRequest, path: Path) -> None:
    """Record the sharded `models`, teacher-forced on the request's sequences."""
    runs = [_TransformersModel(model, request, "") for model in models]
    ranks = range(ring.size)
    whole = models[0].config
    specs = tap_specs(
        whole.num_hidden_layers,
        {"qk_norm"} if hasattr(models[0].model.layers[0].self_attn, "q_norm") else (),
        max(1, ring.size // whole.num_key_value_heads),
    )
    taps = [Tap(i, spec.name, str(spec.layout)) for i, spec in enumerate(specs)]
    known = runs[0].meta()
    meta = replace(
        known,
        config=ConfigMeta(tp=ring.size, device="cpu", dtype=request.dtype),
        sequences={
            seq: SequenceMeta(prompt_ids=plan.prompt, forced=plan.forced)
            for seq, plan in enumerate(request.sequences)
        },
        absent={},
        biases={},
    )
    with (
        SessionWriter.create(path, taps=taps, ranks=ring.size, meta=meta) as writer,
        ThreadPoolExecutor(ring.size) as pool,
    ):
        read = [0] * len(request.sequences)
        for step in range(request.steps + 1):
            tensors: list[TensorRecord] = []
            done = []
            for seq, plan in enumerate(request.sequences):
                assert plan.forced is not None
                ids = plan.prompt if step == 0 else (plan.forced[step - 1],)
                passes = [pool.submit(_forward, runs[rank], rank, seq, ids, ring) for rank in ranks]
                for one in passes:
                    tensors += one.result()
                positions = range(read[seq], read[seq] + len(ids))
                read[seq] += len(ids)
                lengths = [run.cached(seq) for run in runs]
                done.append(
                    SequenceStep(seq, ids, positions, lengths, emitted=plan.forced[step], forced=True)
                )
            phase = "decode" if step else "prefill"
            writer.step(0, StepRecord(step, phase, done, 0.0, tensors=tensors))


def _forward(run: Any, rank: int, seq: int, ids: Sequence[int], ring: Ring) -> list[TensorRecord]:
    """One rank's pass of one sequence."""
    found: list[TensorRecord] = []

    def see(tap: str, tensor: Tensor) -> None:
        found.append(TensorRecord(tap, rank, seq, array(tensor), dtype_name(tensor)))

    for i, layer in enumerate(run.model.model.layers):
        layer.self_attn.o_proj.see = _seen(see, f"layers.{i}.attn.o_proj.partial")
        layer.mlp.down_proj.see = _seen(see, f"layers.{i}.mlp.down.partial")
    try:
        run.forward(seq, ids, see)
    except BaseException:
        ring.abort()
        raise
    return found


def _seen(see: Callable[[str, Tensor], None], tap: str) -> Callable[[Tensor], None]:
    return lambda partial: see(tap, partial[0])
