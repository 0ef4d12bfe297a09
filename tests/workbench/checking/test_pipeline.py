"""The main job, in process: a faultless engine matches at every tp, and each known bug is named where it begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lockstep.engine.config import EngineConfig
from lockstep.engine.errors import RequestError
from lockstep.engine.faults.catalogue import faults_of
from lockstep.sessions import Session
from lockstep.sessions.format import captures
from lockstep.sessions.format.archive import Archive
from lockstep.sessions.format.rows import Row
from lockstep.workbench.checking import pipeline
from lockstep.workbench.checking.forced_run import check, check_fits, record_reference
from lockstep.workbench.checking.pipeline import CheckResult, Reference
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.models.capture import FULL
from lockstep.workbench.models.opening import OpenedModel, open_model
from lockstep.workbench.models.requests import plan
from tests.checkpoints import tiny_checkpoint
from tests.workbench.checking.within_noise import over_noise

pytestmark = pytest.mark.sampled_file(2)

PROMPTS = [[5, 6, 7, 8, 9, 130], [20, 21, 22]]  # ragged; 130 is the last id, in the last rank's rows
STEPS = 3

Check = Callable[..., CheckResult]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return open_model(str(tiny_checkpoint(tmp_path_factory.mktemp("checking"), "qwen2")))


@pytest.fixture(scope="module")
def reference(model: OpenedModel) -> Reference:
    return record_reference(model.directory, PROMPTS, STEPS, "float32")


def engine(model: OpenedModel, tp: int) -> Inferior:
    return Inferior(model.path, model.config, plan(model, EngineConfig(tp=tp), PROMPTS, STEPS + 1, FULL))


@pytest.fixture(scope="module")
def at_two(
    model: OpenedModel, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Check]:
    """A check at tp=2 under some rules, by `reference` or another one; one engine serves them all."""
    path = tmp_path_factory.mktemp("runs") / "run.session"
    with engine(model, 2) as inferior:
        yield lambda rules, by=reference, **heard: check(inferior, by, path, rules=rules, **heard)


#: rule -> where the issue threads and the teams saw it first (layer 0), and in which pass. All ranks are wrong alike.
FIRST = {
    "mask=additive": ("layers.0.attn.scores", 0),
    "qkv_shard_dim=1": ("layers.0.attn.q_proj", 0),
    "lm_head=missing": ("logits", 0),
    "rope=swallowed": ("layers.0.attn.q_rope", 0),
    "rope=interleaved": ("layers.0.attn.q_rope", 0),
    "cache_reuse=false": ("layers.0.attn.k_cache", 1),
    "cache_layer=shared": ("layers.0.attn.k_cache", 1),
    "qkv_sizes=mixed": ("layers.0.attn.k_proj", 0),
    "load_bias=false": ("layers.0.attn.q_proj", 0),
    "positions=stuck": ("layers.0.attn.q_rope", 1),
}

#: What the best explanation must speak of, found from the recordings alone.
CAUSE = {
    "mask=additive": "0 * -inf",
    "qkv_shard_dim=1": "partial sum",
    "lm_head=missing": "output head",
    "rope=swallowed": "not applied",
    "rope=interleaved": "(2i, 2i+1)",
    "cache_reuse=false": "not the cache",
    "cache_layer=shared": "rows are those of layer 2",
    "qkv_sizes=mixed": "cut out of the rank's pack where they begin",
    "load_bias=false": "{q,k,v}_proj.bias is not added",
    "positions=stuck": "position 0",
}


#: A mask, a shard, a rotation, the cache.
QUICK = ("mask=additive", "qkv_shard_dim=1", "rope=interleaved", "cache_layer=shared")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rules", [{}, {"mask": "additive"}])
def test_a_process_that_judges_beside_changes_no_result(
    rules: dict[str, str], at_two: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of large models: what it has judged is what this process would have."""
    in_turn = at_two(rules)
    monkeypatch.setattr(pipeline, "_worth_a_process", lambda session: True)
    beside = at_two(rules)
    assert in_turn.to_json() == beside.to_json()
    assert in_turn.event.untapped is not None


