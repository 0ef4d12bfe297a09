"""SGLang's dumper (`DUMPER_ENABLE=1`): a file a tensor, `step=0___rank=1___dump_index=3___name=…___layer_id=0.pt`.

The writer is sglang/srt/debug_utils/dumper.py: {"value": tensor, "meta": {…}}, where `dims`, if the caller gave them,
give the layout. Without a change to the engine it writes what goes into a pass (`input_ids`, `positions`, `seq_lens`,
`rids`), and with DUMPER_NON_INTRUSIVE_MODE=all inputs and outputs of every module: `non_intrusive__<module>.output`.
A module that layers share has one name for all of them; `layer_id` shows whose call it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from lockstep.engine.text import printable
from lockstep.sessions.meta import ModelMeta
from lockstep.workbench.foreign.passes import (
    ForeignDumpError,
    ForeignFacts,
    ForeignPass,
    ForeignTensor,
    checked_ranks,
)
from lockstep.workbench.foreign.readers.arrays import numbers
from lockstep.workbench.foreign.readers.dims import layout_of
from lockstep.workbench.foreign.readers.files import children, shown
from lockstep.workbench.foreign.readers.modules import ModuleNames, in_layer
from lockstep.workbench.foreign.readers.pass_rows import PassRows, whole_numbers
from lockstep.workbench.foreign.readers.shape import read_model
from lockstep.workbench.foreign.readers.torch_file import load_torch

_FILE = re.compile(
    r"step=(?P<step>\d{1,9})___rank=(?P<rank>\d{1,5})___dump_index=(?P<index>\d{1,9})___name=(?P<name>.+?)"
    r"(?P<more>(?:___\w+=[^=]*)*)\.pt",
    re.ASCII,
)
_LAYER = re.compile(r"___layer_id=(\d{1,5})(?:___|$)", re.ASCII)
_MODULE = re.compile(
    r"non_intrusive__(?P<module>.+?)\.(?P<side>inputs|output)(?:\.(?P<key>[\w.]+))?", re.ASCII
)
#: Gradients, weights, and what goes in and out of the model as a whole, which its modules have as well.
_NOT_READ = ("grad__", "param__", "non_intrusive__inputs.", "non_intrusive__output")
_INPUTS = ("input_ids", "positions", "seq_lens")
_CORE = (*_INPUTS, "rids", "req_pool_indices")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One file, by its name alone. `module` and `side` are "" for a tensor that a caller named."""

    path: Path
    step: int
    rank: int
    index: int
    name: str
    layer: int | None
    module: str
    side: str

    @classmethod
    def of(cls, path: Path) -> _Entry | None:
        """None for another file, and for gradients and weights."""
        found = _FILE.fullmatch(path.name)
        if found is None or found["name"].startswith(_NOT_READ):
            return None
        own = _LAYER.search(found["more"])
        layer = None if own is None else int(own[1])
        module = _MODULE.fullmatch(found["name"])
        called = "" if module is None else module["module"]
        if layer is not None:  # a module that layers share has the first one's name
            called = in_layer(called, layer)
        side = "" if module is None else module["side"]
        return cls(
            path,
            int(found["step"]),
            int(found["rank"]),
            int(found["index"]),
            found["name"],
            layer,
            called,
            side,
        )


@dataclass(slots=True)
class DumperRun:
    """The dump of one experiment: by rank and step its files, in the order in which they were written."""

    folder: Path
    model: ModelMeta
    steps: Mapping[int, Mapping[int, Sequence[_Entry]]]
    size: int
    _notes: dict[str, None] = field(default_factory=dict)

    @property
    def facts(self) -> ForeignFacts:
        return ForeignFacts("SGLang dumper", self.size, "", self.model, notes=tuple(self._notes))

    def passes(self, rank: int) -> Iterator[ForeignPass]:
        for step, entries in self.steps.get(rank, {}).items():
            batch = _batch(entries, f"{shown(self.folder)}: rank {rank}, step {step}")
            names = ModuleNames.of((entry.module for entry in entries), self.size, self.model)
            rest = (entry for entry in entries if entry.name not in _CORE)
            groups = groupby(
                rest, key=lambda one: (one.module, one.side, one.layer) if one.module else one.index
            )
            context = _context(entries)
            tensors: list[ForeignTensor] = []
            for _, group in groups:
                found = self._tensors(list(group), names, batch, context)
                seen = {one.tap for one in tensors} if found else ()
                tensors += [one for one in found if one.tap not in seen]
            yield batch.passed(rank, step, tensors)

    def _tensors(
        self, group: Sequence[_Entry], names: ModuleNames, batch: PassRows, context: int | None
    ) -> list[ForeignTensor]:
        """The tensors of one module's inputs or outputs, or the one that a caller named."""
        first = group[0]
        loaded = [_load(entry) for entry in group]
        found = [numbers(value, entry.path) for (value, _), entry in zip(loaded, group, strict=True)]
        arrays = [x for _, x in found]
        if not first.module:
            named = [names.called(first.name, first.layer, arrays[0])]
        elif first.side == "output":
            named = names.outputs(first.module, arrays, context)
        else:
            named = names.inputs(first.module, arrays)
        dims = loaded[0][1].get("dims")
        if isinstance(dims, str) and len(named) == 1 and "replicas" not in named[0].layout:
            named = [replace(named[0], layout=layout_of(dims))]
        tensors = [batch.tensor(one, found[0][0]) for one in named]
        if None in tensors:
            self._notes["tensors without a row a token are left out"] = None
        return [one for one in tensors if one is not None]


