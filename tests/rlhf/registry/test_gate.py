"""The gate's verdicts, with p-values worked out by hand: P(X >= gained) for X ~ Binomial(gained + lost, 1/2)."""

from __future__ import annotations

import pytest

from rlhf.evaluation.statistics import PairedTable
from rlhf.registry.gate import Candidate, Champion, judge, kl_of_selected
from tests.registered import GATE, candidate, right


def table(gained: int, lost: int) -> Candidate:
    """A policy known by what it gained and lost on 100 problems."""
    return Candidate(PairedTable(30, gained, lost, 70 - gained - lost), right(30 + gained), 0.0, 0.0, 0.0)


def test_a_clear_gain_passes():
    verdict = judge(table(gained=5, lost=0), None, GATE)
    assert verdict.passed
    assert verdict.reasons == ()
    assert verdict.merits == "gain on gate +5.0 points, p 0.031"  # 1/32


@pytest.mark.parametrize(
    ("gained", "lost", "reason"),
    [
        (4, 0, "gain on gate +4.0 points, not significant: p 0.062, above 0.05"),  # 1/16
        (0, 0, "gain on gate +0.0 points, not significant: p 1, above 0.05"),
        (2, 3, "gain on gate -1.0 points, below 0"),
    ],
)
def test_what_may_be_luck_is_refused(gained, lost, reason):
    assert judge(table(gained, lost), None, GATE).reasons == (reason,)


def test_the_least_gain_is_asked_for_beside_the_test():
    gate = GATE.model_copy(update={"min_gain": 0.05})
    assert judge(table(5, 0), None, gate).passed
    assert judge(table(20, 16), None, gate).reasons == ("gain on gate +4.0 points, below 5",)


def test_a_level_of_one_asks_for_no_test():
    assert judge(table(0, 0), None, GATE.model_copy(update={"alpha": 1.0})).passed


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        ({"kl": 20.04}, "KL 20.0 nats a sequence, above 20"),
        ({"cut_off": 0.5}, "50.0 % of its answers cut off, above 10.0 %"),
        ({"parse_failures": 0.11}, "11.0 % of its answers without a number, above 10.0 %"),
    ],
)
def test_each_limit_refuses_by_itself(measured, reason):
    assert judge(candidate(80, **measured), None, GATE).reasons == (reason,)


def test_what_is_at_a_limit_passes():
    assert judge(candidate(80, kl=20.0, cut_off=0.1, parse_failures=0.1), None, GATE).passed
    assert judge(candidate(80, kl=1e9), None, GATE.model_copy(update={"max_kl": None})).passed


def test_all_reasons_are_given():
    reasons = judge(candidate(10, kl=30, cut_off=1, parse_failures=1), Champion("2", right(90)), GATE).reasons
    assert [reason.split()[0] for reason in reasons] == ["gain", "KL", "100.0", "100.0", "not"]


# --- against the champion


def test_a_champion_that_is_beaten_significantly_is_named_among_the_merits():
    verdict = judge(candidate(65), Champion("2", right(60)), GATE)
    assert verdict.passed
    assert (
        verdict.merits == "gain on gate +45.0 points, p 2.8e-14; better than champion version 2: +5.0 points, p 0.031"
    )


@pytest.mark.parametrize(
    ("count", "reason"),
    [
        (64, "not better than champion version 2: +4.0 points, p 0.062, above 0.05"),
        (60, "not better than champion version 2: +0.0 points, p 1"),
        (50, "not better than champion version 2: -10.0 points, p 1"),
    ],
)
def test_a_champion_that_is_not_beaten_stays(count, reason):
    assert judge(candidate(count), Champion("2", right(60)), GATE).reasons == (reason,)


def test_a_champions_level_of_one_asks_for_more_right_answers_alone():
    gate = GATE.model_copy(update={"champion_alpha": 1.0})
    assert judge(candidate(61), Champion("2", right(60)), gate).passed
    assert not judge(candidate(60), Champion("2", right(60)), gate).passed
    assert not judge(candidate(59), Champion("2", right(60)), gate).passed


def test_splits_that_differ_are_compared_where_they_overlap():
    # The champion saw problems 0 to 99, 60 right; the candidate 40 to 139, of which 40 to 99 are right.
    verdict = judge(candidate(60, start=40), Champion("2", right(60)), GATE)
    assert verdict.passed
    assert verdict.merits.endswith("champion version 2: +66.7 points on the 60 problems that both answered, p 9.1e-13")


@pytest.mark.parametrize(
    ("champions", "reason"),
    [
        (right(60, start=1000), "which answered none of these 100 problems"),
        (None, "whose answers to the gate's problems are gone"),
    ],
)
def test_without_a_comparison_nobody_is_crowned(champions, reason):
    (given,) = judge(candidate(99), Champion("2", champions), GATE).reasons
    assert given == (
        f"nothing to compare with champion version 2, {reason}: promote this version by hand if it is the better one"
    )


# --- what the gate looks at


def test_the_numbers_come_from_the_gate_split():
    split = {
        "paired": {"both_right": 1, "gained": 2, "lost": 3, "both_wrong": 4},
        "cut_off": {"sft": 0.9, "policy": 0.25},
        "parse_failures": {"sft": 0.9, "policy": 0.5},
    }
    expected = Candidate(PairedTable(1, 2, 3, 4), {"a": True}, 1.5, 0.25, 0.5)
    assert Candidate.of(split, {"a": True}, 1.5) == expected


def test_other_numbers_or_other_rules_are_other_evidence():
    seen = candidate(60).fingerprint(GATE)
    assert candidate(60).fingerprint(GATE) == seen
    others = [candidate(61), candidate(60, start=1), candidate(60, kl=2), candidate(60, cut_off=0.01)]
    stricter = GATE.model_copy(update={"max_kl": 3.0})
    assert len({seen, candidate(60).fingerprint(stricter), *(other.fingerprint(GATE) for other in others)}) == 6


CURVE = "iteration,score,kl_sequence\n0,,\n1,0.1,0\n2,0.2,0.5\n3,0.3,0.75\n"


@pytest.mark.parametrize(("iteration", "kl"), [(0, 0.0), (1, 0.5), (2, 0.75), (3, 0.75)])
def test_the_kl_is_that_of_the_selected_policys_own_samples(iteration, kl):
    """Those that the next iteration drew; after the last one there is none, and its own have to do."""
    assert kl_of_selected(CURVE, iteration) == kl
