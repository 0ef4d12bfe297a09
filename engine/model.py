"""The decoder: one model for all families, by flags of `ModelConfig`.

`Decoder.forward` is the whole pass, `DecoderLayer` one block. The layers hold this rank's weights; rules and
taps are bound separately (`bind`) and can be rebound without touching the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lockstep.engine.batch import Batch
from lockstep.engine.checkpoint.load import TORCH_DTYPES
from lockstep.engine.config import EngineConfig, ModelConfig
from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.graph import GATE_UP, final_norm_of, operations_of
from lockstep.engine.kv.pool import KVPool
from lockstep.engine.kv.states import LayerState
from lockstep.engine.layers.attention import Attention
from lockstep.engine.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from lockstep.engine.layers.experts import Biases, Expert, MixtureOfExperts, Router, SharedExpert
from lockstep.engine.layers.experts_beside import ExpertsBeside
from lockstep.engine.layers.latent_attention import LatentAttention
from lockstep.engine.layers.layer_inputs import AllLayerInputs, LayerInputGate
from lockstep.engine.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from lockstep.engine.layers.linear_attention import GatedDeltaNet
from lockstep.engine.layers.mamba import Mamba2
from lockstep.engine.layers.mlp import MLP, UngatedMLP
from lockstep.engine.layers.norm import Norm, QKNorm, WholeQKNorm, norm_of, unnormed
from lockstep.engine.layers.shared_attention import BorrowingAttention, ValueNormAttention
from lockstep.engine.layers.short_convolution import ShortConvolution
from lockstep.engine.layers.side_by_side import MultipliedMLP, SideBySide
from lockstep.engine.layers.sparse_attention import SparseAttention
from lockstep.engine.layers.stateful import StatefulLayer
from lockstep.engine.layers.step_inputs import StepInputs
from lockstep.engine.layers.weight import DenseMatrix, KeptMatrix, KeptTensor, Store
from lockstep.engine.layers.wiring import TapCallback, Wiring
from lockstep.engine.layers.xielu import XIELUMLP
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.rows import products
from lockstep.engine.rules import Rules
from lockstep.engine.taps import cpu_pass


class DecoderLayer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), or the MLP of what attention reads, or one of both
    alone; and, of some models, x + norm(gate(x, inputs)); times `scalar`. `norms` by tap: those that the model has;
    `beside`: experts beside the MLP."""

    def __init__(
        self,
        number: int,
        model: ModelConfig,
        attention: Attention | StatefulLayer | SideBySide | None,
        mlp: MLP | MixtureOfExperts | None,
        norms: Mapping[str, Norm],
        comm: Comm,
        gate: LayerInputGate | None = None,
        scalar: tuple[str, Tensor] | None = None,
        beside: ExpertsBeside | None = None,
    ) -> None:
        self.number, self.model, self.norms, self.comm = number, model, norms, comm
        self.attention, self.mlp = attention, mlp
        self.gate, self.scalar, self.beside = gate, scalar, beside
        self.attn_norm, self.post_attn_norm, self.mlp_norm, self.post_mlp_norm, self.post_gate_norm = (
            norms.get(tap, unnormed)
            for tap in ("attn_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm", "post_layer_input_norm")
        )

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's share."""
        parts = (self.attention, self.mlp, self.beside, *self.norms.values(), self.gate)
        params = {name: x for part in parts if part is not None for name, x in part.parameters().items()}
        return params if self.scalar is None else params | dict([self.scalar])

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""
        factor = wiring.rules.residual_factor(self.model)
        add = wiring.rules.residual
        self.residual = add if factor == 1 else lambda x, y: add(x, y * factor)
        self.place = wiring.place(operations_of(self.model)[0].tap)
        self.tap_attn_residual = wiring.tap("attn_residual")
        self.tap_mlp_residual = wiring.tap("mlp_residual")
        for tap, norm in self.norms.items():
            norm.bind(wiring, tap)
        for block in (self.attention, self.mlp, self.beside):
            if block is not None:
                block.bind(wiring)
        self.scale = wiring.rules.layer_scalar
        if self.gate is not None:
            self.gate.bind(wiring)

    def __call__(
        self,
        x: Tensor,
        batch: Batch,
        angles: tuple[Tensor, Tensor],
        inputs: StepInputs,
        pool: KVPool,
        of_layers: Tensor | None = None,
    ) -> Tensor:
        self.comm.enter(self.place)
        normed = x
        if self.attention is None:
            pool.pass_over(self.number, batch)
        else:
            normed = self.attn_norm(x)
            y = self.attention(normed, batch, angles, inputs, pool)  # [T, H]
            x = self.residual(x, self.post_attn_norm(y))
            if self.tap_attn_residual:
                self.tap_attn_residual(x)
        if self.mlp is not None:
            read = normed if self.model.parallel else self.mlp_norm(x)
            y = self.mlp(read)
            if self.beside is not None:
                y = self.beside(y, x)
            x = self.residual(x, self.post_mlp_norm(y))
        if self.gate is not None and of_layers is not None:
            x = self.residual(x, self.post_gate_norm(self.gate(x, of_layers)))
        if self.scalar is not None:
            x = self.scale(x, self.scalar[1])
        if self.tap_mlp_residual:
            self.tap_mlp_residual(x)
        return x


