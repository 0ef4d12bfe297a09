"""Where vLLM puts the rows of its cache, and which it reads: what it hands its attention in a pass, as integers.

Taken from the forward context, of each group of layers with a block table; what the scheduler counts is reported beside
it, so that one can be held against the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

#: Specs of caches that hold a row a token in the slots of a block table.
PAGED = ("FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec", "SlidingWindowMLASpec")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def unobserved(config: Any) -> str:
    """Why the rows of the cache cannot be followed in an engine with this config; "" where they can."""
    model = getattr(config, "model_config", None)
    if getattr(config, "kv_transfer_config", None) is not None:
        return "a KV transfer fills the cache"
    if getattr(config, "speculative_config", None) is not None:
        return "what is computed is known after the draft is judged"
    if getattr(model, "uses_mrope", False):
        return "positions are no places in the request (M-RoPE)"
    if getattr(model, "is_hybrid", False):
        return "states of linear attention come from the prefix cache too"
    if getattr(config, "use_v2_model_runner", False):
        return "model runner V2"
    return ""


def cache_accesses(runner: Any, output: Any, spans: Sequence[tuple[str, int]]) -> dict[str, Any] | None:
    """What `tape.cache` takes of the pass at hand: `spans` are its requests with their numbers of rows. None where no
    layer has a block table."""
    from vllm.forward_context import get_forward_context

    context = get_forward_context().attn_metadata
    if not isinstance(context, dict):
        return None
    reported, count = _scheduled(output), sum(rows for _, rows in spans)
    groups = [
        _group(group, context[group.layer_names[0]], len(spans), count)
        for groups in runner.attn_groups
        for group in groups
        if _is_paged(group, context)
    ]
    requests = [
        {"request": name, "rows": rows, "computed": reported[name][0], "cached": reported[name][1]}
        for name, rows in spans
    ]
    return {"requests": requests, "groups": groups} if groups else None


def _scheduled(output: Any) -> Mapping[str, tuple[int, list[int]]]:
    """By request how many of its tokens have rows, and, where it begins now, which these are: the scheduler's count."""
    cached = output.scheduled_cached_reqs
    found = {
        name: (count, list[int]())
        for name, count in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    }
    for one in output.scheduled_new_reqs:
        tokens = one.prefill_token_ids or one.prompt_token_ids or []
        found[one.req_id] = (one.num_computed_tokens, list(tokens[: one.num_computed_tokens]))
    return found


def _is_paged(group: Any, context: Mapping[str, Any]) -> bool:
    metadata = context.get(group.layer_names[0])
    reported = all(
        getattr(metadata, name, None) is not None for name in ("slot_mapping", "block_table", "seq_lens")
    )
    return reported and type(group.kv_cache_spec).__name__ in PAGED


def _group(group: Any, metadata: Any, requests: int, rows: int) -> dict[str, Any]:
    spec = group.kv_cache_spec
    size = getattr(group, "kernel_block_size", None) or spec.block_size
    lengths = metadata.seq_lens[:requests].tolist()
    counts = [-(-length // size) for length in lengths]
    table = metadata.block_table[:requests, : max(counts, default=0)].tolist()
    blocks = [line[:count] for line, count in zip(table, counts, strict=True)]
    numbers = [int(found[1]) for name in group.layer_names if (found := _LAYER.search(name))]
    return {
        "layers": sorted(numbers), "block_size": size, "window": getattr(spec, "sliding_window", None),
        "slots": metadata.slot_mapping[:rows].tolist(), "padding": metadata.slot_mapping[rows:].tolist(),
        "lengths": lengths, "blocks": blocks,
    }  # fmt: skip
