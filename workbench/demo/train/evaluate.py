"""Measure the demo model: how many unseen questions it answers rightly at greedy.

python -m lockstep.workbench.demo.train.evaluate                  # 200 questions, bf16, with biases
python -m lockstep.workbench.demo.train.evaluate --without-biases # the same, q/k/v biases set to zero
python -m lockstep.workbench.demo.train.evaluate --model demo-q4_k_m  # a GGUF file, by Lockstep's own engine
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lockstep.engine import Engine, EngineConfig
from lockstep.workbench.demo import MODEL_DIR
from lockstep.workbench.demo.checker import haiku_has_nonce
from lockstep.workbench.demo.checkpoints import demo_path
from lockstep.workbench.demo.train.corpus import UNSEEN_SEED, Example, unseen_examples
from lockstep.workbench.demo.train.tokenizer import END_OF_TEXT, IM_END, chat

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}

_MAX_NEW_TOKENS = 48
_AT_ONCE = 20  # questions in a batch of the engine


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model wrote to one question, and how sure it was of each token.

    A margin is the distance, in logits, from the token taken to the runner-up.
    """

    example: Example
    text: str
    margins: tuple[float, ...]

    @property
    def right(self) -> bool:
        """True when the text passes the checker."""
        return haiku_has_nonce(self.text, self.example.nonce)


def load(folder: Path = MODEL_DIR, dtype: str = "bf16") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, as transformers loads it from the folder alone, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], local_files_only=True)
    return model.train(False), AutoTokenizer.from_pretrained(folder, local_files_only=True)


@torch.no_grad()
def remove_biases(model: PreTrainedModel) -> None:
    """Set every q, k and v bias to zero: the fault whose effect the demo must show."""
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")):
            parameter.zero_()


@torch.no_grad()
def answer_all(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]
) -> list[Answer]:
    """Answer every question at greedy.

    Questions of one length go together, so that no row needs padding, which would change the sums.
    """
    end, pad = tokenizer.convert_tokens_to_ids(IM_END), tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    prompts = [tokenizer.encode(chat(example.question)) for example in examples]
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    answers: dict[int, Answer] = {}
    generate = cast(Callable[..., Any], model.generate)
    for length, indices in by_length.items():
        ids = torch.tensor([prompts[index] for index in indices])
        out = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=_MAX_NEW_TOKENS,
            eos_token_id=end,
            pad_token_id=pad,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best_two = torch.stack(out.logits, dim=1).float().topk(2).values
        gaps = best_two[..., 0] - best_two[..., 1]
        for row, index in enumerate(indices):
            written = out.sequences[row, length:].tolist()
            # The end token is a choice like any other, so its margin counts too.
            steps = written.index(end) + 1 if end in written else len(written)
            text = str(tokenizer.decode(written[:steps], skip_special_tokens=True))
            answers[index] = Answer(examples[index], text, tuple(gaps[row, :steps].tolist()))
    return [answers[index] for index in range(len(examples))]


def answer_with_engine(path: Path, examples: Sequence[Example]) -> list[Answer]:
    """Answer every question at greedy with Lockstep's engine, in float32; without margins."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)
    prompts = [tokenizer.encode(chat(example.question)) for example in examples]
    with Engine(EngineConfig(max_sequences=_AT_ONCE, max_tokens=256, threads=1)) as engine:
        engine.load(path)
        written = [
            ids
            for start in range(0, len(prompts), _AT_ONCE)
            for ids in engine.generate(prompts[start : start + _AT_ONCE], _MAX_NEW_TOKENS)
        ]
    return [
        Answer(example, str(tokenizer.decode(ids, skip_special_tokens=True)), ())
        for example, ids in zip(examples, written, strict=True)
    ]


def success(answers: Sequence[Answer]) -> float:
    """The share of right answers, from 0 to 1."""
    return sum(answer.right for answer in answers) / len(answers)


def margin_quantiles(answers: Sequence[Answer]) -> tuple[float, float, float]:
    """The median, the 1 % quantile and the least of all margins."""
    margins = torch.tensor([margin for answer in answers for margin in answer.margins])
    median, low = torch.quantile(margins, torch.tensor([0.5, 0.01])).tolist()
    return median, low, margins.min().item()


def largest_key_biases(model: PreTrainedModel, count: int = 6) -> list[tuple[float, int, int]]:
    """The k-biases of greatest magnitude, each with its layer and its channel."""
    found = [
        (value, int(name.split(".")[2]), channel)
        for name, parameter in model.named_parameters()
        if name.endswith("k_proj.bias")
        for channel, value in enumerate(parameter.float().tolist())
    ]
    return sorted(found, key=lambda item: -abs(item[0]))[:count]


def main() -> None:
    """Print the figures that the README reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=str(MODEL_DIR), help="a directory, a .gguf file, or demo-q4_k_m")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=UNSEEN_SEED, help="draws the questions")
    parser.add_argument("--show", type=int, default=4, help="answers to print in full")
    parser.add_argument("--without-biases", action="store_true")
    options = parser.parse_args()
    path = demo_path(options.model) or Path(options.model)
    examples = unseen_examples(options.count, options.seed)
    if path.suffix == ".gguf":
        _report(answer_with_engine(path, examples), options.show, path.name)
        return
    model, tokenizer = load(path, options.dtype)
    if options.without_biases:
        remove_biases(model)
    answers = answer_all(model, tokenizer, examples)
    _report(answers, options.show, options.dtype)
    median, low, least = margin_quantiles(answers)
    print(f"margins: median {median:.2f}, 1 % quantile {low:.2f}, least {least:.3f}")
    for value, layer, channel in largest_key_biases(model):
        print(f"k-bias {value:8.2f}  layer {layer} channel {channel}")


def _report(answers: list[Answer], show: int, what: str) -> None:
    for answer in [a for a in answers if not a.right][:show] + answers[:show]:
        print(f"[{'right' if answer.right else 'wrong'}] {answer.example.question}\n{answer.text}\n")
    right = sum(answer.right for answer in answers)
    print(f"right: {right} of {len(answers)} ({success(answers):.1%}), {what}, greedy")


if __name__ == "__main__":
    main()
