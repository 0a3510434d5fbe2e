"""A process that is killed at a named point of its journal, and one that goes on: every point is there once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rlhf import anchors, tracking
from rlhf.faults import KILL_VARIABLE, POINTS
from rlhf.tracking.journal import waiting
from tests.e2e.preloaded import FORKS
from tests.e2e.test_kills import KILLED
from tests.e2e.workspaces import PATIENCE_SECONDS

STEPS = 5
VISITS = {"journal.appended": (1, 4), "journal.sent": (1, 2), "journal.acknowledged": (1, 2)}
KILLS = [f"{point}:{visit}" for point in POINTS if point.startswith("journal.") for visit in VISITS.get(point, (1,))]


def log_run(place: Path, environ: Mapping[str, str]) -> None:
    os.environ.update(environ)
    with tracking.stage_run("train_ppo", {"seed": 3}) as run:
        run.resume(place / "run")
        for step in range(STEPS):
            run.log_metrics({"kl": step / 8}, step)
        run.flush()
        run.log_text("a sample", "samples.txt")


def outcome(place: Path, environ: Mapping[str, str]) -> int | None:
    process = FORKS.Process(target=log_run, args=(place, environ))
    process.start()
    process.join(PATIENCE_SECONDS)
    return process.exitcode


@pytest.mark.parametrize("kill", KILLS)
def test_killed_and_gone_on(tmp_path: Path, kill: str) -> None:
    with tracking.stage_run("prepare_data", {}):
        pass  # sets the database up, once for all of these tests
    environ = anchors.environment() | {"RLHF_JOURNAL_DIR": str(tmp_path / "journal")}
    assert outcome(tmp_path, environ | {KILL_VARIABLE: kill}) == KILLED
    assert outcome(tmp_path, environ) == 0

    store = MlflowClient(anchors.tracking_uri())
    experiment = store.get_experiment_by_name(tracking.EXPERIMENT)
    assert experiment
    key = (tmp_path / "run").read_text()
    (found,) = store.search_runs([experiment.experiment_id], f"tags.`rlhf.key` = '{key}'")
    history = store.get_metric_history(found.info.run_id, "kl")
    assert Counter((point.step, point.value) for point in history) == {(step, step / 8): 1 for step in range(STEPS)}
    assert (found.info.status, found.data.params) == ("FINISHED", {"seed": "3"})
    assert [item.path for item in store.list_artifacts(found.info.run_id)] == ["samples.txt"]
    assert waiting(tmp_path / "journal") == []
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["lock"]
