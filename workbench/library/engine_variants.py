"""What other engines can be asked for along the axes, by their own arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.sessions.text import clean
from lockstep.workbench.checking.axes.axis import AxisName


@dataclass(frozen=True, slots=True)
class EngineVariant:
    """What an engine is asked for along one axis, and that in words: arguments that it is given whatever its command
    states, or `words` behind the command. `untapped`: nothing is changed in the engine, and its tokens alone are
    seen."""

    summary: str
    arguments: Mapping[str, int | bool] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    untapped: bool = False

    @classmethod
    def by_words(cls, words: Sequence[str]) -> EngineVariant:
        """The command with these words more."""
        return cls(f"with {' '.join(words)} = as started", words=tuple(words))


_GRAPHS = (EngineVariant("with the graphs of the command, by its tokens = eagerly", untapped=True),)
#: vLLM's arguments (`vllm.engine.arg_utils.EngineArgs`; of `preempt` the recorder's), by axis.
_VLLM: Mapping[AxisName, tuple[EngineVariant, ...]] = {
    "batch": (EngineVariant("one request at a time = as started", {"max_num_seqs": 1}),),
    "preempt": (EngineVariant("each request dropped and read anew = as started", {"preempted_after": 2}),),
    "chunk": (  # a threshold for long prompts would hold only while several requests are there
        EngineVariant(
            "passes of 4 rows at most = as started",
            {"enable_chunked_prefill": True, "max_num_batched_tokens": 4, "max_num_seqs": 4},
        ),
    ),
    "prefix": (EngineVariant("without the prefix cache = with it", {"enable_prefix_caching": False}),),
    "tp": tuple(EngineVariant(f"tp {tp} = as started", {"tensor_parallel_size": tp}) for tp in (1, 2, 4)),
    "ep": (EngineVariant("experts among the ranks = as started", {"enable_expert_parallel": True}),),
    "graph": _GRAPHS,
}
ENGINES: Mapping[str, Mapping[AxisName, tuple[EngineVariant, ...]]] = {
    "vllm": _VLLM,
    "sglang": {"graph": _GRAPHS},
    "nano-vllm": {"graph": _GRAPHS},
}


def variants_of(engine: str, axis: AxisName, ranks: int) -> Sequence[EngineVariant]:
    """Those of an engine that runs on so many ranks."""
    if axis == "ep" and ranks == 1:
        return ()
    known = ENGINES.get(engine.split(" ")[0].lower(), {}).get(axis, ())
    return [one for one in known if one.arguments.get("tensor_parallel_size") != ranks]


def why_none(engine: str, axis: AxisName, ranks: int) -> str:
    """Why an engine has no variant along an axis."""
    if axis == "ep" and ranks == 1:
        return "there is one rank"
    if axis in ("order", "preempt", "speculation"):
        return "which requests come when is the command's own: it cannot be asked of the engine"
    return f"{clean(engine, limit=80) or 'this engine'} cannot be asked for a variant of it: it is the command's own"
