"""A model of transformers, changed or not, recorded as attach does and diagnosed by its checkpoint alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from lockstep.sessions import Session
from lockstep.workbench.attach.inside.lockstep_modules import attach, follow
from lockstep.workbench.attach.inside.lockstep_tap import Tape
from lockstep.workbench.diagnosis.diagnose import Explanation, diagnose
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.foreign.importing import import_run
from lockstep.workbench.foreign.readers.lockstep import LockstepDump

IDS = [3, 30, 17, 99, 4, 64, 5, 12, 77, 20, 31, 8]


def attached_and_diagnosed(
    path: Path, scratch: Path, dtype: str, change: Callable[[Any], None] = lambda model: None,
    prompts: Sequence[list[int]] = (IDS,), **how: Any,
) -> Explanation:  # fmt: skip
    """Two tokens of each prompt, one after the other; `change` is made to the model before it is recorded, `how` are
    further arguments of `generate`."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    change(model)
    tape = Tape(scratch / "dump", config=model.config, model=str(path))
    attach(model, tape)
    follow(model, tape)
    with torch.no_grad():
        for ids in prompts:
            model.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False, **how)
    tape.close()
    import_run(LockstepDump.open(scratch / "dump"), scratch / "run.session", form="lockstep")
    with Session.open(scratch / "run.session") as session:
        return diagnose(session, Facts.of(path, dtype))
