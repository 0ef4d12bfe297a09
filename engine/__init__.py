"""A tensor-parallel inference engine that can be looked into. The ranks are processes of their own, at TP=1 too.

    from lockstep.engine import Engine, EngineConfig

    with Engine(EngineConfig(tp=2)) as engine:
        engine.load("path/to/checkpoint")  # a Hugging Face directory
        print(engine.generate([[1, 2, 3]], max_tokens=8))  # the new tokens of each prompt
        engine.capture("layers.0.attn.*", statistics=True)
        seq = engine.add([1, 2, 3])
        step = engine.step()  # one forward pass
        print(step.token(seq), step.tensor("layers.0.attn.probs", seq).shape)  # whole: [heads, tokens, keys]
        print([part.shape for part in step.parts("layers.0.attn.probs", seq)])  # each rank's part

`Rules` are the seams at which a rank program of your own may replace the correct behaviour: see `Engine`.
Importing this package loads no torch; `Rules` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.engine.api import Engine, Pass
    from lockstep.engine.config import EngineConfig
    from lockstep.engine.errors import EngineError
    from lockstep.engine.rules import Rules
    from lockstep.engine.run.sampling import Sampling

__all__ = ["Engine", "EngineConfig", "EngineError", "Pass", "Rules", "Sampling"]

_HOMES = {
    "Engine": "lockstep.engine.api",
    "EngineConfig": "lockstep.engine.config",
    "EngineError": "lockstep.engine.errors",
    "Pass": "lockstep.engine.api",
    "Rules": "lockstep.engine.rules",
    "Sampling": "lockstep.engine.run.sampling",
}


def __getattr__(name: str) -> object:
    """Import what is asked for, when it is: this package is imported by processes that must stay light."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
