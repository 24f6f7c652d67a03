"""Both engines on the virtual clock: small cases, the published run, cost models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cbasync.__main__ import main
from cbasync.devices.costs import (
    ARTICLE,
    COST_MODELS,
    LAPTOP,
    CostModel,
    PhaseCost,
    cost_model,
)
from cbasync.mutants import mutants
from cbasync.race_table import RaceTable
from cbasync.simulate import (
    PUBLISHED,
    Simulation,
    published_difference,
    published_experiment,
    simulate,
)
from cbasync.timeline import Timeline
from cbasync.trace import PHASES

ROOT = Path(__file__).parents[1]

Bars = list[tuple[str, int, float, float]]


def machine(**phases_ms: float) -> CostModel:
    """A machine with fixed times, in milliseconds; what is not named costs nothing."""
    launch_us = 1000 * phases_ms.pop("launch", 0.0)
    costs = {phase: PhaseCost(1000 * ms) for phase, ms in phases_ms.items()}
    return CostModel("by hand", **costs, launch_us=launch_us)  # type: ignore[arg-type]


def bars(timeline: Timeline, lane: str) -> Bars:
    """A lane as (phase, batch, start, end), in milliseconds."""
    return [
        (s.phase, s.batch, s.start_us / 1000, s.end_us / 1000)
        for s in timeline.lane(lane)
    ]


def small(costs: CostModel, steps: int = 3, depth: int = 1) -> Simulation:
    return simulate(costs, steps=steps, batch=2, depth=depth, prompt=4)


# ------------------------------------------------------------------ worked out by hand

README_CASE = machine(prepare=3, h2d=1, compute=8, d2h=1, update=2)


def test_three_batches_in_turns() -> None:
    timeline = small(README_CASE).sync.timeline
    assert bars(timeline, "cpu") == [
        ("schedule", 0, 0, 0), ("prepare", 0, 0, 3), ("update", 0, 13, 15),
        ("schedule", 1, 15, 15), ("prepare", 1, 15, 18), ("update", 1, 28, 30),
        ("schedule", 2, 30, 30), ("prepare", 2, 30, 33), ("update", 2, 43, 45),
    ]  # fmt: skip
    assert bars(timeline, "h2d") == [
        ("h2d", 0, 3, 4), ("h2d", 1, 18, 19), ("h2d", 2, 33, 34),
    ]  # fmt: skip
    assert bars(timeline, "compute") == [
        ("compute", 0, 4, 12), ("compute", 1, 19, 27), ("compute", 2, 34, 42),
    ]  # fmt: skip
    assert bars(timeline, "d2h") == [
        ("d2h", 0, 12, 13), ("d2h", 1, 27, 28), ("d2h", 2, 42, 43),
    ]  # fmt: skip
    assert (timeline.gpu_busy_us, timeline.gpu_window_us) == (24_000, 38_000)


def test_three_batches_one_ahead() -> None:
    timeline = small(README_CASE).overlapped.timeline
    assert bars(timeline, "cpu") == [
        ("schedule", 0, 0, 0), ("prepare", 0, 0, 3),
        ("schedule", 1, 3, 3), ("prepare", 1, 3, 6), ("update", 0, 13, 15),
        ("schedule", 2, 15, 15), ("prepare", 2, 15, 18), ("update", 1, 21, 23),
        ("schedule", -1, 23, 23), ("update", 2, 29, 31),
    ]  # fmt: skip
    assert bars(timeline, "h2d") == [
        ("h2d", 0, 3, 4), ("h2d", 1, 6, 7), ("h2d", 2, 18, 19),
    ]  # fmt: skip
    assert bars(timeline, "compute") == [
        ("compute", 0, 4, 12), ("compute", 1, 12, 20), ("compute", 2, 20, 28),
    ]  # fmt: skip
    assert bars(timeline, "d2h") == [
        ("d2h", 0, 12, 13), ("d2h", 1, 20, 21), ("d2h", 2, 28, 29),
    ]  # fmt: skip
    assert (timeline.gpu_busy_us, timeline.gpu_window_us) == (24_000, 24_000)


def test_a_slow_host_keeps_the_gpu_waiting_even_ahead() -> None:
    # The host needs 10 ms for a step, the GPU 4: from the second batch on the GPU waits
    # for the host, whatever the depth.
    costs = machine(schedule=1, prepare=6, h2d=1, compute=4, d2h=1, update=3)
    timeline = small(costs, steps=4).overlapped.timeline
    assert bars(timeline, "cpu") == [
        ("schedule", 0, 0, 1), ("prepare", 0, 1, 7),
        ("schedule", 1, 7, 8), ("prepare", 1, 8, 14), ("update", 0, 14, 17),
        ("schedule", 2, 17, 18), ("prepare", 2, 18, 24), ("update", 1, 24, 27),
        ("schedule", 3, 27, 28), ("prepare", 3, 28, 34), ("update", 2, 34, 37),
        ("schedule", -1, 37, 38), ("update", 3, 40, 43),
    ]  # fmt: skip
    assert bars(timeline, "compute") == [
        ("compute", 0, 8, 12), ("compute", 1, 15, 19),
        ("compute", 2, 25, 29), ("compute", 3, 35, 39),
    ]  # fmt: skip
    idle_ms = {c: us / 1000 for c, us in timeline.idle_by_cause().items() if us}
    assert idle_ms == {"prepare": 2 + 5 + 5, "h2d": 3}


def test_launches_take_the_hosts_time() -> None:
    costs = machine(prepare=3, compute=8, update=1, launch=1)
    timeline = small(costs, steps=2).overlapped.timeline
    # prepare 0-3; h2d, compute, d2h are issued at 4, 5, 6; then batch 1 is prepared.
    assert bars(timeline, "h2d") == [("h2d", 0, 4, 4), ("h2d", 1, 10, 10)]
    assert bars(timeline, "compute") == [("compute", 0, 5, 13), ("compute", 1, 13, 21)]
    assert bars(timeline, "cpu")[3:] == [
        ("prepare", 1, 6, 9), ("update", 0, 13, 14),
        ("schedule", -1, 14, 14), ("update", 1, 21, 22),
    ]  # fmt: skip


def test_depth_2_hides_slow_copies_and_depth_1_does_not() -> None:
    costs = machine(prepare=4, h2d=4, compute=10, d2h=4, update=1)
    steps = 13
    active = {}
    for depth in (1, 2):
        timeline = small(costs, steps, depth).overlapped.timeline
        starts = [start for _, _, start, _ in bars(timeline, "compute")]
        active[depth] = starts[-1] - starts[-3]
    # Depth 1: d2h, update, prepare, h2d of 13 ms against 10 ms of compute of the batch
    # between; two batches take 23 ms. Depth 2 leaves two batches of time for the way.
    assert active == {1: 23, 2: 20}


def test_depth_0_is_taking_turns() -> None:
    result = small(README_CASE, steps=5, depth=0)
    result.sync.timeline.name = result.overlapped.timeline.name = "either"
    assert result.overlapped.timeline == result.sync.timeline
    deeper = small(README_CASE, steps=5, depth=1)
    deeper.overlapped.timeline.name = "either"
    assert deeper.overlapped.timeline != result.sync.timeline


def test_readme_shows_what_the_package_prints() -> None:
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"<!-- timelines -->\n```\n(.*?)\n```", readme, re.DOTALL)
    assert block
    assert block[1] == small(README_CASE).timelines()


# ------------------------------------------------------------------ all machines


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("costs", COST_MODELS.values(), ids=COST_MODELS)
def test_tokens_are_equal_and_nothing_beats_the_ideal(
    costs: CostModel, depth: int
) -> None:
    result = simulate(costs, steps=9, batch=3, depth=depth, prompt=5)
    assert result.tokens_equal
    assert [len(tokens) for tokens in result.sync.tokens] == [9] * 3
    assert len({tuple(tokens) for tokens in result.sync.tokens}) == 3
    for run in (result.sync, result.overlapped):
        assert run.timeline.batches() == list(range(9))
        assert run.numbers["total_s"] >= result.ideal_s
    assert result.overlapped.numbers["total_s"] <= result.sync.numbers["total_s"]


def test_a_longer_run_goes_on_as_a_short_one_did() -> None:
    short, long = (small(README_CASE, steps=steps) for steps in (4, 50))
    for one, other in ((short.sync, long.sync), (short.overlapped, long.overlapped)):
        assert one.total_s(50) == pytest.approx(other.numbers["total_s"])
        assert one.total_s(4) == pytest.approx(one.numbers["total_s"])
    assert short.sync.step_s == pytest.approx(0.015)
    assert small(README_CASE, steps=1).sync.step_s == 0


def test_the_same_run_every_time() -> None:
    first, second = (small(LAPTOP, steps=6) for _ in range(2))
    assert first.overlapped.timeline == second.overlapped.timeline
    assert first.sync.timeline == second.sync.timeline


def test_summary_adds_up() -> None:
    result = small(README_CASE, steps=4).summary()
    assert "published" not in result
    assert result["ideal_s"] == pytest.approx(4 * 0.008)
    for name in ("sync", "async"):
        run = result[name]
        window_s = run["gpu_busy_s"] / run["gpu_active"]
        idle_s = sum(run["idle_by_cause_s"].values())
        assert run["gpu_busy_s"] + idle_s == pytest.approx(window_s)
    assert result["sync"]["total_s"] == pytest.approx(4 * 0.015)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps is 0, at least 1"),
        ({"batch": 0}, "batch is 0, at least 1"),
        ({"prompt": -1}, "prompt is -1, at least 1"),
        ({"depth": 4}, "depth is 4, at most 3"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    arguments: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(ARTICLE, **arguments)


# ------------------------------------------------------------------ the published run


def check_published(result: Simulation) -> None:
    """What the article's cost model has to give, for any number of steps."""
    sync, overlapped = result.sync.numbers, result.overlapped.numbers
    assert result.tokens_equal
    assert result.sync.total_s(8192) == pytest.approx(300.6, rel=0.005)
    assert sync["gpu_active"] == pytest.approx(0.760, rel=0.005)
    assert overlapped["gpu_active"] >= 0.994
    assert result.ideal_s * 8192 / result.steps == pytest.approx(228.475, abs=0.001)
    assert 228.475 <= result.overlapped.total_s(8192) < 228.5


