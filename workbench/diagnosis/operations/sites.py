"""A recording read into sites: every operation on every rank, with what it should have given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from engine.taps.names import layer_of, local_name
from workbench.diagnosis.dataflow import is_known
from workbench.diagnosis.operations.attention import BLOCKS, AttentionPass, settled
from workbench.diagnosis.operations.deviation import Part
from workbench.diagnosis.operations.expected import ROW_WISE, Lacking, Operands
from workbench.diagnosis.operations.facts import LARGEST, Facts
from workbench.diagnosis.operations.layers import missing_layers
from workbench.diagnosis.operations.recorded import RecordedTaps, Row
from workbench.diagnosis.operations.shares import BEFORE, rank_spans, weight_names
from workbench.diagnosis.operations.site import Site, Unjudged, near
from workbench.diagnosis.recording import Array

_Inputs = Mapping[str, tuple[str, ...]]
#: Tap kind -> operation, and its inputs by role: kinds of the same layer, of which the first that is recorded counts.
OPERATIONS: Mapping[str, tuple[str, _Inputs]] = {
    "embed": ("embedding", {}),
    **dict.fromkeys(("attn_norm", "final_norm"), ("norm", {"x": ("<",)})),
    **dict.fromkeys(("attn.q_proj", "attn.k_proj", "attn.v_proj"), ("linear", {"x": ("attn_norm",)})),
    "attn.q_norm": ("norm", {"x": ("attn.q_proj",)}),
    "attn.k_norm": ("norm", {"x": ("attn.k_proj",)}),
    "attn.q_rope": ("rope", {"x": ("attn.q_norm", "attn.q_proj")}),
    "attn.k_rope": ("rope", {"x": ("attn.k_norm", "attn.k_proj")}),
    "attn.k_cache": ("cache", {"new": ("attn.k_rope",)}),
    "attn.v_cache": ("cache", {"new": ("attn.v_proj",)}),
    "attn.scores": ("scores", {"q": ("attn.q_rope",), "k": ("attn.k_cache",)}),
    "attn.probs": ("softmax", {"scores": ("attn.scores",)}),
    "attn.context": ("context", {"probs": ("attn.probs",), "v": ("attn.v_cache",)}),
    "attn.o_proj.partial": ("linear", {"x": ("attn.context",)}),
    "attn.o_proj": ("reduce", {"partial": ("attn.o_proj.partial",)}),
    "attn_residual": ("residual", {"x": ("<",), "y": ("attn.o_proj",)}),
    "mlp_norm": ("norm", {"x": ("attn_residual",)}),
    **dict.fromkeys(("mlp.gate", "mlp.up"), ("linear", {"x": ("mlp_norm",)})),
    "mlp.act": ("activation", {"gate": ("mlp.gate",), "up": ("mlp.up",)}),
    "mlp.down.partial": ("linear", {"x": ("mlp.act",)}),
    "mlp.down": ("reduce", {"partial": ("mlp.down.partial",)}),
    "mlp_residual": ("residual", {"x": ("attn_residual",), "y": ("mlp.down",)}),
    "logits": ("head", {"x": ("final_norm",)}),
}


def sites(taps: RecordedTaps, facts: Facts) -> Iterator[Site | Unjudged]:
    """Every operation that the recording has the output of, in the order of execution, rank by rank; ranks with
    the same inputs and outputs, bit for bit, at one site."""
    for tap in taps.recording.session.taps:
        if taps.has(tap.name) and is_known(tap.name):
            yield from sites_of(tap.name, taps, facts)
            yield from missing_layers(tap.name, taps, facts)


def sites_of(tap: str, taps: RecordedTaps, facts: Facts) -> Iterator[Site | Unjudged]:
    """One operation on all ranks."""
    found = [_operation(tap, rank, taps, facts) for rank in taps.ranks]
    groups: dict[tuple[object, ...], list[int]] = {}
    for one in found:
        groups.setdefault(one.identity(), []).append(one.rank)
    for ranks in groups.values():
        yield found[ranks[0]].site(tuple(ranks))


@dataclass(frozen=True, slots=True)
class _Source:
    """One input by role: a tap of which each rank's own part goes in, or (`gathered`) all ranks'."""

    tap: str
    gathered: bool = False


@dataclass(frozen=True, slots=True)
class _RankOperation:
    """One operation on one rank, nothing of it computed yet."""

    tap: str
    operation: str
    rank: int
    taps: RecordedTaps
    facts: Facts
    sources: Mapping[str, _Source]
    missing: str
    span: slice | None
    columns: slice | None

    def identity(self) -> tuple[object, ...]:
        """Equal for ranks that do the same on the same bits."""
        leads = [self.taps.lead(s.tap, self.rank) for s in self.sources.values() if not s.gathered]
        spans = [(s.start, s.stop) if s else None for s in (self.span, self.columns)]
        return (self.taps.lead(self.tap, self.rank), *leads, *spans)

    def site(self, ranks: tuple[int, ...]) -> Site | Unjudged:
        if self.missing:
            return Unjudged(self.tap, self.rank, self.missing)
        try:
            with np.errstate(all="ignore"):  # what overflows in an engine may overflow here
                parts, passes = self._blocks() if self.operation in BLOCKS else self._row_wise()
        except Lacking as error:
            return Unjudged(self.tap, self.rank, str(error))
        except (ValueError, IndexError) as error:
            return Unjudged(self.tap, self.rank, f"shapes that do not fit together: {error}")
        return Site(
            self.tap, self.operation, self.rank, ranks, tuple(parts), self.facts, self.taps, tuple(passes),
            self.weights, self.span, self.columns,
        )  # fmt: skip

    @property
    def weights(self) -> Mapping[str, str]:
        return weight_names(self.tap, self.operation, self.facts)

    def _row_wise(self) -> tuple[list[Part], list[int]]:
        passes = self._passes()
        inputs = {role: self._rows(source, passes) for role, source in self.sources.items()}
        seen = self.taps.rows(self.tap, self.rank, passes)
        if seen is None:
            raise Lacking("its tensors have other shapes from step to step")
        rows = [row for i in passes for row in self.taps.passes[i].rows]
        if self.tap == "logits":  # of each pass the last token's row
            counts = [len(self.taps.passes[i].rows) for i in passes]
            if len(seen) == len(passes):
                rows = [self.taps.passes[i].rows[-1] for i in passes]
                inputs["x"] = inputs["x"][np.cumsum(counts) - 1]
        operands = Operands(self.facts, tuple(rows), inputs, self.weights, self.span, self.columns)
        expected, noise = ROW_WISE[self.operation](operands)
        if seen.shape != expected.shape and seen.size == expected.size:
            seen = seen.reshape(expected.shape)
        return [Part(tuple(rows), inputs, seen, expected, noise, LARGEST[self.facts.dtype])], passes

    def _passes(self) -> list[int]:
        """Those of which the output and all inputs were captured."""
        names = [(source.tap, source.gathered) for source in self.sources.values()]
        wanted = [self.taps.tensors(self.tap, self.rank)]
        for tap, gathered in names:
            ranks = self.taps.ranks if gathered else [self.rank]
            wanted += [self.taps.tensors(tap, rank) for rank in ranks]
        found = [i for i, held in enumerate(zip(*wanted, strict=True)) if all(x is not None for x in held)]
        if not found:
            raise Lacking(
                f"neither it nor its inputs ({', '.join(name for name, _ in names)}) were captured whole"
            )
        return found

    def _rows(self, source: _Source, passes: list[int]) -> Array:
        if not source.gathered:
            found = self.taps.rows(source.tap, self.rank, passes)
        elif self.operation == "reduce":
            parts = [self.taps.rows(source.tap, rank, passes) for rank in self.taps.ranks]
            shapes = {None if part is None else part.shape for part in parts}
            found = (
                None if None in shapes or len(shapes) > 1 else np.stack([p for p in parts if p is not None])
            )
        else:
            found = self.taps.whole(source.tap, passes)
        if found is None:
            raise Lacking(f"{source.tap} has other shapes from step to step, or from rank to rank")
        return found

    # --- attention -----------------------------------------------------------------------------------

    def _blocks(self) -> tuple[list[Part], list[int]]:
        parts, layer = [], layer_of(self.tap)
        windows, passes = self.facts.model.windows, self._passes()
        if self.operation == "cache":
            passes = self._written_passes(passes)
        for i in passes:
            inputs = self._written(i) if self.operation == "cache" else {
                role: _there(self.taps.tensors(source.tap, self.rank)[i]) for role, source in self.sources.items()
            }  # fmt: skip
            rows, seen = self.taps.passes[i].rows, _there(self.taps.tensors(self.tap, self.rank)[i])
            positions = np.array([row.position for row in rows])
            window = windows[layer] if windows and layer is not None else None
            expected, noise = BLOCKS[self.operation](AttentionPass(self.facts, inputs, positions, window))
            if self.operation == "cache":
                rows = self._history(i)
            if self.operation == "scores":
                seen = settled(self.facts, seen, expected)
            parts.append(Part(rows, inputs, seen, expected, noise, LARGEST[self.facts.dtype]))
        return parts, passes

    def _written_passes(self, passes: list[int]) -> list[int]:
        """Of a cache: those before which everything that was written was captured."""
        new = self.taps.tensors(self.sources["new"].tap, self.rank)
        found = [i for i in passes if all(new[j] is not None for j in self._until(i))]
        if not found:
            raise Lacking(
                f"what was written to it ({self.sources['new'].tap}) was not captured from the start"
            )
        return found

    def _until(self, i: int) -> list[int]:
        """The passes of the same sequence up to and with this one."""
        return [j for j in range(i + 1) if self.taps.passes[j].seq == self.taps.passes[i].seq]

    def _history(self, i: int) -> tuple[Row, ...]:
        return tuple(row for j in self._until(i) for row in self.taps.passes[j].rows)

    def _written(self, i: int) -> dict[str, Array]:
        """What the passes so far have written, [K, kv_heads, D], and what the cache held before this one."""
        new, head_dim = self.taps.tensors(self.sources["new"].tap, self.rank), self.facts.model.head_dim
        written = [_there(new[j]) for j in self._until(i)]
        found = {"written": np.concatenate([x.reshape(len(x), -1, head_dim) for x in written])}
        *_, before = [None, *(self.taps.tensors(self.tap, self.rank)[j] for j in self._until(i)[:-1])]
        return found if before is None else found | {"before": before}


def _there(x: Array | None) -> Array:
    if x is None:
        raise Lacking("it was not captured whole")
    return x


# --- what a rank works with --------------------------------------------------------------------------------


def _operation(tap: str, rank: int, taps: RecordedTaps, facts: Facts) -> _RankOperation:
    operation, wanted = OPERATIONS[local_name(tap)]
    sources, missing = {}, ""
    for role, kinds in wanted.items():
        names = [near(kind, layer_of(tap), facts.model.num_layers) for kind in kinds]
        there = [name for name in names if taps.has(name)]
        if there:
            sources[role] = _Source(there[0], gathered=operation == "reduce")
        elif operation == "reduce":  # an engine that shows no partial products
            operation = "linear"
            sources = {
                "x": _Source(near(BEFORE[local_name(tap)], layer_of(tap), 0), gathered=len(taps.ranks) > 1)
            }
            missing = "" if taps.has(sources["x"].tap) else f"{sources['x'].tap} was not recorded"
        else:
            missing = f"{names[-1]} was not recorded"
    span, columns = rank_spans(tap, operation, rank, taps, facts)
    return _RankOperation(tap, operation, rank, taps, facts, sources, missing, span, columns)
