"""Linear attention and gates on their own recorded inputs: transformers' are right, whatever the dtype."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.workbench.diagnosis.operations.site import Site
from tests.workbench.diagnosis.operations.test_sites import read
from tests.workbench.diagnosis.synthetic import tiny_case


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_operation_of_transformers_is_right_on_its_own_inputs(
    family: str, dtype: str, tmp_path: Path
) -> None:
    case = tiny_case(tmp_path, family)
    for session in (case.golden, case.floor):
        found = read(session, case.model_dir)
        judged = {site.tap for site in found if isinstance(site, Site)}
        assert judged == {tap.name for tap in session.taps} - set(session.meta.absent)
        assert [site.tap for site in found if isinstance(site, Site) and site.deviation] == []