def test_published_figures_scaled() -> None:
    check_published(simulate(ARTICLE, steps=512))


@pytest.mark.slow
def test_published_figures_in_full() -> None:
    import resource

    result = simulate(ARTICLE)
    assert (result.steps, result.batch, result.depth) == (8192, 32, 1)
    check_published(result)
    assert result.sync.numbers["total_s"] == pytest.approx(300.646, abs=0.001)
    assert result.overlapped.numbers["total_s"] == pytest.approx(228.484, abs=0.001)
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak_bytes < 1e9


def test_difference_to_the_published_run_is_named() -> None:
    parts = published_difference(228.5)
    assert parts.pop("difference_s") == pytest.approx(234.5 - 228.5)
    assert sum(parts.values()) == pytest.approx(234.5 - 228.5)
    # 99.4 % of 234.5 s against 76.0 % of 300.6 s; the rest of 234.5 s.
    assert parts["extra_active_s"] == pytest.approx(233.093 - 228.456)
    assert parts["idle_s"] == pytest.approx(1.407)
    text = " ".join(str(simulate(ARTICLE, steps=64)).split())
    assert "The published async run took 6.0 s more than this model" in text
    assert "4.6 s of extra GPU time: 233.1 s active, 228.5 s in the published" in text
    assert "1.4 s of idle GPU" in text