class Rotation:
    """The rotary frequencies of the layers that have the same. `model` is as these layers have it."""

    def __init__(self, model: ModelConfig, rules: Rules, device: torch.device) -> None:
        self.model, self.rules, self.device, self.theta = model, rules, device, rules.rope_theta(model)
        inv_freq, self.factor = rules.rope_frequencies(model, self.theta, 0)
        self.inv_freq = inv_freq.to(device)

    def frequencies(self, batch: Batch) -> Tensor:
        """Angle per position of each pair, [D / 2], or [T, 1, D / 2] where each sequence has its own."""
        if not self.model.rope_scaling.by_length:
            return self.inv_freq
        parts = []
        for span in batch.spans:
            own, _ = self.rules.rope_frequencies(self.model, self.theta, span.length)
            parts.append(own.expand(span.stop - span.start, 1, -1))
        return torch.cat(parts).to(self.device)


def _rotation_of(model: ModelConfig) -> Hashable:
    """What a layer's rotation depends on."""
    return (
        model.rope_theta,
        model.rope_scaling,
        model.head_dim,
        model.rotary_dim,
        model.rotary_last,
        model.neighbours,
    )


class Decoder:
    """One rank's share of the model."""

    def __init__(self, model: ModelConfig, config: EngineConfig, comm: Comm, rules: Rules) -> None:
        self.model, self.config, self.comm = model, config, comm
        self.dtype = TORCH_DTYPES[config.dtype]
        self.device = comm.device
        self._store = Store(
            self.dtype,
            self.device,
            rules,
            kept=config.weights == "quantised",
            batch_invariant=config.batch_invariant,
            many=config.for_many,
        )
        #: Whether decode steps of few sequences have kernels of their own, which are worth loading.
        self._reads_rows = (
            self._store.in_float32
            and not (self._store.kept or self._store.for_many)
            and 3 * model.num_layers * model.intermediate_size * model.hidden_size >= products.WORTH
        )
        if self._reads_rows:
            cpu_pass.use(cpu_pass.WORTH)  # numba is imported anyhow
        self.embed = VocabParallelEmbedding(model, comm, self._store)
        inputs = model.layer_inputs
        self.layer_inputs = None if inputs is None else AllLayerInputs(model, inputs, comm, self._store)
        self.layers = [self._layer(i, rules) for i in range(model.num_layers)]
        self.final_norm = norm_of(model)(final_norm_of(model), model.hidden_size, model, self._store)
        bias = self._store.bias(self.embed.span.size) if model.head_bias else None
        self.head = VocabParallelHead(self._head_weight(self.embed.span, rules), model, bias)
        self.head_name = rules.lm_head(model)

    def _head_weight(self, vocab: shards.Span, rules: Rules) -> DenseMatrix | KeptMatrix:
        source = rules.lm_head(self.model)
        if source == "model.embed_tokens.weight":
            return self.embed.weight
        if source is not None:
            return self._store.matrix([source], [vocab.size], self.model.hidden_size)
        unfilled = DenseMatrix(["lm_head.weight"], [vocab.size], self.model.hidden_size, self._store)
        (weight,) = unfilled.parts().values()
        # As a framework initialises a head that no checkpoint fills; same every time.
        weight.normal_(0.0, 0.02, generator=torch.Generator(self.device).manual_seed(self.comm.rank))
        return unfilled

    def _layer(self, i: int, rules: Rules) -> DecoderLayer:
        m, name, store = self.model.of_layer(i), f"model.layers.{i}", self._store
        modules = {one.tap: f"{name}.{one.module}" for one in operations_of(m)}
        attention: Attention | StatefulLayer | SideBySide | None = None
        mlp: MLP | MixtureOfExperts | None = None
        if "mlp" not in m.blocks:
            state = attention = self._stateful(i, m, modules)
            if state is None or m.beside:
                attention = self._attention(i, m, modules, rules)
                attention = attention if state is None else SideBySide(attention, state, m)
        mixture = None if m.experts is None else self._experts(i, m, m.experts, modules)
        alone = m.experts is None or not m.experts.beside_mlp
        if "attention" not in m.blocks:
            mlp = mixture if alone and mixture is not None else self._mlp(name, m, modules)
        norms = {
            one.tap: norm_of(m)(f"{name}.{one.module}", m.hidden_size, m, store)
            for one in operations_of(m)
            if one.kind == "norm" and one.width == "hidden"
        }
        gate = None if m.layer_inputs is None else LayerInputGate(m, m.layer_inputs, modules, store)
        scalar = (f"{name}.{shards.LAYER_SCALAR}", store.vector(1)) if m.layer_scalar else None
        beside = None
        if mixture is not None and not alone:
            beside = ExpertsBeside(mixture, norms, f"{name}.{shards.ROUTER_SCALE}", m, store)
        return DecoderLayer(i, m, attention, mlp, norms, self.comm, gate, scalar, beside)

    def _stateful(self, i: int, m: ModelConfig, modules: Mapping[str, str]) -> StatefulLayer | None:
        """What a layer has in place of attention; None where it has that."""
        tp, rank, store = self.comm.size, self.comm.rank, self._store
        if not m.stateful:
            return None
        read = next(one.inputs["x"] for one in operations_of(m) if one.tap == "attn.out_proj.partial")
        width = next(one.width for one in operations_of(m) if one.tap == read)
        rows, hidden = shards.span_of(width, m, tp, rank), m.hidden_size
        out_proj = RowParallelLinear(modules["attn.out_proj"], rows, hidden, m.ssm_bias, self.comm, store)
        if m.mamba is not None:
            return Mamba2(i, m, m.mamba, modules, out_proj, store)
        if m.linear is not None:
            return GatedDeltaNet(i, m, m.linear, modules, out_proj, store)
        assert m.short_conv is not None, "a layer with a state has one of these"
        return ShortConvolution(i, m, m.short_conv, modules, out_proj, store)

    def _attention(self, i: int, m: ModelConfig, modules: Mapping[str, str], rules: Rules) -> Attention:
        name, tp, rank, store = f"model.layers.{i}", self.comm.size, self.comm.rank, self._store
        rows = shards.span_of("value_heads", m, tp, rank)
        o_proj = RowParallelLinear(modules["attn.o_proj"], rows, m.hidden_size, m.o_bias, self.comm, store)
        # The whole model: its seam decides what of the layers' rotations this one has.
        whole, page = self.model, self.config.block_size
        if m.latent is not None:
            kind = LatentAttention if m.indexer is None else SparseAttention
            return kind(i, whole, m.latent, modules, o_proj, store)
        qkv = QKVParallelLinear(
            modules["attn.q_proj"].rpartition(".")[0], m, tp, rules.qkv_shard_dim(m, tp, rank), store
        )
        gate = None
        if m.output_gate:
            gate = MergedColumnParallelLinear([modules["attn.gate"]], [rows], m.hidden_size, False, store)
        if m.kv_from is not None:
            q_norm = Norm(f"{name}.self_attn.q_norm", m.head_dim, m, store)
            return BorrowingAttention(i, whole, qkv, o_proj, q_norm, page)
        if m.value_norm:
            return ValueNormAttention(i, whole, qkv, o_proj, self._qk_norm_by_head(m, modules), page)
        sinks = store.vector(shards.heads(m, tp, rank).size) if m.sinks else None
        rotated = None
        if m.rotated_qk_norm:
            q, k = "attn.q_rope_norm", "attn.k_rope_norm"
            rotated = QKNorm(*(Norm(modules[tap], m.head_dim, m, store) for tap in (q, k)), taps=(q, k))
        return Attention(i, whole, qkv, o_proj, self._qk_norm(name, m, modules), sinks, page, gate, rotated)

    def _mlp(self, layer: str, m: ModelConfig, modules: Mapping[str, str]) -> MLP:
        rows, store = shards.intermediate(m, self.comm.size, self.comm.rank), self._store
        read = [modules[tap] for tap in GATE_UP if tap in modules]
        gate_up = MergedColumnParallelLinear(read, [rows] * len(read), m.hidden_size, m.mlp_bias, store)
        down = RowParallelLinear(modules["mlp.down"], rows, m.hidden_size, m.mlp_bias, self.comm, store)
        if m.activation == "xielu":
            return XIELUMLP(gate_up, down, layer, store)
        if m.multipliers is not None:
            return MultipliedMLP(gate_up, down, m.activation, m.multipliers)
        return (MLP if m.gated else UngatedMLP)(gate_up, down, m.activation)

    def _experts(
        self, layer: int, m: ModelConfig, config: ExpertsConfig, modules: Mapping[str, str]
    ) -> MixtureOfExperts:
        where, store = (self.comm.size, self.comm.rank, self.config.ep), self._store
        matrices = ("gate", "up", "down") if m.gated else ("up", "down")
        names = [modules[f"mlp.experts.{one}"] for one in matrices]
        held = shards.held_experts(m, *where)
        experts = [
            Expert(
                [name.format(expert) for name in names],
                shards.expert_features(m, *where, expert),
                m.hidden_size,
                store.unpacked,
                Biases(config.biased, held.start <= expert < held.stop, shards.is_first_of_group(*where)),
            )
            for expert in range(config.count)
        ]
        correction = f"model.layers.{layer}.{shards.correction_name(m)}"
        scale = f"model.layers.{layer}.{shards.EXPERT_SCALE}"
        router = Router(modules["mlp.router"], correction, m.hidden_size, config, store, scale)
        shared = self._shared_expert(m, config, modules)
        return MixtureOfExperts(router, experts, held, shared, m.gating, self.comm)

    def _shared_expert(
        self, m: ModelConfig, config: ExpertsConfig, modules: Mapping[str, str]
    ) -> SharedExpert | None:
        if not config.shared_width:
            return None
        matrices = ("gate", "up", "down") if m.gated else ("up", "down")
        names = [modules[f"mlp.shared.{one}"] for one in matrices]
        features = shards.span_of("shared_expert", m, self.comm.size, self.comm.rank)
        gate = None
        if config.shared_gated:
            gate = MergedColumnParallelLinear(
                [modules["mlp.shared_gate"]], [shards.Span(0, 1)], m.hidden_size, False, self._store
            )
        expert = Expert(names, features, m.hidden_size, self._store)
        return SharedExpert(expert, gate, m.activation)

    def _qk_norm(self, layer: str, m: ModelConfig, modules: Mapping[str, str]) -> QKNorm | None:
        if not m.qk_norm:
            return None
        if m.qk_norm_whole:
            return WholeQKNorm(f"{layer}.self_attn", m, self.comm, self._store)
        return self._qk_norm_by_head(m, modules)

    def _qk_norm_by_head(self, m: ModelConfig, modules: Mapping[str, str]) -> QKNorm:
        return QKNorm(*(norm_of(m)(modules[f"attn.{one}_norm"], m.head_dim, m, self._store) for one in "qk"))

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's shard, sharing memory with the layers."""
        params: dict[str, Tensor | KeptTensor] = {**self.embed.weight.parts(), **self.final_norm.parameters()}
        if self.layer_inputs is not None:
            params |= self.layer_inputs.parameters()
        for layer in self.layers:
            params |= layer.parameters()
        if self.head_name not in params and self.head_name is not None:
            params |= self.head.weight.parts()
        return params | self.head.biases()

    def weights(self) -> dict[str, Tensor | KeptTensor]:
        """All weights that the forward pass reads: `parameters`, and an output head that no tensor was loaded into."""
        tied = self.head.weight is self.embed.weight
        return self.parameters() if tied else {**self.parameters(), **self.head.weight.parts()}

    def bind(
        self, rules: Rules, taps: Callable[[str], TapCallback | None], places: Mapping[str, int]
    ) -> None:
        """Apply rules and switch taps on: cheap, no weight is touched."""
        self.wiring = Wiring(rules, taps, places)
        self.rules = rules
        own = [rules.layer_rope(self.model, i) for i in range(self.model.num_layers)]
        keys = [_rotation_of(model) for model in own]
        different = list(dict.fromkeys(keys))
        self._ropes = [Rotation(own[keys.index(key)], rules, self.device) for key in different]
        self._rope_of = [different.index(key) for key in keys]
        self.embed.bind(self.wiring)
        if self.layer_inputs is not None:
            self.layer_inputs.bind(self.wiring)
        for i, layer in enumerate(self.layers):
            layer.bind(self.wiring.layer(i))
        self.final_norm.bind(self.wiring, "final_norm")
        self.head.bind(self.wiring)

    @property
    def unpaged(self) -> str | None:
        """Why attention does not read the paged cache directly; None: it does."""
        return next((one.unpaged for one in self._mixers() if isinstance(one, Attention)), "no layer has any")

    @property
    def unrepeatable(self) -> str | None:
        """Why a decode step cannot be captured in a CUDA graph; None: it can."""
        if self.device.type != "cuda" or self.comm.size > 1:
            return "decode steps are captured on one GPU alone"
        if self._store.kept:
            return "weights are kept quantised"
        if self.layer_inputs is not None or self.model.rope_scaling.by_length:
            return "a step depends on more than the sequences' tokens and blocks"
        for layer in self.layers:
            if not isinstance(layer.mlp, MLP):
                return "which experts compute is known to the GPU alone"
            if not isinstance(layer.attention, Attention) or not layer.attention.by_lengths:
                return "a layer's attention is not computed by lengths on the GPU"
        return None

    def fresh_states(self) -> dict[int, LayerState]:
        """Of each layer that keeps a state that of a sequence that has read nothing."""
        return {one.layer: one.fresh() for one in self._mixers() if isinstance(one, StatefulLayer)}

    def _mixers(self) -> Iterator[Attention | StatefulLayer]:
        """What mixes tokens, of all layers."""
        for layer in self.layers:
            one = layer.attention
            if isinstance(one, SideBySide):
                yield from (one.attention, one.state)
            elif one is not None:
                yield one

    def reading(self, batch: Batch) -> AbstractContextManager[None]:
        """Within the block a pass of the batch is made, and what follows from it chosen."""
        bound_by_reading = (
            self._reads_rows
            and len(batch.ids) <= products.FEW
            and all(
                span.kv_len > span.stop - span.start for span in batch.spans
            )  # none begins: see `products`
            and products.is_short([span.kv_len for span in batch.spans])
        )
        return products.reading() if bound_by_reading else nullcontext()

    def forward(self, batch: Batch, pool: KVPool) -> Tensor:
        """This rank's logits [S, V / tp] of each sequence's last row."""
        x = self.embed(batch.ids)  # [T, H]
        of_layers = None if self.layer_inputs is None else self.layer_inputs(batch.ids, x)
        positions = self.rules.rope_positions(batch)
        angles = [
            self.rules.rope_angles(positions, rope.frequencies(batch), rope.factor, self.dtype)
            for rope in self._ropes
        ]
        inputs = StepInputs(batch, self.wiring, self.dtype)
        for layer, rope in zip(self.layers, self._rope_of, strict=True):
            x = layer(x, batch, angles[rope], inputs, pool, of_layers)
        return self.head(self.rules.head_input(x, self.final_norm(x))[batch.last])

    def lens(self, rows: Tensor) -> Tensor:
        """This rank's logits [L, V / tp] of residual rows [L, H], each taken for the last layer's. Calls no tap."""
        return self.head.logits(self.final_norm.normalised(rows))
