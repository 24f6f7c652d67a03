"""profile(): six phases as ranges; foreign traces, read and held to raw events."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from cbasync.config import EngineConfig
from cbasync.devices import Device, SimDevice, make_device
from cbasync.engine import AsyncEngine
from cbasync.foreign_trace import iter_events, load_timeline, read_profile
from cbasync.model_runner import ModelRunner
from cbasync.models import tiny_model
from cbasync.mutants import EVEN_COSTS
from cbasync.profile import lean, profile
from cbasync.sampling import SamplingParams
from cbasync.timeline import CAUSES, PHASES, Span, Timeline
from cbasync.trace import write_trace

ROOT = Path(__file__).parents[1]
TRACES = sorted((ROOT / "data" / "traces").glob("*.json.gz"))
CONFIG = EngineConfig(max_num_seqs=4, block_size=4, num_blocks=32, max_model_len=32)


def raw_events(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def raw_idle_share(events: list[dict[str, Any]]) -> float:
    """By hand: sort, walk along, add up what lies between an end and a start."""
    bars = sorted((e["ts"], e["ts"] + e["dur"]) for e in events)
    end, idle = bars[0][0], 0.0
    for start, stop in bars:
        idle += max(0.0, start - end)
        end = max(end, stop)
    return float(idle / (end - bars[0][0]))


def small_engine(model: LlamaForCausalLM, device: Device) -> AsyncEngine:
    engine = AsyncEngine(ModelRunner(model), CONFIG, device)
    for length in (3, 5):
        engine.add_request(list(range(length)), SamplingParams(max_tokens=4))
    return engine


# -- profile() -------------------------------------------------------------------------


def test_profile_has_every_phase_of_every_batch(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    with small_engine(model, make_device("threads")) as engine:
        with profile(engine, tmp_path) as recording:
            engine.run()
        batches = engine.timeline.batches()
    names = [event.name for event in recording.read().ranges]
    for phase in ("prepare", "h2d", "compute", "d2h", "update"):
        for batch in batches:
            assert f"{phase} {batch} {'AB'[batch % 2]}" in names
    assert {name.split()[0] for name in names} == set(PHASES)


def test_profile_reads_back_as_the_engine_s_own_timeline(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    with small_engine(model, make_device("threads")) as engine:
        with profile(engine, tmp_path) as recording:
            engine.run()
        ours = engine.timeline
    theirs = recording.read().timeline()
    for lane in ("h2d", "compute", "d2h"):
        order = [(span.phase, span.batch, span.slot) for span in ours.lane(lane)]
        assert [(s.phase, s.batch, s.slot) for s in theirs.lane(lane)] == order
    assert theirs.batches() == ours.batches()
    assert sum(theirs.idle_by_cause().values()) == pytest.approx(theirs.idle_us)


def test_profile_leaves_the_engine_as_it_was(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    with small_engine(model, make_device("threads")) as engine:
        with profile(engine, tmp_path):
            with (
                pytest.raises(RuntimeError, match="is being profiled already"),
                profile(engine, tmp_path),
            ):
                pass
            engine.run()
        assert engine.device.mark is None


def test_file_is_named_as_the_plugin_wants_it(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "one"
    engine = small_engine(model, make_device("threads"))
    with engine, profile(engine, folder, name="tiny") as recording:
        engine.run()
    assert recording.path.parent == folder
    assert re.fullmatch(r".+_tiny\.pt\.trace\.json\.gz", recording.path.name)


@pytest.mark.gpu
def test_profile_on_a_gpu_agrees_with_its_raw_kernels(tmp_path: Path) -> None:
    model = tiny_model().to("cuda")  # type: ignore[arg-type]
    with small_engine(model, make_device("cuda")) as engine:
        with profile(engine, tmp_path) as recording:
            engine.run()
        batches = engine.timeline.batches()
    read = recording.read()
    run = read.timeline()
    kernels = [
        event
        for event in raw_events(recording.path)
        if event.get("cat") in ("kernel", "gpu_memset")
    ]
    assert read.has_device
    assert set(batches) <= {span.batch for span in run.lane("compute")}
    assert 1 - run.gpu_active == pytest.approx(raw_idle_share(kernels), rel=1e-3)


# -- foreign traces --------------------------------------------------------------------


def gpu_trace() -> dict[str, Any]:
    """Two batches as a GPU's profiler has them: launches, kernels, copies, ranges."""

    def event(
        name: str, cat: str, ts: float, dur: float, **args: Any
    ) -> dict[str, Any]:
        return {
            "ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 1,
            "tid": 7, "args": args,
        }  # fmt: skip

    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1}]
    for n, t in enumerate((0.0, 200.0)):
        one, two = 10 * n + 1, 10 * n + 2
        events += [
            event("schedule", "user_annotation", t, 10),
            event("prepare", "user_annotation", t + 10, 20),
            event("h2d", "user_annotation", t + 30, 3),
            event("cudaMemcpyAsync", "cuda_runtime", t + 31, 1, correlation=10 * n),
            event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", t + 34, 6, stream=7,
                  correlation=10 * n),
            event("compute", "user_annotation", t + 33, 5),
            event("cudaLaunchKernel", "cuda_runtime", t + 34, 1, correlation=one),
            event("cudaLaunchKernel", "cuda_runtime", t + 36, 1, correlation=two),
            event("gemm", "kernel", t + 40, 50, stream=9, correlation=one),
            event("softmax", "kernel", t + 100, 20, stream=9, correlation=two),
            event("d2h", "user_annotation", t + 38, 84),
            event("Memcpy DtoH (Device -> Host)", "gpu_memcpy", t + 120, 2, stream=11),
            event("update", "user_annotation", t + 125, 15),
        ]  # fmt: skip
    return {"schemaVersion": 1, "traceEvents": events, "traceName": "x"}


