"""The PPO stage in two processes, started both ways: one policy, one line for a fault, and nobody left behind."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load

from rlhf.ppo.trainer import Progress
from stages import train_ppo
from tasks.supervisor import descendants
from tests import ppo_workspace

TWO = "distributed.processes=2"
PYTHON = [sys.executable, "-m", "stages.train_ppo"]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc_per_node=2",
    "-m",
    "stages.train_ppo",
]
SECONDS = 180
OUTPUTS = (
    "models/policy/model.safetensors",
    "models/policy/value_head.safetensors",
    "metrics/ppo.json",
    "plots/ppo.csv",
    "plots/panel.csv",
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the stage reads, at smoke scale."""
    return ppo_workspace.fill(tmp_path_factory.mktemp("workspace"))


def start(command: list[str], workspace: Path, *overrides: str) -> subprocess.Popen[str]:
    environ = os.environ | {"RLHF_STATE_DIR": str(workspace / "state")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, *overrides], cwd=workspace, env=environ, **pipes)  # type: ignore[call-overload]


def run(command: list[str], workspace: Path, *overrides: str) -> tuple[int, str, str]:
    process = start(command, workspace, *overrides)
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


def outputs(workspace: Path) -> dict[str, bytes]:
    (place,) = (workspace / "runs" / "train_ppo").iterdir()
    return {name: (place / name).read_bytes() for name in OUTPUTS}


def test_a_number_that_is_not_finite_does_not_cost_the_run_its_outputs(tmp_path: Path) -> None:
    def output(name: str) -> Path:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        return tmp_path / name

    rows = [
        {"iteration": 0.0, "validation_accuracy": 0.5},
        {"iteration": 1.0, "value_loss": float("inf"), "accuracy": float("nan"), "score": 0.25},
    ]
    stage = SimpleNamespace(output=output, log=SimpleNamespace(log_metrics=lambda _: None))
    train_ppo.write_metrics(stage, Progress(iteration=1, rows=rows))  # type: ignore[arg-type]
    final = json.loads((tmp_path / "metrics/ppo.json").read_text())["final"]
    assert final == {"iteration": 1.0, "score": 0.25}
    assert "inf" in (tmp_path / "plots/ppo.csv").read_text()


def numbers(table: bytes) -> list[float]:
    """Every number of a table, in their order."""
    rows = csv.reader(table.decode().splitlines()[1:])
    return [float(cell) for row in rows for cell in row if cell]


def test_both_ways_of_starting_two_processes_write_the_same_policy_once(workspace: Path) -> None:
    code, out, err = run(PYTHON, workspace, TWO)
    assert (code, err) == (0, "")
    assert out.count("with overrides the outputs go to") == out.count("best validation accuracy") == 1
    first = outputs(workspace)
    assert not list((workspace / ".partial").iterdir()) and not list((workspace / "state" / "train_ppo").iterdir())
    code, out, err = run(TORCHRUN, workspace, TWO)
    assert code == 0, err
    assert out.count("best validation accuracy") == 1
    assert outputs(workspace) == first


def test_sharded_models_write_the_policy_of_whole_ones(workspace: Path) -> None:
    whole = outputs(workspace)
    shutil.rmtree(workspace / "runs")
    code, _, err = run(PYTHON, workspace, TWO, "distributed.strategy=fsdp")
    assert (code, err) == (0, "")
    for name in OUTPUTS[:2]:
        ours, theirs = load(outputs(workspace)[name]), load(whole[name])
        assert ours.keys() == theirs.keys()
        for tensor in ours:
            torch.testing.assert_close(ours[tensor], theirs[tensor], rtol=0, atol=1e-5)
    assert numbers(outputs(workspace)["plots/ppo.csv"]) == pytest.approx(numbers(whole["plots/ppo.csv"]), abs=1e-4)


def test_the_native_sampler_trains_the_policy_that_transformers_does(workspace: Path) -> None:
    found = []
    for sampler in ("transformers", "native"):
        shutil.rmtree(workspace / "runs", ignore_errors=True)
        code, _, err = run(PYTHON, workspace, f"generation.sampler={sampler}")
        assert (code, err) == (0, "")
        found.append(outputs(workspace))
    theirs, ours = (load(files["models/policy/model.safetensors"]) for files in found)
    for tensor in theirs:
        torch.testing.assert_close(ours[tensor], theirs[tensor], rtol=0, atol=1e-5)
    assert numbers(found[1]["plots/ppo.csv"]) == pytest.approx(numbers(found[0]["plots/ppo.csv"]), abs=1e-4)


def test_a_fault_of_all_ranks_is_one_line_and_their_exit_code(workspace: Path) -> None:
    (workspace / "models" / "sft").rename(workspace / "models" / "hidden")
    try:
        code, _, err = run(PYTHON, workspace, TWO)
    finally:
        (workspace / "models" / "hidden").rename(workspace / "models" / "sft")
    assert (code, err) == (1, "train_ppo: models/sft is missing: run dvc repro finetune_sft\n")


def test_several_hosts_cannot_share_one_process(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_HOSTS", "2")
    monkeypatch.setenv("RLHF_RENDEZVOUS", "127.0.0.1:29400")
    code, _, err = run(PYTHON, workspace)
    assert code == 2
    assert err.startswith("train_ppo: RLHF_HOSTS=2: distributed.processes=1 counts") and err.count("\n") == 1


def test_torchrun_must_start_as_many_processes_as_the_params_say(workspace: Path) -> None:
    code, _, err = run(TORCHRUN, workspace)
    assert code != 0
    # torchrun ends the other rank, which may say so.
    lines = [line for line in err.splitlines() if line.startswith("train_ppo: ") and "interrupted" not in line]
    assert len(lines) == 1 and lines[0].startswith("train_ppo: distributed.processes=1, but torchrun started 2: ")


@pytest.fixture
def long_run(workspace: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run of many iterations in the midst of them, and its ranks' process ids."""
    process = start(PYTHON, workspace, TWO, "ppo.iterations=100000")
    assert process.stdout is not None
    for line in process.stdout:
        if "/100000" in line:  # "resumed after iteration 7" comes before the models are loaded
            break
    ranks = descendants(process.pid)
    assert len(ranks) == 2
    yield process, ranks
    process.kill()
    process.communicate()


def ended(processes: list[int]) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{process}").exists() for process in processes):
            return True
        time.sleep(0.1)
    return False


def test_an_interrupt_ends_all_ranks_with_one_line(long_run: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, ranks = long_run
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "train_ppo: interrupted: nothing half-written is left\n")
    assert ended(ranks)


def test_ranks_end_when_the_process_that_started_them_is_killed(
    long_run: tuple[subprocess.Popen[str], list[int]],
) -> None:
    process, ranks = long_run
    process.kill()
    assert ended(ranks)


def test_a_killed_rank_ends_the_other_and_is_named(long_run: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, ranks = long_run
    os.kill(ranks[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith("train_ppo: process ") and "was ended by SIGKILL" in err and err.count("\n") == 1
    assert ended(ranks)
