"""How much disk is taken, and the refusal of a run where that is too much."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhf import anchors
from rlhf.config import compose, validate
from rlhf.errors import UserError
from rlhf.params import Limits
from tasks import disk, workspaces

MB = 1_000_000


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(anchors, "main_checkout", lambda: tmp_path)
    monkeypatch.setattr(workspaces, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setenv("RLHF_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("RLHF_JOURNAL_DIR", str(tmp_path / "journal"))
    monkeypatch.setenv("RLHF_DOWNLOADS_DIR", str(tmp_path / "downloads"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    for place, size in ((".workspaces/run/models", 1), ("cache", 2), ("state/train_ppo", 3), ("mlartifacts", 4)):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "weights").write_bytes(os.urandom(size * MB))
    return tmp_path


def limits(disk_gb: float) -> Limits:
    return validate(compose(["scale=smoke", f"limits.disk_gb={disk_gb}"])).limits


def test_each_place_counts_and_a_file_with_two_names_counts_once(checkout: Path) -> None:
    os.link(checkout / "cache/weights", checkout / ".workspaces/run/models/linked")
    (checkout / "state/loop").symlink_to(checkout)
    taken = {name: round(amount / MB) for name, amount in disk.used().items()}
    expected = {"workspaces": 3, "DVC's cache": 0, "training states": 3, "downloads": 0}
    expected |= {"journals": 0, "runs/": 0, "artifacts": 4}
    assert taken == expected
    assert disk.in_words({"a": 3 * 10**9, "b": 10**9, "c": 5}) == "4.0 GB are taken (a 3.0, b 1.0)"


def test_artifacts_of_a_server_take_no_disk_here(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert "artifacts" not in disk.used()


def test_a_run_is_refused_over_the_budget_alone(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.require_room(limits(0.02))
    with pytest.raises(UserError, match=r"^limits.disk_gb=0.009: 0.0 GB are taken: make gc, or raise the limit$"):
        disk.require_room(limits(0.009))
    monkeypatch.setattr(disk, "used", lambda: pytest.fail("measured without a budget"))
    disk.require_room(limits(0))
