"""How far each operation of a recording is from what its own inputs give."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lockstep.sessions import Session
from lockstep.sessions.keeping import keeping
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.operations.sites import sites
from lockstep.workbench.diagnosis.recording import Recording


def over_noise(path: Path, checkpoint: Path, dtype: str) -> dict[str, float]:
    """By tap the error's norm over that of the rounding it may have, the worst rank's."""
    found: dict[str, float] = {}
    with Session.open(path) as session, keeping(session):
        for site in sites(RecordedTaps(Recording(session)), Facts.of(checkpoint, dtype)):
            assert isinstance(site, Site), site
            error, noise = (
                float(np.linalg.norm([np.linalg.norm(array) for array in arrays]))
                for arrays in zip(*((part.error(), part.noise) for part in site.parts), strict=True)
            )
            found[site.tap] = max(found.get(site.tap, 0.0), error / noise)
    return found
