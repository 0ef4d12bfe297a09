"""A recording read into sites: every operation on every rank, with what it should have given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from lockstep.engine.graph import LAYER, Operation, operation_of
from lockstep.engine.graph.formula import FORMULAS, evaluate, numbers_of
from lockstep.engine.graph.operation import Kind, state_of
from lockstep.engine.parallel.shards import is_first_of_group
from lockstep.engine.taps.flow import is_known, near
from lockstep.engine.taps.names import layer_of, local_name
from lockstep.workbench.diagnosis.operations.attention import (
    FUSED,
    AttentionPass,
    attended,
    of_hidden_rows,
    own_sinks,
    settled,
)
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.expected import ROW_WISE as OF_TOKENS
from lockstep.workbench.diagnosis.operations.expected import Lacking, Operands, Result, as_read
from lockstep.workbench.diagnosis.operations.experts import (
    choice,
    choice_weights,
    combine,
    expert_groups,
    expert_input,
    experts,
    held_experts,
    settled_choice,
)
from lockstep.workbench.diagnosis.operations.facts import LARGEST, MODEL_FREE, Facts
from lockstep.workbench.diagnosis.operations.gathered import gathered_logits
from lockstep.workbench.diagnosis.operations.indexer import (
    PASS_WISE,
    settled_keys,
    settled_scores,
    shared_choice,
)
from lockstep.workbench.diagnosis.operations.layers import missing_layers
from lockstep.workbench.diagnosis.operations.mixture import (
    MIXTURE,
    ROOTS,
    expert_placements,
    mixture,
    undecided,
)
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.recurrent import GATES, RECURRENT, own_group
from lockstep.workbench.diagnosis.operations.shares import rank_spans, weight_names
from lockstep.workbench.diagnosis.operations.site import Site, Unjudged
from lockstep.workbench.diagnosis.operations.sources import OperationInput, made_ready, slack_of, sources_of
from lockstep.workbench.diagnosis.recording import Array, unpadded

ROW_WISE: Mapping[str, Callable[[Operands], Result]] = {
    **OF_TOKENS,
    "choice": choice,
    "choice_weights": choice_weights,
    "experts": experts,
    "expert_input": expert_input,
    "combine": combine,
    "shared_choice": shared_choice,
    MIXTURE: mixture,
    **GATES,
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
class _RankOperation:
    """One operation on one rank, nothing of it computed yet."""

    tap: str
    operation: str
    rank: int
    taps: RecordedTaps
    facts: Facts
    sources: Mapping[str, OperationInput]
    missing: str
    span: slice | None
    columns: slice | None
    held: range | None

    def identity(self) -> tuple[object, ...]:
        """Equal for ranks that do the same on the same bits."""
        own = (source for source in self.sources.values() if not source.gathered)
        leads = [self.taps.lead(tap, self.rank) for source in own for tap in source.taps]
        spans = [(s.start, s.stop) if s else None for s in (self.span, self.columns)]
        return (self.taps.lead(self.tap, self.rank), *leads, *spans)

    def site(self, ranks: tuple[int, ...]) -> Site | Unjudged:
        if self.operation == MIXTURE and local_name(self.tap) == ROOTS[0] and len(self.taps.ranks) > 1:
            tried = [one._site(ranks) for one in self._placements()]
            return min(
                tried, key=lambda one: one.deviation.ratio if isinstance(one, Site) and one.deviation else 0.0
            )
        return self._site(ranks)

    def _placements(self) -> Iterator[_RankOperation]:
        """Every way in which the experts may lie on the ranks, which nothing of one kernel shows."""
        for _, span, held in expert_placements(self.facts.model, len(self.taps.ranks), self.rank):
            yield replace(self, span=span, held=held)

    def _site(self, ranks: tuple[int, ...]) -> Site | Unjudged:
        if self.missing:
            return Unjudged(self.tap, self.rank, self.missing)
        try:
            with np.errstate(all="ignore"):  # what overflows in an engine may overflow here
                if self.operation in RECURRENT:
                    parts, passes = self._recurrent()
                else:
                    parts, passes = self._blocks() if self.operation in PASS_WISE else self._row_wise()
        except Lacking as error:
            return Unjudged(self.tap, self.rank, str(error))
        except (ValueError, IndexError) as error:
            return Unjudged(self.tap, self.rank, f"shapes that do not fit together: {error}")
        return Site(
            self.tap, self.operation, self.rank, ranks, tuple(parts), self.facts, self.taps, tuple(passes),
            self.weights, self.span, self.columns, held=self.held,
        )  # fmt: skip

    @property
    def declared(self) -> Operation | None:
        """The model's operation at the tap; None of a model that is not known."""
        found = None if self.facts.model_free else operation_of(self.facts.model, local_name(self.tap))
        if (
            found is not None and found.kind == "reduce" and self.operation in ("combine", MIXTURE)
        ):  # no terms were recorded
            return operation_of(self.facts.model, found.inputs["partial"])
        return found

    @property
    def weights(self) -> Mapping[str, str]:
        """By role; a term of an expert has its bias on the first of the ranks that share the expert."""
        found = weight_names(self.tap, self.operation, self.facts)
        if self.operation == "experts" and self.declared is not None and self.declared.summed:
            groups = expert_groups(self.tap, self.taps)
            if not is_first_of_group(len(self.taps.ranks), self.rank, groups):
                found.pop("bias", None)
        return found

    def _row_wise(self) -> tuple[list[Part], list[int]]:
        passes = self._passes()
        rows = [row for i in passes for row in self.taps.passes[i].rows]
        inputs = {role: self._rows(source, passes) for role, source in self.sources.items()}
        for role, source in self.sources.items():
            inputs[role] = made_ready(source, inputs[role], rows, self.facts)
            if self.declared is not None:
                inputs[role] = as_read(self.declared, inputs[role], self.facts.model)
        inputs |= own_group(inputs, self.facts.model, self.span)
        seen = self.taps.rows(self.tap, self.rank, passes)
        if seen is None:
            raise Lacking("its tensors have other shapes from step to step")
        at = np.arange(len(rows))
        if self.tap == "logits" and len(seen) == len(passes):  # of each pass the last token's row
            at = np.cumsum([len(self.taps.passes[i].rows) for i in passes]) - 1
            rows = [self.taps.passes[i].rows[-1] for i in passes]
            inputs["x"] = inputs["x"][at]
        operands = Operands(
            self.facts, tuple(rows), inputs, self.weights, self.span, self.columns, self.declared, self.held,
        )  # fmt: skip
        expected, noise = ROW_WISE[self.operation](operands)
        if self.tap == "logits" and self.rank == self.taps.ranks[-1]:
            seen = unpadded(seen, expected.shape[-1])
        if self.operation == "choice":
            seen, expected = settled_choice(operands, seen, expected)
        if self.operation == "shared_choice":
            seen = np.sort(seen, -1)
        if self.operation == MIXTURE and seen.shape == expected.shape:
            expected = np.where(undecided(operands)[:, None], seen, expected)
        if self.tap == "logits" and self.span is None:
            others = [replace(operands, inputs={"x": x[at]}) for x in self._of_other_ranks(passes)]
            expected = gathered_logits(expected, [ROW_WISE[self.operation](one)[0] for one in others], seen)
        noise = noise + self._summed_noise(inputs, expected, passes)
        if seen.shape != expected.shape and seen.size == expected.size:
            seen = seen.reshape(expected.shape)
        return [Part(tuple(rows), inputs, seen, expected, noise, LARGEST[self.facts.dtype])], passes

    def _of_other_ranks(self, passes: list[int]) -> list[Array]:
        """The input of every rank, where they differ and are as large; else none."""
        tap = self.sources["x"].tap
        if len({self.taps.lead(tap, rank) for rank in self.taps.ranks}) == 1:
            return []
        found = [self.taps.rows(tap, rank, passes) for rank in self.taps.ranks]
        held = [x for x in found if x is not None]
        return held if len(held) == len(found) and len({x.shape for x in held}) == 1 else []

    def _summed_noise(self, inputs: Mapping[str, Array], expected: Array, passes: list[int]) -> Array | float:
        """What an engine may have rounded of sums that were not recorded: by the size of their terms, as far as it goes
        through the operation."""
        for role, source in self.sources.items():
            if len(source.taps) > 1:
                terms = [self.taps.rows(tap, self.rank, passes) for tap in source.taps]
                size, x = sum(np.abs(term) for term in terms if term is not None), inputs[role]
                through = np.abs(np.divide(expected, x, out=np.ones_like(x), where=x != 0))
                return np.asarray(self.facts.unit * size * (through if self.operation == "norm" else 1.0))
        return 0.0

    def _passes(self) -> list[int]:
        """Those of which the output and all inputs were captured."""
        names = [(tap, source.gathered) for source in self.sources.values() for tap in source.taps]
        wanted = [self.taps.tensors(self.tap, self.rank)]
        for tap, gathered in names:
            ranks = self.taps.ranks if gathered else [self.rank]
            wanted += [self.taps.tensors(tap, rank) for rank in ranks]
        found = [i for i, held in enumerate(zip(*wanted, strict=True)) if all(x is not None for x in held)]
        if not found:
            inputs = ", ".join(name for name, _ in names)
            raise Lacking(
                f"neither it nor its inputs ({inputs}) were captured whole"
                if inputs
                else "it was not captured whole"
            )
        return found

    def _rows(self, source: OperationInput, passes: list[int]) -> Array:
        if not source.gathered:
            terms = [self.taps.rows(tap, self.rank, passes) for tap in source.taps]
            found = None if any(x is None for x in terms) else sum(x for x in terms if x is not None)
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
        return np.asarray(found)

    # --- linear attention ----------------------------------------------------------------------------

    def _recurrent(self) -> tuple[list[Part], list[int]]:
        """Pass by pass, with what the sequence's passes before it have left."""
        found = {i: before for i in self._passes() if (before := self._before(i)) is not None}
        if not found:
            raise Lacking("what its sequence had before was not captured")
        return [self._pass(i, before) for i, before in found.items()], list(found)

    def _pass(self, i: int, before: Mapping[str, Array]) -> Part:
        tensors = {role: self.taps.tensors(source.tap, self.rank)[i] for role, source in self.sources.items()}
        rows = self.taps.passes[i].rows
        given = {
            role: made_ready(self.sources[role], _there(x), rows, self.facts) for role, x in tensors.items()
        }
        inputs = {**given, **before}
        operands = Operands(self.facts, rows, inputs, self.weights, self.span, self.columns, self.declared)
        expected, noise = RECURRENT[self.operation](operands)
        seen = _there(self.taps.tensors(self.tap, self.rank)[i])
        if LAYER[local_name(self.tap)].form == "state":  # a row, that of the last token
            rows, expected, noise = rows[-1:], expected[None], noise[None]
        return Part(rows, inputs, seen, expected, noise, LARGEST[self.facts.dtype])

    def _before(self, i: int) -> Mapping[str, Array] | None:
        """What a pass meets of the sequence's earlier ones; None where that was not captured."""
        earlier = self._until(i)[:-1]
        if self.operation == "conv":
            return self._rows_before(earlier)
        tensors = self.taps.tensors(near(state_of(self.operation), layer_of(self.tap), 0), self.rank)
        if earlier:
            last = tensors[earlier[-1]]
            return None if last is None else {"before": last[0]}
        like = next((x for x in tensors if x is not None), None)
        return None if like is None else {"before": np.zeros_like(like[0])}

    def _rows_before(self, earlier: list[int]) -> Mapping[str, Array] | None:
        """The rows before a convolution's; and those at the end of the last pass over several tokens, which one keeps
        that decode steps do not update."""
        rows = self._newest_rows(earlier)
        several = max((j for j in earlier if len(self.taps.passes[j].rows) > 1), default=-1)
        frozen = self._newest_rows([j for j in earlier if j <= several])
        return None if rows is None or frozen is None else {"before": rows, "frozen": frozen}

    def _newest_rows(self, passes: list[int]) -> Array | None:
        """The last rows that a convolution read in those passes, zeros before the first; None where they lack."""
        tensors = self.taps.tensors(self.sources["x"].tap, self.rank)
        count = max(1, self.facts.model.conv - 1)
        rows = np.zeros((0, next(x.shape[1] for x in tensors if x is not None)))
        for j in reversed(passes):
            if len(rows) >= count:
                break
            if (x := tensors[j]) is None:
                return None
            rows = np.concatenate([x, rows])
        return np.concatenate([np.zeros((count, rows.shape[1])), rows])[-count:]

    # --- attention -----------------------------------------------------------------------------------

    def _blocks(self) -> tuple[list[Part], list[int]]:
        histories = {role: self._history(one) for role, one in self.sources.items() if one.history}
        passes = [i for i in self._passes() if all(i in held for held in histories.values())]
        if not passes:
            names = ", ".join(self.sources[role].tap for role in histories)
            raise Lacking(f"what was written to the cache ({names}) was not captured from the start")
        return [self._block(i, histories) for i in passes], passes

    def _block(self, i: int, histories: Mapping[str, Mapping[int, Array]]) -> Part:
        """One pass; `histories` hold of roles the rows [K, kv_heads, D] so far, by pass."""
        rows, layer, windows = self.taps.passes[i].rows, layer_of(self.tap), self.facts.model.windows
        inputs = {
            role: histories[role][i] if source.history
            else made_ready(source, _there(self.taps.tensors(source.tap, self.rank)[i]), rows, self.facts)
            for role, source in self.sources.items()
        }  # fmt: skip
        if self.weights:  # of the softmax
            heads = len(inputs["scores"]) if "scores" in inputs else inputs["q"].shape[1]
            inputs |= own_sinks(self.facts, self.weights, heads, self.rank)
        given = AttentionPass(
            self.facts,
            inputs,
            np.array([row.position for row in rows]),
            windows[layer] if windows and layer is not None else None,
            max(slack_of(source, rows, self.facts) for source in self.sources.values()),
        )
        expected, noise = PASS_WISE[self.operation](given)
        seen = _there(self.taps.tensors(self.tap, self.rank)[i])
        if self.operation in FUSED:
            inputs = attended(given)
        if self.operation == "scores":
            seen = settled(given, seen, expected)
        if self.operation == "index_scores":
            seen = settled_scores(seen, expected)
        if self.operation == "key_choice":
            seen, expected = settled_keys(given, seen, expected)
        if self.operation == "softmax":
            expected = of_hidden_rows(inputs["scores"], seen, expected)
        if self.operation == "cache":
            rows = tuple(row for j in self._until(i) for row in self.taps.passes[j].rows)
            *_, before = [None, *(self.taps.tensors(self.tap, self.rank)[j] for j in self._until(i)[:-1])]
            inputs |= {} if before is None else {"before": before}
        return Part(rows, inputs, seen, expected, noise, LARGEST[self.facts.dtype])

    def _until(self, i: int) -> list[int]:
        """The passes of the same sequence up to and with this one."""
        return [j for j in range(i + 1) if self.taps.passes[j].seq == self.taps.passes[i].seq]

    def _history(self, source: OperationInput) -> dict[int, Array]:
        """For each pass before which all were captured the rows [K, kv_heads, D] of its sequence so far."""
        if source.made is None:
            return self._rows_so_far(source.tap, source)
        held = [self._rows_so_far(tap, source) for tap in source.taps]
        roles = LAYER[f"attn.{source.made}"].inputs
        whole = (i for i in held[0] if all(i in rows for rows in held))
        return {
            i: self._made(source.made, {role: rows[i] for role, rows in zip(roles, held, strict=True)})
            for i in whole
        }

    def _made(self, kind: Kind, given: Mapping[str, Array]) -> Array:
        """Keys or values [K, heads, D] of what latents gave [K, 1, heads * D], and of the rotated part of keys."""
        latent = self.facts.model.latent
        assert latent is not None, "keys and values that are made of latents"
        expanded = given["expanded"].reshape(len(given["expanded"]), -1, latent.expanded_dim)
        numbers = numbers_of(self.facts.model)
        return np.asarray(evaluate(FORMULAS[kind], {**numbers, **given, "expanded": expanded}))

    def _rows_so_far(self, tap: str, source: OperationInput) -> dict[int, Array]:
        tensors, found = self.taps.tensors(tap, self.rank), dict[int, Array]()
        for seq in {one.seq for one in self.taps.passes}:
            mine = [i for i, one in enumerate(self.taps.passes) if one.seq == seq]
            mine = mine[: next((n for n, i in enumerate(mine) if tensors[i] is None), len(mine))]
            if not mine:
                continue
            rows = [row for i in mine for row in self.taps.passes[i].rows]
            held = [_there(tensors[i]) for i in mine]
            latent, dim = self.facts.model.latent, self.facts.model.head_dim
            whole = np.concatenate([x.reshape(len(x), -1, x.shape[-1] if latent else dim) for x in held])
            whole = made_ready(source, whole, rows, self.facts)
            for i, stop in zip(mine, np.cumsum([len(x) for x in held]).tolist(), strict=True):
                found[i] = whole[:stop]
        return found


def _there(x: Array | None) -> Array:
    if x is None:
        raise Lacking("it was not captured whole")
    return x


def _operation(tap: str, rank: int, taps: RecordedTaps, facts: Facts) -> _RankOperation:
    facts = facts.of_layer(layer_of(tap))
    operation, sources, missing = sources_of(tap, taps, facts)
    if facts.model_free and operation not in MODEL_FREE:
        missing = "that takes the model's checkpoint"
    span, columns = rank_spans(tap, operation, rank, taps, facts)
    facts = facts.of_tap(tap)
    held = held_experts(tap, rank, taps, facts)
    return _RankOperation(tap, operation, rank, taps, facts, sources, missing, span, columns, held)
