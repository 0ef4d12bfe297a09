"""ENGINE MODEL TP TOKENS FILE: generate greedily with an engine; the seconds of it go into FILE."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

#: Generates as many tokens.
Generate = Callable[[int], None]
PROMPT = list(range(1, 17))


def transformers(path: str, tp: int) -> Generate:
    """TP 1."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompt = torch.tensor([PROMPT])

    def generate(count: int) -> None:
        model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)

    return generate


def vllm(path: str, tp: int) -> Generate:
    """Eager without a tap as well: the ratio is that of recording, not of compiling."""
    from vllm import LLM, SamplingParams

    model = LLM(
        path, tensor_parallel_size=tp, dtype="float32", max_model_len=256, enforce_eager=True,
        enable_prefix_caching=False,
    )  # fmt: skip

    def generate(count: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        model.generate([{"prompt_token_ids": PROMPT}], sampling)

    return generate


ENGINES: dict[str, Callable[[str, int], Generate]] = {"torch": transformers, "vllm": vllm}


def main() -> None:
    engine, path, tp, tokens, reported = sys.argv[1:]
    generate = ENGINES[engine](path, int(tp))
    generate(2)
    began = time.perf_counter()
    generate(int(tokens))
    Path(reported).write_text(str(time.perf_counter() - began))


if __name__ == "__main__":
    main()