@pytest.fixture
def gpu_file(tmp_path: Path) -> Path:
    path = tmp_path / "engine.json.gz"
    path.write_bytes(gzip.compress(json.dumps(gpu_trace()).encode()))
    return path


def test_gpu_trace_becomes_lanes(gpu_file: Path) -> None:
    run = load_timeline(gpu_file, progress=False)
    compute = [(s.batch, s.start_us, s.end_us) for s in run.lane("compute")]
    assert compute == [(0, 40, 90), (0, 100, 120), (1, 240, 290), (1, 300, 320)]
    assert [(s.batch, s.start_us) for s in run.lane("h2d")] == [(0, 34), (1, 234)]
    assert [s.phase for s in run.lane("cpu")] == [
        "schedule", "prepare", "d2h", "update",
    ] * 2  # fmt: skip
    assert read_profile(gpu_file, progress=False).streams() == {"7": 2, "9": 4, "11": 2}


def test_gpu_trace_by_kernel_and_by_batch(gpu_file: Path) -> None:
    read = read_profile(gpu_file, progress=False)
    assert read.timeline().idle_us == 10 + 120 + 10  # inside, between, inside
    assert read.timeline(per="batch").idle_us == 120
    causes = {c: us for c, us in read.timeline().idle_by_cause().items() if us}
    assert causes == {
        "sync": 22, "update": 15, "schedule": 10, "prepare": 20, "h2d": 6, "host": 67,
    }  # fmt: skip


def test_gpu_trace_agrees_with_a_computation_by_hand(gpu_file: Path) -> None:
    kernels = [e for e in raw_events(gpu_file) if e.get("cat") == "kernel"]
    share = 1 - load_timeline(gpu_file, progress=False).gpu_active
    assert share == pytest.approx(raw_idle_share(kernels), abs=1e-12)


def test_trace_may_lack_ranges_and_launches(tmp_path: Path) -> None:
    kept = [e for e in gpu_trace()["traceEvents"] if e.get("cat") == "kernel"]
    path = tmp_path / "bare.json"
    path.write_text(json.dumps({"traceEvents": kept}))
    run = load_timeline(path, progress=False)
    assert {span.batch for span in run.spans} == {-1}
    assert run.idle_by_cause()["host"] == run.idle_us == 140


def test_operators_stand_for_a_device_that_is_not_there(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": n, "ts": t, "dur": d, "tid": 1}
        for n, t, d in (("aten::mm", 0, 10), ("aten::add", 2, 3), ("aten::mm", 15, 5))
    ]
    path = tmp_path / "ops.json"
    path.write_text(json.dumps(events))  # a bare list is a Chrome trace, too
    assert load_timeline(path, progress=False).gpu_active == 15 / 20


def test_our_own_trace_comes_back_exactly(tmp_path: Path) -> None:
    run = Timeline("run", [Span("compute", "compute", 0, 1, 0.1, 0.30000000000000004)])
    for name in ("run.json", "run.json.gz"):
        run.save(tmp_path / name)
        assert load_timeline(tmp_path / name) == run


def test_events_are_read_across_pieces(
    gpu_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = list(iter_events(gpu_file, progress=False))
    for size in (1, 7, 100):
        monkeypatch.setattr("cbasync.foreign_trace._PIECE", size)
        assert list(iter_events(gpu_file, progress=False)) == whole
    assert whole == raw_events(gpu_file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no traceEvents"),
        (b"not json", "no traceEvents"),
        (b'{"traceEvents": [{"ph": "X"', "does not hold a whole JSON trace"),
        (b'{"traceEvents": [{"ph": "M"}]}', "none of them a kernel"),
        (b"\xff\xfe", "does not hold a whole JSON trace"),
    ],
)
def test_damaged_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_timeline(path, progress=False)


def test_damaged_gzip_is_named(tmp_path: Path, gpu_file: Path) -> None:
    path = tmp_path / "cut.json.gz"
    path.write_bytes(gpu_file.read_bytes()[:-40])
    with pytest.raises(ValueError, match="does not hold a whole JSON trace"):
        list(iter_events(path, progress=False))


