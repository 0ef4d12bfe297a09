"""A mixture of experts in place of an MLP: a router, the experts that this rank holds, a shared one.

Every rank routes every token, and computes what its own experts, or its part of them, give; one sum over the ranks puts
both together. Rows of a token's experts are in the order of the experts' numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.config.families import Activation, ClampedSwiGLU, Gating
from lockstep.engine.layers.linear import MergedColumnParallelLinear
from lockstep.engine.layers.weight import KeptTensor, Store
from lockstep.engine.layers.wiring import Wiring
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.parallel.shards import Span


class Biases(NamedTuple):
    """Of an expert: whether it has any, whether the rank holds that of down, and whether it is the one to add it to its
    term of the sum."""

    there: bool
    held: bool
    added: bool


NO_BIASES = Biases(False, False, False)


class Router:
    """The logits of every expert, and the bias that corrects the choice. In float32 where the model's is."""

    def __init__(
        self, module: str, correction: str, hidden: int, experts: ExpertsConfig, store: Store, scale: str = ""
    ) -> None:
        """`correction`: the name of what corrects the choice, `scale` of what each expert's weight is multiplied
        by."""
        self.name, self.experts, self.hidden_size = module, experts, hidden
        self.correction_name = correction
        self.store = store.wide() if experts.wide else store
        self.weight = self.store.matrix([f"{module}.weight"], [experts.count], hidden)
        self.bias = self.store.bias(experts.count) if experts.biased else None
        self.correction = self.store.vector(experts.count) if experts.correction else None
        self.scale_name = scale
        self.scale = self.store.vector(experts.count) if experts.beside_mlp else None

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> the weight, and the bias."""
        found: dict[str, Tensor | KeptTensor] = {**self.weight.parts()}
        if self.bias is not None:
            found[f"{self.name}.bias"] = self.bias
        if self.scale is not None:
            found[self.scale_name] = self.scale
        return found if self.correction is None else found | {self.correction_name: self.correction}

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight.product(x.to(self.store.dtype), self.bias)  # [T, E]


class Expert:
    """One MLP's matrices, of which a rank has `features`: none of them where another rank has the expert."""

    def __init__(
        self, names: Sequence[str], features: Span, hidden: int, store: Store, biases: Biases = NO_BIASES
    ) -> None:
        """`names` of gate, up and down, or of up and down alone."""
        *read, down = names
        self.name = down
        self.gate_up = MergedColumnParallelLinear(read, [features] * len(read), hidden, biases.there, store)
        self.down = store.matrix([f"{down}.weight"], [hidden], features.size)
        self.bias = store.bias(hidden if biases.held else 0) if biases.there else None
        self.adds_bias = biases.added

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's share."""
        found = {**self.gate_up.parameters(), **self.down.parts()}
        return found if self.bias is None else found | {f"{self.name}.bias": self.bias}


def activated(
    act: Callable[[Tensor, Tensor, Gating], Tensor],
    alone: Callable[[Tensor, Activation], Tensor],
    gates: Sequence[Tensor],
    up: Tensor,
    activation: Gating,
) -> Tensor:
    """What is made of gate and up, or of up where experts have no gate."""
    if gates:
        return act(gates[0], up, activation)
    assert not isinstance(activation, ClampedSwiGLU), "which is of gate and up"
    return alone(up, activation)


class SharedExpert:
    """The expert to which every token goes. `gate`: the matrix of one row of its own gate."""

    def __init__(self, expert: Expert, gate: MergedColumnParallelLinear | None, activation: Gating) -> None:
        self.expert, self.gate, self.activation = expert, gate, activation

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's share."""
        return self.expert.parameters() | ({} if self.gate is None else self.gate.parameters())

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""
        self.act, self.act_alone = wiring.rules.act, wiring.rules.act_alone
        self.tap_gate, self.tap_up, self.tap_act, self.tap_down = (
            wiring.tap(f"mlp.shared.{one}") for one in ("gate", "up", "act", "down")
        )
        self.tap_logit = wiring.tap("mlp.shared_gate")

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """This rank's term of what it gives [T, H], and the logits of its gate [T, 1]."""
        *gates, up = self.expert.gate_up(x)
        if self.tap_gate and gates:
            self.tap_gate(gates[0])
        if self.tap_up:
            self.tap_up(up)
        hidden = activated(self.act, self.act_alone, gates, up, self.activation)
        if self.tap_act:
            self.tap_act(hidden)
        out = self.expert.down.product(hidden)
        if self.tap_down:
            self.tap_down(out)
        if self.gate is None:
            return out, None
        (logit,) = self.gate(x)
        if self.tap_logit:
            self.tap_logit(logit)
        return out, logit


