"""Artifacts of a stage: what a line says, what a table shows, and that no server holds a stage up."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from rlhf import tracking
from rlhf.runtime import progress
from tasks import artifacts
from tasks.artifacts import Progress, ProgressArtifact, key_metrics, parse_progress, show_results

IDENTITY = UUID(int=1)


@pytest.fixture(autouse=True)
def _in_a_task_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "is_watched", lambda: True)
    monkeypatch.setattr(artifacts, "EVERY_SECONDS", 0.01)
    monkeypatch.setattr(artifacts, "PATIENCE_SECONDS", 30.0)


class Server:
    """Prefect's API as far as progress goes; it can be made to hang or to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers = threading.Event()
        self.answers.set()
        self.failures = 0
        monkeypatch.setattr(artifacts, "create_progress_artifact", self.create)
        monkeypatch.setattr(artifacts, "update_progress_artifact", self.update)

    def create(self, percent: float, key: str, text: str) -> UUID:
        self._answer()
        self.calls.append((key, percent, text))
        return IDENTITY

    def update(self, identity: UUID, percent: float, text: str) -> None:
        assert identity == IDENTITY
        self._answer()
        self.calls.append((percent, text))

    def _answer(self) -> None:
        assert self.answers.wait(60)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("refused")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def test_a_line_that_a_stage_prints_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("evaluate SFT", 4) as bar:
        bar.advance(4, score=0.25)
    printed = parse_progress(capsys.readouterr().out.strip())
    assert printed == Progress(100.0, "evaluate SFT 4/4 0s score 0.25")
    assert parse_progress("train_ppo █████░░░░░░░░░░░░░░░ 3/12 41s") == Progress(25.0, "train_ppo 3/12 41s")
    assert parse_progress("train_reward: normalisation ████████████████████ 0/0 0s") is not None
    assert parse_progress("train_ppo: resumed after iteration 3/12") is None


def line(done: int) -> str:
    return f"train_ppo {'█' * done}{'░' * (20 - done)} {done}/20 {done}s"


def test_progress_becomes_one_artifact_that_moves_to_the_end(server: Server) -> None:
    shown = ProgressArtifact("train_ppo")
    shown.show("train_ppo: loading")
    for done in range(1, 21):
        shown.show(line(done))
        time.sleep(0.002)
    shown.close()
    assert server.calls[0][0] == "progress-train-ppo"
    percents = [call[-2] for call in server.calls]
    assert percents == sorted(set(percents))
    assert server.calls[-1] == (100.0, "train_ppo 20/20 20s")


def test_a_server_that_hangs_holds_no_line_up_and_gets_only_the_newest(server: Server) -> None:
    server.answers.clear()
    shown = ProgressArtifact("train_ppo")
    for done in range(1, 21):
        shown.show(line(done))  # would hang here
    server.answers.set()
    shown.close()
    assert len(server.calls) <= 3
    assert server.calls[-1][-2] == 100.0


def test_the_end_of_a_stage_waits_for_a_server_that_hangs_only_a_little(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "PATIENCE_SECONDS", 0.05)
    server.answers.clear()
    shown = ProgressArtifact("train_ppo")
    shown.show(line(1))
    shown.close()
    assert server.calls == []
    server.answers.set()


def test_a_message_that_fails_is_told_once_and_the_next_one_arrives(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Log:
        def warning(self, text: str) -> None:
            told.append(text)

    monkeypatch.setattr(artifacts, "get_run_logger", Log)
    monkeypatch.setattr(artifacts, "BACK_OFF_SECONDS", 0.01)
    server.failures = 1
    shown = ProgressArtifact("train_ppo")
    shown.show(line(1))
    while not told:
        time.sleep(0.01)
    shown.show(line(2))
    shown.close()
    assert told == ["not shown in the Prefect UI: refused"]
    assert server.calls == [("progress-train-ppo", 10.0, "train_ppo 2/20 2s")]


def test_the_table_has_what_is_worth_a_look(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    ppo = {"best_iteration": 3, "final": {"score": 0.5, "lr": 0.001}, "iterations": 4}
    (tmp_path / "metrics/ppo.json").write_text(json.dumps(ppo))
    (tmp_path / "metrics/mine.json").write_text(json.dumps({"a": {"b": 1}, "ok": True, "name": "x"}))
    expected = {"best_iteration": 3, "final.score": 0.5, "iterations": 4}
    assert {row["metric"]: row["value"] for row in key_metrics(tmp_path, "metrics/ppo.json")} == expected
    assert list(key_metrics(tmp_path, "metrics/mine.json")) == [{"metric": "a.b", "value": 1}]


def test_links_lead_to_the_run_and_to_the_page_of_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links: list[tuple[str, str, str]] = []
    monkeypatch.setattr(artifacts, "create_link_artifact", lambda *call: links.append(call))
    monkeypatch.setattr(tracking, "find_run_by_outs", lambda stage, outs: outs.get("made"))
    monkeypatch.setattr(tracking, "experiment_id", lambda: "7")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example/")
    run = uuid4().hex
    show_results("evaluate", [], tmp_path, {"made": run})
    show_results("register", [], tmp_path, {})
    assert links == [
        (f"https://mlflow.example/#/runs/{run}", f"MLflow run {run}", "mlflow-evaluate"),
        (
            f"https://mlflow.example/#/experiments/7/runs/{run}/artifacts/evaluation/index.html",
            "Report",
            "report",
        ),
    ]


def test_nothing_is_sent_outside_a_task_run(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    shown = ProgressArtifact("train_ppo")
    shown.show(line(1))
    shown.close()
    show_results("evaluate", ["metrics/evaluation.json"], tmp_path, {})
