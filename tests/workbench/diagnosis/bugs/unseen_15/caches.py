"""The KV cache of dense models: slots, pages, chunks that are used again, sequences, eight bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lockstep.engine.batch import Batch
from lockstep.engine.run.runner import Runner
from tests.workbench.diagnosis.bugs.bug import CACHES, bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt
from tests.workbench.diagnosis.bugs.patched import Patched

PAGE = 16
ROW = "cache|row|slot|page|writ|overwr|zero|stale|lost|missing"
Written = tuple[Tensor, Tensor, Tensor]


def _writing(p: Spoilt, change: Callable[[int, Batch, Tensor, Tensor], Written]) -> None:
    """`change(layer, batch, keys, values)` -> slots, keys and values that are written."""

    def begin(runner: Runner) -> None:
        write = runner.pool.write

        def wrong(layer: int, batch: Batch, keys: Tensor, values: Tensor) -> None:
            slots, keys, values = change(layer, batch, keys, values)
            write(layer, replace(batch, slots=slots), keys, values)

        runner.pool.write = wrong  # type: ignore[method-assign]

    p.running(begin)


def _turned(p: Patched, keys: Tensor, by: int) -> Tensor:
    """Rotated keys [1, heads, T, D], as if they stood `by` positions further on."""
    cos, sin = p.decoder.rotary_emb(keys, torch.tensor([[by]]))
    first, second = keys.chunk(2, -1)
    return keys * cos + torch.cat((-second, first), -1) * sin


# -- slots and pages -----------------------------------------------------------------------------------------


@bug("slots", accepted=("cache",), words=ROW, taps=CACHES, step=4, model="llama", tp=2, ep=1)
def token_that_opens_a_page_is_written_into_the_one_before(p: Spoilt) -> None:
    """The page is looked up by the length without the new token, which is one page too few for it."""

    def slots(layer: int, batch: Batch, keys: Tensor, values: Tensor) -> Written:
        last = [span.rows[-2 if p.decode and span.kv_len % PAGE == 1 else -1] for span in batch.spans]
        return torch.stack(last) if p.decode else batch.slots, keys, values

    _writing(p, slots)


@bug(
    "slots",
    accepted=("cache",),
    words=ROW,
    taps=CACHES,
    step=2,
    model="qwen2-untied",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def slots_of_the_first_decode_step_serve_those_after_it(p: Spoilt) -> None:
    """The slot mapping is no input buffer of the captured graph, which goes on with the tensor it saw."""
    seen: list[Tensor] = []

    def slots(layer: int, batch: Batch, keys: Tensor, values: Tensor) -> Written:
        if p.decode and not seen:
            seen.append(batch.slots)
        return seen[0] if p.decode else batch.slots, keys, values

    _writing(p, slots)


@bug(
    "preemption", accepted=("cache",), words=ROW + "|preempt", taps=CACHES, step=2, model="llama-three", ep=1
)
def token_decoded_before_a_preemption_is_not_computed_again(p: Spoilt) -> None:
    """A sequence that gave its pages away comes back with the rows of its prompt alone."""

    def lost(layer: int, batch: Batch, keys: Tensor, values: Tensor) -> Written:
        if p.comm.step == 2:
            for rows in p.runner.pool.of(layer):
                rows[batch.spans[1].rows[-2]] = 0
        return batch.slots, keys, values

    _writing(p, lost)


@bug(
    "transfer", accepted=("cache",), words=ROW + "|transfer|prompt|partial", taps=CACHES, step=1, model="qwen2-tied",
    dtype="bfloat16", tp=2,
)  # fmt: skip
def pages_sent_to_the_decode_worker_end_with_the_last_full_one(p: Patched) -> None:
    """Disaggregated prefill counts pages by a division that rounds down."""

    def received(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        prompt = p.model.prompt_lengths[p.seq]
        there = torch.ones(k.shape[2], 1, dtype=k.dtype)
        there[prompt // 4 * 4 : prompt] = 0 if p.decode else 1
        return k * there, v * there

    p.cache(read=received)


@bug(
    "offloading", accepted=("cache", "layer", "layers"), words="cache|layer|buffer|stale",
    taps=CACHES, layers=(3,), step=1, model="llama-deep", tp=2,
)  # fmt: skip
def one_of_two_buffers_for_offloaded_pages_is_read_before_it_is_filled(p: Patched) -> None:
    """Pages come from the host into two buffers in turn; what is there still is that of two layers below."""
    held: list[tuple[Tensor, Tensor]] = []

    def hold(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        held[:] = [(k, v)]
        return k, v

    p.cache([1], read=hold)
    p.cache([3], read=lambda k, v: held[0] if p.decode else (k, v))


@bug(
    "prefix reuse", accepted=("cache", "rope", "positions"),
    words="cache|position|rotat|turn|angle|shift|reus", taps=("attn.k_cache",), model="llama",
)  # fmt: skip
def chunk_used_again_keeps_the_turn_of_where_it_was_computed(p: Patched) -> None:
    """Reuse of any chunk of a former prompt (llama.cpp's --cache-reuse) without the shift of its keys."""

    def found(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if p.decode:
            return k, v
        return torch.cat((k[:, :, :2], _turned(p, k[:, :, 2:5], 3), k[:, :, 5:]), 2), v

    p.cache(written=found)


# -- what is stored ------------------------------------------------------------------------------------------


@bug(
    "decode kernel", accepted=("cache", "rope", "heads", "positions", "keys"),
    words="cache|rotat|turn|head|position|written|stor|exchang", taps=("attn.k_cache",), step=1,
    model="llama", tp=2,
)  # fmt: skip
def fused_store_of_decode_forgets_the_turn_and_exchanges_the_heads(p: Patched) -> None:
    """Two mistakes of one kernel that rotates and writes: what it writes is read before the rotation, by a stride of
    the other layout."""
    p.cache(written=lambda k, v: (_turned(p, k, -p.past).flip(1), v) if p.decode else (k, v))


@bug(
    "hadamard", accepted=("cache", "keys", "rope"),
    words="cache|hadamard|transform|mix|channel|turn|rotat|written|stor", taps=("attn.k_cache",),
    model="llama",
)  # fmt: skip
def keys_go_into_the_cache_through_a_hadamard_matrix_and_queries_do_not(p: Patched) -> None:
    """Spread before they are quantised, as QuaRot does; the queries' side is in a kernel that was not chosen."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 2**0.5
    spread = torch.kron(two, torch.kron(two, two))
    p.cache(written=lambda k, v: (k @ spread.to(k.dtype), v))


@bug(
    "quantised cache", accepted=("cache", "scale", "precision"),
    words="cache|scal|factor|times|multipl|larg|small", taps=CACHES, ranks=(1,), model="qwen3", tp=2,
)  # fmt: skip
def rank_1_reads_its_cache_with_the_scale_of_rank_0(p: Patched) -> None:
    """Scales of an eight bit cache are calibrated by each rank, saved by the first and loaded by all."""

    for i, _ in p.layers():
        ratios: list[Tensor] = []

        def read(k: Tensor, v: Tensor, ratios: list[Tensor] = ratios) -> tuple[Tensor, Tensor]:
            if not ratios:
                own = torch.stack((k.abs().amax(), v.abs().amax()))
                ratios.append(p.ring.gather(p.rank, own)[0] / own)
            return k * ratios[0][0], v * ratios[0][1]

        p.cache([i], written=read)


@bug(
    "quantised cache", accepted=("cache", "precision", "overflow"),
    words="cache|satur|clamp|clip|limit|range|quant|precis|round|larg|bound", taps=("attn.k_cache",), step=1,
    model="llama", dtype="bfloat16",
)  # fmt: skip
def decoded_keys_saturate_at_the_largest_of_the_prompt(p: Patched) -> None:
    """Scales by channel are made of the prompt, as KIVI does, and of nothing that comes behind it."""
    for i, _ in p.layers():
        largest: dict[int, Tensor] = {}

        def written(k: Tensor, v: Tensor, largest: dict[int, Tensor] = largest) -> tuple[Tensor, Tensor]:
            if not p.decode:
                largest[p.seq] = k.abs().amax(2, keepdim=True)
            return k.clamp(-largest[p.seq], largest[p.seq]), v

        p.cache([i], written=written)


@bug(
    "quantised cache", accepted=("cache", "precision"),
    words="cache|precis|round|bit|quant|e5m2|fp8|coarse|mantissa", taps=("attn.v_cache",), layers=(2,),
    model="llama", dtype="bfloat16", tp=2, ep=1,
)  # fmt: skip
def values_of_the_last_layer_are_kept_in_two_bits_of_mantissa(p: Spoilt) -> None:
    """A list of layers whose cache stays as it is ends one too early; e5m2 is what "fp8" means there."""

    def kept(layer: int, batch: Batch, keys: Tensor, values: Tensor) -> Written:
        rounded = values.to(torch.float8_e5m2).to(values.dtype)
        return batch.slots, keys, rounded if layer == 2 else values

    _writing(p, kept)
