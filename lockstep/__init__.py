"""Lockstep: a debugger for LLM inference engines. From Python (docs/library.md):

lockstep.check("path/of/a/model", tp=2)   # -> Verdict: the engine against a reference, tap by tap
lockstep.diagnose("run.session")          # -> Verdict: what is wrong with a recording, and why
lockstep.open("run.session")              # -> RecordedRun: tokens, statistics, tensors, pictures
lockstep.diff("a.session", "b.session")   # -> RunDiff
lockstep.invariant("path", axis="batch")  # -> Invariance: what depends on the batch, and whether that is rounding
lockstep.mismatch("rollout.session", "trainer.session")   # -> Mismatch: why log-probabilities differ
lockstep.attach(["python", "serve.py"])   # -> AttachedRuns: somebody else's engine, recorded
lockstep.weights(["python", "serve.py"], model="path")    # -> WeightsVerdict: what it has really loaded
with lockstep.record(module) as recording: ...    # a model in this process, recorded
lockstep.Engine(lockstep.EngineConfig(tp=2))      # a tensor-parallel engine, step by step
"""

# Nothing is imported here: this is the first of Lockstep that runs, and what it imported could come from a stranger's
# working directory (see `workbench.cli`). A name is imported when it is asked for.

TYPE_CHECKING = False  # what type checkers take for true, without an import of `typing`
if TYPE_CHECKING:
    from lockstep.engine.api import Engine
    from lockstep.engine.config import EngineConfig
    from lockstep.engine.errors import EngineError
    from lockstep.engine.run.sampling import Sampling
    from lockstep.sessions.errors import SessionError
    from lockstep.version import __version__
    from lockstep.workbench.attach.launch import AttachError
    from lockstep.workbench.debugger.errors import DebuggerError
    from lockstep.workbench.diagnosis.judgement import DiagnosisError
    from lockstep.workbench.exit_codes import UsageError
    from lockstep.workbench.foreign.passes import ForeignDumpError
    from lockstep.workbench.library.attach_passes import AttachedRuns
    from lockstep.workbench.library.attached import attach
    from lockstep.workbench.library.comparing import RunDiff, diff
    from lockstep.workbench.library.invariance import Invariance, invariant
    from lockstep.workbench.library.judging import check, diagnose
    from lockstep.workbench.library.listening import Listener
    from lockstep.workbench.library.loading_weights import WeightsVerdict, weights
    from lockstep.workbench.library.mismatching import Mismatch, mismatch
    from lockstep.workbench.library.module_recording import ModuleRecording, record
    from lockstep.workbench.library.pictures import Drawing
    from lockstep.workbench.library.reading import RecordedRun
    from lockstep.workbench.library.reading import open_session as open
    from lockstep.workbench.library.verdict import Verdict

__all__ = [
    "AttachError", "AttachedRuns", "DebuggerError", "DiagnosisError", "Drawing", "Engine", "EngineConfig",
    "EngineError", "ForeignDumpError", "Invariance", "Listener", "Mismatch", "ModuleRecording", "RecordedRun",
    "RunDiff", "Sampling", "SessionError", "UsageError", "Verdict", "WeightsVerdict", "__version__", "attach",
    "check", "diagnose", "diff", "invariant", "mismatch", "open", "record", "weights",
]  # fmt: skip

#: Name -> its module, and what it is called there if that is another name.
_HOMES = {
    "AttachError": ("workbench.attach.launch",),
    "AttachedRuns": ("workbench.library.attach_passes",),
    "DebuggerError": ("workbench.debugger.errors",),
    "DiagnosisError": ("workbench.diagnosis.judgement",),
    "Drawing": ("workbench.library.pictures",),
    "Engine": ("engine.api",),
    "EngineConfig": ("engine.config",),
    "EngineError": ("engine.errors",),
    "ForeignDumpError": ("workbench.foreign.passes",),
    "Invariance": ("workbench.library.invariance",),
    "Listener": ("workbench.library.listening",),
    "Mismatch": ("workbench.library.mismatching",),
    "ModuleRecording": ("workbench.library.module_recording",),
    "RecordedRun": ("workbench.library.reading",),
    "RunDiff": ("workbench.library.comparing",),
    "Sampling": ("engine.run.sampling",),
    "SessionError": ("sessions.errors",),
    "UsageError": ("workbench.exit_codes",),
    "Verdict": ("workbench.library.verdict",),
    "WeightsVerdict": ("workbench.library.loading_weights",),
    "__version__": ("version",),
    "attach": ("workbench.library.attached",),
    "check": ("workbench.library.judging",),
    "diagnose": ("workbench.library.judging",),
    "diff": ("workbench.library.comparing",),
    "invariant": ("workbench.library.invariance",),
    "mismatch": ("workbench.library.mismatching",),
    "open": ("workbench.library.reading", "open_session"),
    "record": ("workbench.library.module_recording",),
    "weights": ("workbench.library.loading_weights",),
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, *there = _HOMES[name]
    named = there[0] if there else name
    return getattr(__import__(f"{__name__}.{home}", fromlist=[named]), named)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
