"""The LoRA adapter that vLLM has put beside a rank's weights, written once a request has brought it.

DUMP/rankN/adapter.safetensors has the factors of each module that the adapter changes, by slices of its rows:
MODULE.0.a [rank, in] and MODULE.0.b [out, rank], which is multiplied by the scale already; weights.json is written
again, and awaits no adapter any longer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import wraps
from typing import Any

from torch import Tensor

from .lockstep_recorder import guarded, weights_alone
from .lockstep_tap import write_safetensors
from .lockstep_weights import rank_folder, write_facts


def vllm_adapters(module: Any) -> None:
    """After `vllm.lora.worker_manager`: whenever a request's adapter has been put into force. Adapters of warming up
    come another way."""
    for of in (module.WorkerLoRAManager, module.LRUCacheWorkerLoRAManager):
        if "add_adapter" in vars(of):
            of.add_adapter = _watched(of.add_adapter)


def _watched(add: Any) -> Any:
    @wraps(add)
    def add_adapter(self: Any, request: Any) -> Any:
        added = add(self, request)
        guarded("keeping vLLM's adapter", _keep)(self._adapter_manager, request)
        return added

    return add_adapter


def _keep(manager: Any, request: Any) -> None:
    """The first adapter alone."""
    from vllm.distributed import parallel_state

    if not weights_alone():
        return
    folder = rank_folder(parallel_state.get_tp_group().rank_in_group)
    facts = json.loads((folder / "weights.json").read_text(encoding="utf-8"))
    if not facts.get("awaits_adapter"):
        return
    slot = manager.lora_index_to_id.index(request.lora_int_id)
    adapter = manager.get_adapter(request.lora_int_id)
    kept: dict[str, Tensor] = {}
    unread: dict[str, str] = {}
    for name, module in manager.modules.items():
        if why := _unreadable(module):
            if manager._get_lora_layer_weights(adapter, name):
                unread[name] = why
            continue
        kept.update(_factors(name, module, slot))
    write_safetensors(folder / "adapter.safetensors", kept)
    facts |= {"awaits_adapter": False, "adapter_path": str(request.lora_path), "unread": unread}
    write_facts(folder, facts)


def _unreadable(module: Any) -> str:
    """Why the factors of a module cannot be taken as they lie there; "" where they can."""
    a, b = getattr(module, "lora_a_stacked", None), getattr(module, "lora_b_stacked", None)
    if not isinstance(a, tuple) or not isinstance(b, tuple) or len(a) != len(b):
        return f"{type(module).__name__} holds its adapter in a form of its own"
    if getattr(module.lora_config, "fully_sharded_loras", False) and module.tp_size > 1:
        return "fully_sharded_loras divides the factors over ranks"
    return ""


def _factors(name: str, module: Any, slot: int) -> Iterator[tuple[str, Tensor]]:
    """By slices of the module's rows; none where the adapter has nothing for it."""
    pairs = [
        (a[slot, 0], b[slot, 0]) for a, b in zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
    ]
    if any(bool(x.any()) for pair in pairs for x in pair):
        for number, (a, b) in enumerate(pairs):
            yield f"{name}.{number}.a", a
            yield f"{name}.{number}.b", b
