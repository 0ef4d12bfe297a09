"""The weights that a rank of an engine holds, written as they are before anything is computed with them.

DUMP/rankN/weights.safetensors has every parameter and buffer once, in its own dtype; weights.json, which is written
last, what is to be known of them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .lockstep_config_reads import names_read
from .lockstep_recorder import guarded, version, weights_alone
from .lockstep_tap import CODES, write_safetensors


def keep_weights(
    module: nn.Module, engine: str, rank: int, size: int, model: str = "", *, awaits_adapter: bool = False
) -> None:
    """Write the weights of `module`, which `rank` of `size` holds; an error is reported, and the engine goes on."""
    guarded("keeping the weights", _keep)(module, engine, rank, size, model, awaits_adapter)


def rank_folder(rank: int) -> Path:
    """Where a rank of an attached engine writes."""
    return Path(os.environ["LOCKSTEP_TAP"]) / f"rank{rank}"


def write_facts(folder: Path, facts: Mapping[str, object]) -> None:
    """weights.json, which is whole or not there at any time."""
    new = folder / "weights.json.new"
    new.write_text(json.dumps(facts), encoding="utf-8")
    os.replace(new, folder / "weights.json")


def _keep(module: nn.Module, engine: str, rank: int, size: int, model: str, awaits_adapter: bool) -> None:
    folder = rank_folder(rank)
    if not (folder / "weights.json").exists():  # else of another model in the same process, as a draft's
        named = f"{engine} {version(engine)}".strip()
        write_weights(module, folder, named, rank, size, model, awaits_adapter=awaits_adapter)


def write_weights(
    module: nn.Module,
    folder: Path,
    engine: str,
    rank: int,
    size: int,
    model: str = "",
    *,
    whole: bool = False,
    awaits_adapter: bool = False,
) -> None:
    """Into a rank's folder. `whole`: of what FSDP has cut the whole tensors, for which every rank has to come here.
    `awaits_adapter`: the engine goes on until it has loaded one."""
    folder.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Tensor] = {}
    facts: dict[str, Any] = {"engine": engine, "rank": rank, "size": size}
    facts |= {"model": str(model), "buffers": [], "same": {}, "skipped": {}, "dtypes": {}}
    facts |= {"adapters": dict(_adapters(module)), "awaits_adapter": awaits_adapter}
    facts["reads"] = [] if rank else sorted(names_read(module))  # the same on all
    seen: dict[tuple[Any, ...], str] = {}
    for name, held, is_buffer in _tensors(module):
        x, dtype = _of_rank(held, whole=whole), str(held.dtype).removeprefix("torch.")
        if x.is_meta or (dtype not in CODES and not dtype.startswith("float8")):
            facts["skipped"][name] = "meta" if x.is_meta else dtype
            continue
        key = (x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, x.device)
        if x.numel() and seen.setdefault(key, name) != name:
            facts["same"][name] = seen[key]
            continue
        kept[name] = x.detach()
        if dtype not in CODES:  # all numbers of eight bits are numbers of 32
            kept[name], facts["dtypes"][name] = kept[name].float(), dtype
        if is_buffer:
            facts["buffers"].append(name)
    room, needed = shutil.disk_usage(folder).free, sum(x.nbytes for x in kept.values())
    if needed * size > room:
        raise OSError(
            f"no room on the disk: {size} ranks have {needed >> 20} MiB each, {room >> 20} MiB are free"
        )
    write_safetensors(folder / "weights.safetensors", kept)
    write_facts(folder, facts)


def _of_rank(held: Any, *, whole: bool) -> Tensor:
    """A tensor, or of one that is cut over ranks this one's part."""
    found: Tensor = held
    if hasattr(held, "to_local"):
        found = held.full_tensor() if whole else held.to_local()
    return found


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Parameters and buffers by name, one that has two names under both."""
    yield from ((name, one, False) for name, one in module.named_parameters(remove_duplicate=False))
    yield from ((name, one, True) for name, one in module.named_buffers(remove_duplicate=False))


def _adapters(module: nn.Module) -> Iterator[tuple[str, dict[str, float | bool]]]:
    """What modules that PEFT has wrapped do with their adapter; of several the one that acts, or the last."""
    for name, one in module.named_modules():
        part: Any = one
        if not all(
            hasattr(part, word) for word in ("lora_A", "scaling", "active_adapters", "merged_adapters")
        ):
            continue  # another library's, or none
        active = () if getattr(part, "disable_adapters", False) else tuple(part.active_adapters)
        merged = tuple(part.merged_adapters)
        for adapter, scale in sorted(part.scaling.items(), key=lambda item: item[0] in active):
            yield name, {"scale": float(scale), "active": adapter in active, "merged": adapter in merged}


def vllm_loader(module: Any) -> None:
    """After `vllm.model_executor.model_loader.utils`: once a model's weights are loaded, before they are repacked."""
    process = module.process_weights_after_loading

    def process_weights_after_loading(model: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        guarded("keeping the weights of vLLM", _vllm)(model, model_config)
        return process(model, model_config, *args, **kwargs)

    module.process_weights_after_loading = process_weights_after_loading


def _vllm(model: Any, config: Any) -> None:
    from vllm.config import get_current_vllm_config
    from vllm.distributed import parallel_state

    if not weights_alone():
        return
    group, awaited = parallel_state.get_tp_group(), _adapter_awaited(get_current_vllm_config())
    keep_weights(model, "vllm", group.rank_in_group, group.world_size, config.model, awaits_adapter=awaited)


def _adapter_awaited(config: Any) -> bool:
    """Whether an adapter is to be compared that this engine may yet load, by vLLM's configuration."""
    return bool(os.environ.get("LOCKSTEP_TAP_ADAPTER")) and getattr(config, "lora_config", None) is not None
