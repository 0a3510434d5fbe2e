"""The command line and the flow, with stages that do next to nothing in a checkout of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows import pipeline as command_line
from flows import servers
from rlhf import anchors
from rlhf.anchors import CHECKOUT
from tasks import disk
from tasks.supervisor import LINUX, descendants
from tests.tasks.test_summary import split
from tests.tasks.test_supervisor import is_running

PATIENCE_SECONDS = 180

DVC_YAML = """
stages:
  evaluate:
    cmd: python -c "import shutil; shutil.copy('given.json', 'metrics/evaluation.json')"
    deps: [given.json]
    metrics: [metrics/evaluation.json]
  train_ppo:
    cmd: python train_ppo.py
    deps: [metrics/evaluation.json]
    always_changed: true
  register:
    cmd: python -c "print('register - gsm8k-policy version 1')"
    always_changed: true
"""

# Trains at once, fails, tells a secret, or goes on and on: as the file `manner` says.
TRAIN_PPO = """
import os, pathlib, sys, time
manner = pathlib.Path("manner").read_text()
print("train_ppo: loading")
if manner == "leak":
    print("train_ppo: token", os.environ["PLANTED_TOKEN"])
    sys.exit(f"train_ppo: log-in with {os.environ['PLANTED_TOKEN']} refused: ask for another")
if manner == "fail":
    sys.exit("train_ppo: models/sft: broken: make it again")
while pathlib.Path("manner").read_text() == "slow":
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("checkout")
    for house in ("flows", "tasks", "rlhf", "conf"):
        shutil.copytree(CHECKOUT / house, place / house, ignore=shutil.ignore_patterns("__pycache__"))
    (place / "dvc.yaml").write_text(DVC_YAML)
    (place / "train_ppo.py").write_text(TRAIN_PPO)
    (place / "given.json").write_text(json.dumps({"gate": split(400, 0.3, 0.7), "test": split(500, 0.3, 0.7)}))
    (place / "metrics").mkdir()
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, cwd=place, check=True)
    return place


def set_manner(checkout: Path, manner: str) -> None:
    """At once: the stage reads it all the time, and must not find it empty."""
    (checkout / "manner.new").write_text(manner)
    (checkout / "manner.new").replace(checkout / "manner")


def pipeline(checkout: Path, manner: str, *overrides: str) -> subprocess.Popen[str]:
    set_manner(checkout, manner)
    command = [sys.executable, "-u", "-m", "flows.pipeline", *overrides]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=checkout, text=True, start_new_session=True, **pipes)


def lines_until(process: subprocess.Popen[str], wanted: str) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        yield line
        if wanted in line:
            return
    pytest.fail(f"ended without {wanted!r}")


def test_params_that_are_wrong_are_refused_before_anything_is_started() -> None:
    script = (
        "import sys; from flows.pipeline import main; code = main(['ppo.klcoef=1']);"
        "assert not {'prefect', 'mlflow', 'torch', 'dvc'} & set(sys.modules), 'too much is imported'; sys.exit(code)"
    )
    answer = subprocess.run([sys.executable, "-c", script], check=False, cwd=CHECKOUT, capture_output=True, text=True)
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr.startswith("pipeline: ppo.klcoef=1: ")
    assert answer.stderr.count("\n") == 1


def test_overrides_whose_quotes_are_open_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["--from-make", " seed='1"]) == 2
    assert capsys.readouterr().err == "pipeline: overrides=seed='1: No closing quotation: close every quotation\n"


def test_a_disk_budget_that_is_used_up_is_told_before_params_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/nothing").touch()
    monkeypatch.setattr(anchors, "CHECKOUT", tmp_path)
    monkeypatch.setattr(servers, "prefect_api", lambda: nullcontext(lambda: pytest.fail("waited for the server")))
    monkeypatch.setattr(disk, "used", lambda: {"artifacts": 2_000_000_000, "journals": 10})
    assert command_line.main(["scale=smoke", "limits.disk_gb=1.5"]) == 1
    expected = "limits.disk_gb=1.5: 2.0 GB are taken (artifacts 2.0): make gc, or raise the limit"
    assert capsys.readouterr().err == f"pipeline: {expected}\n"
    assert not (tmp_path / "params.yaml").exists()


