"""Whether a policy was reproduced: a pure function of what was made then and what is made now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf.evaluation.wording import accuracy, percent
from rlhf.machine import DECISIVE

POLICY = "models/policy"


@dataclass(frozen=True)
class Made:
    """What a run of the pipeline made."""

    outs: Mapping[str, str]
    """md5 of each output that was made, by its path."""
    machine: Mapping[str, str]
    """What the policy was trained on; empty where nobody knows."""
    evaluation: Mapping[str, Any]
    """`metrics/evaluation.json`."""


@dataclass(frozen=True)
class Comparison:
    """The outcome, as a verdict with its reasons."""

    reproduced: bool
    """The same policy hash for hash; or another one, as another machine makes it, whose accuracy is the version's."""
    verdict: str
    details: tuple[str, ...]


def compare(then: Made, now: Made) -> Comparison:
    """Compares hashes; where the policy's differ, the machines, and the accuracy with the interval that it had then."""
    same = then.outs[POLICY] == now.outs.get(POLICY)
    others = [path for path, md5 in sorted(now.outs.items()) if path != POLICY and then.outs.get(path) != md5]
    differing = tuple(f"another hash: {path}" for path in others)
    if same:
        return Comparison(True, f"reproduced: the same policy, hash for hash ({then.outs[POLICY]})", differing)
    machines = machine_differences(then.machine, now.machine)
    policies = f"policy {then.outs[POLICY]} then, {now.outs.get(POLICY)} now"
    if not machines:
        return Comparison(False, f"not reproduced on the same kind of machine: {policies}", differing)
    within, accuracies = _accuracies(then.evaluation, now.evaluation)
    details = (policies, *machines, *accuracies, *differing)
    if within:
        return Comparison(True, "reproduced within its accuracy's interval, on another kind of machine", details)
    return Comparison(False, "not reproduced: another kind of machine, and another accuracy", details)


def machine_differences(then: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """What differs of that which decides bits, in words; that nobody knows the machine of then is a difference."""
    if not then:
        return ("machine: not known then",)
    return tuple(
        f"{key}: {then.get(key, 'none')} then, {now.get(key, 'none')} now"
        for key in DECISIVE
        if then.get(key) != now.get(key)
    )


def _accuracies(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """Whether the accuracy on every split lies within the interval that it had then, and the numbers in words."""
    if not then:
        return False, ("accuracy: not kept with this version",)
    pairs = {split: (found["policy"], now[split]["policy"]) for split, found in then.items()}
    lines = (f"{split}: {percent(new['accuracy'])} now, {accuracy(old)} then" for split, (old, new) in pairs.items())
    return all(old["low"] <= new["accuracy"] <= old["high"] for old, new in pairs.values()), tuple(lines)
