"""A mixture of experts as a model's configuration describes it: how many there are, which layers have them, and how
tokens are routed to them (Shazeer et al. 2017, arXiv:1701.06538). Torch-free.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.engine.config.fields import Fields
from lockstep.engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Each token goes to `top_k` of `count` experts, MLPs with `width` intermediate features; `layers` states for each
    layer whether it has experts or a single MLP.

    An expert is chosen by its score: the router's logits, under a softmax, a sigmoid or as they are, with a
    `correction` of the choice alone (a bias of the checkpoint); where there are several `groups`, from the
    `top_groups` best ones, by the sum of each one's `group_best` best scores. What it gives is multiplied by its
    score, of `renormalised` scores by its share in the chosen ones' sum (plus `shares_eps`), times `factor`.
    `shared_width`: of the expert to which every token goes (0: none), times the sigmoid of a logit where it is
    `shared_gated`. `biased`: the router and the experts have biases. `weighed_inputs`: what goes into an expert is
    multiplied by its weight, not what it gives. `jitter`: of two experts each one's weight is its share among those
    whose logits are not much lower (SparseMixer). `wide`: router and scores stay in float32 whatever the model's
    dtype; `wide_weights`: the scores alone. `beside_mlp`: a layer has an MLP as well, and norms of both; the router
    reads the stream under one without a weight, and each expert's weight is multiplied by a number of its own.
    """

    count: int
    top_k: int
    width: int
    layers: tuple[bool, ...]
    scores: Literal["softmax", "sigmoid", "logits"] = "softmax"
    renormalised: bool = True
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    factor: float = 1.0
    shared_width: int = 0
    shared_gated: bool = False
    biased: bool = False
    weighed_inputs: bool = False
    jitter: float | None = None
    shares_eps: float = 0.0
    wide: bool = False
    wide_weights: bool = False
    beside_mlp: bool = False

    def __post_init__(self) -> None:
        """ConfigError where so many cannot be chosen."""
        if self.top_k > self.count:
            raise ConfigError(f"num_experts_per_tok is {self.top_k}: there are {self.count} experts")
        if self.count % self.groups or self.top_groups > self.groups:
            raise ConfigError(
                f"{self.count} experts in n_group = {self.groups} groups, of which topk_group = {self.top_groups} "
                "are chosen, do not fit together"
            )
        if self.groups > 1 and self.top_k > self.top_groups * (self.count // self.groups):
            raise ConfigError(
                f"num_experts_per_tok is {self.top_k}: topk_group = {self.top_groups} groups have fewer experts"
            )
        if self.groups > 1 and self.count // self.groups < self.group_best:
            raise ConfigError(
                f"{self.count} experts in n_group = {self.groups} groups: each needs two or more"
            )


def expert_count(fields: Fields, keys: Sequence[str]) -> int:
    """How many experts a layer has, by the first of the keys that is there."""
    return fields.size(next((key for key in keys if key in fields), keys[0]))


def experts_beside(fields: Fields) -> ExpertsConfig | None:
    """Those of Gemma-4, in every layer; None where they are switched off."""
    if not fields.flag("enable_moe_block", False):
        return None
    layers = (True,) * fields.size("num_hidden_layers")
    count, chosen, width = (
        fields.size(key) for key in ("num_experts", "top_k_experts", "moe_intermediate_size")
    )
    return ExpertsConfig(count, chosen, width, layers, wide_weights=True, beside_mlp=True)


def sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Of each layer whether it has experts: every `decoder_sparse_step`-th one that `mlp_only_layers` does not name."""
    layers, step = fields.size("num_hidden_layers"), fields.size("decoder_sparse_step", 1)
    single: Container[object] = fields.data.get("mlp_only_layers") or ()  # type: ignore[assignment]
    if not isinstance(single, list) and single != ():
        raise fields.error("mlp_only_layers", "expected a list of layers")
    found = tuple(i not in single and (i + 1) % step == 0 for i in range(layers))
    if not any(found):
        raise ConfigError(f"{fields.where}: no layer has experts, though it is a {fields.word('model_type')}")
    return found
