"""What can be said of an embedding that no known mistake explains: whether it is the table whose rows are others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.variant import ELEMENTS_A_PARAMETER, Variant
from lockstep.workbench.diagnosis.operations.shares import EMBEDDING
from lockstep.workbench.diagnosis.operations.site import Site

#: Ids that are told.
TOLD = 6


def other_numbers(site: Site) -> Iterator[Variant]:
    """Some ids have other rows than the checkpoint's, the same wherever they stand. Nothing is reproduced: the numbers
    are not known."""
    deviation, part = site.deviation, site.parts[0]
    if deviation is None or not part.fits or not np.isfinite(part.seen).all():
        return
    wrong = np.asarray(deviation.scopes[0].any(1))
    rows: dict[int, list[int]] = {}
    for i, row in enumerate(site.rows):
        rows.setdefault(row.token, []).append(i)
    ids = sorted(token for token, at in rows.items() if wrong[at].any())
    alike = all(wrong[rows[i]].all() and not np.ptp(part.seen[rows[i]], axis=0).any() for i in ids)
    right = [token for token in rows if token not in ids]
    # A row that is wrong at some steps alone is no matter of the table.
    told_by = [i for i in ids if len({site.rows[at].step for at in rows[i]}) > 1 or len(rows[i]) > 1]
    if not alike or not (told_by or (right and max(right) < ids[0])):
        return
    seen, own = part.seen[wrong], part.expected[wrong]
    cosine = float((seen * own).sum() / max(float(np.linalg.norm(seen) * np.linalg.norm(own)), 1e-300))
    which = f"{len(ids)} ids ({', '.join(map(str, ids[:TOLD]))})"
    if not right:
        which = "all ids"
    elif max(right) < ids[0]:
        which = f"ids from {ids[0]} on"
    text = f"the rows of {which} in {EMBEDDING} hold other numbers than the checkpoint's"
    if abs(cosine) < 8 / np.sqrt(seen.size):
        text += (
            f", of standard deviation {seen.std():.2g}, with nothing of these: never loaded, or drawn anew"
        )
        text += " as the table was resized for added tokens" if right and max(right) < ids[0] else ""
    fitted = {"ids": ids[:TOLD], "number": len(ids), "cosine": cosine}
    parameters = int(deviation.scopes[0].sum()) // ELEMENTS_A_PARAMETER
    predicted = np.where(wrong[:, None], part.seen, part.expected)
    yield Variant("embedding_rows_differ", "embedding", text, fitted, predicted, parameters)
