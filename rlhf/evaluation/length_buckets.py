"""Test problems by the length of their solution: where the policy gains, and where it pays for it."""

from __future__ import annotations

import csv
import io
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean

from rlhf.evaluation.accuracy import Graded
from rlhf.evaluation.statistics import DECIMALS, gain_interval, paired_table

BUCKETS = 4


@dataclass(frozen=True)
class LengthBucket:
    """A row of `plots/length_buckets.csv`: the `n` problems whose gold rationale has `shortest` to `longest` tokens.

    Accuracies, the paired gain with its interval and cut-off are shares of all `n`; `*_length` is the mean of the
    response tokens and `kl` of the answers' `divergence.state_kls` sums in nats, in which a prompt that was too long
    counts 0.
    """

    shortest: int
    longest: int
    n: int
    sft_accuracy: float
    policy_accuracy: float
    gain: float
    gain_low: float
    gain_high: float
    sft_cut_off: float
    policy_cut_off: float
    sft_length: float
    policy_length: float
    kl: float


def bucket_rows(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Row numbers in `count` quantiles of `lengths`, the shortest first; there are fewer where few lengths differ.

    A row falls where the middle of all rows of its length does, so that ties stay together.
    """
    ordered = sorted(lengths)
    buckets: list[list[int]] = [[] for _ in range(count)]
    for row, length in enumerate(lengths):
        middle = (bisect_left(ordered, length) + bisect_right(ordered, length)) / 2
        buckets[int(count * middle / len(ordered))].append(row)
    return [rows for rows in buckets if rows]


def length_buckets(
    lengths: Sequence[int],
    sft: Sequence[Graded],
    policy: Sequence[Graded],
    kls: Sequence[float],
    confidence: float,
) -> list[LengthBucket]:
    """The problems in about `BUCKETS` rows; `lengths` are the gold rationales' tokens, `kls` each answer's nats."""
    return [
        _bucket(
            [lengths[row] for row in rows],
            [sft[row] for row in rows],
            [policy[row] for row in rows],
            [kls[row] for row in rows],
            confidence,
        )
        for rows in bucket_rows(lengths, BUCKETS)
    ]


def buckets_csv(buckets: Sequence[LengthBucket]) -> str:
    """`plots/length_buckets.csv`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(LengthBucket)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(bucket) for bucket in buckets)
    return text.getvalue()


def _bucket(
    lengths: Sequence[int], sft: Sequence[Graded], policy: Sequence[Graded], kls: Sequence[float], confidence: float
) -> LengthBucket:
    table = paired_table([row.correct for row in sft], [row.correct for row in policy])
    gain = gain_interval(table, confidence)
    return LengthBucket(
        shortest=min(lengths),
        longest=max(lengths),
        n=table.n,
        sft_accuracy=round(table.right_before / table.n, DECIMALS),
        policy_accuracy=round(table.right_after / table.n, DECIMALS),
        gain=round(table.gain, DECIMALS),
        gain_low=round(gain.low, DECIMALS),
        gain_high=round(gain.high, DECIMALS),
        sft_cut_off=round(fmean(row.cut_off for row in sft), DECIMALS),
        policy_cut_off=round(fmean(row.cut_off for row in policy), DECIMALS),
        sft_length=round(fmean(row.length for row in sft), DECIMALS),
        policy_length=round(fmean(row.length for row in policy), DECIMALS),
        kl=round(fmean(kls), DECIMALS),
    )
