"""The server as an agent meets it: over stdio, by the SDK's own client."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from lockstep.sessions.meta import ModelMeta
from lockstep.workbench.demo import MODEL_DIR
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.mcp.roots import Roots
from lockstep.workbench.mcp.server import GUIDE
from lockstep.workbench.mcp.tools import AgentTools
from tests.checkpoints import tiny_checkpoint
from tests.sessions.samples import create
from tests.workbench.mcp.scripted_client import Refused, agent, plantable

QUICK = ("load_bias=false", "cache_reuse=false")


def test_there_are_at_least_twenty_bugs_to_plant() -> None:
    assert len(plantable()) >= 20
    assert set(QUICK) <= set(plantable())


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_planted_bugs_are_named_in_three_calls() -> None:
    async with agent() as one:
        for fault in QUICK:
            assert await one.name_bug(fault) == fault
            assert len(one.calls) == 3


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("first", range(0, 18, 3))
async def test_bugs_of_the_catalogue_are_named_in_six_calls_at_most(first: int) -> None:
    """A third of them; `python -m tests.workbench.mcp.scripted_client` names all."""
    found, faults = {}, plantable()
    assert len(faults) >= 56
    async with agent() as one:
        for fault in faults[first::18]:
            named = await one.name_bug(fault)
            found[fault] = (named == fault, named, len(one.calls))
    assert len(found) >= 3
    assert {fault: reported for fault, reported in found.items() if not reported[0] or reported[2] > 6} == {}


async def test_a_run_is_stepped_looked_at_changed_and_exported(tmp_path: Path) -> None:
    async with agent(tmp_path) as one:
        opened = await one.call("open", target="demo", tp=2, faults=["load_bias=false"])
        assert opened["run"] == "run1"
        assert opened["rests_on"]["live"]
        stopped = await one.call(
            "step", command="continue", breakpoints=["break layers.2.attn.scores if step >= 1"]
        )
        assert stopped["rests_on"]["tap"] == "layers.2.attn.scores"
        assert stopped["rests_on"]["step"] == 1
        assert stopped["stop"]["reason"] == "breakpoint"
        shown = await one.call("show", what="print layers.0.attn.q_proj[0, :4]")
        assert "layers.0.attn.q_proj[0, :4], step 1: 4 float32" in shown["text"]
        where = await one.call("where")
        assert "layers.2.attn.scores" in where["text"]
        compared = await one.call("compare")
        assert compared["verdict"] == "diverged"
        assert compared["rests_on"]["first_wrong"] == "layers.0.attn.q_proj"
        toggled = await one.call("branch", command="toggle load_bias true --stay")
        assert toggled["rests_on"]["branch"] == "1 (load_bias=true)"
        assert (await one.call("compare"))["verdict"] == "match"
        await one.call("export", kind="script", file="again.txt")
        assert "toggle load_bias true" in (tmp_path / "again.txt").read_text()
        difference = await one.call("compare", against="main")
        assert "layers.0.attn.q_proj" in difference["text"]


async def test_a_recording_is_replayed_and_refuses_what_needs_the_model() -> None:
    async with agent() as one:
        opened = await one.call("open", target="gallery/mask-additive")
        assert opened["rests_on"]["session"] == "mask-additive.session"
        found = await one.call("diagnose")
        assert found["causes"][0]["fault"] == "mask=additive"
        await one.call("step", command="goto 0")
        with pytest.raises(Refused, match="this is a replay"):
            await one.call("branch", command="set seed 3")
        with pytest.raises(Refused, match="step has no argument where: it takes command, breakpoints, run"):
            await one.call("step", where="goto 2")
        with pytest.raises(
            Refused, match=r'^open: faults has to be a list of strings, not \{"mask":\s?"none"\}$'
        ):
            await one.call("open", target="demo", faults={"mask": "none"})
        with pytest.raises(
            Refused, match=r"^open: target is missing; tp has to be a whole number, not 1\.5$"
        ):
            await one.call("open", tp=1.5)
        assert (await one.call("where"))["rests_on"]["step"] == 0, "nothing moved"


@pytest.mark.slow
async def test_a_model_without_a_tokenizer_is_given_token_ids(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "qwen2", num_hidden_layers=2)
    async with agent(tmp_path) as one:
        with pytest.raises(Refused, match="--ids 1,2,3"):
            await one.call("open", target=str(model))
        await one.call("open", target=str(model), ids=[5, 6, 7])
        assert (await one.call("step"))["stop"]["position"] == 2


async def test_sessions_and_the_guide_are_resources(tmp_path: Path) -> None:
    async with agent(tmp_path) as one:
        listed = json.loads((await one.client.read_resource("lockstep://sessions")).contents[0].text)
        assert "gallery/mask-additive" in listed["sessions"]
        read = await one.client.read_resource("lockstep://session/gallery/mask-additive")
        assert json.loads(read.contents[0].text)["rests_on"]["ranks"] == 2
        guide = (await one.client.read_resource("lockstep://guide")).contents[0].text
        prompt = await one.client.get_prompt("debug")
        assert guide == prompt.messages[0].content.text == GUIDE.read_text()
        tools = {tool.name for tool in (await one.client.list_tools()).tools}
    assert tools == {"open", "where", "step", "show", "compare", "diagnose", "branch", "export"}
    assert tools == set(re.findall(r"\*\*`(\w+)`\*\*", guide))


async def test_a_recording_does_not_lead_to_a_checkpoint_outside_the_roots(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    shutil.copy(MODEL_DIR / "tokenizer.json", elsewhere)
    for field in ("path", "name"):
        with create(root / f"{field}.session", ranks=1, model=ModelMeta(**{field: str(elsewhere)})):
            pass
    roots, outside = Roots([root]), pytest.raises(UsageError, match="is outside of what was opened")
    for field in ("path", "name"):
        with outside:
            AgentTools(roots).open(f"{field}.session")
    tools = AgentTools(Roots([root, elsewhere]))
    assert json.loads(tools.open("path.session"))["run"] == "run1"
    tools.close()


async def test_nothing_outside_the_roots_is_opened_or_written(tmp_path: Path) -> None:
    root = tmp_path / "root"
    linked = root / "model"
    linked.mkdir(parents=True)
    for file in MODEL_DIR.iterdir():
        (linked / file.name).symlink_to(file)
    (root / "out").symlink_to(tmp_path)
    async with agent(root) as one:
        for target in ("../x.session", str(tmp_path / "x.session"), "/etc/passwd"):
            with pytest.raises(Refused, match="is outside of what was opened"):
                await one.call("open", target=target)
        with pytest.raises(Refused, match="does not exist"):
            await one.call("open", target="Qwen/Qwen2.5-0.5B-Instruct")
        with pytest.raises(Refused, match="leads outside of what was opened"):
            await one.call("open", target="model")
        await one.call("open", target="gallery/mask-additive")
        for file in ("/tmp/x.html", "out/x.html", "../x.html"):
            with pytest.raises(Refused, match="is outside of what was opened"):
                await one.call("export", kind="html", file=file)
        for what in ("export html x", "source x", "diff main x.session", "quit", "record x"):
            with pytest.raises(Refused, match="is not this tool's"):
                await one.call("show", what=what)
        with pytest.raises(Refused, match=r"'candidates' is not this tool's: it takes .*\btopk\b"):
            await one.call("show", what="candidates")
        with pytest.raises(Refused, match=r"'topk' is not this tool's: it takes .*\breverse-next\b"):
            await one.call("step", command="topk")
        with pytest.raises(Refused, match="is not this tool's"):
            await one.call("step", command="next", breakpoints=["commands 1"])
    assert list(tmp_path.iterdir()) == [root]
