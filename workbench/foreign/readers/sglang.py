"""SGLang's `--debug-tensor-dump-output-folder`: `TP0_PP0_Rank0_pid17/Pass00000.pt`, dictionaries of module outputs.

The writer is `TensorDumper` of sglang/srt/debug_utils/tensor_dump_forward_hook.py. What it does to a reader:

- The hook of the top module (`model`) writes the file *before* it adds its own output: `model`, `lm_head` and
  `logits_processor` of pass k stand in file k + 1, and those of the last pass are never written.
- A module that is shared (RoPE) is hooked once for each name that it has, and each call overwrites what all of them
  hold: every layer's `rotary_emb` is the last layer's.
- `.cpu()` of a tensor that is on the CPU already is no copy: there in-place kernels write over what was kept. Tensors
  that share their memory in a file show it; all but the last of them are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lockstep.sessions.meta import ModelMeta
from lockstep.workbench.foreign.passes import ForeignDumpError, ForeignFacts, ForeignPass, checked_ranks
from lockstep.workbench.foreign.readers.arrays import numbers
from lockstep.workbench.foreign.readers.files import children, numbered, shown
from lockstep.workbench.foreign.readers.modules import ModuleNames
from lockstep.workbench.foreign.readers.number_formats import Numbers
from lockstep.workbench.foreign.readers.pass_rows import PassRows, whole_numbers
from lockstep.workbench.foreign.readers.shape import read_model
from lockstep.workbench.foreign.readers.torch_file import TorchTensor, load_torch

_RANK = re.compile(r"TP(\d{1,4})_PP(\d{1,4})_Rank(\d{1,5})_pid(\d{1,10})", re.ASCII)
_PASS = re.compile(r"Pass(\d{1,9})\.pt", re.ASCII)
_BATCH = ".forward_batch_info."

#: What a file holds of one module: its outputs.
Outputs = dict[str, list[Numbers]]


@dataclass(frozen=True, slots=True)
class _File:
    """One file: what went into the pass, what its modules gave, what stands there of modules behind the top one (and
    whether that is of this pass after all), and whose memory a later module wrote over."""

    number: int
    batch: PassRows
    own: Outputs
    late: Outputs
    late_is_own: bool
    overwritten: frozenset[str]


@dataclass(slots=True)
class SglangRun:
    """The dump of an SGLang server; a folder a tensor-parallel rank."""

    folder: Path
    model: ModelMeta
    ranks: Mapping[int, Path]
    size: int
    _notes: dict[str, None] = field(default_factory=dict)

    @property
    def facts(self) -> ForeignFacts:
        return ForeignFacts("SGLang", self.size, "eager", self.model, notes=tuple(self._notes))

    def passes(self, rank: int) -> Iterator[ForeignPass]:
        files = [] if rank not in self.ranks else numbered(self.ranks[rank], _PASS).items()
        before: _File | None = None
        in_place = False
        for number, path in files:
            file = _read(number, path)
            if before is None:
                in_place = file.late_is_own
            else:
                follows = file.number == before.number + 1
                yield self._pass(rank, before, before.late if in_place else file.late if follows else {})
            before = file
        if before is not None:
            if not in_place:
                self._note("SGLang does not write the logits of the last pass")
            yield self._pass(rank, before, before.late if in_place else {})

    def _pass(self, rank: int, file: _File, late: Outputs) -> ForeignPass:
        batch, own = file.batch, dict(file.own) | late
        if len(batch.ids) < batch.lead[0]:
            self._note("rows behind the last request are padding: left out")
        names = ModuleNames.of(own, self.size, self.model)
        self._leave_out(own, file)
        found = [
            batch.tensor(named, outputs[0][0])
            for module, outputs in own.items()
            for named in names.outputs(module, [x for _, x in outputs], _context(own, module))
        ]
        return batch.passed(rank, file.number, [one for one in found if one is not None])

    def _leave_out(self, own: dict[str, list[Numbers]], file: _File) -> None:
        if file.overwritten:
            self._note(
                "tensors that share memory were overwritten by later operations (a run on the CPU): left out"
            )
        rotary = [name for name in own if name.endswith(".rotary_emb")]
        same = len(rotary) > 1 and len({own[name][0][1].tobytes() for name in rotary if own[name]}) == 1
        if same:
            self._note(
                "all layers share one rotary_emb, of which SGLang keeps the last call: only that layer's is used"
            )
        for name in (*file.overwritten, *(rotary[:-1] if same else ())):
            own.pop(name, None)

    def _note(self, note: str) -> None:
        self._notes[note] = None


def open_sglang(folder: Path, model: Path | None = None) -> SglangRun:
    """Open a dump; `model` is the checkpoint that it is of. ForeignDumpError where the folder is no such dump."""
    found: dict[int, dict[int, Path]] = {}
    for path in children(folder):
        if (match := _RANK.fullmatch(path.name)) is not None and path.is_dir():
            if match[2] != "0":
                raise ForeignDumpError(
                    f"{shown(path)}: a pipeline stage; dump with --pp-size 1, so that a rank has all layers"
                )
            found.setdefault(int(match[1]), {})[int(match[4])] = path
    if not found:
        raise ForeignDumpError(
            f"{shown(folder)}: has no folder TP0_PP0_Rank0_pid…; name the folder given to SGLang"
        )
    twice = [shown(path) for pids in found.values() if len(pids) > 1 for path in pids.values()]
    if twice:
        raise ForeignDumpError(
            f"{shown(folder)}: holds several runs, distinguished by their process ids alone ({', '.join(twice[:4])}): "
            "move those of one run to a folder of their own"
        )
    ranks = {rank: next(iter(pids.values())) for rank, pids in sorted(found.items())}
    return SglangRun(folder, read_model(folder, model), ranks, checked_ranks(max(ranks) + 1, folder.name))


def _context(own: Outputs, module: str) -> int | None:
    """The width of the attention's output beside a `qkv_proj`."""
    beside = own.get(module.removesuffix("qkv_proj") + "attn")
    return beside[0][1].shape[-1] if beside and beside[0][1].ndim else None


