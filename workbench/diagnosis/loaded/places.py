"""Where the numbers of an engine's tensor come from: which rows and columns of which parameters of the checkpoint.

Engines stack parameters (q, k and v; gate and up; the matrices of all experts) and give each rank its part of them.
That follows from names and shapes: a dimension that is part of the parameter's is cut over the ranks in their order
(Megatron's scheme, arXiv:1909.08053), key and value heads that are fewer than ranks are repeated by neighbours, rows
behind the vocabulary are padding.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.engine.checkpoint.source import Source
from lockstep.engine.checkpoint.stacks import stored_in
from lockstep.engine.checkpoint.wrapped import other_part
from lockstep.engine.config import ModelConfig
from lockstep.engine.graph.checkpoint_names import STACKS
from lockstep.engine.parallel.shards import Span
from lockstep.workbench.diagnosis.loaded.megatron import GROUPED, grouped_rows, plain_name

Shape = tuple[int, ...]

#: What wrappers (FSDP, torch.compile, checkpointing, PEFT) put between the modules of a name.
_WRAPPERS = {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "module", "base_layer"}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)", re.ASCII)
_EXPERT = re.compile(r"(layers\.\d+)\.mlp\.experts\.(\d+)\.(\w+)\.weight", re.ASCII)
_STACKED_EXPERTS = re.compile(
    r"(layers\.\d+)\.mlp\.experts\.(?:\w+\.)*?(w13|w2|gate_up_proj|down_proj|up_proj)(?:[._]weight)?",
    re.ASCII,
)
#: What libraries call a layer's MLP, and the matrices of Mixtral's experts.
_OTHER_NAMES = {
    **dict.fromkeys(("block_sparse_moe", "feed_forward", "mixer"), "mlp"),
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
}
#: Where a router's weight may be, and the one place for all of them; and the bias that corrects its choice.
_ROUTERS, _ROUTER = (".mlp.router.layer.weight", ".mlp.router.weight", ".mlp.gate.weight"), ".mlp.gate.weight"
_CORRECTION = "e_score_correction_bias"
_OF_EXPERTS = {
    "w13": ("gate_proj", "up_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w2": ("down_proj",),
    "down_proj": ("down_proj",),
    "up_proj": ("up_proj",),
}
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class HeldPart:
    """`rows` of an engine's tensor (of matrix `matrix` of a stack) are `taken` of the checkpoint's `parameter`, in its
    `columns` (None: all, or it is a vector). `among`: it is one of several parts that a rank has of the parameter."""

    parameter: str
    rows: Span
    taken: Span
    columns: Span | None = None
    matrix: int | None = None
    among: bool = False


def key_of(name: str) -> str:
    """What a name of a parameter has in common with those of other libraries: "layers.3.mlp.up_proj.weight", outside
    the layers the last two words."""
    name = plain_name(".".join(word for word in name.split(".") if word not in _WRAPPERS))
    if (match := _LAYER.search(name)) is None:
        ending = ".".join(name.split(".")[-2:])
        return EMBEDDING if ending == "embeddings.weight" else ending
    layer, parts = f"layers.{match[1]}", match[2].split(".")
    if parts[-1] == _CORRECTION:
        return f"{layer}.mlp.{_CORRECTION}"
    if "experts" in parts or "block_sparse_moe" in parts:
        parts = [_OTHER_NAMES.get(part, part) for part in parts]
    if parts[0] == "experts":  # beside an MLP
        parts = ["mlp", *parts]
    key = f"{layer}.{'.'.join(parts)}"
    found = next((router for router in _ROUTERS if key == f"{layer}{router}"), None)
    return key if found is None else f"{layer}{_ROUTER}"


class Parameters:
    """The parameters of a checkpoint by what their names have in common with others'. `tied`: the head is the
    embedding; `model` None: not known."""

    def __init__(self, source: Source, tied: bool, model: ModelConfig | None = None) -> None:
        self.head_dim = 0 if model is None else model.head_dim
        self.shapes: dict[str, Shape] = {
            name: source.info(name).shape or (1,) for name in source.names() if not other_part(name)
        }
        self._rows = {} if model is None else _row_stacks(model, self.shapes)
        self._names = {key_of(name): name for name in sorted(self.shapes)}
        if tied and EMBEDDING in self._names:
            self._names.setdefault(HEAD, self._names[EMBEDDING])
        self._experts: dict[tuple[str, str], dict[int, str]] = {}
        for key, name in self._names.items():
            if match := _EXPERT.fullmatch(key):
                self._experts.setdefault((match[1], match[3]), {})[int(match[2])] = name

    def places(self, name: str, shape: Shape, rank: int, size: int) -> list[HeldPart] | None:
        """Where the tensor `name` of a rank comes from; None where the checkpoint has nothing of that name, an empty
        list where `shape` is no part of what it has."""
        key = key_of(name)
        shape = shape or (1,)
        if key in self._names:
            return list(self._single(self._names[key], shape, rank, size))
        if key in self._rows:
            return list(self._stacked(self._rows[key], shape, rank, size))
        if (match := _STACKED_EXPERTS.fullmatch(key)) and len(shape) == 3:
            return list(self._of_experts(match[1], _OF_EXPERTS[match[2]], shape, rank, size))
        if f".{GROUPED}." in key:
            return list(self._grouped(key, shape, rank, size))
        owner, _, leaf = key.rpartition(".")
        above, _, module = owner.rpartition(".")
        parts = STACKS.get(f"{above.rpartition('.')[2]}.{module}", ()) or STACKS.get(f"mlp.{module}", ())
        names = [self._names.get(f"{above}.{part.rpartition('.')[2]}.{leaf}", "") for part in parts]
        if not parts or not any(names):
            return None
        return list(self._stacked(names, shape, rank, size)) if all(names) else []

    def _single(self, name: str, shape: Shape, rank: int, size: int) -> Iterator[HeldPart]:
        whole = self.shapes[name]
        if len(shape) != len(whole) or not 0 < len(shape) < 3:
            return
        table = key_of(name) in (EMBEDDING, HEAD)
        spans = [
            part_of(*sizes, rank, size, padded=table and not i)
            for i, sizes in enumerate(zip(whole, shape, strict=True))
        ]
        if all(spans) and sum(span != Span(0, n) for span, n in zip(spans, whole, strict=True)) < 2:
            rows, *columns = [span for span in spans if span is not None]
            yield HeldPart(name, Span(0, rows.size), rows, columns[0] if columns else None)

    def _stacked(self, names: Sequence[str], shape: Shape, rank: int, size: int) -> Iterator[HeldPart]:
        """Of attention's q, k and v the two last have equally many rows, of gate and up both."""
        wholes = [self.shapes[name] for name in names]
        if any(one[1:] != shape[1:] for one in wholes):
            return
        counts = _rows([one[0] for one in wholes], shape[0], size)
        start = 0
        for name, whole, count in zip(names, wholes, counts, strict=bool(counts)):
            if (taken := part_of(whole[0], count, rank, size)) is None:
                return
            yield HeldPart(
                name, Span(start, start + count), taken, Span(0, shape[1]) if len(shape) > 1 else None
            )
            start += count

    def _grouped(self, key: str, shape: Shape, rank: int, size: int) -> Iterator[HeldPart]:
        """Queries, keys and values group by group."""
        names = [self._names.get(key.replace(GROUPED, f"self_attn.{one}_proj"), "") for one in "qkv"]
        if not all(names) or not self.head_dim:
            return
        q, k, v = (self.shapes[name][0] for name in names)
        columns = Span(0, shape[1]) if len(shape) > 1 else None
        for which, rows, taken in grouped_rows((q, k, v), shape[0], self.head_dim, rank, size):
            yield HeldPart(names[which], rows, taken, columns, among=True)

    def _of_experts(
        self, layer: str, modules: Sequence[str], shape: Shape, rank: int, size: int
    ) -> Iterator[HeldPart]:
        """Whole experts are divided among groups of ranks, each of them within its group."""
        found = [self._experts.get((layer, module), {}) for module in modules]
        if not all(found):
            return
        whole, rows = self.shapes[found[0][0]], shape[1] // len(modules)
        inside = max(1, whole[0] // max(1, rows)) * max(1, whole[1] // max(1, shape[2]))
        held = part_of(len(found[0]), shape[0], rank // inside, max(1, size // inside))
        spans = [
            part_of(n, local, rank % inside, inside) for n, local in zip(whole, (rows, shape[2]), strict=True)
        ]
        if held is None or spans[0] is None or spans[1] is None:
            return
        for i, expert in enumerate(range(held.start, held.stop)):
            for at, names in enumerate(found):
                yield HeldPart(names[expert], Span(at * rows, (at + 1) * rows), spans[0], spans[1], i)


def _row_stacks(model: ModelConfig, there: Collection[str]) -> dict[str, list[str]]:
    """Tensors of the model's checkpoints that have the rows of several parameters, one behind the other -> these."""
    found: dict[str, list[str]] = {}
    for name, place in stored_in(model).items():
        if (
            name in there
            and place.matrix is None
            and not (place.transposed or place.step > 1 or place.blocks > 1)
        ):
            found.setdefault(key_of(place.tensor), []).append(name)
    return {key: names for key, names in found.items() if len(names) > 1}


def part_of(whole: int, local: int, rank: int, size: int, *, padded: bool = False) -> Span | None:
    """Which part of a dimension of `whole` a rank has that holds `local` of it; None where it is no part. The rows of a
    `padded` table are cut after padding."""
    if local == whole:
        return Span(0, whole)
    if padded and local * size >= whole:
        return Span(min(rank * local, whole), min((rank + 1) * local, whole))
    each = -(-whole // size)
    if local == min(each, whole - rank * each):  # as torch.chunk cuts what cannot be cut evenly
        return Span(rank * each, rank * each + local)
    if not local or whole % local or whole // local > size:
        return None
    index = rank * (whole // local) // size
    return Span(index * local, (index + 1) * local)


def _rows(wholes: Sequence[int], local: int, size: int) -> list[int]:
    """How many rows a rank has of each of the parameters that are stacked in `local` rows; [] where that is open."""
    if local == sum(wholes):
        return list(wholes)
    if local * size == sum(wholes) and not any(whole % size for whole in wholes):
        return [whole // size for whole in wholes]
    if len(set(wholes)) == 1:
        return [local // len(wholes)] * len(wholes) if local % len(wholes) == 0 else []
    first, rest = wholes[0] // size, len(wholes) - 1
    other = (local - first) // rest
    return [first] + [other] * rest if other > 0 and first + other * rest == local else []


def unheld(
    parameters: Mapping[str, Shape], held: Mapping[str, list[Span]]
) -> Iterator[tuple[str, list[Span]]]:
    """The parameters of which ranks together hold nothing, or not all rows: with the rows that nobody has."""
    for name, shape in parameters.items():
        rows = sorted(held.get(name, []))
        reached, gaps = 0, list[Span]()
        for span in rows:
            if span.start > reached:
                gaps.append(Span(reached, span.start))
            reached = max(reached, span.stop)
        if reached < shape[0]:
            gaps.append(Span(reached, shape[0]))
        if gaps:
            yield name, gaps
