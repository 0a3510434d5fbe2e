"""Metrics mirrored to TensorBoard and to Weights & Biases, read back from their files."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf import anchors, tracking
from rlhf.errors import UsageError
from rlhf.tracking import mirrors, runs
from tests.rlhf.tracking.mirrored import PARAMS, STEPS


@pytest.fixture(autouse=True)
def _places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_MIRROR_DIR", str(tmp_path / "mirror"))
    monkeypatch.setenv("RLHF_JOURNAL_DIR", str(tmp_path / "journal"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", tracking.PARENT_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def scalars(directory: Path, name: str) -> list[tuple[int, float]]:
    """Every point of a metric, not a sample of them."""
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return [(point.step, round(point.value, 6)) for point in events.Scalars(name)]


def test_tensorboard_has_every_point_once_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracking.PARENT_VARIABLE, "pipeline-abc")
    for steps in (range(4), range(2, 6)):  # killed after step 3, resumed from the state of step 1
        with tracking.stage_run("train_ppo", PARAMS, "tensorboard") as run:
            run.resume(tmp_path / "run")
            for step in steps:
                run.log_metrics({"kl": step / 8, "loss": 1.0 + step}, step)
    directory = tmp_path / "mirror" / "tensorboard" / "pipeline-abc" / "train_ppo"
    assert scalars(directory, "kl") == [(step, step / 8) for step in range(6)]
    assert scalars(directory, "loss") == [(step, 1.0 + step) for step in range(6)]


def test_a_run_by_itself_has_a_directory_of_its_own_and_mlflows_times(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(runs, "_now", lambda: 1_700_000_000_250)
    with tracking.stage_run("evaluate", PARAMS, "tensorboard") as run:
        run.log_metrics({"accuracy": 0.5})
    events = EventAccumulator(str(tmp_path / "mirror" / "tensorboard" / run.key))
    events.Reload()
    assert [(point.step, point.wall_time) for point in events.Scalars("accuracy")] == [(0, 1_700_000_000.25)]


def test_weights_and_biases_has_every_point_once_after_a_resume_and_asks_no_server(tmp_path: Path) -> None:
    """In a process of its own: the package keeps a service, and threads, until its process ends."""
    environment = os.environ | {tracking.PARENT_VARIABLE: "pipeline-abc", "HTTPS_PROXY": "http://127.0.0.1:1"}
    command = [sys.executable, "-m", "tests.rlhf.tracking.mirrored", "wandb", str(tmp_path / "run")]
    for _ in range(2):
        done = subprocess.run(command, cwd=anchors.CHECKOUT, env=environment, check=True, capture_output=True)
        assert done.stderr == b""
    (file,) = (tmp_path / "mirror" / "wandb" / "wandb").glob("offline-run-*/*.wandb")
    run, history = read_wandb(file)
    assert (run.display_name, run.run_group, run.job_type, run.project) == (
        "train_ppo",
        "pipeline-abc",
        "train_ppo",
        "gsm8k-rlhf",
    )
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["seed"] == 3
    assert [(row["_step"], row["step"], row.get("kl"), row.get("too_long")) for row in history] == [
        (0, 0, None, 2),
        *((1 + step, step, step / 8, None) for step in range(STEPS)),
    ]


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format: blocks of 32 kB, a record in one piece (1) or several (2, 3..., 4)."""
    place, record = 0, b""
    while place < len(data):
        left = 32768 - (place + 7) % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        piece = data[place + 7 : place + 7 + length]
        place += 7 + length
        record = piece if kind in (1, 2) else record + piece
        if kind in (1, 4):
            yield record


def read_wandb(file: Path):
    from wandb.proto.wandb_internal_pb2 import Record

    run, history = None, []
    for data in leveldb_log(file.read_bytes()[7:]):  # behind the package's own header
        record = Record()
        record.ParseFromString(data)
        match record.WhichOneof("record_type"):
            case "run":
                run = record.run
            case "history":
                items = record.history.item
                history.append({(i.key or i.nested_key[0]): json.loads(i.value_json) for i in items})
    return run, history


def test_a_mirror_that_fails_costs_a_line_and_not_the_run(tmp_path: Path, capsys) -> None:
    (tmp_path / "mirror").write_text("no directory")
    with tracking.stage_run("train_ppo", PARAMS, "tensorboard") as run:
        run.log_metrics({"kl": 0.5}, 1)
    assert run.is_begun
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tracking: tracking.mirror=tensorboard: ") and line.endswith(": the run goes on without it")


def test_a_missing_package_is_named_before_anything_is_logged(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(mirrors, "find_spec", lambda _: None)
    with (
        pytest.raises(UsageError, match="tracking.mirror=wandb: the package wandb is missing: install the project's"),
        tracking.stage_run("train_ppo", PARAMS, "wandb"),
    ):
        pytest.fail("the run began")
    assert not (tmp_path / "journal").exists()


def test_without_a_mirror_there_is_none(tmp_path: Path) -> None:
    with tracking.stage_run("train_ppo", PARAMS) as run:
        run.log_metrics({"kl": 0.5}, 1)
    assert not (tmp_path / "mirror").exists()
