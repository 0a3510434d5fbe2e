"""Which rows ring which alarm."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf.ppo import guards
from tests.rlhf.ppo.toy import toy_params

HEALTHY = {"score_std": 0.5, "cut_off": 0.0, "cut_mass": 0.0, "kl_sequence": 3.0}


@pytest.mark.parametrize(
    ("row", "overrides", "names", "told"),
    [
        ({}, (), [], ""),
        ({"score_std": 0.0}, (), ["equal_scores"], "all scores are equal"),
        ({"cut_off": 1.0}, (), ["cut_off"], "ppo.sampling.max_new_tokens"),
        ({"cut_off": 0.99}, (), [], ""),
        ({"cut_mass": 0.009}, (), [], ""),
        ({"cut_mass": 0.02}, (), ["cut_mass"], "2.0 %"),
        ({"cut_mass": 0.02}, ("ppo.truncation=exact",), [], ""),
        ({"kl_sequence": 1e9}, (), [], ""),
        ({"kl_sequence": 3.1}, ("ppo.kl.limit=3",), ["kl"], "3.1 nats a sequence exceeds ppo.kl.limit=3"),
        ({"kl_sequence": float("nan")}, ("ppo.kl.limit=3",), ["kl"], "ppo.kl.limit=3"),
        ({"kl_sequence": 2.9}, ("ppo.kl.limit=3",), [], ""),
    ],
)
def test_rollouts(row: dict[str, float], overrides: tuple[str, ...], names: list[str], told: str) -> None:
    alarms = guards.of_rollout(HEALTHY | row, toy_params(*overrides).ppo)
    assert [alarm.name for alarm in alarms] == names
    assert told in " ".join(alarm.text for alarm in alarms)
    assert [alarm.fatal for alarm in alarms] == [name == "kl" for name in names]


@pytest.mark.parametrize(
    ("log_ratio", "kl", "dtype", "told"),
    [
        (5e-5, 1e-9, torch.float32, []),
        (2e-4, 1e-9, torch.float32, ["log ratio is 0.0002"]),
        (math.nan, math.nan, torch.float32, ["log ratio is nan"]),
        (0.4, 5e-4, torch.bfloat16, []),
        (0.4, 3e-3, torch.bfloat16, ["kl is 0.003"]),
        (math.nan, math.nan, torch.bfloat16, ["kl is nan"]),
    ],
)
def test_updates(log_ratio: float, kl: float, dtype: torch.dtype, told: list[str]) -> None:
    alarms = guards.of_update({"first_log_ratio": log_ratio, "first_kl": kl}, dtype)
    assert len(alarms) == len(told)
    assert all(text in alarm.text and not alarm.fatal for text, alarm in zip(told, alarms, strict=True))