def test_published_figures_stand_beside_the_article_only() -> None:
    assert "published sync" in str(simulate(ARTICLE, steps=4))
    other = replace(ARTICLE, name="another")
    assert "published sync" not in str(simulate(other, steps=4))
    assert "published" not in simulate(LAPTOP, steps=4).summary()


def test_published_experiment_as_text() -> None:
    text = published_experiment()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 88
    assert "total of 8192 steps        300.6 s  228.5 s         300.6 s" in text
    assert "GPU active                  76.0 %  100.0 %          76.0 %" in text
    assert "GPU idle a step: prepare   6.81 ms  0.00 ms" in text
    assert "the same tokens" in text
    for name in ("sync ", "async"):
        assert any(line.startswith(f"{name}  cpu  SP0P") for line in lines)
    assert text.count("drawn: batches 0-3 of 1024") == 2


def test_different_tokens_are_told() -> None:
    result = small(README_CASE)
    result.overlapped.tokens[1][0] += 1
    assert not result.tokens_equal
    assert "DIFFERENT tokens" in str(result)


# ------------------------------------------------------------------ cost models

GROWING = CostModel(
    name="growing",
    schedule=PhaseCost(30.0),
    prepare=PhaseCost(50.0),
    h2d=PhaseCost(20.0),
    compute=PhaseCost(4000.0, per_context_us=0.5),
    d2h=PhaseCost(7.0),
    update=PhaseCost(40.0),
)


