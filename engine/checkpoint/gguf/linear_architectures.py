"""Linear attention as the metadata of GGUF files has it, and what llama.cpp's programs (`src/models/qwen3next.cpp`,
`qwen35.cpp`, `qwen35moe.cpp`) have in them alone. Torch-free.
"""

from __future__ import annotations

from lockstep.engine.checkpoint.gguf.expert_architectures import gated_shared
from lockstep.engine.checkpoint.gguf.stated_sizes import Own, StatedSizes
from lockstep.engine.checkpoint.gguf.windows import of_layers
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.linear_attention import LinearAttentionConfig
from lockstep.engine.errors import ConfigError

RECURRENT, SECTIONS = "attention.recurrent_layers", "rope.dimension_sections"
#: Lists that are no reason to refuse: which layers are recurrent, and which channels turn with the time, the height and
#: the width of an image; of text all three are the position.
LINEAR_KEYS = (RECURRENT, SECTIONS)
_INNER = "ssm.inner_size"


def qwen3_5(fields: Fields, of: StatedSizes) -> Own:
    """Most layers with a recurrent state, the others with a gate of what they attend to."""
    return {"norm": "plus_one", "qk_norm": True, "output_gate": True, "linear": _linear(fields, of)}


def qwen3_5_moe(fields: Fields, of: StatedSizes) -> Own:
    """The same with experts; weights are renormalised always. Qwen3-Next's are alike."""
    return {**qwen3_5(fields, of), "experts": gated_shared(fields, of, True)}


def _linear(fields: Fields, of: StatedSizes) -> LinearAttentionConfig:
    every = fields.size("full_attention_interval", 4)
    blocks = fields.size("block_count")
    stated = of_layers(fields, RECURRENT, blocks) or [(i + 1) % every != 0 for i in range(blocks)]
    layers = tuple(stated[: of.layers])
    if not any(layers):
        raise ConfigError(f"{fields.where}: no layer has linear attention")
    heads, inner = fields.size("ssm.time_step_rank"), fields.size(_INNER)
    if inner % heads:
        raise fields.error(_INNER, f"ssm.time_step_rank = {heads} does not divide it")
    return LinearAttentionConfig(
        key_heads=fields.size("ssm.group_count"),
        value_heads=heads,
        key_dim=fields.size("ssm.state_size"),
        value_dim=inner // heads,
        conv=fields.size("ssm.conv_kernel", least=2),
        layers=layers,
    )
