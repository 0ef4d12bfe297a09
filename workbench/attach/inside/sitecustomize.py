"""Python runs this file at the start of every process below `lockstep attach`, spawned ranks included.

It imports nothing of an engine by itself: after the engine has imported one of its own modules, the installer for that
module is run on it. A sitecustomize that this one hides runs as well. Nothing here may end a process that would have
lived without it: errors are told by `lockstep_report`.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

HERE = os.path.dirname(os.path.abspath(__file__))

#: Module of an engine -> the installer that is run on it, as "module.function", and the engine as in --engine.
INSTALLERS = {
    "vllm.engine.arg_utils": ("lockstep_vllm.vllm_arguments", "vllm"),
    "vllm.v1.worker.worker_base": ("lockstep_vllm.vllm_worker", "vllm"),
    "sglang.srt.server_args": ("lockstep_sglang.sglang_arguments", "sglang"),
    "sglang.srt.model_executor.model_runner": ("lockstep_sglang.sglang_runner", "sglang"),
    "nanovllm.engine.model_runner": ("lockstep_nano.nano_runner", "nano"),
    "transformers.modeling_utils": ("lockstep_transformers.transformers_models", "torch"),
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, and has the installer run once the module's own code has been."""

    def __init__(self, installers: dict[str, str]) -> None:
        self.installers = installers

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.installers:
            return None
        installer = self.installers.pop(name)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None and spec.loader is not None:
                spec.loader = InstallingLoader(spec.loader, installer)
                return spec
        return None


class InstallingLoader(importlib.abc.Loader):
    """The module's own loader, and the installer after it."""

    def __init__(self, loader: importlib.abc.Loader, installer: str) -> None:
        self.loader, self.installer = loader, installer

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        import lockstep_report

        try:
            file, _, function = self.installer.partition(".")
            getattr(importlib.import_module(file), function)(module)
            lockstep_report.found(module.__name__)
        except Exception as error:
            lockstep_report.failed(f"{self.installer} on {module.__name__}", error)


def run_the_other() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    elsewhere = [folder for folder in sys.path if os.path.abspath(folder or os.getcwd()) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("LOCKSTEP_TAP"):
    engine = os.environ.get("LOCKSTEP_TAP_ENGINE", "auto")
    wanted = {name: installer for name, (installer, of) in INSTALLERS.items() if engine in ("auto", of)}
    sys.meta_path.insert(0, AfterImport(wanted))
run_the_other()
