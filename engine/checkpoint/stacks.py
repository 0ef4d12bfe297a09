"""Where a checkpoint stacks tensors: q, k, v in `qkv_proj`, gate and up in `gate_up_proj`, the matrices of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lockstep.engine.checkpoint.mxfp4 import BLOCKS
from lockstep.engine.config import ModelConfig
from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.graph import operation_of
from lockstep.engine.graph.checkpoint_names import EXPERT_STACKS, FUSED, USUAL_EXPERT_STACKS
from lockstep.engine.graph.mamba import CONVOLVED
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.shards import Span
from lockstep.engine.parallel.sizes import size_of

if TYPE_CHECKING:
    import torch


A = TypeVar("A")


class Place(NamedTuple):
    """Where a parameter lies: in which rows of a tensor of the checkpoint, every `step`-th of them, of a stack of
    matrices (or vectors) in those of the one with that number. `shape` is the tensor's; of a `transposed` matrix rows
    are the last axis. Where a tensor has several equal `blocks` of rows, one below the other, `rows` of each."""

    tensor: str
    rows: Span
    shape: tuple[int, ...]
    matrix: int | None = None
    step: int = 1
    transposed: bool = False
    blocks: int = 1

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """Of the parameter. A tensor [rows, 1, columns] has matrices."""
        inner = self.shape if self.matrix is None else self.shape[1:]
        inner = inner[::-1] if self.transposed else inner
        rows = self.blocks * len(range(self.rows.start, self.rows.stop, self.step))
        return rows, *inner[1:][-1:]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The parameter; of one block as a view of the tensor."""
        return self.within(whole if self.matrix is None else whole[self.matrix])

    def within(self, matrix: A) -> A:
        """The same of the one matrix or vector, a tensor or an array."""
        one: Any = matrix
        found: A
        if self.blocks > 1 or one.ndim == 3:
            blocks = one.reshape(self.blocks, -1, one.shape[-1])[:, self.rows.start : self.rows.stop]
            found = blocks.reshape(-1, one.shape[-1])
        else:
            found = (one.T if self.transposed else one)[self.rows.start : self.rows.stop : self.step]
        return found

    def pieces(self, span: Span) -> list[Span]:
        """Rows of the tensor, or of the matrix in the stack, that hold the parameter's rows `span`, without steps."""
        found, high = [], self.shape[0 if self.matrix is None else 1] // self.blocks
        for block in range(self.blocks):
            first = block * self.rows.size
            start, stop = max(span.start - first, 0), min(span.stop - first, self.rows.size)
            if start < stop:
                at = block * high + self.rows.start
                found.append(Span(at + start, at + stop))
        return found or [Span(self.rows.start, self.rows.start)]


def stored_in(model: ModelConfig, *, packed: bool = False, apart: bool = False) -> dict[str, Place]:
    """Parameter -> where it lies in a checkpoint that stacks it; of those that may be stacked. `packed`: where experts
    are in MXFP4 blocks, in the values of these; `apart`: where z of linear attention is a tensor of its own."""
    found: dict[str, Place] = {}
    for i in range(model.num_layers):
        shapes = shards.layer_parameters(model, i)
        own = model.of_layer(i)
        places = dict(_rows_of(model, shapes)) | dict(_experts_of(own, packed)) | _heads_of(own, apart)
        for part, place in places.items():
            found[f"model.layers.{i}.{part}"] = place._replace(tensor=f"model.layers.{i}.{place.tensor}")
    return found


def _rows_of(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Place]]:
    """Of a layer's stacks by rows."""
    for whole, modules in FUSED.get(model.family, {}).items():
        if f"{modules[0]}.weight" not in shapes:  # a layer of another kind
            continue
        parts = [shapes[f"{one}.weight"] for one in modules]
        start, rows = 0, sum(part[0] for part in parts)
        for module, part in zip(modules, parts, strict=True):
            span = Span(start, start + part[0])
            yield f"{module}.weight", Place(f"{whole}.weight", span, (rows, *part[1:]))
            if f"{module}.bias" in shapes:
                yield f"{module}.bias", Place(f"{whole}.bias", span, (rows,))
            start = span.stop


