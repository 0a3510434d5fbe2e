"""The gate: whether a candidate may become champion. Pure: what was measured goes in, a verdict with reasons comes out.

A candidate has to beat its SFT start and the reigning champion on problems of the gate split, which nothing was trained
or selected on: by McNemar's exact test, one-sided, on the same problems.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from rlhf.evaluation.right_answers import RightAnswers, compare_common
from rlhf.evaluation.statistics import PairedTable, mcnemar_p_value
from rlhf.evaluation.wording import percent, signed_points
from rlhf.params import Gate


@dataclass(frozen=True)
class Candidate:
    """What is known of a policy that knocks at the gate."""

    against_sft: PairedTable
    """On the gate split, before is the SFT start."""
    right: RightAnswers
    """On the gate split."""
    kl: float
    """To the SFT start, nats a sampled sequence."""
    cut_off: float
    """Share of its answers on the gate split that the length limit ended."""
    parse_failures: float
    """Share of its answers on the gate split without a number."""

    @classmethod
    def of(cls, gate_split: Mapping[str, Any], right: RightAnswers, kl: float) -> Candidate:
        """From the gate split in `metrics/evaluation.json`."""
        return cls(
            against_sft=PairedTable(**{name: int(count) for name, count in gate_split["paired"].items()}),
            right=right,
            kl=kl,
            cut_off=float(gate_split["cut_off"]["policy"]),
            parse_failures=float(gate_split["parse_failures"]["policy"]),
        )

    def fingerprint(self, gate: Gate) -> str:
        """Equal only where the gate would look at the same numbers by the same rules."""
        seen = json.dumps([asdict(self), gate.model_dump()], sort_keys=True)
        return sha256(seen.encode()).hexdigest()


@dataclass(frozen=True)
class Champion:
    """The version that reigns; `right` is None where its answers to the gate's problems are gone."""

    number: str
    right: RightAnswers | None


@dataclass(frozen=True)
class Verdict:
    """What the gate decides: it passes whoever it has no reason against."""

    reasons: tuple[str, ...]
    merits: str
    """The comparisons that were made, in words."""

    @property
    def passed(self) -> bool:
        return not self.reasons


def judge(candidate: Candidate, champion: Champion | None, gate: Gate) -> Verdict:
    """The verdict on `candidate`; without a champion only the SFT start has to be beaten."""
    table = candidate.against_sft
    p_value = mcnemar_p_value(table)
    reasons = []
    if table.gain < gate.min_gain:
        reasons.append(f"gain on gate {signed_points(table.gain)} points, below {_number(100 * gate.min_gain)}")
    elif p_value > gate.alpha:
        reasons.append(
            f"gain on gate {signed_points(table.gain)} points, not significant: p {p_value:.2g}, above {gate.alpha}"
        )
    if gate.max_kl is not None and candidate.kl > gate.max_kl:
        reasons.append(f"KL {candidate.kl:.1f} nats a sequence, above {_number(gate.max_kl)}")
    if candidate.cut_off > gate.max_cut_off:
        reasons.append(f"{percent(candidate.cut_off)} of its answers cut off, above {percent(gate.max_cut_off)}")
    if candidate.parse_failures > gate.max_parse_failures:
        share, limit = percent(candidate.parse_failures), percent(gate.max_parse_failures)
        reasons.append(f"{share} of its answers without a number, above {limit}")
    merits = [f"gain on gate {signed_points(table.gain)} points, p {p_value:.2g}"]
    if champion:
        better, words = _beats(candidate.right, champion, gate.champion_alpha)
        (merits if better else reasons).append(words)
    return Verdict(tuple(reasons), "; ".join(merits))


def kl_of_selected(curve: str, iteration: int) -> float:
    """KL of the policy after `iteration` PPO iterations to its SFT start, nats a sampled sequence.

    `curve` is the text of `plots/ppo.csv`. An iteration samples before it updates, so the policy's own samples are
    those of the iteration after it; for the last one, whose samples nobody drew, those before its update have to do.
    """
    if iteration == 0:
        return 0.0
    rows = {int(row["iteration"]): row for row in csv.DictReader(io.StringIO(curve))}
    return float(rows[min(iteration + 1, max(rows))]["kl_sequence"])


def _beats(right: RightAnswers, champion: Champion, alpha: float) -> tuple[bool, str]:
    """Whether the candidate has more of the common problems right than the champion, and significantly so."""
    name = f"champion version {champion.number}"
    remedy = "promote this version by hand if it is the better one"
    if champion.right is None:
        return False, f"nothing to compare with {name}, whose answers to the gate's problems are gone: {remedy}"
    table = compare_common(champion.right, right)
    if not table.n:
        return False, f"nothing to compare with {name}, which answered none of these {len(right)} problems: {remedy}"
    shared = "" if table.n == len(right) == len(champion.right) else f" on the {table.n} problems that both answered"
    p_value = mcnemar_p_value(table)
    words = f"{name}: {signed_points(table.gain)} points{shared}, p {p_value:.2g}"
    if table.gained > table.lost and p_value <= alpha:
        return True, f"better than {words}"
    limit = f", above {alpha}" if table.gained > table.lost else ""
    return False, f"not better than {words}{limit}"


def _number(value: float) -> str:
    return f"{value:g}"
