from __future__ import annotations

import csv
from dataclasses import replace
from itertools import pairwise

import pytest

from rlhf.evaluation.accuracy import Graded
from rlhf.evaluation.length_buckets import bucket_rows, buckets_csv, length_buckets
from rlhf.evaluation.statistics import compare


def test_different_lengths_fall_into_equal_parts() -> None:
    assert bucket_rows([50, 10, 80, 30, 70, 20, 60, 40], 4) == [[1, 5], [3, 7], [0, 6], [2, 4]]


def test_ties_stay_together() -> None:
    # Behind one shorter row the five of length 7 have their middle at 3.5 of 8 rows: the second quarter.
    assert bucket_rows([7, 7, 3, 7, 9, 7, 7, 8], 4) == [[2], [0, 1, 3, 5, 6], [4, 7]]
    assert bucket_rows([5] * 9, 4) == [list(range(9))]


@pytest.mark.parametrize("lengths", [[1], [2, 1], [1, 1, 2], [3, 1, 2, 2, 2, 9, 9, 9, 9, 4], list(range(101))])
def test_every_row_is_in_one_bucket_and_no_length_in_two(lengths: list[int]) -> None:
    buckets = bucket_rows(lengths, 4)
    assert sorted(row for rows in buckets for row in rows) == list(range(len(lengths)))
    assert 1 <= len(buckets) <= 4
    spans = [[lengths[row] for row in rows] for rows in buckets]
    assert all(max(before) < min(after) for before, after in pairwise(spans))


def graded(question: str, correct: bool, length: int, finished: bool = True) -> Graded:
    return Graded(question, "1", "", correct, correct, correct, True, finished, [3], [5] * length, False)


LENGTHS = [10, 40, 10, 41, 20, 30, 21, 31]
SFT = [graded(f"q{n}", n in (0, 1, 2), 4 + n, finished=n != 3) for n in range(8)]
POLICY = [graded(f"q{n}", n in (0, 1, 3, 4), 10) for n in range(8)]
KLS = [0.5, 2.0, 1.5, 3.0, 0.0, 0.25, 0.25, 0.75]


def test_a_bucket_compares_its_own_problems() -> None:
    buckets = length_buckets(LENGTHS, SFT, POLICY, KLS, 0.9)
    assert [(bucket.shortest, bucket.longest, bucket.n) for bucket in buckets] == [
        (10, 10, 2),
        (20, 21, 2),
        (30, 31, 2),
        (40, 41, 2),
    ]
    first, last = buckets[0], buckets[-1]
    assert (first.sft_accuracy, first.policy_accuracy, first.gain) == (1.0, 0.5, -0.5)
    assert (last.sft_accuracy, last.policy_accuracy, last.gain) == (0.5, 1.0, 0.5)
    alone = compare([SFT[1], SFT[3]], [POLICY[1], POLICY[3]], "strict", 0.9)
    assert (last.gain_low, last.gain_high) == (alone["gain_low"], alone["gain_high"])
    assert (last.sft_cut_off, last.policy_cut_off) == (0.5, 0.0)
    assert (last.sft_length, last.policy_length) == (6.0, 10.0)  # (5 + 7) / 2
    assert (first.kl, last.kl) == (1.0, 2.5)


def test_a_prompt_that_was_too_long_counts_as_an_empty_answer() -> None:
    empty = replace(POLICY[0], tokens=[], prompt=[], correct=False, too_long=True)
    first = length_buckets(LENGTHS, SFT, [empty, *POLICY[1:]], [0.0, *KLS[1:]], 0.95)[0]
    assert (first.policy_length, first.kl, first.policy_accuracy) == (5.0, 0.75, 0.0)


def test_the_table_has_a_row_a_bucket() -> None:
    buckets = length_buckets(LENGTHS, SFT, POLICY, KLS, 0.95)
    text = buckets_csv(buckets)
    rows = list(csv.DictReader(text.splitlines()))
    assert [{name: float(value) for name, value in row.items()} for row in rows] == [vars(bucket) for bucket in buckets]
    assert text.endswith("\n") and "\r" not in text
