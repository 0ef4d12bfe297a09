"""Names of families that are others but for a few flags (`further_families`). Torch-free."""

from __future__ import annotations

from typing import Literal

FurtherFamily = Literal[
    "gemma", "seed_oss", "exaone4", "ernie4_5", "glm", "helium", "dots1", "exaone_moe", "hunyuan_v1_dense",
    "cohere", "cohere2", "arcee", "stablelm", "nemotron", "vaultgemma", "granitemoe", "ernie4_5_moe",
    "hunyuan_v1_moe", "ministral", "cwm", "internlm3", "iquestcoder", "jais2", "hyperclovax", "solar_open",
    "flex_olmo", "youtu", "llama4_text", "mistral4", "phimoe",
    "apertus",
    "deepseek_v32", "glm_moe_dsa",
    "phi", "olmo", "lfm2", "lfm2_moe",
    "granitemoehybrid", "nemotron_h", "bamba", "falcon_h1",
]  # fmt: skip
