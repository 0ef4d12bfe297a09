"""A Llama with the modules, names and shapes of Megatron-core's GPTModel, tensors [tokens, batch, …]."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb


class Product(nn.Linear):
    """Of what is cut over ranks: a pair of the result and the bias."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


def product(weight: Tensor) -> Product:
    made = Product(weight.shape[1], weight.shape[0], bias=False)
    made.weight.data.copy_(weight)
    return made


class Attended(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


class Attention(nn.Module):
    def __init__(self, theirs: Any, config: Any) -> None:
        super().__init__()
        self.num_query_groups_per_partition = groups = config.num_key_value_heads
        self.hidden_size_per_attention_head = dim = config.head_dim
        q, k, v = (getattr(theirs, f"{one}_proj").weight for one in "qkv")
        stacked = [
            part for i in range(groups) for part in (q.chunk(groups)[i], k.split(dim)[i], v.split(dim)[i])
        ]
        self.linear_qkv = product(torch.cat(stacked))
        self.core_attention = Attended()
        self.linear_proj = product(theirs.o_proj.weight)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Any:
        groups, dim = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        q, k, v = self.linear_qkv(x)[0].unflatten(-1, (groups, -1, dim)).split([2, 1, 1], 3)
        q, k = apply_rotary_pos_emb(
            q.flatten(2, 3).transpose(0, 1), k.flatten(2, 3).transpose(0, 1), *turns, unsqueeze_dim=2
        )
        return self.linear_proj(self.core_attention(q.transpose(0, 1), k.transpose(0, 1), v.flatten(2, 3)))


class Mlp(nn.Module):
    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.linear_fc1 = product(torch.cat([theirs.gate_proj.weight, theirs.up_proj.weight]))
        self.linear_fc2 = product(theirs.down_proj.weight)

    def forward(self, x: Tensor) -> Any:
        gate, up = self.linear_fc1(x)[0].chunk(2, -1)
        return self.linear_fc2(nn.functional.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, theirs: Any, config: Any) -> None:
        super().__init__()
        self.input_layernorm = theirs.input_layernorm
        self.self_attention = Attention(theirs.self_attn, config)
        self.pre_mlp_layernorm = theirs.post_attention_layernorm
        self.mlp = Mlp(theirs.mlp)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Any:
        x = x + self.self_attention(self.input_layernorm(x), turns)[0]
        return x + self.mlp(self.pre_mlp_layernorm(x))[0], None


class Summed(nn.Module):
    """The product of a rank's columns, and the sum over the ranks."""

    def __init__(self, whole: nn.Module, rank: int, size: int) -> None:
        super().__init__()
        weight: Any = whole.weight
        self.weight = nn.Parameter(weight.data.chunk(size, 1)[rank].clone())

    def forward(self, x: Tensor) -> Any:
        partial = nn.functional.linear(x, self.weight)
        torch.distributed.all_reduce(partial)
        return partial, None


class Embedding(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.word_embeddings = table

    def forward(self, ids: Tensor) -> Tensor:
        return torch.as_tensor(self.word_embeddings(ids)).transpose(0, 1)


class Megatron(nn.Module):
    """Of a Llama of transformers, two queries to a key."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        config = theirs.config
        self.config = SimpleNamespace(
            gated_linear_unit=True, num_layers=config.num_hidden_layers, hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads, num_query_groups=config.num_key_value_heads,
            kv_channels=config.head_dim, ffn_hidden_size=config.intermediate_size,
        )  # fmt: skip
        self.embedding = Embedding(theirs.model.embed_tokens)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(Layer(one, config) for one in theirs.model.layers)
        self.decoder.final_layernorm = theirs.model.norm
        self.output_layer = product(theirs.lm_head.weight)
        self.turns = LlamaRotaryEmbedding(config)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        x = self.embedding(ids)
        turns = self.turns(x, positions)
        for layer in self.decoder.layers:  # type: ignore[union-attr]
            x, _ = layer(x, turns)
        return torch.as_tensor(self.output_layer(self.decoder.final_layernorm(x))[0]).transpose(0, 1)  # type: ignore[operator]


def cut(model: Megatron, rank: int, size: int) -> Megatron:
    """The same as tensor-parallel ranks have it: groups of heads, the MLP's columns and the vocabulary divided."""
    model.config.tensor_model_parallel_size = size
    for layer in model.decoder.layers:  # type: ignore[union-attr]
        attention, mlp = layer.self_attention, layer.mlp
        attention.num_query_groups_per_partition //= size
        attention.linear_qkv = product(attention.linear_qkv.weight.chunk(size)[rank])
        attention.linear_proj = Summed(attention.linear_proj, rank, size)
        gate, up = (one.chunk(size)[rank] for one in mlp.linear_fc1.weight.chunk(2))
        mlp.linear_fc1 = product(torch.cat([gate, up]))
        mlp.linear_fc2 = Summed(mlp.linear_fc2, rank, size)
    model.output_layer = product(model.output_layer.weight.chunk(size)[rank])
    return model