def test_fit_gives_back_what_made_the_timeline() -> None:
    timeline = small(GROWING, steps=40).overlapped.timeline
    fitted = CostModel.fit(timeline, name="growing")
    for phase in PHASES:
        want, got = getattr(GROWING, phase), getattr(fitted, phase)
        assert got.fixed_us == pytest.approx(want.fixed_us, rel=1e-6), phase
        assert got.per_context_us == pytest.approx(want.per_context_us, rel=1e-6)
    assert fitted.note == "fitted to async"


def test_fit_to_a_sync_run_predicts_an_async_run_of_another_length() -> None:
    fitted = CostModel.fit(small(GROWING, steps=40).sync.timeline)
    real, told = (small(c, steps=100, depth=2) for c in (GROWING, fitted))
    want, got = (r.overlapped.numbers for r in (real, told))
    assert got["total_s"] == pytest.approx(want["total_s"], rel=1e-6)
    assert got["gpu_active"] == pytest.approx(want["gpu_active"], rel=1e-6)


def test_fit_finds_what_grows_with_the_tokens() -> None:
    # The prompt's batch has 8 tokens, the others 2: no other part explains that.
    costs = replace(GROWING, compute=PhaseCost(100.0, per_token_us=25.0))
    fitted = CostModel.fit(small(costs, steps=5).sync.timeline)
    assert fitted.compute.fixed_us == pytest.approx(100.0)
    assert fitted.compute.per_token_us == pytest.approx(25.0)


def test_fit_takes_the_median_where_nothing_grows() -> None:
    timeline = small(README_CASE, steps=9).sync.timeline
    late = timeline.lane("cpu")[-1]
    timeline.spans.remove(late)
    timeline.add(replace(late, end_us=late.end_us + 1e6))  # one hiccup
    assert CostModel.fit(timeline).update == PhaseCost(2000.0)


def test_fit_to_nothing_costs_nothing() -> None:
    fitted = CostModel.fit(Timeline("empty"))
    assert all(getattr(fitted, phase) == PhaseCost() for phase in PHASES)


@pytest.mark.parametrize(
    "model", [*COST_MODELS.values(), GROWING], ids=lambda m: m.name
)
def test_cost_models_come_back_from_files(model: CostModel, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    model.save(path)
    assert CostModel.load(path) == model
    assert cost_model(path) == cost_model(str(path)) == model
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"cost_model": json.loads(path.read_text())}))
    assert cost_model(results) == model


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "no JSON", '{"cost_model": 3}', '{"name": "x", "speed": 3}',
        '{"name": "x", "compute": {"fixed_ms": 3}}',
        '{"name": "x", "compute": {"fixed_us": -1}}',
        '{"name": "x", "compute": {"fixed_us": NaN}}',
    ],
)  # fmt: skip
def test_files_that_hold_no_cost_model_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.json holds no cost model"):
        cost_model(path)


def test_presets_by_name() -> None:
    assert cost_model("article") is ARTICLE
    assert cost_model("laptop") is LAPTOP
    with pytest.raises(ValueError, match="neither a preset"):
        cost_model("h9000")


# ------------------------------------------------------------------ command line

Output = Callable[..., str]


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Output:
    """What a command prints when all is well."""

    def run(*argv: str) -> str:
        assert main(argv) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run