def _heads_of(model: ModelConfig, apart: bool) -> dict[str, Place]:
    """Of a layer's stacks whose rows lie head by head: those of the queries and their gate, and of Qwen3-Next's
    products of linear attention. The kernels of its convolution lie one below the other, each [1, width]."""
    hidden, linear = model.hidden_size, model.linear
    if model.output_gate:
        return _by_heads(
            "self_attn.q_proj", {"self_attn.q_proj": model.head_dim, "self_attn.gate_proj": model.head_dim},
            model.num_heads, hidden,
        )  # fmt: skip
    if model.mamba is not None:
        return _kernels_of_mamba(model)
    if model.short_conv is not None:
        shape = (hidden, 1, model.conv)
        return {"conv.conv.weight": Place("conv.conv.weight", Span(0, hidden), shape)}
    if linear is None:
        return {}
    values, dims = linear.group * linear.value_dim, (linear.key_dim, linear.key_dim)
    sizes = dict(
        zip("qkv", (*(linear.key_heads * dim for dim in dims), linear.key_heads * values), strict=True)
    )
    found, start, shape = dict[str, Place](), 0, (sum(sizes.values()), 1, linear.conv)
    for name, size in sizes.items():
        place = Place("linear_attn.conv1d.weight", Span(start, start + size), shape)
        found[f"linear_attn.conv1d_{name}.weight"] = place
        start += size
    if model.family == "qwen3_next":
        stacks = {"qkvz": (*dims, values, values), "ba": (linear.group, linear.group)}
        for names, widths in stacks.items():
            if apart and names == "qkvz":
                continue
            parts = {f"linear_attn.in_proj_{one}": width for one, width in zip(names, widths, strict=True)}
            found |= _by_heads(f"linear_attn.in_proj_{names}", parts, linear.key_heads, hidden)
    return found


def _kernels_of_mamba(model: ModelConfig) -> dict[str, Place]:
    """Those of its convolution, which lie one below the other, each [1, width], and their biases."""
    found, start = dict[str, Place](), 0
    convolved = [one for tap in CONVOLVED if (one := operation_of(model, tap)) is not None]
    sizes = [size_of(one.width, model) for one in convolved]
    for one, size in zip(convolved, sizes, strict=True):
        whole, span = one.module.rpartition("_")[0], Span(start, start + size)
        found[f"{one.module}.weight"] = Place(f"{whole}.weight", span, (sum(sizes), 1, model.conv))
        if model.conv_bias:
            found[f"{one.module}.bias"] = Place(f"{whole}.bias", span, (sum(sizes),))
        start = span.stop
    return found


def _by_heads(whole: str, parts: Mapping[str, int], heads: int, hidden: int) -> dict[str, Place]:
    """Modules of which the tensor has, head by head, so many rows each."""
    found, start, shape = dict[str, Place](), 0, (heads * sum(parts.values()), hidden)
    for module, rows in parts.items():
        found[f"{module}.weight"] = Place(f"{whole}.weight", Span(start, start + rows), shape, blocks=heads)
        start += rows
    return found


