"""`golden` with llama.cpp as the reference of a GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.workbench.debugger.errors import NotCaptured
from lockstep.workbench.debugger.host.launch import start
from lockstep.workbench.debugger.host.options import Launch, target_of
from lockstep.workbench.debugger.host.replay import open_replay
from lockstep.workbench.references.llamacpp import library
from lockstep.workbench.references.request import ReferenceFailure
from tests.checkpoints import tiny_variant
from tests.gguf_twins import gguf_twin
from tests.workbench.debugger.conftest import Live

needs_llamacpp = pytest.mark.skipif(not library.is_installed(), reason=library.INSTALL)


@needs_llamacpp
@pytest.mark.llamacpp
def test_golden_asks_whom_it_is_reported_and_then_the_same_again(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.model": "none"}
    file = gguf_twin(tiny_variant(tmp_path, "qwen2-tied"), tmp_path / "tiny.gguf", "Q8_0", keys=keys)
    path = tmp_path / "a.session"
    with start(target_of(Launch(str(file), ids=["5,6,7"], session=path, reference="llama.cpp"))) as debugger:
        debugger.execute("next")
        reported = debugger.execute("golden")
        assert (reported.to_json()["reference"], reported.to_json()["verdict"]) == ("llama.cpp", "match")
        head, quantised = reported.to_text().splitlines()
        assert head == "golden (llama.cpp): match over 1 step"
        assert quantised.startswith("quantised: llama.cpp on the blocks as stored is off by max abs ")
        assert "right on the blocks dequantised" in debugger.execute("diagnose").to_text()
        assert debugger.execute("golden transformers").to_text() == "golden: match over 1 step"
        assert debugger.settings.reference == "transformers"  # whom the next one asks
        assert debugger.execute("diff 0 golden").to_text().startswith("match: ")
    with open_replay(path) as replay:
        replay.execute("goto 0")
        assert replay.execute("golden").to_json()["reference"] == "transformers"
        with pytest.raises(NotCaptured, match=r"never held against llama\.cpp here"):
            replay.execute("golden llama.cpp")


@needs_llamacpp
@pytest.mark.llamacpp
def test_llama_cpp_is_no_reference_of_safetensors(live: Live) -> None:
    debugger = live()
    debugger.execute("next")
    with pytest.raises(ReferenceFailure, match=r"llama\.cpp reads GGUF files, and this is none"):
        debugger.execute("golden llama.cpp")
    assert debugger.execute("golden").to_json()["reference"] == "transformers"