def test_of_a_large_model_causes_are_shown_before_the_verdict(
    at_two: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first as soon as it is found, all of them once every operation was judged."""
    monkeypatch.setattr(pipeline, "_worth_a_process", lambda session: True)
    heard: list[str] = []
    result = at_two({"load_bias": "false"}, found=heard.append)
    assert heard == [
        "layers.0.attn.q_proj: model.layers.0.self_attn.q_proj.bias is not added",
        result.causes[0].in_words(),
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=[pytest.mark.slow] * (rule not in QUICK)) for rule in FIRST]
)
def test_each_known_bug_is_named_where_it_begins(rule: str, at_two: Check) -> None:
    name, _, value = rule.partition("=")
    result = at_two({name: value})
    first = result.judgement.first_divergence
    assert result.judgement.verdict == "diverged"
    assert first is not None
    assert (first.tap, first.step) == FIRST[rule]
    assert (first.rank, first.ranks) == (None, (0, 1))
    assert result.causes, "no cause is named"
    assert CAUSE[rule] in result.causes[0].text
    (fault,) = faults_of({name: value})
    assert (fault.first_tap.replace("*", "0"), fault.step) == FIRST[rule]  # the catalogue states the same


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "positions=ahead",
        "rope_positions=ahead_in_decode",
        pytest.param("load_bias=without_k", marks=pytest.mark.slow),
        pytest.param("reduce=without_last", marks=pytest.mark.slow),
    ],
)
def test_a_cause_has_the_name_of_the_fault_that_it_is(fault: str, at_two: Check) -> None:
    """Of faults that do much the same, the right one; all others are in `test_catalogue`."""
    rule, _, value = fault.partition("=")
    assert at_two({rule: value}).causes[0].fault == fault


@pytest.mark.slow
def test_a_fault_that_only_costs_memory_is_a_note(at_two: Check) -> None:
    """Each rank has a single KV head: its copies are read as itself."""
    result = at_two({"cache_heads": "repeated"})
    assert result.matches
    assert any("cached several times" in note for note in result.event.notes), result.event.notes


def test_biases_dropped_are_named_in_every_layer_and_restored_leave_noise(
    at_two: Check, model: OpenedModel
) -> None:
    """The same at 24 layers and 0.5B shapes, in 16 bits too: `test_riddle`."""
    (cause, *_) = at_two({"load_bias": "false"}).causes
    assert (cause.fault, cause.layers) == ("load_bias=false", tuple(range(model.config.num_layers)))
    result = at_two({})
    left = over_noise(result.engine_session, model.path, "float32")
    assert left
    assert max(left.values()) <= 1, left
    judged = result.judgement
    assert result.matches
    assert judged.tokens_identical
    assert judged.max_abs_logits <= 1e-4
    assert judged.first_divergence is None
    assert result.causes == ()


def test_each_tensor_is_decoded_once(
    at_two: Check, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many steps of the judgement read it: two thirds of their time went there."""
    counts: Counter[tuple[Path, object]] = Counter()
    decode = captures._decoded

    def counting(archive: Archive, found: Sequence[Row], blob: object, where: str) -> object:
        counts[archive.path, blob] += 1
        return decode(archive, found, blob, where)

    monkeypatch.setattr(captures, "_decoded", counting)
    result = at_two({"load_bias": "false"})
    sides = {result.engine_session, reference.golden, reference.floor}
    assert {path for path, _ in counts} > sides
    assert {pair: count for pair, count in counts.items() if count > 1} == {}


@pytest.mark.parametrize("tp", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_other_parallelisms_match(tp: int, model: OpenedModel, reference: Reference, tmp_path: Path) -> None:
    with engine(model, tp) as inferior:
        result = check(inferior, reference, tmp_path / "run.session")
    assert result.matches
    assert result.judgement.tp == tp
    assert result.judgement.max_abs_logits <= 1e-4


def test_the_session_keeps_the_verdicts_and_both_runs_read_the_same_ids(
    at_two: Check, reference: Reference
) -> None:
    result = at_two({"act": "gelu"})
    with Session.open(result.engine_session) as ours, Session.open(reference.golden) as theirs:
        assert len(ours.steps()) == len(theirs.steps()) == STEPS + 1
        for step in ours.steps():
            ids = [[list(one.ids) for one in session.step(step).sequences] for session in (ours, theirs)]
            assert ids[0] == ids[1]
        verdicts = ours.verdicts(step=0, tap="layers.0.mlp.act")
        assert [one.verdict for one in verdicts] == ["fail"]
        assert ours.meta.rules == {"act": "gelu"}
        (event,) = ours.events(kind="golden")
        assert event.data["first_divergence"]["tap"] == "layers.0.mlp.act"
        assert event.data["golden_session"] == reference.golden.name


def test_fixed_tolerances_report_it(model: OpenedModel, reference: Reference, at_two: Check) -> None:
    fixed = record_reference(model.directory, PROMPTS, STEPS, "float32", floor=False)
    assert (fixed.golden, fixed.floor) == (reference.golden, None)  # the truth came from the cache
    result = at_two({}, fixed)
    assert result.matches
    assert result.judgement.tolerance == "fixed"


def test_the_context_bounds_prompt_and_steps() -> None:
    check_fits([[1, 2, 3]], 5, 8)
    with pytest.raises(RequestError, match="fewer --steps"):
        check_fits([[1], [1, 2, 3]], 6, 8)
