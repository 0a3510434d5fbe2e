"""Which device locks a stage takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from rlhf import anchors
from rlhf.config import compose, validate
from tasks import devices
from tasks.devices import lock_files

STAGES = yaml.safe_load((anchors.CHECKOUT / "dvc.yaml").read_text())["stages"]


@pytest.fixture(autouse=True)
def _a_main_checkout_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "main_checkout", lambda: tmp_path)


def names(stage: str, *overrides: str) -> list[str]:
    return [path.name for path in lock_files(STAGES[stage]["params"], validate(compose(overrides)))]


def test_stages_that_compute_take_the_device_and_the_others_take_none(tmp_path: Path) -> None:
    computing = {"finetune_sft", "collect_preferences", "train_reward", "train_ppo", "evaluate"}
    assert {stage for stage in STAGES if names(stage, "runtime.device=cpu")} == computing
    (lock,) = lock_files(["runtime"], validate(compose(["runtime.device=cpu"])))
    assert lock == tmp_path / ".cache" / "devices" / "cpu.lock"
    assert lock.parent.is_dir()


@pytest.mark.parametrize(
    ("device", "processes", "visible", "expected"),
    [
        ("cpu", 2, None, ["cpu.lock"]),
        ("cuda", 1, None, ["cuda-0.lock"]),
        ("cuda", 2, None, ["cuda-0.lock", "cuda-1.lock"]),
        ("cuda", 2, "2, 3", ["cuda-2.lock", "cuda-3.lock"]),
        ("cuda", 1, "2,3", ["cuda-2.lock"]),
    ],
)
def test_a_gpu_for_each_process_of_ppo(
    device: str, processes: int, visible: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    overrides = [f"runtime.device={device}", f"distributed.processes={processes}"]
    assert names("train_ppo", *overrides) == expected
    assert names("evaluate", *overrides) == expected[:1]


def test_a_host_locks_the_gpus_of_its_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("RLHF_HOSTS", "2")
    monkeypatch.setenv("RLHF_RENDEZVOUS", "10.0.0.1:29400")
    assert names("train_ppo", "runtime.device=cuda", "distributed.processes=2") == ["cuda-0.lock"]


def test_auto_means_the_device_that_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.devices("auto", 1) == (["cuda-0"] if torch.cuda.is_available() else ["cpu"])
    for found, expected in ((True, ["cuda-0"]), (False, ["cpu"])):
        monkeypatch.setattr(devices, "_gpu_is_here", lambda found=found: found)
        assert devices.devices("auto", 1) == expected
