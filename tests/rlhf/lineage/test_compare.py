"""When a policy counts as reproduced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhf.lineage.compare import Made, compare, machine_differences

MACHINE = {"processor": "P 9", "libc": "glibc 2.36", "python": "3.11.7", "torch": "2.15.0", "lock": "c1", "cores": "8"}


def evaluation(accuracy: float) -> dict[str, Any]:
    return {split: {"policy": {"accuracy": accuracy, "low": 0.5, "high": 0.75}} for split in ("gate", "test")}


THEN = Made({"models/policy": "p1.dir", "plots/ppo.csv": "c1", "models/reward": "r1"}, MACHINE, evaluation(0.625))
OTHER = {"models/policy": "p2.dir", "plots/ppo.csv": "c2"}


def test_the_same_hash_is_the_same_policy_whatever_the_machine():
    now = Made({"models/policy": "p1.dir", "plots/ppo.csv": "c1"}, {"processor": "Q"}, evaluation(0))
    found = compare(THEN, now)
    assert found.reproduced
    assert found.verdict == "reproduced: the same policy, hash for hash (p1.dir)"
    assert found.details == ()


def test_other_outputs_with_another_hash_are_named():
    found = compare(THEN, replace(THEN, outs=THEN.outs | {"plots/ppo.csv": "c2"}))
    assert found.reproduced
    assert found.details == ("another hash: plots/ppo.csv",)


def test_another_policy_on_the_same_kind_of_machine_is_no_reproduction():
    found = compare(THEN, Made(OTHER, MACHINE | {"cores": "64"}, evaluation(0.625)))
    assert not found.reproduced
    assert found.verdict == "not reproduced on the same kind of machine: policy p1.dir then, p2.dir now"
    assert found.details == ("another hash: plots/ppo.csv",)


@pytest.mark.parametrize(
    ("accuracy", "told", "reproduced"),
    [(0.5, "50.0 %", True), (0.75, "75.0 %", True), (0.499, "49.9 %", False), (0.751, "75.1 %", False)],
)
def test_elsewhere_its_accuracy_has_to_lie_in_the_interval(accuracy, told, reproduced):
    found = compare(THEN, Made(OTHER, MACHINE | {"processor": "Q 1"}, evaluation(accuracy)))
    assert found.reproduced is reproduced
    assert found.details == (
        "policy p1.dir then, p2.dir now",
        "processor: P 9 then, Q 1 now",
        f"gate: {told} now, 62.5 % [50.0, 75.0] then",
        f"test: {told} now, 62.5 % [50.0, 75.0] then",
        "another hash: plots/ppo.csv",
    )


def test_one_split_outside_is_enough():
    now = evaluation(0.625) | {"gate": evaluation(0.25)["gate"]}
    assert not compare(THEN, Made(OTHER, {}, now)).reproduced


def test_without_accuracies_of_then_nothing_is_shown():
    found = compare(replace(THEN, evaluation={}), Made(OTHER, {}, evaluation(0.625)))
    assert not found.reproduced
    assert "accuracy: not kept with this version" in found.details


def test_what_differs_between_machines():
    assert machine_differences(MACHINE, MACHINE) == ()
    assert machine_differences(MACHINE, MACHINE | {"gpu": "G"}) == ("gpu: none then, G now",)
    assert machine_differences({}, MACHINE) == ("machine: not known then",)