def test_sim_as_json(output: Output) -> None:
    argv = ["--steps", "32", "--batch", "4", "--depth", "2"]
    result: dict[str, Any] = json.loads(output("sim", *argv, "--json"))
    assert result["cost_model"] == "article"
    assert (result["steps"], result["batch"], result["depth"]) == (32, 4, 2)
    assert result["tokens_equal"] is True
    assert result["wall_s"] > 0
    for name in ("sync", "async"):
        run = result[name]
        assert {"total_s", "gpu_active", "idle_by_cause_s", "wall_s"} <= set(run)
    assert result["sync"]["total_s"] == pytest.approx(32 * 0.0367)
    assert result["published"] == PUBLISHED
    assert result["not_in_model"]["extra_active_s"] == pytest.approx(4.637)


def test_sim_as_text(output: Output, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    README_CASE.save(path)
    text = output("sim", "--cost", str(path), "--steps", "5", "--batch", "2")
    assert "Cost model by hand: 5 steps of 2 requests, depth 1" in text
    assert re.search(r"^total +0\.0750 s +0\.0470 s$", text, re.MULTILINE)
    assert re.search(r"^GPU idle a step: prepare +3\.00 ms +0\.00 ms$", text, re.M)
    assert "published" not in text
    assert "sync   cpu  P0P" in text


def test_sim_as_page(output: Output, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    said = output("sim", "--cost", "laptop", "--batch", "7", "--html", str(path))
    assert said == f"wrote {path}: open it in a browser\n"
    presets = json.loads(path.read_text().split("const PRESETS = ")[1].split(";\n")[0])
    assert [preset["name"] for preset in presets] == ["laptop", "article"]
    assert presets[0]["batch"] == 7


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sim", "--cost", "nowhere"], "cost is 'nowhere', neither a preset"),
        (["sim", "--depth", "5"], "depth is 5, at most 3"),
        (["sim", "--html", "no/such/folder/page.html"], "cannot write"),
        (["page", "no/such/folder/page.html"], "cannot write no/such/folder"),
        (["races", "--device", "tpu"], "device is 'tpu', mutants run on sim, threads"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("cbasync: ")
    assert message in captured.err


def test_races_as_json(output: Output) -> None:
    result = json.loads(output("races", "--json", "--device", "sim"))
    assert result["shipped_reports"] == 0
    assert [m["name"] for m in result["mutants"]] == [m.name for m in mutants()]
    for mutant in result["mutants"]:
        assert set(mutant) == {
            "name", "device", "detected", "named", "wrong_token", "edges",
        }  # fmt: skip
        assert mutant["device"] == "sim"
        assert mutant["detected"]
        assert mutant["edges"]
    by_name = {mutant["name"]: mutant for mutant in result["mutants"]}
    assert by_name["without d2h_done"]["wrong_token"]
    assert "d2h_done" in by_name["without d2h_done"]["edges"]


@pytest.fixture(scope="module")
def race_table() -> RaceTable:
    return RaceTable(["sim", "sim"])  # a name given twice counts once


def test_races_as_text(race_table: RaceTable) -> None:
    text = str(race_table)
    assert max(map(len, text.splitlines())) <= 88
    assert re.search(r"^without h2d_done +yes +yes +yes$", text, re.MULTILINE)
    assert "Not detected: none." in text
    assert "0 reports." in text
    for mutant in mutants():
        assert text.count(f"\n{mutant.name}\n") == 1
    # Right and wrong tokens stand one above the other, and differ.
    pair = re.search(r"without d2h_done\n.*right +(.*)\n +got +(.*)\n", text)
    assert pair
    assert pair[1] != pair[2]
    assert "  no token differs\n" in text


def test_races_tell_what_was_not_detected(
    race_table: RaceTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = race_table.verdicts
    missed = replace(first, detected=False, named=False, races=())
    monkeypatch.setattr(race_table, "verdicts", [missed, *others])
    text = str(race_table)
    assert f"Not detected: {missed.name} on sim." in text
    assert re.search(rf"^{missed.name} +- +- +yes$", text, re.MULTILINE)