def test_a_whole_run_a_failed_one_and_the_next(checkout: Path) -> None:
    out, err = pipeline(checkout, "quick", "scale=smoke", "seed=3").communicate(timeout=PATIENCE_SECONDS)
    assert err == ""
    lines = out.splitlines()
    assert lines[0].startswith("starting: ")
    assert f"{'train_ppo':20}loading" in lines
    assert lines[-7].startswith("accuracy on test  SFT 30.0 % → policy 70.0 % ")
    assert lines[-5] == "registered        register - gsm8k-policy version 1"
    assert "seed: 3" in (checkout / "params.yaml").read_text()
    run_id = lines[-3].split()[-1]
    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["overrides"] == "scale=smoke seed=3"
    assert run.data.metrics["test/policy_accuracy"] == 0.7
    artifacts = {artifact.path for artifact in client.list_artifacts(run_id)}
    assert artifacts >= {"params.yaml", "dvc.lock"}

    failed = pipeline(checkout, "fail", "scale=smoke", "seed=3")
    out, err = failed.communicate(timeout=PATIENCE_SECONDS)
    assert failed.returncode == 1
    assert f"{'evaluate':20}unchanged" in out.splitlines()
    assert err == "pipeline: train_ppo: models/sft: broken: make it again\n"


def test_a_planted_secret_reaches_neither_screen_nor_server_nor_disk(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "planted-a1b2c3"
    monkeypatch.setenv("PLANTED_TOKEN", secret)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    out, err = pipeline(checkout, "leak", "scale=smoke").communicate(timeout=PATIENCE_SECONDS)
    assert f"{'train_ppo':20}token ***" in out.splitlines()
    assert err == "pipeline: train_ppo: log-in with *** refused: ask for another\n"
    databases = [tmp_path / "mlflow.db", *(tmp_path / "prefect").glob("prefect.db*")]
    assert all(
        any(b"log-in with *** refused" in file.read_bytes() for file in databases if file.match(name))
        for name in ("mlflow.db", "prefect.db*")
    )
    written = [file for place in (checkout, tmp_path) for file in place.rglob("*") if file.is_file()]
    assert [file for file in written if secret.encode() in file.read_bytes()] == []
    assert secret not in out


def test_a_second_run_is_refused_and_changed_params_stop_the_first(checkout: Path) -> None:
    first = pipeline(checkout, "slow", "scale=smoke")
    for _ in lines_until(first, "loading"):
        pass
    written = (checkout / "params.yaml").read_text()
    second = pipeline(checkout, "slow", "scale=smoke", "seed=7")
    out, err = second.communicate(timeout=PATIENCE_SECONDS)
    assert (second.returncode, out) == (1, "")
    assert err == f"pipeline: process {first.pid} is running here: wait for it or stop it\n"
    assert (checkout / "params.yaml").read_text() == written

    (checkout / "params.yaml").write_text(written.replace("seed: 0", "seed: 7"))
    set_manner(checkout, "quick")
    out, err = first.communicate(timeout=PATIENCE_SECONDS)
    assert first.returncode == 1, (out, err)
    assert err.startswith("pipeline: params.yaml was changed while the pipeline ran: ")
    assert err.count("\n") == 1
    assert "register" not in out


@pytest.mark.skipif(not LINUX, reason="counts processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_or_killed_run_leaves_no_process(checkout: Path, number: signal.Signals) -> None:
    process = pipeline(checkout, "slow", "scale=smoke")
    for _ in lines_until(process, "loading"):
        below = descendants(process.pid)
    assert len(below) >= 5  # two supervisors, the Prefect server, dvc, the stage
    os.killpg(process.pid, number)  # what Ctrl-C does: the flow's group, which is the terminal's
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(map(is_running, below)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in below if is_running(pid)]
    if number == signal.SIGINT:
        assert process.returncode == 1
        assert err.startswith("pipeline: interrupted: ")
        assert err.count("\n") == 1


def test_an_unexpected_error_is_one_line_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_overrides: list[str]) -> None:
        raise ZeroDivisionError("division by zero\nand more")

    monkeypatch.setattr(command_line, "_run", broken)
    monkeypatch.chdir(tmp_path)
    assert command_line.main(["scale=smoke"]) == 1
    log = "runs/pipeline-error.log"
    expected = f"pipeline: ZeroDivisionError: division by zero: not expected, please report it with {log}\n"
    assert capsys.readouterr().err == expected
    assert "in broken" in Path(log).read_text()
