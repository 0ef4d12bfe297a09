"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3's attention and routing, with keys chosen by an indexer. Torch-free, as
transformers 5 (`models/deepseek_v32`, `models/glm_moe_dsa`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lockstep.engine.config.families import RULES, FamilyRules, Own, sparse_types
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.indexer import indexer_of
from lockstep.engine.config.latent import LatentConfig, latent_of


def _sparse(fields: Fields, latent: LatentConfig, heads: int, *, neighbours: bool, shared: bool) -> Own:
    """DeepSeek-V3, whose layers with experts may be listed, with an indexer."""
    if fields.flag("mlp_bias", False):
        raise fields.error("mlp_bias", "a shared expert with biases is not supported")
    own = RULES["deepseek_v3"].own(fields)
    experts = own["experts"]
    layers = sparse_types(fields, experts.layers)
    indexer = indexer_of(fields, latent, heads, neighbours=neighbours, shared=shared)
    return {**own, "experts": replace(experts, layers=layers), "indexer": indexer, "neighbours": True}


def _deepseek_v32(fields: Fields) -> Own:
    """The indexer rotates halves, attention neighbours (arXiv:2512.02556)."""
    return _sparse(fields, latent_of(fields), 64, neighbours=False, shared=False)


_GLM_LATENT = partial(latent_of, plain_dim=192, value_dim=256, q_rank=2048)


def _glm_moe_dsa(fields: Fields) -> Own:
    """Both rotate neighbours; layers may take the choice of an earlier one (arXiv:2603.12201)."""
    return _sparse(fields, _GLM_LATENT(fields), 32, neighbours=True, shared=True)


DEEPSEEK_V32 = FamilyRules(_deepseek_v32, 163840, latent=latent_of)
GLM_MOE_DSA = FamilyRules(_glm_moe_dsa, 202752, eps=1e-5, latent=_GLM_LATENT)
