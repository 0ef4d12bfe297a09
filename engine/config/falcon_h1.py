"""Falcon-H1 (`models/falcon_h1` of transformers 5, arXiv:2507.22448): in each layer attention and Mamba-2 stand side by
side, of the same input, behind them an MLP, and multipliers of all of them. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lockstep.engine.config.families import RULES, FamilyRules
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.granite_hybrid import MAMBA_KEYS
from lockstep.engine.config.linear_attention import LINEAR
from lockstep.engine.config.mamba import MambaConfig, mamba
from lockstep.engine.config.multipliers import Multipliers


def _mixer(fields: Fields) -> MambaConfig:
    width = fields.size("mamba_expand", 2) * fields.size("hidden_size")
    if fields.data.get("mamba_d_ssm", 1024) is not None:
        width = fields.size("mamba_d_ssm", 1024)
    found = mamba(fields, [LINEAR] * fields.size("num_hidden_layers"), MAMBA_KEYS, width)
    assert found is not None, "every layer has one"
    if fields.flag("projectors_bias", False) != found.proj_bias:
        raise fields.error("projectors_bias", "a bias of one of Mamba-2's products alone is not supported")
    return replace(
        found,
        beside=True,
        normed=fields.flag("mamba_rms_norm", False),
        norm_first=fields.flag("mamba_norm_before_gate", True),
    )


def _multipliers(fields: Fields) -> Multipliers:
    parts = (1.0,) * 5 if "ssm_multipliers" not in fields else fields.numbers("ssm_multipliers", 5)
    gate, down = (1.0,) * 2 if "mlp_multipliers" not in fields else fields.numbers("mlp_multipliers", 2)
    single = ("attention_in", "key", "attention_out", "ssm_in", "ssm_out")
    return Multipliers(
        **{name: fields.number(f"{name}_multiplier", 1.0) for name in single},
        **dict(zip(("z", "x", "b", "c", "dt"), parts, strict=True)),
        gate=gate,
        down=down,
    )


def _own(fields: Fields) -> Mapping[str, Any]:
    if fields.word("hidden_act", "silu") != "silu":
        raise fields.error(
            "hidden_act", "an activation other than silu, of Mamba-2 as well, is not supported"
        )
    divisor = fields.number("lm_head_multiplier", 1.0)
    if divisor == 0:
        raise fields.error("lm_head_multiplier", "expected a number other than 0")
    return {
        **RULES["llama"].own(fields),
        "mamba": _mixer(fields),
        "multipliers": _multipliers(fields),
        "embedding_multiplier": fields.number("embedding_multiplier", 1.0),
        "logit_divisor": 1 / divisor,
    }


FALCON_H1 = FamilyRules(_own, 8192, eps=1e-5, own_kv_heads=True, intermediate=14336)
