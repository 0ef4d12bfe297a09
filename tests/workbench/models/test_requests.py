"""What a user's words mean to the engine, wherever they were typed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lockstep.engine.errors import ConfigError, EngineError, RequestError
from lockstep.workbench.debugger.host.options import Launch, target_of
from lockstep.workbench.demo import DEFAULT_PROMPT
from lockstep.workbench.models import requests
from lockstep.workbench.models.capture import STATS
from lockstep.workbench.models.opening import DEMO, OpenedModel, open_model


@pytest.fixture(scope="module")
def demo() -> OpenedModel:
    return open_model(DEMO)


def test_text_comes_before_ids_and_the_demo_has_a_question_of_its_own(demo: OpenedModel) -> None:
    assert demo.tokenizer is not None
    stated = demo.tokenizer.encode("Who?")
    assert requests.prompt_ids(demo, ["Who?"], ["7,8", " 9 "], False) == [stated, [7, 8], [9]]
    asked = demo.tokenizer.encode_chat([{"role": "user", "content": DEFAULT_PROMPT}])
    assert requests.prompt_ids(demo, None, None, False) == [asked]


def test_a_model_of_the_users_is_asked_nothing_by_itself(demo: OpenedModel) -> None:
    with pytest.raises(RequestError, match="nothing to run"):
        requests.prompt_ids(replace(demo, name="mine"), (), (), False)


@pytest.mark.parametrize(
    ("ask", "printed"),
    [
        (lambda model: requests.prompt_ids(model, [], ["1,x"], False), "whole numbers"),
        (lambda model: requests.prompt_ids(model, [""], [], False), "empty"),
        (lambda model: requests.faults_of(["mask=none", "mask=additive"], model, 1), "choose one"),
        (lambda model: requests.faults_of(["reduce=twice"], model, 1), "two ranks"),
        (lambda model: requests.engine_config(model, tp=1, device="tpu", dtype="auto"), "tpu"),
        (lambda model: requests.engine_config(model, tp=1, device="cpu", dtype="auto", load="no"), "rank0"),
        (lambda model: requests.capture_of(["layers.99.*"], model, 1), "no tap"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    demo: OpenedModel, ask: Callable[[OpenedModel], object], printed: str
) -> None:
    with pytest.raises(EngineError, match=printed):
        ask(demo)


def test_the_same_rule_twice_is_one_rule(demo: OpenedModel) -> None:
    assert requests.faults_of(["mask=none", "mask=none"], demo, 1) == {"mask": "none"}
    assert requests.capture_of(None, demo, 1) == STATS


def test_a_debugger_is_started_on_what_generate_would_run(demo: OpenedModel) -> None:
    """`lockstep run` and the screens' host go through the same words."""
    target = target_of(Launch(DEMO, ids=["5,6"], rules=["rope=twice"], tp=2))
    assert (target.prompts, target.rules, target.config.tp) == ([[5, 6]], {"rope": "twice"}, 2)
    with pytest.raises(ConfigError, match="choose one"):
        target_of(Launch(DEMO, rules=["mask=none", "mask=additive"]))


def test_a_rule_given_its_correct_value_does_not_differ(demo: OpenedModel) -> None:
    """It was recorded, and the screen reported of it that it differs from correct."""
    assert requests.faults_of(["rope=half_split", "load_bias=false"], demo, 1) == {"load_bias": "false"}
