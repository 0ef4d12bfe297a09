"""The engine's public face, as its docstring shows it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep import engine as public
from lockstep.engine import Engine, EngineConfig
from lockstep.engine.errors import RequestError
from tests.checkpoints import VARIANTS, tiny_model
from tests.engine.harness import reference_logits


def example() -> str:
    """The code in the package's docstring."""
    assert public.__doc__ is not None
    block = public.__doc__.split("\n\n")[1:]
    return textwrap.dedent("\n\n".join(part for part in block if part.startswith("    ")))


@pytest.mark.slow
def test_the_example_runs_and_loads_no_torch(variant: Callable[[str], Path]) -> None:
    code = example().replace("path/to/checkpoint", str(variant("qwen2-tied")))
    assert len(code.splitlines()) <= 12
    code += "\nimport sys; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    tokens, step, parts = done.stdout.splitlines()
    assert len(eval(tokens)[0]) == 8
    assert step.endswith("(8, 3, 3)")  # heads, tokens, keys
    assert parts == "[(4, 3, 3), (4, 3, 3)]"


def test_what_is_public_is_there() -> None:
    assert {name for name in public.__all__ if not hasattr(public, name)} == set()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = public.nonsense


def test_tokens_and_tensors_are_the_references(variant: Callable[[str], Path]) -> None:
    path, prompt = variant("llama-bias"), [3, 130, 17]
    family, overrides = VARIANTS["llama-bias"]
    logits, ids = reference_logits(tiny_model(family, **overrides), prompt, 4)
    with Engine(EngineConfig(tp=2, threads=1)) as engine:
        engine.load(path)
        assert engine.generate([prompt, prompt[:2]], 4)[0] == ids
        engine.capture("logits", last=["layers.*.attn.probs"])
        seq = engine.add(prompt)
        step = engine.step()
        assert step.token(seq) == ids[0]
        assert abs(step.tensor("logits", seq)[0] - logits[0].numpy()).max() < 1e-4
        assert step.tensor("layers.1.attn.probs", seq).shape[1:] == (1, 3)
        with pytest.raises(RequestError, match="was not captured"):
            step.tensor("final_norm", seq)
        with pytest.raises(RequestError, match="there is no tap 'nonsense'"):
            step.parts("nonsense", seq)
        with pytest.raises(RequestError, match="no tap matches 'nonsense'"):
            engine.capture("nonsense")