def _read(number: int, path: Path) -> _File:
    loaded = load_torch(path)
    if not isinstance(loaded, Mapping):
        raise ForeignDumpError(f"{shown(path)}: holds no dictionary of module outputs")
    top = next((name.partition(_BATCH)[0] for name in loaded if _BATCH in name), None)
    if top is None:
        raise ForeignDumpError(
            f"{shown(path)}: has no {_BATCH[1:]}input_ids: which tokens were read is not known"
        )
    batch: dict[str, list[int]] = {}
    own: dict[str, list[Numbers]] = {}
    late: dict[str, list[Numbers]] = {}
    for name, value in loaded.items():
        found = [numbers(one, path) for one in _flat(value)]
        if name.startswith(top + _BATCH) and len(found) == 1:
            batch[name.removeprefix(top + _BATCH)] = whole_numbers(found[0][1], shown(path)).ravel().tolist()
        elif found:
            (own if name.startswith(top + ".") else late)[name] = found
    if missing := [key for key in ("input_ids", "positions", "seq_lens") if key not in batch]:
        raise ForeignDumpError(f"{shown(path)}: has no {missing[0]}: which rows are whose is not known")
    if len(batch["input_ids"]) != len(batch["positions"]):
        raise ForeignDumpError(
            f"{shown(path)}: {len(batch['input_ids'])} ids at {len(batch['positions'])} positions"
        )
    try:
        packed = PassRows.packed(batch["input_ids"], batch["positions"], batch["seq_lens"])
    except ForeignDumpError as error:
        raise ForeignDumpError(f"{shown(path)}: {error}") from error
    is_own = _is_own(top, own, late)
    if f"{top}.norm" in own:
        late.pop(top, None)  # the same again
    return _File(number, packed, own, late, is_own, _overwritten(loaded, top))


def _is_own(top: str, own: Outputs, late: Outputs) -> bool:
    """Whether what the top module gave is of this file's pass: it is then what its last norm gave."""
    given, norm = late.get(top), own.get(f"{top}.norm")
    return given is not None and norm is not None and np.array_equal(given[0][1], norm[0][1])


def _flat(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _overwritten(loaded: Mapping[str, object], top: str) -> frozenset[str]:
    """The modules whose output lies in memory that a later one's lies in as well."""
    owner: dict[str, str] = {}
    lost = set()
    for name, value in loaded.items():
        for one in _flat(value):
            kept = name.startswith(top + ".") and not name.endswith(".rotary_emb")  # shared in any case
            if isinstance(one, TorchTensor) and one.size and kept:
                if owner.get(one.memory, name) != name:
                    lost.add(owner[one.memory])
                owner[one.memory] = name
    return frozenset(name for name in lost if _BATCH not in name)
