"""The model that is measured: Qwen2.5-0.5B's shape with random weights, written once to a directory.

The real configuration is read from `../shared/data/qwen2.5-0.5b-instruct` where it is at hand; the numbers
below are the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from lockstep.engine.config import EngineConfig
from lockstep.engine.machine import keep_freed_pages
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.rules import CORRECT
from lockstep.engine.run.loading import Loader
from lockstep.engine.run.runner import Runner

REAL = Path(__file__).parents[2] / "shared" / "data" / "qwen2.5-0.5b-instruct"

SHAPE: dict[str, Any] = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "bos_token_id": 151643, "eos_token_id": 151645,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip


#: k-biases of a layer by channel, as large as the published checkpoints have them.
KEY_BIASES = {0: -34.0, 17: -15.0, 2: -14.0, 19: 12.0, 33: 15.0, 48: -12.0, 50: 14.0}


def half_billion(directory: Path | None = None, *, biased: bool = False, **changes: Any) -> Path:
    """The checkpoint in bfloat16 (1 GB), made if it is not there; `changes` make another shape of it. The biases of q,
    k and v are zero, or (`biased`) random, and of k as large as those of the published checkpoints."""
    name = "lockstep-bench-0.5b" + "-biased" * biased
    name += "".join(f"-{key}-{value}" for key, value in sorted(changes.items()))
    path = (directory or Path(tempfile.gettempdir())) / name
    if not (path / "model.safetensors").is_file():
        config = AutoConfig.from_pretrained(REAL) if REAL.is_dir() else Qwen2Config(**SHAPE)
        for key, value in changes.items():
            setattr(config, key, value)
        if changes:
            config.layer_types = None  # one for each layer: of the wrong number now
            config = type(config)(**{k: v for k, v in config.to_dict().items() if k != "layer_types"})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if biased:
            _set_biases(model)
        model.save_pretrained(path)
    return path


def local_runner(path: Path, **config: Any) -> Runner:
    """A single rank in this process, with the model; as a rank's own process does, it keeps freed pages."""
    keep_freed_pages()
    engine = EngineConfig(**config)
    comm = Comm(device=torch.device(engine.device))
    loader = Loader(path, engine, comm)
    return Runner(loader.model, engine, comm, CORRECT, loader)


@torch.no_grad()
def _set_biases(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.bias"):
            parameter.normal_(std=0.5)
        if name.endswith("k_proj.bias"):
            channels = torch.tensor(list(KEY_BIASES)) % len(parameter)
            parameter[channels] = torch.tensor(list(KEY_BIASES.values()), dtype=parameter.dtype)
