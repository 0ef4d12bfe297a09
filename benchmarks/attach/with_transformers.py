"""MODEL TP TOKENS FILE: generate greedily with transformers (TP 1); seconds into FILE."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    path, _, tokens, told = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompt = torch.arange(1, 17)[None]

    def generate(count: int) -> None:
        model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)

    generate(2)
    began = time.perf_counter()
    generate(int(tokens))
    Path(told).write_text(str(time.perf_counter() - began))


if __name__ == "__main__":
    main()
