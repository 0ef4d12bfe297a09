"""What a model is: `ModelConfig`, from Hugging Face `config.json` and `generation_config.json`. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, get_args

from lockstep.engine.config import huggingface
from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.config.families import (
    FAMILIES,
    Activation,
    ClampedSwiGLU,
    Family,
    Gating,
    NormForm,
)
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.further_families import RULES
from lockstep.engine.config.indexer import INDEX_EPS, IndexerConfig
from lockstep.engine.config.lacking import lacking
from lockstep.engine.config.latent import LatentConfig
from lockstep.engine.config.layer_shapes import Block, LayerInputs, LayerShape, layer_shapes
from lockstep.engine.config.linear_attention import LinearAttentionConfig
from lockstep.engine.config.mamba import MambaConfig
from lockstep.engine.config.multipliers import Multipliers
from lockstep.engine.config.query_scaling import QueryScaling
from lockstep.engine.config.rope_scaling import (
    Rope,
    RopeScaling,
    magnitude,
    query_scaling,
    ropes_from_hf,
    rotary_dim,
)
from lockstep.engine.config.short_convolution import ShortConvolutionConfig
from lockstep.engine.config.wrappers import SUPPORTED, text_fields

DType = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[DType, ...] = get_args(DType)
MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder, whatever its family: sizes, and flags for what the families do differently.

    Where layers differ in size (`shapes`), the model's own sizes are the largest of them. `windows[i]` is layer i's
    sliding window in tokens (itself included), or the size of its chunks, None where it sees all. `block_types` are the
    types of a GGUF file's tensors by ggml's names, none for other files. `notes` are sentences for the user: what the
    checkpoint holds that is ignored, or is not as its configuration states.
    """

    family: Family
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    layer_ropes: tuple[
        Rope | None, ...
    ] = ()  # where layers differ: of each its own, None: it does not rotate
    rotary: int | None = None  # channels of each head that are rotated, the first; None: all
    rotary_last: bool = False  # the last ones instead of the first
    neighbours: bool = False  # channels (2i, 2i + 1) are rotated together instead of (i, i + D/2)
    qkv_bias: bool = False
    clip_qkv: float | None = None  # what q, k and v lie within
    o_bias: bool = False
    head_bias: bool = False  # of the output head
    mlp_bias: bool = False
    norm: NormForm = "rms"
    pre_norms: bool = True  # before attention and MLP
    post_norms: bool = False  # of what attention and MLP give, before it is added to the stream
    qk_norm: bool = False
    qk_norm_whole: bool = False  # over all heads at once
    rotated_qk_norm: bool = False  # of each head, behind the rotation
    unit_qk_norm: bool = False  # the same without weight, in layers that rotate
    query_scaling: QueryScaling | None = None  # of rotated queries, by their position
    parallel: bool = False  # the MLP reads what attention does, beside it
    activation: Activation = "silu"
    gated: bool = True  # the MLP: activation(gate) * up, else activation(up)
    latent: LatentConfig | None = None  # keys and values of all heads from one latent
    indexer: IndexerConfig | None = None  # which keys a query attends to
    clamp: ClampedSwiGLU | None = None  # in the activation's place
    experts: ExpertsConfig | None = None  # in place of the MLP, of some layers or all
    linear: LinearAttentionConfig | None = None  # in place of attention, of some layers
    short_conv: ShortConvolutionConfig | None = None  # the same
    mamba: MambaConfig | None = None  # the same, or beside attention
    multipliers: Multipliers | None = None  # of what the blocks read, give and compute between
    blocks: tuple[
        Block, ...
    ] = ()  # of each layer the one that it has, attention (or a state) or an MLP; empty: both
    shapes: tuple[LayerShape, ...] = ()  # where layers differ in size: of each its own
    keys_as_values: bool = False  # values are made by the product of keys
    kv_from: int | None = None  # of one layer: that whose cached keys and values it reads; None: its own
    value_norm: bool = False  # of each head of v, without weight
    layer_scalar: bool = False  # each layer's output is multiplied by a number
    layer_inputs: LayerInputs | None = None  # a second embedding, of which each layer reads its part
    output_gate: bool = False  # what attention gives is multiplied by the sigmoid of a product
    score_scale: float | None = None  # None: 1 / sqrt(head_dim)
    sinks: bool = False  # each head's own term in the softmax's sum
    score_cap: float = 0.0  # of scores, and of logits: cap * tanh(x / cap); 0: none
    logit_cap: float = 0.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what a block adds to the stream
    logit_divisor: float = 1.0
    tie_embeddings: bool = False
    windows: tuple[int | None, ...] = ()
    chunked: bool = False  # a window is a chunk: tokens see those of their own one, of so many positions
    dtype: DType = "float32"
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    block_types: tuple[str, ...] = ()
    wrapper: str = ""  # the model of which this is the text part, by its `model_type`
    notes: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """What scores are multiplied by (Vaswani et al. 2017): the *head's* width, not the model's, if nothing else is
        stated. Where keys are made from latents YaRN's factor on queries and on keys is a part of it, and not of the
        rotation, which turns a part of them alone (arXiv:2405.04434)."""
        if self.score_scale is not None:
            return self.score_scale
        weight = self.rope_scaling.mscale_all_dim if self.latent is not None else None
        stretched = magnitude(self.rope_scaling.factor, weight) if weight else 1.0
        return stretched**2 / math.sqrt(self.head_dim)

    @property
    def value_dim(self) -> int:
        """Channels of each head's value."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def latent_bias(self) -> bool:
        """Whether the products that make latents have biases."""
        return self.latent is not None and self.latent.bias

    @property
    def index_bias(self) -> bool:
        """Whether the norm of index keys has a bias: always."""
        return self.indexer is not None

    @property
    def norm_bias(self) -> bool:
        """Whether the norms of the stream have biases."""
        return self.norm in ("layer", "layer_plus_one")

    @property
    def centring(self) -> bool:
        """Whether the norms of the stream take the mean off."""
        return self.norm in ("centred", "bare") or self.norm_bias

    @property
    def norm_weight(self) -> bool:
        """Whether the norms of the stream have weights."""
        return self.norm != "bare"

    @property
    def norms_add_one(self) -> bool:
        """Whether norms multiply by 1 + weight."""
        return self.norm in ("plus_one", "layer_plus_one")

    @property
    def gating(self) -> Gating:
        """What is made of gate and up."""
        return self.activation if self.clamp is None else self.clamp

    @property
    def expert_bias(self) -> bool:
        """Whether the router and the experts have biases."""
        return self.experts is not None and self.experts.biased

    @property
    def stateful(self) -> tuple[bool, ...]:
        """Of each layer whether it keeps a state of fixed size, in place of keys and values or `beside` them; empty:
        none does."""
        found = self.linear or self.short_conv or self.mamba
        return () if found is None else found.layers

    @property
    def beside(self) -> bool:
        """Whether layers with a state have attention as well."""
        return self.mamba is not None and self.mamba.beside

    @property
    def conv(self) -> int:
        """How many tokens the convolution of a stateful layer sees; 1 where there is none."""
        found = self.linear or self.short_conv or self.mamba
        return 1 if found is None else found.conv

    @property
    def conv_bias(self) -> bool:
        """Whether that convolution has a bias."""
        return self.mamba is not None and self.mamba.conv_bias

    @property
    def ssm_bias(self) -> bool:
        """Whether the products of Mamba-2 have biases."""
        return self.mamba is not None and self.mamba.proj_bias

    @property
    def rotary_dim(self) -> int:
        """Channels of each head that are rotated."""
        return self.head_dim if self.rotary is None else self.rotary

    def as_indexer(self) -> ModelConfig:
        """The model with the heads, rotation, norm and scale of its indexer as its own."""
        return self if self.indexer is None else _as_indexer(self, self.indexer)

    def of_layer(self, layer: int | None) -> ModelConfig:
        """The model with that layer's rotation and sizes as its own, without experts where that layer has none, and
        with either attention or linear attention; None: outside of the layers."""
        return self if layer is None else _of_layer(self, layer)

    @property
    def context(self) -> int:
        """How many tokens a sequence may have: more than were trained where rotary frequencies follow its length."""
        scaling = self.rope_scaling
        stretch = scaling.factor if scaling.kind == "dynamic" else 1.0
        return int(self.max_position * max(stretch, 1.0))

    def keys_seen(self, position: int, window: int | None) -> int:
        """How many keys the token at a position sees, itself among them, in a layer with that window."""
        if window is None:
            return position + 1
        return position % window + 1 if self.chunked else min(position + 1, window)

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, object],
        generation: Mapping[str, object] | None = None,
        where: str = "config.json",
    ) -> ModelConfig:
        """Read a Hugging Face `config.json` and `generation_config.json` as transformers 5 would.

        `where` names the file in errors. ConfigError for anything that the engine would compute differently.
        """
        fields, wrapper = text_fields(Fields(config, where))
        family = _family(fields)
        rules = RULES[family]
        huggingface.refuse_unsupported(fields)
        activation = huggingface.activation(fields, rules)
        heads = fields.size("num_attention_heads")
        hidden = fields.size("hidden_size")
        stated = (
            None if rules.layer_types is None or "num_hidden_layers" in fields else rules.layer_types(fields)
        )
        layers = fields.size("num_hidden_layers", most=MOST_LAYERS) if stated is None else len(stated)
        max_position = fields.size("max_position_embeddings", rules.max_position)
        latent = rules.latent(fields) if rules.latent is not None else None
        head_dim = huggingface.head_dim(fields, rules, hidden, heads) if latent is None else latent.head_dim
        types = huggingface.layer_types(fields, rules, layers)
        shared = (
            latent is not None and rules.partial_rotary is not None
        )  # the share is that of `qk_rope_head_dim`
        rotary = None if shared else rotary_dim(fields, head_dim, rules.partial_rotary)
        rotary = rotary if latent is None else latent.rope_dim
        kv = heads if latent is not None else huggingface.kv_heads(fields, rules, heads)
        shapes = layer_shapes(fields, types, kv, head_dim) if rules.shaped else ()
        ropes = ropes_from_hf(fields, rules, types, max_position, head_dim if rotary is None else rotary)
        extra = Fields({} if generation is None else generation, "generation_config.json")
        bos = extra.ids("bos_token_id") or fields.ids("bos_token_id")
        plain = cls(
            family=family,
            hidden_size=hidden,
            intermediate_size=(
                fields.size(rules.intermediate_key)
                if rules.intermediate is None
                else fields.size(rules.intermediate_key, rules.intermediate)
            ),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=max([kv, *(one.num_kv_heads for one in shapes)]),
            head_dim=max([head_dim, *(one.head_dim for one in shapes)]),
            shapes=shapes,
            vocab_size=fields.size("vocab_size"),
            max_position=max_position,
            rms_eps=fields.number(rules.eps_key, rules.eps, above=0.0),
            rope_theta=ropes[0].theta,
            rope_scaling=ropes[0].scaling,
            layer_ropes=ropes[1:],
            rotary=rotary,
            rotary_last=latent is not None,
            latent=latent,
            activation=activation,
            tie_embeddings=fields.flag("tie_word_embeddings", rules.tied),
            windows=huggingface.windows(fields, rules, types),
            dtype=_dtype(fields),
            bos_id=bos[0] if bos else None,
            eos_ids=extra.ids("eos_token_id") or fields.ids("eos_token_id"),
            query_scaling=query_scaling(fields, rules.rope, max_position),
            wrapper=wrapper,
        )
        widest = max([plain.intermediate_size, *(one.intermediate_size for one in shapes)])
        return replace(plain, **{"intermediate_size": widest, **rules.own(fields)})


@cache
def _as_indexer(model: ModelConfig, indexer: IndexerConfig) -> ModelConfig:
    return replace(
        model,
        num_heads=indexer.heads,
        num_kv_heads=1,
        head_dim=indexer.dim,
        rotary_last=False,
        neighbours=indexer.neighbours,
        norm="layer",
        rms_eps=INDEX_EPS,
        score_scale=indexer.dim**-0.5,
    )


@cache
def _of_layer(model: ModelConfig, layer: int) -> ModelConfig:
    if model.experts is not None and not any(model.experts.layers[layer : layer + 1]):
        model = replace(model, experts=None)
    if model.linear is not None:
        if any(model.linear.layers[layer : layer + 1]):
            own = replace(model.linear, layers=(True,) * model.num_layers)
            model = replace(model, linear=own, qk_norm=False, output_gate=False)
        else:
            model = replace(model, linear=None)
    if (short := model.short_conv) is not None:
        there = any(short.layers[layer : layer + 1])
        own_conv = replace(short, layers=(True,) * model.num_layers) if there else None
        model = replace(model, short_conv=own_conv, qk_norm=model.qk_norm and not there)
    if (indexer := model.indexer) is not None:
        source = indexer.sources[layer]
        model = replace(model, indexer=replace(indexer, source=None if source == layer else source))
    if model.blocks:
        model = replace(model, blocks=model.blocks[layer : layer + 1] * model.num_layers)
    if model.mamba is not None:
        here = any(model.mamba.layers[layer : layer + 1])
        own_mamba = replace(model.mamba, layers=(True,) * model.num_layers) if here else None
        model = replace(model, mamba=own_mamba)
    if layer < len(model.shapes):
        shape, inputs = model.shapes[layer], model.layer_inputs
        model = replace(
            model,
            head_dim=shape.head_dim,
            num_kv_heads=shape.num_kv_heads,
            intermediate_size=shape.intermediate_size,
            keys_as_values=shape.keys_as_values,
            kv_from=shape.kv_from,
            shapes=(),
            layer_inputs=None if inputs is None else replace(inputs, layer=layer),
        )
    ropes = model.layer_ropes[layer : layer + 1]
    if None in ropes:
        return replace(model, rotary=0, rope_scaling=RopeScaling(), layer_ropes=(), unit_qk_norm=False)
    if model.query_scaling is not None and model.query_scaling.unrotated_alone:
        model = replace(model, query_scaling=None)
    for rope in filter(None, ropes):
        model = replace(model, rope_theta=rope.theta, rope_scaling=rope.scaling, layer_ropes=())
    return model


def _family(fields: Fields) -> Family:
    name = fields.word("model_type")
    if name not in FAMILIES:
        known = ", ".join(SUPPORTED)
        raise fields.error(
            "model_type", f"not a supported architecture; supported are {known}; {lacking(name, fields.data)}"
        )
    return name


def _dtype(fields: Fields) -> DType:
    key = "dtype" if "dtype" in fields else "torch_dtype"
    name = fields.word(key, "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise fields.error(key, f"not a supported dtype; supported are {', '.join(DTYPES)}")
    return name
