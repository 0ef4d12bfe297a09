"""A program that uses vLLM as anyone would: MODEL TP IDS, greedy tokens to stdout."""

from __future__ import annotations

import sys


def main() -> None:
    from vllm import LLM, SamplingParams

    path, tp, ids = sys.argv[1:]
    model = LLM(path, tensor_parallel_size=int(tp), dtype="float32", max_model_len=256)
    prompts = [{"prompt_token_ids": [int(token) for token in prompt.split(",")]} for prompt in ids.split(";")]
    for one in model.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)):
        print("tokens", list(one.outputs[0].token_ids))


if __name__ == "__main__":
    main()
