"""A small inference engine of one's own: python engine.py MODEL "a question"

It reads a Llama-like checkpoint (Llama, Mistral, Qwen2, Qwen3) in safetensors, keeps a KV cache and decodes greedily.
It has a bug: docs/toy-engine.md finds it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F


@dataclass
class Config:
    """What the engine needs of config.json."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    eos: set[int]

    @classmethod
    def read(cls, folder: Path) -> Config:
        reported = json.loads((folder / "config.json").read_text())
        heads = reported["num_attention_heads"]
        rope = reported.get("rope_parameters") or reported
        eos = reported["eos_token_id"]
        return cls(
            layers=reported["num_hidden_layers"],
            heads=heads,
            kv_heads=reported.get("num_key_value_heads", heads),
            head_dim=reported.get("head_dim") or reported["hidden_size"] // heads,
            eps=reported["rms_norm_eps"],
            theta=rope["rope_theta"],
            eos=set(eos) if isinstance(eos, list) else {eos},
        )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint in float32, by its name without the leading "model."."""
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                weights[name.removeprefix("model.")] = file.get_tensor(name).float()
    weights.setdefault("lm_head.weight", weights["embed_tokens.weight"])
    return weights


@dataclass
class Cache:
    """Keys and values of what was read so far, [tokens, kv_heads, head_dim] for each layer."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    length: int = 0

    def add(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.keys:
            k, v = torch.cat([self.keys[layer], k]), torch.cat([self.values[layer], v])
        self.keys[layer], self.values[layer] = k, v
        return k, v


class Engine:
    """The model, read into memory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config, self.weights = folder, Config.read(folder), read_weights(folder)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return (
            self.weights[f"{name}.weight"]
            * x
            * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.eps)
        )

    def rotate(self, x: Tensor, start: int) -> Tensor:
        """Rotary embedding of [tokens, heads, head_dim], the first token at position `start`."""
        half = self.config.head_dim // 2
        frequencies = self.config.theta ** (-torch.arange(half) / half)
        angles = torch.arange(start, start + len(x))[:, None, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)

    def attention(self, layer: int, x: Tensor, cache: Cache) -> Tensor:
        name, config = f"layers.{layer}.self_attn", self.config
        q, k, v = (self.linear(f"{name}.{one}_proj", x).unflatten(-1, (-1, config.head_dim)) for one in "qkv")
        if f"{name}.q_norm.weight" in self.weights:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        q_rope, k_rope = self.rotate(q, cache.length), self.rotate(k, cache.length)
        keys, values = cache.add(layer, k_rope, v)
        groups = config.heads // config.kv_heads
        keys, values = (one.repeat_interleave(groups, 1) for one in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q_rope, keys) / config.head_dim**0.5
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + cache.length)
        probs = scores.masked_fill(future, -torch.inf).softmax(-1)
        context = torch.einsum("hqk,khd->qhd", probs, values).flatten(1)
        return self.linear(f"{name}.o_proj", context)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        name = f"layers.{layer}.mlp"
        gate, up = self.linear(f"{name}.gate_proj", x), self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", F.silu(gate) * up)

    def forward(self, ids: list[int], cache: Cache) -> Tensor:
        """The logits after the last of `ids`, which follow what is in the cache."""
        x = self.weights["embed_tokens.weight"][ids]
        for layer in range(self.config.layers):
            x = x + self.attention(layer, self.norm(f"layers.{layer}.input_layernorm", x), cache)
            x = x + self.mlp(layer, self.norm(f"layers.{layer}.post_attention_layernorm", x))
        cache.length += len(ids)
        return self.linear("lm_head", self.norm("norm", x[-1:]))

    @torch.inference_mode()
    def generate(self, ids: list[int], most: int) -> list[int]:
        """Up to `most` tokens, each the likeliest."""
        cache, new, read = Cache(), list[int](), ids
        while len(new) < most:
            token = int(self.forward(read, cache).argmax())
            if token in self.config.eos:
                break
            new.append(token)
            read = [token]
        return new


def main(folder: str, question: str, *rest: Any) -> None:
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    new = Engine(Path(folder)).generate(tokenizer.encode(text).ids, int(rest[0]) if rest else 24)
    print(tokenizer.decode(new))


if __name__ == "__main__":
    main(*sys.argv[1:])
