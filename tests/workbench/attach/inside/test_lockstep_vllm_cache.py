"""What vLLM hands its attention, on stand-ins of its runner and its scheduler."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.workbench.attach.inside.lockstep_vllm_cache import cache_accesses


class SlidingWindowSpec(SimpleNamespace):
    """vLLM's, by its name."""


class FullAttentionSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


def group(spec: Any, *layers: int, **more: Any) -> SimpleNamespace:
    names = [f"model.layers.{layer}.self_attn.attn" for layer in layers]
    return SimpleNamespace(layer_names=names, kv_cache_spec=spec, kernel_block_size=None, **more)


def runner(groups: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A runner in whose forward context each group has the metadata that it brings."""
    context = ModuleType("vllm.forward_context")
    reported = {name: one.metadata for one in groups for name in one.layer_names}
    context.get_forward_context = lambda: SimpleNamespace(attn_metadata=reported)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.forward_context", context)
    return SimpleNamespace(attn_groups=[groups])


def scheduled(new: list[Any] = [], running: dict[str, int] | None = None) -> SimpleNamespace:  # noqa: B006
    cached = running or {}
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=list(cached.values())
        ),
    )


METADATA = SimpleNamespace(
    slot_mapping=torch.tensor([36, 40, 41, -1]),
    block_table=torch.tensor([[7, 9, 0], [2, 10, 0], [0, 0, 0]]),
    seq_lens=torch.tensor([5, 6, 0]),
)
NEW = SimpleNamespace(
    req_id="b", num_computed_tokens=4, prefill_token_ids=None, prompt_token_ids=[5, 6, 7, 8, 9, 1]
)
SPANS = [("a", 1), ("b", 2)]


def test_slots_and_blocks_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    full = group(FullAttentionSpec(block_size=4), 0, 2, metadata=METADATA)
    window = group(SlidingWindowSpec(block_size=4, sliding_window=8), 1, metadata=METADATA)
    state = group(MambaSpec(block_size=4), 3, metadata=METADATA)
    reported = cache_accesses(runner([full, window, state], monkeypatch), scheduled([NEW], {"a": 4}), SPANS)
    assert reported is not None
    assert reported["requests"] == [
        {"request": "a", "rows": 1, "computed": 4, "cached": []},
        {"request": "b", "rows": 2, "computed": 4, "cached": [5, 6, 7, 8]},
    ]
    first, second = reported["groups"]
    assert (first["layers"], first["window"], second["layers"], second["window"]) == ([0, 2], None, [1], 8)
    assert (first["slots"], first["padding"], first["lengths"]) == ([36, 40, 41], [-1], [5, 6])
    assert first["blocks"] == [[7, 9], [2, 10]]


def test_a_layer_without_a_block_table_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    without = group(FullAttentionSpec(block_size=4), 0, metadata=SimpleNamespace())
    assert cache_accesses(runner([without], monkeypatch), scheduled([NEW], {"a": 4}), SPANS) is None
