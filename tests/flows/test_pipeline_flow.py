"""The deployments' flow on one Prefect server: runs in workspaces of their own, with stages that do next to nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows import servers
from rlhf import tracking
from rlhf.anchors import CHECKOUT
from tests.tasks.test_summary import split

PATIENCE_SECONDS = 300

# Both runs train at the same time: each waits for the other's file.
TRAIN_PPO = """
import pathlib, sys, time, yaml
seed = yaml.safe_load(open("params.yaml"))["seed"]
meeting = pathlib.Path(open("meeting").read().strip())
if seed == 9:
    sys.exit("train_ppo - out of memory - take a smaller batch")
(meeting / str(seed)).touch()
while not {"1", "2"} <= {path.name for path in meeting.iterdir()}:
    time.sleep(0.05)
pathlib.Path("policy").write_text(f"seed {seed}")
"""
DVC_YAML = """
stages:
  train_ppo:
    cmd: python train_ppo.py
    deps: [train_ppo.py]
    params: [seed]
    outs: [policy]
  evaluate:
    cmd: mkdir -p metrics && cp given.json metrics/evaluation.json
    deps: [given.json, policy]
    metrics: [metrics/evaluation.json]
  register:
    cmd: python -c "print('register - version 1')"
    deps: [policy]
    always_changed: true
"""
RUN = """
import sys
from flows.parameters import Choices
from flows.pipeline_flow import pipeline
choices = Choices(scale="smoke", overrides=[f"seed={sys.argv[1]}"], allow_dirty="dirty" in sys.argv)
state = pipeline(choices, return_state=True)
print(f"{state.name} | {state.message}")
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, meeting = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("meeting")
    for house in ("flows", "tasks", "rlhf", "conf"):
        shutil.copytree(CHECKOUT / house, place / house, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".gitignore", "requirements.lock"):
        shutil.copy(CHECKOUT / name, place / name)
    (place / "dvc.yaml").write_text(DVC_YAML)
    (place / "train_ppo.py").write_text(TRAIN_PPO)
    (place / "run.py").write_text(RUN)
    (place / "meeting").write_text(str(meeting))
    (place / "given.json").write_text(json.dumps({"gate": split(400, 0.3, 0.7), "test": split(500, 0.3, 0.7)}))
    (place / ".gitignore").write_text(f"{(CHECKOUT / '.gitignore').read_text()}/policy\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    git = [["init", "--quiet"], ["add", "--all"], [*identity, "commit", "--quiet", "--message", "start"]]
    subprocess.run(["git", *git[0]], cwd=place, check=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "--quiet"], cwd=place, check=True)
    for arguments in git[1:]:
        subprocess.run(["git", *arguments], cwd=place, check=True)
    return place


@pytest.fixture(scope="module", autouse=True)
def _servers() -> Iterator[None]:
    """Prefect's server, and MLflow's database, which two processes cannot make at the same time."""
    MlflowClient(os.environ["MLFLOW_TRACKING_URI"]).search_experiments()
    with servers.prefect_api() as wait:
        wait()
        yield


def start(checkout: Path, seed: int, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "run", str(seed), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=checkout, text=True, **pipes)


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """The run's last line, and all that it printed."""
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return output.splitlines()[-1], output


def left(checkout: Path) -> list[str]:
    return sorted(path.name for path in (checkout / ".workspaces").iterdir() if path.is_dir())


def test_two_at_once_then_nothing_new_then_a_failure_and_changes(checkout: Path) -> None:
    (checkout / "params.yaml").write_text("of whoever works here\n")
    both = [start(checkout, seed) for seed in (1, 2)]
    for process in both:
        last, output = end(process)
        assert last == "Completed | registered: register - version 1", output
    assert left(checkout) == []
    assert (checkout / "params.yaml").read_text() == "of whoever works here\n"
    assert not (checkout / "policy").exists()

    last, output = end(start(checkout, 1))
    assert last.startswith("Nothing new | nothing new: every stage unchanged"), output
    assert "restored from the cache" in output

    last, output = end(start(checkout, 9))
    assert "train_ppo - out of memory - take a smaller batch" in last
    (kept,) = left(checkout)
    assert kept in output

    (checkout / "train_ppo.py").write_text(f"{TRAIN_PPO}\nprint('changed')\n")
    last, output = end(start(checkout, 1))
    assert last.startswith("Failed | "), output
    assert "uncommitted changes" in last
    last, output = end(start(checkout, 1, "dirty"))
    assert last.startswith("Completed | "), output
    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name(tracking.EXPERIMENT)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], "tags.uncommitted = 'true'")
    assert "uncommitted.patch" in {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
