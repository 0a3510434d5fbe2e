"""PPO killed at any moment and run again gives the bytes of a run that was never killed.

A kill is SIGKILL of the whole process: at the named points of rlhf/faults.py, and at random moments.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rlhf import config
from rlhf.data.gsm8k import SPLITS, write_prepared
from rlhf.data.sources import prepare
from rlhf.faults import KILL_VARIABLE, POINTS
from rlhf.streams import Purpose, uniforms
from tests.e2e import preloaded, workspaces

# Smoke scale with a start that solves some problems, so that scores and selection have something to tell apart.
CHOICES = (
    "scale=smoke",
    "kl=adaptive",
    "runtime.threads=1",
    "data.generator.train=400",
    "sft.tiny.hidden_size=64",
    "sft.finetune.steps=100",
    "sft.finetune.lr=0.006",
    "ppo.iterations=3",
    "ppo.lr=0.001",
)
TRAIN_PPO = ["python", "-m", "stages.train_ppo"]
OUTS = ("models/policy", "metrics/ppo.json", "plots/ppo.csv", "plots/panel.csv")
MOMENTS = 10
KILLED = -signal.SIGKILL

VISITS = {  # the second save is the first after an update; outputs are renamed beside those already in place
    **{point: (2,) for point in POINTS if point.startswith("state.")},
    "publish.aside": (1, 2, 3, 4),
    "publish.renamed": (1, 2, 3),
}
KILLS = [
    f"{point}:{visit}"
    for point in POINTS
    if not point.startswith(("journal.", "chunk."))  # tests/rlhf/tracking/test_kills.py, tests/stages/test_evaluate.py
    for visit in VISITS.get(point, (1,))
]

Outputs = dict[str, dict[str, bytes]]


@dataclass(frozen=True)
class Workspace:
    """A workspace in which train_ppo can run, with the outputs of some earlier run in place."""

    place: Path
    tracking: Path
    state: Path

    @property
    def environ(self) -> dict[str, str]:
        return workspaces.environment(self.tracking) | {"RLHF_STATE_DIR": str(self.state)}

    def start(self, *overrides: str, kill: str | None = None) -> preloaded.Child:
        return preloaded.start("train_ppo", self.place, self.environ | killing(kill), *overrides)

    def finish(self) -> str:
        """Runs the stage to its end and returns what it printed."""
        return preloaded.succeed("train_ppo", self.place, self.environ)

    def outputs(self) -> Outputs:
        """The files of each output that is there."""
        return {out: files for out in OUTS if (files := files_of(self.place / out))}

    def has_state(self) -> bool:
        return any(self.state.rglob("*.safetensors"))


def killing(point: str | None) -> Mapping[str, str]:
    return {KILL_VARIABLE: point} if point else {}


def files_of(path: Path) -> dict[str, bytes]:
    return {"": path.read_bytes()} if path.is_file() else workspaces.contents(path)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A committed checkout with data and SFT checkpoint; its outputs are dummies."""
    place, tracking = (tmp_path_factory.mktemp(name) for name in ("checkout", "tracking"))
    made = Workspace(workspaces.copy_checkout(place), tracking, tracking / "state")
    config.write(config.compose(CHOICES), place / "params.yaml")
    workspaces.commit(place)
    splits = prepare(config.load((), place / "params.yaml").data)
    for split in SPLITS:
        write_prepared(place / f"data/prepared/{split}.parquet", splits[split])
    for stage in ("fetch_sft", "finetune_sft"):
        preloaded.succeed(stage, place, made.environ)
    for out, file in zip(OUTS, ("models/policy/old.safetensors", *OUTS[1:]), strict=True):
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text(f"{out} of an earlier run")
    return made


@pytest.fixture
def workspace(inputs: Workspace, tmp_path: Path) -> Workspace:
    """A fresh copy with a training state of its own."""
    shutil.copytree(inputs.place, tmp_path / "checkout", ignore=shutil.ignore_patterns(".git", "*.log"))
    return Workspace(tmp_path / "checkout", inputs.tracking, tmp_path / "state")


