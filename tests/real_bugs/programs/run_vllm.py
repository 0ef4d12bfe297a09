"""A program that uses vLLM as anyone would: MODEL RANKS, greedy tokens to stdout.

Its limits are small as the models are, so that prompts are read in chunks and caches have several blocks.
"""

from __future__ import annotations

import sys

from workload import BATCHES, options


def main() -> None:
    from vllm import LLM, SamplingParams

    path, ranks = sys.argv[1:]
    small = {"max_model_len": 96, "max_num_batched_tokens": 32, "max_num_seqs": 4, "block_size": 32}
    chosen = {"dtype": "float32", "skip_tokenizer_init": True} | small | options()
    model = LLM(path, tensor_parallel_size=int(ranks), **chosen)
    for batch in BATCHES:
        prompts = [{"prompt_token_ids": ids} for ids, _ in batch]
        sampling = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            for _, count in batch
        ]
        for one in model.generate(prompts, sampling):
            print("tokens", list(one.outputs[0].token_ids))


if __name__ == "__main__":
    main()
