"""Dumps in msprobe's format, by what its writer does (files made here; nothing of msprobe runs).

Follows `PytorchDataProcessor` (python/msprobe/core/dump/data_dump/data_processor/pytorch_processor.py), `DataWriter`
(…/json_writer.py) and `ModuleProcessor` (python/msprobe/pytorch/dump/module_dump/module_processor.py) of
mindstudio-probe 26.2.0, level L0: `write_model` as in its guide for PyTorch models (a step a pass), `write_modules` as
in its guide for vLLM, whose modules are fused and whose rows are packed.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.workbench.references.loading import CACHE
from tests.workbench.foreign.readers.packed import Outputs, PackedPass, Rank


class Probe:
    """One rank's files of one step. `keep` are modules whose tensors are written (the task "tensor": all)."""

    def __init__(
        self, folder: Path, step: int, rank: str, *, keep: Sequence[str] = ("",), mode: str = "statistics"
    ) -> None:
        self.folder, self.keep, self.mode = folder / f"step{step}" / rank, keep, mode
        self.data = self.folder / "dump_tensor_data"
        self.data.mkdir(parents=True)
        self.calls: Counter[str] = Counter()
        self.entries: dict[str, Any] = {}

    def call(self, module: str, kind: str, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """A module's forward hook."""
        name = f"Module.{module}.{kind}.forward.{self.calls[module]}"
        self.calls[module] += 1
        outputs = list(output) if isinstance(output, list | tuple) else [output]
        self.entries[name] = {
            "input_args": [self._element(name, f"input.{i}", one) for i, one in enumerate(args)],
            "input_kwargs": {key: self._element(name, f"kwargs.{key}", one) for key, one in kwargs.items()},
            "output": [self._element(name, f"output.{i}", one) for i, one in enumerate(outputs)],
        }

    def _element(self, name: str, suffix: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._element(name, f"{suffix}.{i}", one) for i, one in enumerate(value)]
        if not isinstance(value, Tensor):
            return None if value is None else {"type": type(value).__name__, "value": str(value)}
        floating = value.is_floating_point()
        found = {"type": "torch.Tensor", "dtype": str(value.dtype), "shape": list(value.shape)}
        found |= {"Max": value.max().item(), "Min": value.min().item()}
        found |= {
            "Mean": value.mean().item() if floating else None,
            "Norm": value.norm().item() if floating else None,
        }
        found["requires_grad"] = False
        if self.mode == "md5":
            found["md5"] = f"{zlib.crc32(value.contiguous().numpy().tobytes()):08x}"
        if any(part in name for part in self.keep):
            found["data_name"] = f"{name}.{suffix}.pt"
            torch.save(value.clone().contiguous().detach(), self.data / found["data_name"])
        return found

    def close(self) -> Path:
        """`debugger.step()`."""
        head = {
            "task": "tensor" if self.keep == ("",) else "statistics",
            "level": "L0",
            "framework": "pytorch",
        }
        path = self.folder / "dump.json"
        path.write_text(json.dumps(head | {"dump_data_dir": str(self.data), "data": self.entries}, indent=1))
        return path


def write_model(folder: Path, model: Any, batches: Iterable[dict[str, Tensor]], **options: Any) -> None:
    """A transformers model under PrecisionDebugger, a step each of `batches`, with a cache."""
    cache = None
    for step, inputs in enumerate(batches):
        probe = Probe(folder, step, options.pop("rank", "rank"), **options)
        hooks = [
            module.register_forward_hook(
                lambda module, args, kwargs, out, name=name, probe=probe: probe.call(
                    name, type(module).__name__, args, dict(kwargs), out
                ),
                with_kwargs=True,
            )
            for name, module in model.named_modules()
            if name
        ]
        with torch.inference_mode():
            cache = model(**inputs, use_cache=True, **{CACHE: cache})[CACHE]
        for hook in hooks:
            hook.remove()
        probe.close()


def write_modules(
    folder: Path, passes: Iterable[PackedPass], rank: Rank, *, together: bool = False, **options: Any
) -> None:
    """A fused engine; a step each pass, or all passes `together` in one."""
    found = list(passes)
    probes = [
        Probe(folder, 0 if together else step, f"rank{rank.rank}", **options)
        for step in range(1 if together else len(found))
    ]
    for k, one in enumerate(found):
        probe = probes[0 if together else k]
        for name, value in rank.modules(one.taps):
            rotary = name.endswith("rotary_emb")  # one module for all layers, under the first one's name
            outputs: Outputs = value
            module = "model.layers.0.self_attn.rotary_emb" if rotary else name
            args: list[Tensor] = (
                [one.ids] if name.endswith("embed_tokens") else [one.positions] if rotary else []
            )
            probe.call(module, name.rpartition(".")[2].title(), args, {}, outputs)
        probe.call("logits_processor", "LogitsProcessor", [], {}, one.taps["logits"][one.last])
    for probe in probes:
        probe.close()
