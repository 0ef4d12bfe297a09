"""A program that decodes with a CUDA graph: MODEL; greedy tokens to stdout."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, StaticCache


def main() -> None:
    """One eager pass over the prompt, then replays."""
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="eager").cuda().eval()
    cache = StaticCache(config=model.config, max_cache_len=64)
    token, at = torch.tensor([[5, 9, 33, 77, 2]], device="cuda"), torch.arange(5, device="cuda")

    def step() -> torch.Tensor:
        return model(token, past_key_values=cache, position_ids=at[None]).logits[:, -1:].argmax(-1)

    with torch.inference_mode():
        first = step()
        token, at = first.clone(), at[-1:] + 1
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            following = step()
        tokens = [int(first)]
        for _ in range(4):
            graph.replay()
            token.copy_(following)
            at += 1
            tokens.append(int(token))
    print(tokens)


if __name__ == "__main__":
    main()
