"""Bugs put into transformers' own modules, recorded, and read into sites with the right checkpoint beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lockstep.sessions import Session
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.operations.sites import sites
from lockstep.workbench.diagnosis.recording import Recording
from lockstep.workbench.references import transformers_recorder
from lockstep.workbench.references.golden import forced_onto
from lockstep.workbench.references.loading import load_golden
from lockstep.workbench.references.request import GoldenRequest
from tests.workbench.diagnosis.synthetic import STEPS, Case

Patch = Callable[[Any], object]


def recorded(case: Case, path: Path, patch: Patch, dtype: str = "float32") -> Session:
    """A session of the case's model, spoilt by `patch(model)` before it ran, on the case's tokens."""

    def load(*args: Any) -> Any:
        model = load_golden(*args)
        with torch.no_grad():
            patch(model)
        return model

    request = GoldenRequest(str(case.model_dir), forced_onto(case.floor.path), STEPS, dtype)  # type: ignore[arg-type]
    with mock.patch.object(transformers_recorder, "load_golden", load):
        transformers_recorder.record(request, path)
    return Session.open(path)


def wrong_sites(case: Case, session: Session) -> dict[str, Site]:
    """By tap (with "@rank" where there are several ranks), the operations that are wrong on their own inputs."""
    recording = Recording(session)
    facts = Facts.of(case.model_dir, recording.dtype)
    found = sites(RecordedTaps(recording, Recording(case.golden)), facts)
    wrong = [site for site in found if isinstance(site, Site) and site.deviation is not None]
    return {site.tap + (f"@{site.rank}" if session.ranks > 1 else ""): site for site in wrong}