def open_sglang_dumper(folder: Path, model: Path | None = None) -> DumperRun:
    """Open a dump; `model` is the checkpoint that it is of. ForeignDumpError where the folder is no such dump."""
    folder = _experiment(folder)
    entries = [entry for path in children(folder) if (entry := _Entry.of(path)) is not None]
    if not entries:
        raise ForeignDumpError(f"{shown(folder)}: has no file step=…___rank=…___name=….pt of SGLang's dumper")
    steps: dict[int, dict[int, list[_Entry]]] = {}
    for entry in sorted(entries, key=lambda one: (one.rank, one.step, one.index)):
        steps.setdefault(entry.rank, {}).setdefault(entry.step, []).append(entry)
    first = next(iter(next(iter(steps.values())).values()))[0]
    reported = _load(first)[1].get("world_size")
    size = checked_ranks(reported if isinstance(reported, int) else max(steps) + 1, first.path.name)
    if size <= max(steps):
        raise ForeignDumpError(
            f"{shown(folder)}: has files of rank {max(steps)}, and states that there are {size}"
        )
    _needs_tensor_parallel_alone(first)
    return DumperRun(folder, read_model(folder, model), steps, size)


def _experiment(folder: Path) -> Path:
    """The folder with the files: this one, or the only experiment in it."""
    found = children(folder)
    if any(path.suffix == ".pt" for path in found):
        return folder
    inner = [path for path in found if path.is_dir()]
    if len(inner) > 1:
        raise ForeignDumpError(
            f"{shown(folder)}: holds several experiments ({', '.join(shown(one) for one in inner[:4])}…); name one"
        )
    return inner[0] if inner else folder


def _context(entries: Sequence[_Entry]) -> int | None:
    """The width of this rank's attention output."""
    for entry in entries:
        if entry.side == "output" and entry.module.endswith("self_attn.attn"):
            return int(numbers(_load(entry)[0], entry.path)[1].shape[-1])
    return None


def _load(entry: _Entry) -> tuple[object, Mapping[str, object]]:
    """The value of a file, and what it reports on it."""
    loaded = load_torch(entry.path)
    if not isinstance(loaded, Mapping) or "value" not in loaded:
        return loaded, {}
    meta = loaded.get("meta")
    return loaded["value"], meta if isinstance(meta, Mapping) else {}


def _needs_tensor_parallel_alone(entry: _Entry) -> None:
    """ForeignDumpError for ranks that hold other layers or other requests."""
    info = _load(entry)[1].get("sglang_parallel_info")
    for key, name in (
        ("pp_size", "pipeline"),
        ("attn_dp_size", "data-parallel attention"),
        ("attn_cp_size", "context"),
    ):
        if isinstance(info, Mapping) and info.get(key) not in (None, 1):
            raise ForeignDumpError(
                f"{shown(entry.path)}: of a run with {name} parallelism; tensor parallelism alone can be imported"
            )


def _batch(entries: Sequence[_Entry], where: str) -> PassRows:
    """What went into a pass."""
    found: dict[str, list[int]] = {}
    names: list[str] = []
    for entry in entries:
        if entry.name in _INPUTS and (entry.name == "input_ids" or entry.name not in found):
            value = whole_numbers(numbers(_load(entry)[0], entry.path)[1], where).ravel().tolist()
            if (
                found.setdefault(entry.name, value) != value
            ):  # the same argument of inner modules is written again
                raise ForeignDumpError(f"{where}: two passes; call dumper.step() after each")
        elif entry.name == "rids" and isinstance(rids := _load(entry)[0], list | tuple):
            names = [printable(one, 80) for one in rids]
    if missing := [key for key in _INPUTS if key not in found]:
        raise ForeignDumpError(
            f"{where}: has no {missing[0]}, so which token a row is of is not known; dump with "
            "DUMPER_NON_INTRUSIVE_MODE=core or all, and no DUMPER_FILTER that leaves it out"
        )
    ids, positions, lengths = (found[key] for key in _INPUTS)
    if len(ids) != len(positions) or (names and len(names) != len(lengths)):
        raise ForeignDumpError(
            f"{where}: {len(ids)} ids at {len(positions)} positions of {len(lengths)} requests"
        )
    try:
        return PassRows.packed(ids, positions, lengths, names)
    except ForeignDumpError as error:
        raise ForeignDumpError(f"{where}: {error}") from error
