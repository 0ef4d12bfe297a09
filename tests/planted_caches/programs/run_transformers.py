"""A program that decodes with transformers as anyone would, greedily: MODEL [--one] [--reversed] [--chunks]."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, DynamicCache

PROMPTS = [[3, 17, 99, 4, 64, 5, 12, 33, 20, 77, 6, 41], [80, 2, 45, 9, 101, 7, 7, 58, 13, 110, 31, 26]]
CHUNK, EMITS = 5, 6


def main(path: str, *options: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    batches = [[ids] for ids in PROMPTS] if "--one" in options else [PROMPTS]
    if "--reversed" in options:
        batches = [batch[::-1] for batch in batches[::-1]]
    for batch in batches:
        for tokens in generate(model, torch.tensor(batch), CHUNK if "--chunks" in options else 10_000):
            print("tokens", tokens)


def generate(model: torch.nn.Module, ids: torch.Tensor, chunk: int) -> Sequence[list[int]]:
    """What each of `ids` [batch, tokens] goes on with."""
    cache, new = DynamicCache(config=model.config), list[torch.Tensor]()
    with torch.inference_mode():
        for part in ids.split(chunk, 1):
            logits = model(part, past_key_values=cache, use_cache=True).logits
        while len(new) < EMITS:
            new.append(logits[:, -1].argmax(-1, keepdim=True))
            logits = model(new[-1], past_key_values=cache, use_cache=True).logits
    found: list[list[int]] = torch.cat(new, 1).tolist()
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