@pytest.fixture(scope="module")
def never_killed(inputs: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """What the stage makes, run as a user runs it."""
    place = tmp_path_factory.mktemp("never") / "checkout"
    shutil.copytree(inputs.place, place)
    one = Workspace(place, inputs.tracking, place.parent / "state")
    workspaces.succeed(TRAIN_PPO, place, one.environ)
    made = one.outputs()
    assert made.keys() == set(OUTS) and "model.safetensors" in made["models/policy"]
    return made


def assert_whole(found: Outputs, *allowed: Outputs) -> None:
    """Each output is all of one run's; an output may be missing."""
    for out, files in found.items():
        assert any(files == run[out] for run in allowed), f"{out} is a mixture: {sorted(files)}"


@dataclass(frozen=True)
class Timed:
    """Another run that was never killed, forked, and how many seconds it took."""

    workspace: Workspace
    printed: str
    seconds: float


@pytest.fixture(scope="module")
def again(inputs: Workspace, never_killed: Outputs, tmp_path_factory: pytest.TempPathFactory) -> Timed:
    place = tmp_path_factory.mktemp("again") / "checkout"
    shutil.copytree(inputs.place, place)
    workspace = Workspace(place, inputs.tracking, place.parent / "state")
    start = time.monotonic()
    return Timed(workspace, workspace.finish(), time.monotonic() - start)


def test_a_second_fresh_run_gives_the_same_bytes(again: Timed, never_killed: Outputs) -> None:
    assert "resumed" not in again.printed
    assert again.workspace.outputs() == never_killed
    assert not again.workspace.has_state()


@pytest.mark.parametrize("kill", KILLS)
def test_killed_at_a_named_point(workspace: Workspace, never_killed: Outputs, kill: str) -> None:
    before = workspace.outputs()
    child = workspace.start(kill=kill)
    assert child.end() == KILLED, child.log.read_text()
    assert_whole(workspace.outputs(), before, never_killed)
    workspace.finish()
    assert workspace.outputs() == never_killed
    assert not workspace.has_state()


@pytest.mark.parametrize("number", range(MOMENTS))
def test_killed_at_a_random_moment(workspace: Workspace, never_killed: Outputs, again: Timed, number: int) -> None:
    """One moment in each tenth of a run."""
    before = workspace.outputs()
    within = float(uniforms(0, Purpose.ROLLOUT, position=number))
    workspace.start().kill_after((number + within) / MOMENTS * again.seconds)  # a fast run may have ended
    assert_whole(workspace.outputs(), before, never_killed)
    workspace.finish()
    assert workspace.outputs() == never_killed
    assert not workspace.has_state()


def test_killed_in_one_workspace_and_resumed_in_another(
    inputs: Workspace, workspace: Workspace, never_killed: Outputs, tmp_path: Path
) -> None:
    """Commands as a user types them; the other workspace is a clone, and RLHF_STATE_DIR is what they share."""
    killed = workspaces.run(TRAIN_PPO, workspace.place, workspace.environ | killing("state.safe:3"))
    assert killed.returncode == KILLED, killed.stderr
    (key,) = (file.read_text() for file in workspace.state.rglob("run"))
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", inputs.place, clone], check=True)
    for path in ("data", "models/sft"):
        shutil.copytree(inputs.place / path, clone / path)
    assert "train_ppo: resumed after iteration 2" in workspaces.succeed(TRAIN_PPO, clone, workspace.environ)
    assert Workspace(clone, workspace.tracking, workspace.state).outputs() == never_killed
    store = MlflowClient(workspace.environ["MLFLOW_TRACKING_URI"])
    (run,) = store.search_runs(["1"], f"tags.`rlhf.key` = '{key}'")
    assert run.info.status == "FINISHED"
    assert [point.step for point in store.get_metric_history(run.info.run_id, "kl_sequence")] == [1, 2, 3]


def test_a_changed_run_never_resumes_an_old_state(workspace: Workspace, never_killed: Outputs) -> None:
    assert workspace.start(kill="state.safe:2").end() == KILLED

    def resumes(*overrides: str) -> bool:
        child = workspace.start(*overrides, kill="state.begun")
        assert child.end() == KILLED
        return "resumed" in child.log.read_text()

    assert not resumes("ppo.gamma=0.99")
    assert not resumes("runtime.threads=2")
    for changed in ("rlhf/ppo/losses.py", "requirements.lock", "models/sft/manifest.json"):
        file = workspace.place / changed
        content = file.read_text()
        file.write_text(f"{content}\n")
        assert not resumes(), changed
        file.write_text(content)
    assert resumes()
    workspace.finish()
    assert workspace.outputs() == never_killed
