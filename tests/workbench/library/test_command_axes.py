"""Another engine's command along axes: which arguments are asked for, and what becomes of its runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lockstep.sessions.format import captures
from lockstep.sessions.format.archive import Archive
from lockstep.sessions.format.rows import Row
from lockstep.sessions.keeping import keeping
from lockstep.sessions.limits import Charged
from lockstep.sessions.meta import ForeignMeta
from lockstep.workbench.attach.launch import Attached, AttachError, TapRequest
from lockstep.workbench.checking.axes.axis import AxisName, AxisResult
from lockstep.workbench.checking.axes.row_judge import JudgedRows, RowJudge
from lockstep.workbench.library import command_axes, engine_variants
from lockstep.workbench.library.command_axes import CommandAxes
from lockstep.workbench.library.engine_variants import EngineVariant
from lockstep.workbench.library.listening import Listener
from lockstep.workbench.models.opening import open_model
from tests.workbench.diagnosis.synthetic import Case, Spoil, synthetic, tiny_case

pytestmark = pytest.mark.sampled_file(2)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    found = tiny_case(tmp_path_factory.mktemp("case"))
    with keeping(found.golden, found.floor):
        yield found


@dataclass
class Runs:
    """Stands in for the runs of a command: what each was asked for, and what is wrong in it."""

    case: Case
    folder: Path
    spoilt: Callable[[Mapping[str, object]], dict[str, Spoil]] = lambda arguments: {}
    asked: list[dict[str, object]] = field(default_factory=list)
    mode: str = ""

    def record(self, _: CommandAxes, variant: EngineVariant | None, words: str) -> Path:
        assert words
        arguments = {} if variant is None else {**variant.arguments, **dict.fromkeys(variant.words, True)}
        if arguments.get("tensor_parallel_size") == 4:
            raise AttachError("no rank wrote a pass")
        self.asked.append(dict(arguments))
        path = self.folder / f"{len(self.asked)}.session"
        foreign = ForeignMeta(mode=self.mode) if self.mode else None
        synthetic(path, self.case.floor, spoil=self.spoilt(arguments), foreign=foreign).close()
        return path


def along(
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
    *axes: AxisName,
    judged: bool = True,
    own: Mapping[AxisName, Sequence[EngineVariant]] | None = None,
) -> list[AxisResult]:
    monkeypatch.setattr(
        CommandAxes, "_record", lambda self, variant, words: runs.record(self, variant, words)
    )
    monkeypatch.setattr(engine_variants, "ENGINES", {"transformers": engine_variants.ENGINES["vllm"]})
    opened = open_model(str(runs.case.model_dir)) if judged else None
    subject, found = CommandAxes(["serve"], TapRequest(), runs.folder, opened, Listener(), own or {}).run(
        axes
    )
    assert subject.endswith("tp=1: 21 rows")
    return found


def in_chunks(arguments: Mapping[str, object]) -> dict[str, Spoil]:
    """Values are doubled where prompts come in chunks."""
    return {"layers.1.attn.v_proj": lambda x, at: 2 * x} if "enable_chunked_prefill" in arguments else {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("judged", [True, False])
def test_a_bug_of_chunks_is_found_on_that_axis(
    judged: bool, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(case, tmp_path, in_chunks)
    batch, chunk = along(runs, monkeypatch, "batch", "chunk", judged=judged)
    assert runs.asked[:2] == [{}, {"max_num_seqs": 1}]
    assert runs.asked[2]["max_num_batched_tokens"] == 4
    assert batch.verdict == "equal"
    assert (chunk.verdict, chunk.bugs[0].tap, chunk.bugs[0].first) == ("bug", "layers.1.attn.v_proj", (0, 0))


def test_what_cannot_be_tried_reports_why(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(case, tmp_path)
    found = along(runs, monkeypatch, "order", "prefix", "tp", "ep")
    reported = {one.variant: (one.verdict, one.why) for one in found}
    assert reported["order"][1].startswith("which requests come when is the command's own")
    assert reported["without the prefix cache = with it"][1].startswith("no request found its beginning")
    assert reported["tp 4 = as started"] == ("not tried", "no rank wrote a pass")
    assert reported["ep"] == ("not tried", "there is one rank")
    assert [one.get("tensor_parallel_size") for one in runs.asked] == [None, None, 2]


def test_words_of_the_user_are_a_variant_on_any_axis(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(case, tmp_path)
    own: dict[AxisName, list[EngineVariant]] = {
        "order": [EngineVariant.by_words(["--reversed"])], "prefix": [EngineVariant.by_words(["--no-prefix"])],
    }  # fmt: skip
    order, *prefix = along(runs, monkeypatch, "order", "prefix", own=own)
    assert runs.asked[1] == {"--reversed": True}
    assert (order.variant, order.verdict) == ("with --reversed = as started", "equal")
    assert [one.verdict for one in prefix] == [
        "not tried",
        "equal",
    ]  # the words', of an engine that reports no hits


@pytest.mark.parametrize(("mode", "verdict"), [("compiled", "equal"), ("eager", "not tried")])
def test_graphs_are_held_by_their_tokens(
    mode: str, verdict: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is asked for nothing; what runs eagerly as it is has no graph."""
    runs = Runs(case, tmp_path, mode=mode)
    (graph,) = along(runs, monkeypatch, "graph")
    assert (runs.asked, graph.verdict, graph.taps) == ([{}, {}], verdict, 0)


def test_the_run_without_a_tap_is_recorded_by_its_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[TapRequest] = []

    def attached(command: Sequence[str], dump: Path, request: TapRequest, scratch: Path) -> Attached:
        asked.append(request)
        return Attached(dump, 0, (0,), ())

    monkeypatch.setattr(command_axes, "attach", attached)
    monkeypatch.setattr(command_axes, "import_attached", lambda *given: None)
    axes = CommandAxes(["serve"], TapRequest(only=("logits",)), tmp_path, None, Listener())
    (graph,) = engine_variants.variants_of("vllm 0.32", "graph", 1)
    axes._record(None, "as it is")
    axes._record(graph, "graph")
    assert [(one.capture, one.only) for one in asked] == [("full", ("logits",)), ("ids", ())]


def test_the_run_as_it_is_is_judged_once(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation of it, however many variants are held against it."""
    judged: list[tuple[str, str]] = []
    judge = RowJudge._judged

    def counted(self: RowJudge, tap: str) -> JudgedRows | None:
        judged.append((str(self.taps.recording.session.path), tap))
        return judge(self, tap)

    monkeypatch.setattr(RowJudge, "_judged", counted)
    along(Runs(case, tmp_path), monkeypatch, "batch", "chunk")
    assert len(judged) == len(set(judged))
    assert len({path for path, _ in judged}) == 3


def test_the_steps_of_large_runs_are_read_once(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tap asks for every step: where the lists of steps do not fit into what is kept of any session, too."""
    read = Counter[tuple[Path, int]]()
    rows = captures._rows

    def counted(archive: Archive, owner: int, step: int, where: str) -> Charged[Row]:
        read[archive.path, step] += 1
        return rows(archive, owner, step, where)

    monkeypatch.setattr(captures, "_LIST_BYTES", 0)
    monkeypatch.setattr(captures, "_rows", counted)
    along(Runs(case, tmp_path), monkeypatch, "batch")
    ours = [count for (path, _), count in read.items() if path.parent == tmp_path]
    assert len(ours) == 6
    assert max(ours) == 1
