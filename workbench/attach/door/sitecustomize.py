"""Python runs this file at the start of every process below `lockstep attach`, spawned ranks included.

It imports nothing of an engine by itself: after the engine has imported one of its own modules, the installer for that
module is run on it. A sitecustomize that this one hides runs as well. The files of `inside` are loaded by their path,
in a package of a name that nobody else has: the search path of the engine, which may begin with its working directory,
is neither asked nor changed. Nothing here may end a process that would have lived without it: errors are reported, of
imports too. Hence no module of the standard library that Python itself does not need, and no syntax of Python 3.8 on.
"""

import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from types import ModuleType
    from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
INSIDE = os.path.join(os.path.dirname(HERE), "inside")
#: The package of the files in `inside`, in an attached process.
PACKAGE = "_lockstep_attached"

#: Module of an engine -> the installer that is run on it, as "module.function", and the engine as in --engine.
INSTALLERS = {
    "vllm.engine.arg_utils": ("lockstep_vllm.vllm_arguments", "vllm"),
    "vllm.model_executor.model_loader.utils": ("lockstep_weights.vllm_loader", "vllm"),
    "vllm.lora.worker_manager": ("lockstep_vllm_lora.vllm_adapters", "vllm"),
    "vllm.v1.worker.worker_base": ("lockstep_vllm.vllm_worker", "vllm"),
    "vllm.v1.core.sched.scheduler": ("lockstep_vllm.vllm_scheduler", "vllm"),
    "sglang.srt.server_args": ("lockstep_sglang.sglang_arguments", "sglang"),
    "sglang.srt.model_executor.model_runner": ("lockstep_sglang.sglang_runner", "sglang"),
    "nanovllm.engine.model_runner": ("lockstep_nano.nano_runner", "nano"),
    "transformers.modeling_utils": ("lockstep_transformers.transformers_models", "torch"),
}


def added() -> "dict[str, tuple[str, str]]":
    """The same of what other packages add: module, engine, function and file, a line each."""
    lines = [line.split("\t") for line in os.environ.get("LOCKSTEP_TAP_DOORS", "").splitlines()]
    return {words[0]: ("lockstep_doors.open_door", words[1]) for words in lines}


#: What an engine that records itself may import without a copy of its own.
OFFERED = ("lockstep_tap", "lockstep_modules")


class OurFiles:
    """Finds our package by its path; and, as the last finder, the modules that are offered to the engine."""

    @staticmethod
    def find_spec(
        name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name == PACKAGE:
            file = os.path.join(INSIDE, "__init__.py")
            spec = ModuleSpec(name, SourceFileLoader(name, file), origin=file, is_package=True)
            spec.has_location = True
            spec.submodule_search_locations = [INSIDE]
            return spec
        if name in OFFERED:
            return ModuleSpec(name, Offered)  # type: ignore[arg-type]
        return None


class Offered:
    """The loader of what is offered: the very module that we use."""

    @staticmethod
    def create_module(spec: ModuleSpec) -> "ModuleType":
        module: ModuleType = ours(spec.name)
        spec.loader_state = module.__spec__
        return module

    @staticmethod
    def exec_module(module: "ModuleType") -> None:
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


class AfterImport:
    """Finds what the other finders find, and has the installer run once the module's own code has been."""

    def __init__(self, installers: "dict[str, str]") -> None:
        self.installers = installers

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name not in self.installers:
            return OurFiles.find_spec(name) if name == PACKAGE else None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None) if finder is not self else None
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                loader: Any = spec.loader
                if hasattr(loader, "exec_module"):
                    spec.loader = InstallingLoader(loader, self.installers)  # type: ignore[assignment]
                return spec
        return None


class InstallingLoader:
    """The module's own loader, and the installer after it, the first time."""

    def __init__(self, loader: "Loader", installers: "dict[str, str]") -> None:
        self.loader, self.installers = loader, installers

    def create_module(self, spec: ModuleSpec) -> "ModuleType | None":
        return self.loader.create_module(spec)

    def exec_module(self, module: "ModuleType") -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        installer = self.installers.pop(module.__name__, "")
        file, _, function = installer.partition(".")
        try:
            if installer:
                getattr(ours(file), function)(module)
                ours("lockstep_report").found(module.__name__)
        except Exception as error:
            failed(installer + " on " + module.__name__, error)


def ours(name: str) -> "Any":
    """A module of `inside`."""
    return importlib.import_module(PACKAGE + "." + name)


def failed(what: str, error: Exception) -> None:
    """Report an error; where our files cannot be loaded at all, once on stderr."""
    try:
        ours("lockstep_report").failed(what, error)
    except Exception as also:
        if not unloadable:
            unloadable.append(also)
            try:
                text = (
                    "lockstep attach: {}: {}; its files cannot be loaded here: {}: {} (the engine goes on)\n"
                )
                sys.stderr.write(text.format(what, error, type(also).__name__, also))
            except Exception:  # a stderr that is closed: there is nobody to report to
                return


#: Why our files cannot be loaded, once that was reported.
unloadable: "list[Exception]" = []


def install() -> None:
    engine = os.environ.get("LOCKSTEP_TAP_ENGINE", "auto")
    every = list(added().items()) + list(INSTALLERS.items())  # of two for the same module, ours
    wanted = {name: installer for name, (installer, of) in every if engine in ("auto", of)}
    sys.meta_path.insert(0, AfterImport(wanted))
    sys.meta_path.append(OurFiles)


def run_the_other() -> None:
    """Run the sitecustomize that this one hides, if there is one: as `sitecustomize`, which it is without us."""
    elsewhere = [folder for folder in sys.path if os.path.abspath(folder or os.getcwd()) != HERE]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        other = sys.modules["sitecustomize"] = type(sys)("sitecustomize")
        other.__spec__, other.__loader__, other.__package__ = spec, spec.loader, spec.parent
        other.__file__ = spec.origin
        if spec.submodule_search_locations is not None:
            other.__path__ = spec.submodule_search_locations
        spec.loader.exec_module(other)


if os.environ.get("LOCKSTEP_TAP"):
    install()
run_the_other()