class MixtureOfExperts:
    """The sum over each token's experts of weight times down(activation(gate(x)) * up(x)), and the shared expert."""

    def __init__(
        self,
        router: Router,
        experts: Sequence[Expert],
        held: Span,
        shared: SharedExpert | None,
        activation: Gating,
        comm: Comm,
    ) -> None:
        self.router, self.experts, self.held, self.shared = router, experts, held, shared
        self.config, self.activation, self.comm = router.experts, activation, comm
        self.hidden_size = router.hidden_size

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's share; empty of the experts that others have."""
        params = self.router.parameters()
        for expert in self.experts:
            params |= expert.parameters()
        return params if self.shared is None else params | self.shared.parameters()

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""
        rules = wiring.rules
        self.scores, self.choose, self.weigh = rules.router_scores, rules.choice, rules.choice_weights
        self.own_experts, self.combine, self.add_shared = (
            rules.own_experts,
            rules.combine,
            rules.shared_expert,
        )
        self.act, self.act_alone, self.reduce = rules.act, rules.act_alone, rules.reduce
        self.gate_up, self.add_bias = rules.expert_gate_up, rules.expert_bias
        self.expert_scale = rules.expert_scale
        self.tap_router, self.tap_ids, self.tap_weights = (
            wiring.tap(f"mlp.{one}") for one in ("router", "topk_ids", "topk_weights")
        )
        self.tap_gate, self.tap_up, self.tap_act, self.tap_down = (
            wiring.tap(f"mlp.experts.{one}") for one in ("gate", "up", "act", "down")
        )
        self.weigh_input, self.tap_input = rules.expert_input, wiring.tap("mlp.experts.input")
        self.tap_partial, self.tap_out = wiring.tap("mlp.combine.partial"), wiring.tap("mlp.combine")
        self.place = wiring.place("mlp.combine")
        if self.shared is not None:
            self.shared.bind(wiring)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts, ascending, and their weights: [T, S] both."""
        logits = self.router(x)
        if self.tap_router:
            self.tap_router(logits)
        scores = self.scores(logits, self.config)
        ids = self.choose(scores, self.router.correction, self.config)
        if self.tap_ids:
            self.tap_ids(ids)
        weights = self.weigh(scores, ids, self.router.correction, self.config)
        if self.router.scale is not None:
            weights = weights * self.expert_scale(self.router.scale, ids)
        weights = weights if self.config.wide_weights else weights.to(x.dtype)
        if self.tap_weights:
            self.tap_weights(weights)
        return ids, weights

    def _rows(self, ids: Tensor) -> list[tuple[Expert, Tensor]]:
        """The experts of this rank that any token goes to, and which of the rows [T * S] are theirs."""
        numbers = self.own_experts(ids.flatten(), self.held)
        hit = (number for number in numbers.unique().tolist() if self.held.start <= number < self.held.stop)
        return [(self.experts[number], (numbers == number).nonzero().squeeze(-1)) for number in hit]

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """What experts read and what the router reads (None: the same), [T, H] -> [T, H]."""
        ids, weights = self.route(x if routed is None else routed)
        rows = self._rows(ids)
        read = self._read(x, weights)
        products = self._products(read, ids, rows)
        *gates, up = self.gate_up(*products) if len(products) == 2 else products
        if self.tap_gate and gates:
            self.tap_gate(gates[0])
        if self.tap_up:
            self.tap_up(up)
        hidden = activated(self.act, self.act_alone, gates, up, self.activation)  # [T, S, I / tp]
        if self.held.size < self.config.count:  # zeros are others' rows, though a patch may have filled them
            own = (ids >= self.held.start) & (ids < self.held.stop)
            hidden = hidden.masked_fill(~own.unsqueeze(-1), 0.0)
        if self.tap_act:
            self.tap_act(hidden)
        down = self._outputs(hidden, rows)
        if self.tap_down:
            self.tap_down(down)
        weights = torch.ones_like(weights) if self.config.weighed_inputs else weights
        partial = self.combine(down, weights)  # [T, H], this rank's share of the sum
        if self.shared is not None:
            partial = self.add_shared(partial, *self.shared(x), self.comm)
        if self.tap_partial:
            self.tap_partial(partial)
        self.comm.enter(self.place)
        out = self.reduce(partial, self.comm)
        if self.tap_out:
            self.tap_out(out)
        return out

    def _read(self, x: Tensor, weights: Tensor) -> Tensor:
        """What a token's experts read, [T, 1 or S, H]."""
        if not self.config.weighed_inputs:
            return x.unsqueeze(1)
        read = self.weigh_input(x, weights)
        if self.tap_input:
            self.tap_input(read)
        return read

    def _products(self, x: Tensor, ids: Tensor, rows: list[tuple[Expert, Tensor]]) -> Sequence[Tensor]:
        """Gate and up [T, S, I / tp] of each token's experts, of what they read [T, 1 or S, H]; zeros of those that
        others have."""
        sizes = self.experts[self.held.start].gate_up.sizes
        packed = x.new_zeros(ids.numel(), sum(sizes))
        flat, shared = x.flatten(0, 1), ids.shape[1] // x.shape[1]  # slots that read the same row
        for expert, at in rows:
            packed[at] = expert.gate_up.weight.product(flat[at // shared], expert.gate_up.bias)
        return packed.view(*ids.shape, -1).split_with_sizes(sizes, -1)

    def _outputs(self, hidden: Tensor, rows: list[tuple[Expert, Tensor]]) -> Tensor:
        """[T, S, I / tp] -> this rank's terms of what each token's experts give, [T, S, H]."""
        flat = hidden.flatten(0, 1)
        down = flat.new_zeros(len(flat), self.hidden_size)
        for expert, at in rows:
            term = expert.down.product(flat[at])
            if expert.bias is not None:
                term = self.add_bias(term, expert.bias, expert.adds_bias)
            down[at] = term
        return down.view(*hidden.shape[:2], -1)
