"""The command line, as somebody types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cbasync import bench, demo, simulate
from cbasync.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[1]
THREE = """\
{"id": "a", "prompt": "to be", "kind": "qa", "max_tokens": 5}
{"id": "b", "prompt": "or", "kind": "list", "max_tokens": 9}
{"id": "c", "prompt": "not to be, that is the question", "kind": "qa", "max_tokens": 1}
"""


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "three.jsonl"
    path.write_text(THREE)
    return str(path)


def output_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command prints when all is well."""
    assert main(argv) == 0
    return capsys.readouterr().out


# ------------------------------------------------------------------ demo


@pytest.mark.parametrize("depth", ["1", "2"])
def test_demo_as_json(
    capsys: pytest.CaptureFixture[str], prompts: str, depth: str
) -> None:
    argv = ["demo", "--model", "random-tiny", "--device", "threads", "--json"]
    out = output_of(capsys, *argv, "--prompts", prompts, "--depth", depth)
    result: dict[str, Any] = json.loads(out)
    assert result["model"] == "random-tiny"
    assert result["device"] == "threads"
    assert result["depth"] == int(depth)
    assert result["requests"] == 3
    assert result["tokens"] == 5 + 9 + 1
    assert result["tokens_equal"] is True
    for mode in ("sync", "async"):
        assert result[mode]["wall_s"] > 0
        assert 0 < result[mode]["gpu_active"] <= 1
        assert result[mode]["steps"] == 9
    assert result["machine"]["torch"]


def test_demo_without_arguments_is_the_demo_of_sixteen_prompts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["cbasync"])
    seen = []

    def set_up(*given: object) -> demo.Setup:
        seen.append(given)
        return demo.Setup(None, "threads", [], [], 1)  # type: ignore[arg-type]

    monkeypatch.setattr(demo, "set_up", set_up)
    monkeypatch.setattr(demo, "run", lambda setup: f"answers {setup.depth}")
    monkeypatch.setattr(simulate, "published_experiment", lambda: "on a virtual clock")
    assert main() == 0
    assert seen == [("smollm2", "auto", None, 1)]
    assert capsys.readouterr().out == "answers 1\n\non a virtual clock\n"


def test_demo_for_people(capsys: pytest.CaptureFixture[str], prompts: str) -> None:
    argv = ["demo", "--model", "random-tiny", "--device", "threads"]
    text = output_of(capsys, *argv, "--prompts", prompts)
    assert " 2  or\n    " in text
    assert "the same tokens in 3 of 3 answers" in text
    assert "gpu_active is the time in which a batch computes" in " ".join(text.split())
    assert "\nsync   cpu  S" in text
    assert "\nasync  cpu  S" in text
    assert text.count("drawn: batches 0-3 of 9") == 2
    assert "This machine has no GPU to wait for" in text
    assert max(map(len, text.splitlines())) <= demo.WIDTH
    assert all(char.isprintable() or char == "\n" for char in text)


def test_demo_of_a_model_without_tokenizer(
    capsys: pytest.CaptureFixture[str], prompts: str, tmp_path: Path
) -> None:
    from cbasync.models import load_model

    load_model("random-tiny").model.save_pretrained(tmp_path / "model")
    argv = ["demo", "--model", str(tmp_path / "model"), "--prompts", prompts]
    with pytest.warns(UserWarning, match="prompts must be token ids"):
        assert "token ids [" in output_of(capsys, *argv, "--device", "threads")


def test_demo_tells_different_tokens(
    capsys: pytest.CaptureFixture[str], prompts: str
) -> None:
    setup = demo.set_up("random-tiny", "threads", Path(prompts), 1)
    result = demo.run(setup)
    result.overlapped.outputs[0] = result.overlapped.outputs[1]
    assert result.as_json()["tokens_equal"] is False
    told = " ".join(str(result).split())
    assert "the same tokens in 2 of 3 answers. In a 16-bit type" in told


# ------------------------------------------------------------------ bench


def test_bench_host_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_HOST_ROUNDS", 1)
    argv = ["bench", "--host-only", "--steps", "3"]
    result = json.loads(output_of(capsys, *argv, "--json"))
    assert set(result["host_ms"]) == {"32@100", "32@8000", "256@2000"}
    assert all(ms > 0 for ms in result["host_ms"].values())
    assert [len(samples) for samples in result["samples_ms"].values()] == [3, 3, 3]


def test_bench_peer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_PEER_ROUNDS", 1)
    argv = ["bench", "--peer", "transformers", "--model", "random-tiny"]
    argv += ["--requests", "2", "--max-tokens", "4"]
    result = json.loads(output_of(capsys, *argv, "--json"))
    assert {"ours_tok_s", "peer_tok_s", "ratio", "machine"} <= set(result)
    assert result["tokens_equal"] is True
    assert "transformers, generate_batch" in output_of(capsys, *argv)


# ------------------------------------------------------------------ help and refusals


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, command in COMMANDS.items():
        assert name in text
        assert str(command.__doc__) in text


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_its_arguments(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"usage: python -m cbasync {command}")
    assert str(COMMANDS[command].__doc__) in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["demo", "--device", "tpu"], "device is 'tpu', the devices are auto, threads"),
        (["demo", "--model", "./nowhere"], "no model found for './nowhere'"),
        (["demo", "--depth", "9"], "depth is 9, at most 3"),
        (["demo", "--prompts", "nowhere.jsonl"], "no prompts file nowhere.jsonl"),
        (
            ["bench", "--peer", "transformers", "--model", "./nowhere"],
            "no model found for './nowhere'",
        ),
    ],
)
def test_a_mistake_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("cbasync: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fly"], "invalid choice: 'fly'"),
        (["bench", "--peer", "vllm"], "invalid choice: 'vllm'"),
        (["bench", "--host-only", "--steps", "0"], "'0' is not a positive number"),
        (["demo", "--depth", "one"], "invalid int value: 'one'"),
    ],
)
def test_a_wrong_argument_is_told_with_the_usage(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: python -m cbasync" in err
    assert message in err


def test_a_failure_inside_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from cbasync.devices import StreamError

    def broken(steps: int) -> bench.Result:
        raise StreamError("compute of batch 3 failed")

    monkeypatch.setattr(bench, "bench_host", broken)
    with pytest.raises(StreamError, match="batch 3"):
        main(["bench", "--host-only"])


def test_interrupted_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(steps: int) -> bench.Result:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "bench_host", interrupted)
    assert main(["bench", "--host-only"]) == 130


def test_as_a_program() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "cbasync", "demo", "--device", "tpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.startswith("cbasync: device is 'tpu'")
    assert "Traceback" not in run.stderr
