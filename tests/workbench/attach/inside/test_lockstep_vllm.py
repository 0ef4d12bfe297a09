"""What the tap reports on vLLM's sampling, by stand-ins of its requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.workbench.attach.inside.lockstep_vllm import VllmWorker


def params(**changed: Any) -> SimpleNamespace:
    """vLLM's SamplingParams as they are for temperature 0, and what is asked for beside it."""
    plain = {
        "temperature": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "min_tokens": 0, "logit_bias": None, "allowed_token_ids": None, "bad_words": [], "structured_outputs": None,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **changed})


def scheduled(
    new: dict[str, Any], later: dict[str, int], rows: dict[str, int], **more: Any
) -> SimpleNamespace:
    """A scheduler's output: new requests of 6 tokens, and of those that go on how many tokens are computed."""
    requests = [
        SimpleNamespace(req_id=name, prompt_token_ids=[5] * 6, sampling_params=one, num_computed_tokens=0)
        for name, one in new.items()
    ]
    cached = SimpleNamespace(req_ids=list(later), num_computed_tokens=list(later.values()))
    return SimpleNamespace(
        scheduled_new_reqs=requests, scheduled_cached_reqs=cached, num_scheduled_tokens=rows, **more
    )


def worker(processed: bool = False) -> Any:
    made = VllmWorker.__new__(VllmWorker)
    made.greedy, made.processed = {}, processed
    return made


def test_greedy_tokens_are_those_behind_the_last_row_of_a_prompt() -> None:
    """A chunk that ends within the prompt chooses nothing."""
    one = worker()
    one.output = scheduled({"a": params(), "b": params()}, {}, {"a": 6, "b": 4})
    assert one._chosen() == ["a"]
    one.output = scheduled({}, {"a": 6, "b": 4}, {"a": 1, "b": 2})
    assert one._chosen() == ["a", "b"]
    one.output = scheduled({}, {"a": 7}, {"a": 3}, scheduled_spec_decode_tokens={"a": [1, 2]})
    assert one._chosen() == []


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.7}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5},
        {"min_tokens": 3}, {"logit_bias": {4: 1.0}}, {"allowed_token_ids": [1]}, {"bad_words": ["no"]},
        {"structured_outputs": object()},
    ],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_no_token_is_called_greedy_that_something_else_may_have_chosen(changed: dict[str, Any]) -> None:
    one = worker()
    one.output = scheduled({"a": params(**changed)}, {}, {"a": 6})
    assert one._chosen() == []


def test_no_token_is_called_greedy_behind_logits_processors_of_the_engine() -> None:
    one = worker(processed=True)
    one.output = scheduled({"a": params()}, {}, {"a": 6})
    assert one._chosen() == []