def _experts_of(model: ModelConfig, packed: bool) -> Iterator[tuple[str, Place]]:
    """Of a layer's experts as transformers has them, and of a router that it calls otherwise than the checkpoint."""
    if (has := model.experts) is None:
        return
    if not model.gated:  # transformers splits their stacks when it saves
        return
    gate, up, down, router = (
        "" if (one := operation_of(model, f"mlp.{tap}")) is None else one.module
        for tap in ("experts.gate", "experts.up", "experts.down", "router")
    )
    hidden, width = model.hidden_size, has.width
    if model.family == "gpt_oss":
        for e in range(has.count):
            yield from _interleaved(e, (gate.format(e), up.format(e), down.format(e)), has, hidden, packed)
        return
    turned = model.family == "llama4_text"  # matrices lie [in, out]
    both, single = (has.count, 2 * width, hidden), (has.count, hidden, width)
    if turned:
        both, single = ((count, columns, rows) for count, rows, columns in (both, single))
    stacks = EXPERT_STACKS.get(model.family, USUAL_EXPERT_STACKS)
    for e in range(has.count):
        yield f"{gate.format(e)}.weight", Place(stacks[0], Span(0, width), both, e, transposed=turned)
        yield f"{up.format(e)}.weight", Place(stacks[0], Span(width, 2 * width), both, e, transposed=turned)
        yield f"{down.format(e)}.weight", Place(stacks[1], Span(0, hidden), single, e, transposed=turned)
    if router not in ("mlp.gate", "feed_forward.gate", "router.proj"):
        tensor = "mlp.router.weight" if model.family == "phimoe" else "mlp.gate.weight"
        yield f"{router}.weight", Place(tensor, Span(0, has.count), (has.count, hidden))
    if model.family == "ernie4_5_moe":  # one row, as of several groups
        tensor = f"mlp.moe_statics.{shards.CORRECTION}"
        yield shards.correction_name(model), Place(tensor, Span(0, has.count), (1, has.count), 0)
    elif has.correction and not (name := shards.correction_name(model)).startswith(("mlp.", "feed_forward.")):
        yield name, Place(f"mlp.{shards.CORRECTION}", Span(0, has.count), (has.count,))


def _interleaved(
    e: int, modules: tuple[str, str, str], has: ExpertsConfig, hidden: int, packed: bool
) -> Iterator[tuple[str, Place]]:
    """Of an expert of gpt-oss: gate and up in turn; matrices transposed, but for the values of MXFP4 blocks."""
    stack, both, (gate, up, down) = "mlp.experts", 2 * has.width, modules
    kind = BLOCKS if packed else ""

    def matrices(name: str, rows: int, columns: int) -> tuple[str, tuple[int, ...]]:
        return f"{stack}.{name}{kind}", (has.count, rows, columns) if packed else (has.count, columns, rows)

    tensor, shape = matrices("gate_up_proj", both, hidden)
    for module, first in ((gate, 0), (up, 1)):
        rows = Span(first, both)
        yield f"{module}.weight", Place(tensor, rows, shape, e, 2, not packed)
        yield f"{module}.bias", Place(f"{stack}.gate_up_proj_bias", rows, (has.count, both), e, 2)
    rows, (tensor, shape) = Span(0, hidden), matrices("down_proj", hidden, has.width)
    yield f"{down}.weight", Place(tensor, rows, shape, e, transposed=not packed)
    yield f"{down}.bias", Place(f"{stack}.down_proj_bias", rows, (has.count, hidden), e)


def fitting(place: Place, shape: tuple[int, ...] | None, model: ModelConfig) -> Place | None:
    """The place in a tensor of that shape, None where it is not there. Qwen3-VL's experts are published transposed, and
    saved by transformers as they are: their shape shows which, and where it fits both they are as they are."""
    if shape == place.shape:
        return place
    if model.wrapper == "qwen3_vl_moe" and place.matrix is not None and not place.transposed:
        experts, rows, columns = place.shape
        turned = place._replace(shape=(experts, columns, rows), transposed=True)
        return turned if shape == turned.shape else None
    return None


def whole_stacks(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """As `stored_in`, of the stacks that are there in their shape; `shapes` by the names of tensors."""
    packed = any(name.endswith(BLOCKS) for name in shapes)
    apart = any(name.endswith("linear_attn.in_proj_z.weight") for name in shapes)
    found = stored_in(model, packed=packed, apart=apart).items()
    return {
        name: place
        for name, one in found
        if (place := fitting(one, shapes.get(one.tensor), model)) is not None
    }
