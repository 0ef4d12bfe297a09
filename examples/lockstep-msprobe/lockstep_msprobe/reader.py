"""msprobe's dumps (mindstudio-probe): `step0/rank0/dump.json`, and beside it `dump_tensor_data/*.pt` or `.npy`.

Keys of the JSON are `Module.<name>.<Class>.forward.<call>`. With the task "tensor" each tensor is a file; with
"statistics" there are its minimum, maximum, mean and norm, in the modes md5 and xor a checksum of all of it.

A step may hold several passes, and a module that layers share (RoPE) is called once a layer under the first one's name:
the number of the call gives both. A process without torch.distributed writes `rank` or `proc<pid>` instead of `rank0`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.sessions.meta import ModelMeta
from lockstep.workbench.foreign.passes import (
    ForeignDumpError,
    ForeignFacts,
    ForeignPass,
    ForeignTensor,
    checked_ranks,
)
from lockstep.workbench.foreign.readers.files import children, numbered, read_json, shown
from lockstep.workbench.foreign.readers.modules import ModuleNames, Named, in_layer
from lockstep.workbench.foreign.readers.pass_rows import PassRows
from lockstep.workbench.foreign.readers.shape import read_model
from lockstep_msprobe.entries import Call, Measured
from lockstep_msprobe.rows import IDS_FILE, read_ids, rows_of_pass

_STEP = re.compile(r"step(\d{1,9})", re.ASCII)
_RANK = re.compile(r"rank(\d{0,5})|proc\d+", re.ASCII)
_CALL = re.compile(r"Module\.(?P<module>.+)\.[^.]+\.forward\.\d{1,9}", re.ASCII)


@dataclass(slots=True)
class MsprobeRun:
    """A dump; `files` are the dump.json of each step by rank, `ids` what its passes read where the user stated it."""

    folder: Path
    model: ModelMeta
    files: Mapping[int, Sequence[Path]]
    size: int
    task: str
    ids: Sequence[Sequence[int]]
    _notes: dict[str, None] = field(default_factory=dict)

    @property
    def facts(self) -> ForeignFacts:
        return ForeignFacts(f"msprobe ({self.task})", self.size, "", self.model, notes=tuple(self._notes))

    def passes(self, rank: int) -> Iterator[ForeignPass]:
        index = batch = 0
        for path in self.files.get(rank, ()):
            calls = _calls(path)
            names = ModuleNames.of((one.module for one in calls), self.size, self.model)
            for found in _by_pass(calls, path):
                where = f"{shown(path.parent.parent)}/{shown(path.parent)}/dump.json"
                rows = rows_of_pass(found, self.ids[index] if index < len(self.ids) else None, where)
                batch += 0 in rows.positions
                yield rows.in_batch(batch).passed(rank, index, self._tensors(found, names, rows))
                index += 1

    def _tensors(self, calls: Sequence[Call], names: ModuleNames, rows: PassRows) -> list[ForeignTensor]:
        """Every tensor of a pass; what a module gave counts before what another took."""
        attention = next(
            (one for one in calls if one.module.endswith("self_attn.attn") and one.outputs), None
        )
        context = (
            None if attention is None or not attention.outputs[0].shape else attention.outputs[0].shape[-1]
        )
        tensors: dict[str, ForeignTensor] = {}
        for one in calls:
            for tensor in _taken(one, names, rows):
                tensors.setdefault(tensor.tap, tensor)
            tensors.update({tensor.tap: tensor for tensor in _given(one, names, context, rows)})
        if any(one.array is None for one in tensors.values()):
            self._notes["where there are no tensors, statistics are of all rows of a pass together"] = None
        return list(tensors.values())


def open_msprobe(folder: Path, model: Path | None = None) -> MsprobeRun:
    """Open a dump; `model` is the checkpoint that it is of. ForeignDumpError where the folder is no such dump."""
    files: dict[int, list[Path]] = {}
    for step in numbered(folder, _STEP).values():
        for rank, path in _ranks(step).items():
            files.setdefault(rank, []).append(path)
    if not files:
        raise ForeignDumpError(f"{shown(folder)}: has no step0/rank0/dump.json; name msprobe's dump_path")
    first = read_json(files[min(files)][0])
    task = first.get("task")
    size = checked_ranks(max(files) + 1, shown(folder))
    reported = task[:40] if isinstance(task, str) and task.isidentifier() else "task not stated"
    return MsprobeRun(folder, read_model(folder, model), files, size, reported, read_ids(folder / IDS_FILE))


def _ranks(step: Path) -> dict[int, Path]:
    """The dump.json of each rank. ForeignDumpError for several processes that no rank distinguishes."""
    found: dict[int, Path] = {}
    for path in children(step):
        match = _RANK.fullmatch(path.name)
        if match is None or not (path / "dump.json").is_file():
            continue
        rank = int(match[1] or 0)
        if rank in found:
            other = shown(found[rank].parent)
            raise ForeignDumpError(
                f"{shown(step)}: {shown(path)} and {other} are both rank {rank}: several runs; keep one"
            )
        found[rank] = path / "dump.json"
    return found


def _calls(path: Path) -> list[Call]:
    """The calls of modules in the order in which they ended."""
    data = read_json(path).get("data")
    if not isinstance(data, dict):
        raise ForeignDumpError(f"{shown(path)}: has no data")
    folder = path.parent / "dump_tensor_data"
    found = ((_CALL.fullmatch(key), value) for key, value in data.items())
    return [Call.of(match["module"], value, folder) for match, value in found if match is not None]


def _by_pass(calls: Sequence[Call], path: Path) -> list[list[Call]]:
    """The calls of each pass of a step: as many as the embedding was called."""
    counts = Counter(one.module for one in calls)
    passes = next((count for module, count in counts.items() if module.endswith("embed_tokens")), 0)
    if passes == 0:
        raise ForeignDumpError(
            f"{shown(path.parent.parent)}: has no call of embed_tokens, so which tokens were read is not known; dump "
            'with level "L0" or "mix", and a scope and list that leave it in'
        )
    found: list[list[Call]] = [[] for _ in range(passes)]
    seen: Counter[str] = Counter()
    for one in calls:
        layers, rest = divmod(counts[one.module], passes)
        if not rest:
            number, layer = divmod(seen[one.module], layers)
            # A module that is called once a layer is shared, and has the first layer's name.
            found[number].append(one if layers == 1 else replace(one, module=in_layer(one.module, layer)))
        seen[one.module] += 1
    return found


def _given(call: Call, names: ModuleNames, context: int | None, rows: PassRows) -> list[ForeignTensor]:
    """The outputs of a module under our taps' names."""
    arrays = [one.numbers()[1] for one in call.outputs]
    named = names.outputs(call.module, arrays, context)
    if named and len(named) != len(arrays) and any(one.file is None for one in call.outputs):
        named = names.generic(call.module, arrays)  # statistics of a fused product are those of no part
    return _tensors(call.outputs, named, rows)


def _taken(call: Call, names: ModuleNames, rows: PassRows) -> list[ForeignTensor]:
    """The only tensor that went into a module, where that is a tap of ours."""
    floating = [one for one in call.inputs if one.floating]
    return _tensors(floating, names.inputs(call.module, [one.numbers()[1] for one in floating]), rows)


def _tensors(measured: Sequence[Measured], named: Sequence[Named], rows: PassRows) -> list[ForeignTensor]:
    """Each of `named` is one of `measured`, or a part of the only one."""
    found = []
    for i, one in enumerate(named):
        tensor = measured[min(i, len(measured) - 1)].tensor(one, rows)
        if tensor is not None:
            found.append(tensor)
    return found
