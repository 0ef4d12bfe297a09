"""Dumps in SGLang's two formats, by what its writers do (files made here; nothing of SGLang runs).

`write_passes` follows `TensorDumper` in python/sglang/srt/debug_utils/tensor_dump_forward_hook.py (0.5.23): the top
module's hook adds what went in, writes the file, and only then adds its own output. `Dumper` follows `_Dumper` and
`_NonIntrusiveDumper` in python/sglang/srt/debug_utils/dumper.py (0.5.23).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.workbench.foreign.readers.packed import Outputs, PackedPass, Rank


def write_passes(folder: Path, passes: Iterable[PackedPass], rank: Rank, *, pid: int = 100) -> Path:
    """`--debug-tensor-dump-output-folder`, one rank of it."""
    directory = folder / f"TP{rank.rank}_PP0_Rank{rank.rank}_pid{pid + rank.rank}"
    directory.mkdir(parents=True)
    current: dict[str, Outputs] = {}
    for number, one in enumerate(passes):
        modules = list(rank.modules(one.taps))
        rotary = [x for name, x in modules if name.endswith("rotary_emb")][
            -1
        ]  # one module, hooked once a layer
        for name, x in modules:
            current[name] = rotary if name.endswith("rotary_emb") else x
        for key, x in (("input_ids", one.ids), ("seq_lens", one.lengths), ("positions", one.positions)):
            current[f"model.forward_batch_info.{key}"] = x
        torch.save(current, directory / f"Pass{number:05d}.pt")
        current = {"model": one.taps["final_norm"], "logits_processor": one.taps["logits"][one.last]}
    return directory


class Dumper:
    """`DUMPER_ENABLE=1` of one rank; `DUMPER_NON_INTRUSIVE_MODE=all` for `modules`."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder, self.rank, self.size = folder / "dump_20260101", rank, size
        self.folder.mkdir(parents=True, exist_ok=True)
        self.step = self.index = 0

    def dump(self, name: str, value: Any, dims: str | None = None, **tags: Any) -> Path:
        self.index += 1
        found = {"step": self.step, "rank": self.rank, "dump_index": self.index, "name": name}
        found |= {"recompute_status": "disabled"} | tags
        info = {"tp_rank": self.rank, "tp_size": self.size, "pp_rank": 0, "pp_size": 1, "attn_dp_size": 1}
        meta = found | {"world_rank": self.rank, "world_size": self.size, "sglang_parallel_info": info}
        path = self.folder / ("___".join(f"{key}={one}" for key, one in found.items()) + ".pt")
        torch.save({"value": value, "meta": meta if dims is None else meta | {"dims": dims}}, path)
        return path

    def batch(self, one: PackedPass, names: list[str] | None) -> None:
        """What the hook of the root writes."""
        found = {"input_ids": one.ids, "seq_lens": one.lengths, "positions": one.positions}
        for name, value in found.items():
            self.dump(name, value)
        if names is not None:
            self.dump("rids", names)

    def modules(self, modules: Iterable[tuple[str, Outputs]]) -> None:
        """What the hooks of the modules write: `rotary_emb` has the name that it has in the first layer."""
        for name, value in modules:
            layer = {"layer_id": int(name.split(".")[2])} if ".layers." in name else {}
            module = "model.layers.0.self_attn.rotary_emb" if name.endswith("rotary_emb") else name
            outputs: list[tuple[str, Tensor]] = (
                [(f".{i}", x) for i, x in enumerate(value)] if isinstance(value, list) else [("", value)]
            )
            for key, x in outputs:
                self.dump(f"non_intrusive__{module}.output{key}", x, **layer)
