"""The one way to start a child process: a Python that takes no code from the working directory. Torch-free.

In a folder that holds a stranger's `torch.py`, `lockstep check .` must not run it. Hence `-P`, and an environment in
which no variable that names code names a place relative to the working directory. What is promised, and what cannot
be: docs/security.md.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

#: The folder that `lockstep` lies in: a child imports the very same. Links are not followed: in a checkout
#: `lockstep/engine` is one.
ROOT = str(Path(__file__).absolute().parents[2])

#: Variables that name places to load code from -> the characters that divide their entries ("": one entry).
_CODE = {
    "PYTHONPATH": os.pathsep, "PYTHONHOME": ":", "PYTHONUSERBASE": "", "PYTHONPYCACHEPREFIX": "",
    "PATH": os.pathsep, "LD_LIBRARY_PATH": ":;", "LD_PRELOAD": ": ", "LD_AUDIT": ":", "GCONV_PATH": ":",
    "DYLD_LIBRARY_PATH": ":", "DYLD_FALLBACK_LIBRARY_PATH": ":", "DYLD_INSERT_LIBRARIES": ":",
    "OPENSSL_CONF": "", "OPENSSL_MODULES": "", "OPENSSL_ENGINES": "", "CUDA_CACHE_PATH": "",
    "TORCHINDUCTOR_CACHE_DIR": "", "TORCH_EXTENSIONS_DIR": "", "TRITON_CACHE_DIR": "",
}  # fmt: skip
#: Of these, the lists in which a bare name is looked up in the system's folders.
_LIBRARIES = ("LD_PRELOAD", "LD_AUDIT", "DYLD_INSERT_LIBRARIES")
#: Variables that have Python run or import something else than it was asked to.
_DROPPED = ("PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONBREAKPOINT")


def start_python(
    *words: str,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    settings: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    process_group: int | None = None,
    start_new_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start `python words` (`-m`, a module, its arguments). `settings` are put into its environment;
    the rest is as in `subprocess.Popen`, OSError too."""
    return subprocess.Popen(
        python_command(*words), env=child_environment(settings or {}), stdin=stdin,
        stdout=stdout, stderr=stderr, pass_fds=pass_fds, process_group=process_group,
        start_new_session=start_new_session,
    )  # fmt: skip


def python_command(*words: str) -> list[str]:
    """The command line of `start_python`."""
    return [sys.executable, "-P", *words]


@contextmanager
def loading() -> Iterator[None]:
    """For the imports of a child that begins. Modules are no garbage: a walk through them all, time and again while
    torch or transformers loads, takes a sixth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def child_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """This process's environment as a child may have it, with `settings`. Children of the child are safe as well."""
    checked = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    for name in _CODE.keys() & checked.keys():
        kept = [entry for entry in _entries(name, checked.pop(name)) if _is_absolute(name, entry)]
        if kept:
            checked[name] = (_CODE[name] or " ")[0].join(kept)
    folders = [entry for entry in checked.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", ROOT)]
    return {**checked, "PYTHONPATH": os.pathsep.join([ROOT, *folders]), "PYTHONSAFEPATH": "1", **settings}


def names_working_directory() -> list[str]:
    """The variables of this process's environment by which programs take code from the working directory."""
    return [
        name for name in _CODE
        if (value := os.environ.get(name)) and not all(_is_absolute(name, e) for e in _entries(name, value))
    ]  # fmt: skip


def _entries(name: str, value: str) -> list[str]:
    return re.split(f"[{_CODE[name]}]", value) if _CODE[name] else [value]


def _is_absolute(name: str, entry: str) -> bool:
    """Whether an entry means the same in every working directory; an empty one means that directory itself."""
    if name in _LIBRARIES and "/" not in entry:
        return True
    return os.path.isabs(entry)
