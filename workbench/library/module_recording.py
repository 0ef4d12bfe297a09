"""`lockstep.record`: a model in this process, recorded while the user's own code calls it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.engine.scratch import ScratchFolder
from lockstep.sessions import SessionError
from lockstep.sessions.text import clean
from lockstep.workbench.attach.launch import CAPTURES
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.foreign.passes import ForeignDumpError
from lockstep.workbench.foreign.readers.lockstep import LockstepDump
from lockstep.workbench.inferior.destination import may_write
from lockstep.workbench.library import html
from lockstep.workbench.library.imported import ImportedRun, import_as
from lockstep.workbench.library.listening import Listener
from lockstep.workbench.library.tensor_ranks import TensorRanks, tensor_ranks
from lockstep.workbench.models.opening import OpenedModel, open_model
from lockstep.workbench.paths import new_session_path

if TYPE_CHECKING:
    from torch import nn

    from lockstep.workbench.attach.inside.lockstep_tap import Tape


class ModuleRecording:
    """What `lockstep.record` gives: empty inside the block, `session` and `notes` behind it."""

    def __init__(self) -> None:
        self.imported: ImportedRun | None = None

    @property
    def session(self) -> Path | None:
        """The recording, for `lockstep.open`; None as long as the block runs, or where nothing was recorded."""
        return None if self.imported is None else self.imported.session

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out or inferred, and what went wrong while it was recorded."""
        return () if self.imported is None else tuple(self.imported.lines())

    def __repr__(self) -> str:
        reported = "not recorded" if self.imported is None else self.imported.coverage.in_words()
        return f"<ModuleRecording {clean(str(self.session))}: {clean(reported)}>"

    def _repr_html_(self) -> str:
        if self.imported is None:
            return html.block(html.paragraph("nothing is recorded yet"))
        reported = [("session", str(self.session)), *(("note", note) for note in self.notes)]
        return html.block(html.heading(self.imported.coverage.in_words()), html.lines(reported))


@contextmanager
def record(
    module: nn.Module,
    output: str | Path | None = None,
    *,
    model: str | Path | None = None,
    only: str | Sequence[str] = "*",
    capture: str = "full",
    progress: Listener | None = None,
) -> Iterator[ModuleRecording]:
    """Record every call of `module` inside a `with` block: a model of transformers, or one whose parts have the names
    that transformers, vLLM, SGLang, nano-vllm and Megatron-core give them; also inside of FSDP, DDP, PEFT or
    torch.compile, which runs eagerly meanwhile. Of a model that Megatron-core has cut over tensor-parallel ranks every
    rank has to record; the first writes the session, and the others have none.

    Hooks are set at the beginning and taken away at the end, and the session is written to `output` (None: among the
    user's sessions). `model` is the checkpoint, for the texts of tokens and the verdict later. `only` are globs of the
    taps to keep; `capture` "stats" keeps of each row statistics and a hash. An error inside the block passes through,
    and what was recorded until then is kept.

    ForeignDumpError where the module was never called; SessionError where the session cannot be written.
    """
    if capture not in CAPTURES:
        raise UsageError(f"capture is {' or '.join(CAPTURES)}, not {capture!r}")
    target = new_session_path("record") if output is None else may_write(Path(output))
    opened = None if model is None else open_model(str(model))
    recording, listener = ModuleRecording(), progress or Listener()
    from lockstep.workbench.attach.inside.lockstep_megatron import CUT_OTHERWISE  # with torch

    inner = _model_of(module)
    ranks = tensor_ranks(
        inner, CUT_OTHERWISE, "record takes a model of which each rank has every layer and token"
    )
    first = ranks.rank == 0
    with ScratchFolder.make("record", target.absolute().parent) if first else nullcontext() as scratch:
        folder = ranks.share(None if scratch is None else scratch.path, inner)
        tape = _tape(inner, ranks, folder / "dump", opened, only, capture)
        try:
            with closing(tape), _eager():
                _tap(module, tape)
                yield recording
        except BaseException as error:
            try:
                recording.imported = _imported(tape, ranks, target, opened, listener)
            except (ForeignDumpError, SessionError) as lost:
                error.add_note(f"lockstep.record: {lost}")
            raise
        recording.imported = _imported(tape, ranks, target, opened, listener)


def _model_of(module: nn.Module) -> nn.Module:
    """The model inside of what wraps it. UsageError where it is no module."""
    from torch.nn import Module  # it imports torch, which only this needs

    from lockstep.workbench.attach.inside.lockstep_wrappers import unwrapped

    if not isinstance(module, Module):
        raise UsageError(
            f"record takes a torch.nn.Module, not {clean(type(module).__name__)}: code that is none records itself by "
            "the taps of lockstep_tap.py (`lockstep tap --write .`)"
        )
    return unwrapped(module)


def _tape(
    module: nn.Module, ranks: TensorRanks, dump: Path, opened: OpenedModel | None, only: str | Sequence[str],
    capture: str,
) -> Tape:  # fmt: skip
    from lockstep.workbench.attach.inside.lockstep_megatron import config_of, is_megatron
    from lockstep.workbench.attach.inside.lockstep_tap import Tape

    config: Any = getattr(module, "config", None)
    if is_megatron([path for path, _ in module.named_modules()]):
        config = config_of(config, getattr(module, "vocab_size", None))
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    name = str(getattr(module, "name_or_path", "")) if opened is None else str(opened.path)
    engine = engine_of(module)
    return Tape(
        dump, ranks.rank, ranks.size, engine=engine, model=name, config=config, only=only, capture=capture
    )  # fmt: skip


def _tap(module: nn.Module, tape: Tape) -> None:
    from lockstep.workbench.attach.inside.lockstep_calls import CallInputs, MegatronInputs
    from lockstep.workbench.attach.inside.lockstep_megatron import is_megatron
    from lockstep.workbench.attach.inside.lockstep_modules import attach, follow

    attach(module, tape)
    megatron = is_megatron([path for path, _ in module.named_modules()])
    follow(module, tape, MegatronInputs() if megatron else CallInputs())


@contextmanager
def _eager() -> Iterator[None]:
    """What torch.compile has compiled runs as it is written: hooks are not called in it."""
    from torch.compiler import set_stance

    with set_stance("force_eager"):
        yield


def engine_of(module: nn.Module) -> str:
    """The package that the module's class is of, with its version: "transformers 5.1"."""
    packages = [one.__module__.partition(".")[0] for one in type(module).__mro__]
    package = next((one for one in packages if one != "torch"), "torch")  # FSDP2 makes classes of its own
    package = {"megatron": "megatron-core"}.get(package, package)
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return type(module).__name__


def _imported(
    tape: Tape, ranks: TensorRanks, target: Path, opened: OpenedModel | None, listener: Listener
) -> ImportedRun | None:
    """None on all ranks but the first."""
    if ranks.rank:
        return None
    ranks.wait_for_others(tape.folder.parent)
    if not tape.index:
        stopped = tape.facts.get("stopped")
        why = f"recording stopped at {stopped}" if stopped else "no call of the module ended inside the block"
        raise ForeignDumpError(f"nothing is recorded: {why}")
    imported = import_as(LockstepDump.open(tape.folder.parent), "lockstep", target, opened, listener)
    listener.clear()
    return imported