def test_progress_bar_reaches_the_end(
    gpu_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_timeline(gpu_file, progress=True)
    assert "100%" in capsys.readouterr().err


# -- recorded traces -------------------------------------------------------------------


@pytest.mark.parametrize("path", TRACES, ids=[path.name for path in TRACES])
def test_idle_causes_of_recorded_traces_add_up(path: Path) -> None:
    run = load_timeline(path, progress=False)
    causes = run.idle_by_cause()
    assert set(causes) == set(CAUSES)
    assert sum(causes.values()) == pytest.approx(run.idle_us, abs=1.0)  # microsecond
    assert run.idle_us > 0
    assert path.stat().st_size < 1_000_000


def test_trace_of_transformers_on_a_gpu_agrees_with_its_raw_events() -> None:
    path = ROOT / "data" / "traces" / "transformers-h200.json.gz"
    kernels = [
        event
        for event in raw_events(path)
        if event.get("cat") in ("kernel", "gpu_memset")
    ]
    run = load_timeline(path, progress=False)
    assert 1 - run.gpu_active == pytest.approx(raw_idle_share(kernels), rel=1e-3)


def test_a_lean_trace_reads_the_same(tmp_path: Path, gpu_file: Path) -> None:
    whole = gpu_trace()
    bulk = {"ph": "X", "pid": 1, "tid": 7, "ts": 1.0, "dur": 1.0}
    whole["traceEvents"] += [
        bulk | {"name": "aten::mm", "cat": "cpu_op", "args": {}},
        bulk | {"name": "cudaEventQuery", "cat": "cuda_runtime", "args": {}},
    ]
    whole["traceEvents"][9]["args"]["grid"] = [1, 2, 3]
    slim = lean(whole)
    assert len(slim["traceEvents"]) == len(gpu_trace()["traceEvents"])
    assert "grid" not in str(slim)
    write_trace(slim, tmp_path / "slim.json.gz")
    ours = load_timeline(tmp_path / "slim.json.gz", progress=False)
    assert ours.spans == load_timeline(gpu_file, progress=False).spans


def test_trace_of_transformers_agrees_with_its_raw_events() -> None:
    path = ROOT / "data" / "traces" / "transformers-cpu-random-tiny.json.gz"
    events = [
        event
        for event in raw_events(path)
        if event.get("cat") == "user_annotation" and event["name"] == "compute"
    ]
    run = load_timeline(path, progress=False)
    assert len(events) == len(run.batches()) == 16
    assert 1 - run.gpu_active == pytest.approx(raw_idle_share(events), rel=1e-3)
    # In turns: what the forward pass waits for is the rest of the loop.
    causes = run.idle_by_cause()
    assert causes["prepare"] > causes["schedule"] > 0 < causes["update"]


# -- TensorBoard and HolisticTraceAnalysis ---------------------------------------------


def simulated_run(model: LlamaForCausalLM) -> Timeline:
    device = SimDevice(costs=EVEN_COSTS, order="issue")
    with small_engine(model, device) as engine:
        engine.run()
    return device.timeline


@pytest.mark.skipif(
    importlib.util.find_spec("torch_tb_profiler") is None,
    reason="needs the tensorboard extra",
)
def test_tensorboard_s_plugin_answers_with_our_traces(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    engine = small_engine(model, make_device("threads"))
    with engine, profile(engine, tmp_path / "recorded"):
        engine.run()
    (tmp_path / "simulated").mkdir()
    simulated_run(model).save(tmp_path / "simulated" / "sim.1.pt.trace.json")
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path)]
    command += ["--port", "0", "--host", "127.0.0.1", "--load_fast=false"]
    log = tmp_path / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        address = _address(server, log)
        runs = _runs(address)
        assert set(runs) == {"recorded", "simulated"}
        for run in runs:
            query = f"run={run}"
            views = _get(f"{address}/views?{query}")
            assert "Trace" in views
            (worker,) = _get(f"{address}/workers?{query}&view=Trace")
            spans = _get(f"{address}/spans?{query}&worker={worker}")
            span = f"&span={spans[0]}" if spans else ""
            trace = _get(f"{address}/trace?{query}&worker={worker}{span}")
            names = {event.get("name", "") for event in trace["traceEvents"]}
            assert "compute 1 B" in names
    finally:
        server.terminate()
        server.wait(timeout=30)


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(600):
        if found := re.search(r"http://[\d.]+:\d+/", log.read_text()):
            return found[0] + "data/plugin/pytorch_profiler"
        assert server.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def _get(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=30) as answer:
        data = answer.read()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    return json.loads(data)


def _runs(address: str) -> list[str]:
    for _ in range(300):
        answer = _get(f"{address}/runs")
        if not answer["loading"] and len(answer["runs"]) == 2:
            return list(answer["runs"])
        time.sleep(0.2)
    raise AssertionError(f"the plugin found only {answer}")


@pytest.mark.skipif(
    importlib.util.find_spec("hta") is None, reason="needs the trace extra"
)
def test_holistic_trace_analysis_reads_our_trace(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    hta = importlib.import_module("hta.trace_analysis")

    run = simulated_run(model)
    run.save(tmp_path / "rank0.json")
    analysis = hta.TraceAnalysis(trace_files={0: str(tmp_path / "rank0.json")})
    breakdown = analysis.get_temporal_breakdown(visualize=False)
    assert float(breakdown["compute_time(us)"][0]) == pytest.approx(
        run.gpu_busy_us, rel=1e-3
    )
