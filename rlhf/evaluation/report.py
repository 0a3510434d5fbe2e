"""The evaluation as one page for people: self-contained, no script, nothing loaded from outside."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rlhf.evaluation import charts
from rlhf.evaluation.accuracy import Graded
from rlhf.evaluation.divergence import Divergence
from rlhf.evaluation.length_buckets import LengthBucket
from rlhf.evaluation.wording import p_value, percent

TEMPLATE = Path(__file__).with_name("report.html.j2")

ANSWER = ("response", "correct", "parsed", "finished", "length")
"""What a table says of each answer."""

Table = tuple[list[str], list[list[object]]]
"""Columns and rows."""

OUTCOMES = {
    "gained": "Wrong before, right after PPO",
    "lost": "Right before, wrong after PPO",
    "both_wrong": "Wrong both times",
    "both_right": "Right both times",
}


@dataclass(frozen=True)
class Sample:
    """One problem with both models' answers; `outcome` is a key of OUTCOMES."""

    outcome: str
    sft: Graded
    policy: Graded


@dataclass(frozen=True)
class PanelRun:
    """The same answer at all validations from iteration `first` to `last`."""

    first: int
    last: int
    response: str
    correct: bool


@dataclass(frozen=True)
class PanelProblem:
    """A problem of the panel with its answers through training."""

    question: str
    gold: str
    runs: list[PanelRun]


@dataclass(frozen=True)
class Checkpoint:
    """What the page says of a checkpoint's lineage; `sha256` is the hash of its manifest."""

    name: str
    sha256: str
    manifest: Mapping[str, Any]


def outcome(sft: Graded, policy: Graded) -> str:
    """The cell of the paired table that a problem falls into."""
    if sft.correct:
        return "both_right" if policy.correct else "lost"
    return "gained" if policy.correct else "both_wrong"


def pick_samples(sft: Sequence[Graded], policy: Sequence[Graded], count: int) -> list[Sample]:
    """`count` problems, as evenly over the four outcomes as they allow, in the order of OUTCOMES.

    Within an outcome the hash of the question decides: the same problems each time, from anywhere in the file.
    """
    samples = [Sample(outcome(before, after), before, after) for before, after in zip(sft, policy, strict=True)]
    samples.sort(key=lambda sample: sha256(sample.sft.question.encode()).digest())
    queues = [[sample for sample in samples if sample.outcome == name] for name in OUTCOMES]
    in_turn = [sample for turn in zip_longest(*queues) for sample in turn if sample]
    return sorted(in_turn[:count], key=lambda sample: list(OUTCOMES).index(sample.outcome))


def panel_problems(rows: Sequence[Mapping[str, str]]) -> list[PanelProblem]:
    """The rows of `plots/panel.csv`, problem by problem in their order; equal answers in a row are one run."""
    by_problem: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for row in rows:
        by_problem.setdefault((row["question"], row["gold"]), []).append(row)
    return [PanelProblem(question, gold, _runs(answers)) for (question, gold), answers in by_problem.items()]


def _runs(answers: Sequence[Mapping[str, str]]) -> list[PanelRun]:
    runs = []
    for (response, correct), equal in groupby(answers, key=lambda row: (row["response"], row["correct"])):
        iterations = [int(row["iteration"]) for row in equal]
        runs.append(PanelRun(iterations[0], iterations[-1], response, correct == "True"))
    return runs


def headline(test: Mapping[str, Any]) -> str:
    """One sentence of `metrics/evaluation.json`'s test split: both accuracies, the gain and its interval."""
    low, high = points(test["gain_low"]), points(test["gain_high"])
    return (
        f"SFT {percent(test['sft']['accuracy'])} → policy {percent(test['policy']['accuracy'])} "
        f"on {test['n']} test problems, gain {points(test['gain'])} points [{low}, {high}]"
    )


def verdict(test: Mapping[str, Any]) -> str:
    """What the test split's interval allows to say."""
    level = f"{100 * test['confidence']:g} %"
    if test["gain_low"] > 0:
        return f"The policy is better than its SFT start: the whole {level} interval of the gain lies above zero."
    if test["gain_high"] < 0:
        return f"The policy is worse than its SFT start: the whole {level} interval of the gain lies below zero."
    return f"No difference is shown: the {level} interval of the gain holds zero."


def points(share: float) -> str:
    """A difference of shares in percentage points, with a real minus sign."""
    text = f"{abs(100 * share):.1f}"
    return f"−{text}" if share < 0 and float(text) else text


def tokens(bucket: LengthBucket) -> str:
    """The lengths in a bucket: "31–48"."""
    return f"{bucket.shortest}–{bucket.longest}" if bucket.shortest < bucket.longest else str(bucket.shortest)


def visible(text: str) -> str:
    """The text of a token with its white space to be seen."""
    for unseen, seen in {" ": "␣", "\n": "↵", "\t": "⇥"}.items():
        text = text.replace(unseen, seen)
    return text or "∅"


def results_table(sft: Mapping[str, Sequence[Graded]], policy: Mapping[str, Sequence[Graded]]) -> Table:
    """Every problem of each split with both answers: the columns, and a row a problem."""
    columns = ["split", "question", "gold", "outcome", "too_long"]
    columns += [f"{name}_{key}" for name in ("sft", "policy") for key in ANSWER]
    rows: list[list[object]] = []
    for split in sft:
        for before, after in zip(sft[split], policy[split], strict=True):
            row = [split, before.question, before.gold, outcome(before, after), before.too_long]
            rows.append(row + [getattr(graded, key) for graded in (before, after) for key in ANSWER])
    return columns, rows


def answers_table(split: str, policy: Sequence[Graded]) -> Table:
    """`results_table` of one split, where the policy is evaluated alone."""
    columns = ["split", "question", "gold", "too_long", *(f"policy_{key}" for key in ANSWER)]
    answers = [[getattr(row, key) for key in ANSWER] for row in policy]
    return columns, [
        [split, row.question, row.gold, row.too_long, *answer] for row, answer in zip(policy, answers, strict=True)
    ]


def render(
    metrics: Mapping[str, Any],
    ppo: Mapping[str, Any],
    iterations: Sequence[charts.Row],
    buckets: Sequence[LengthBucket],
    divergence: Divergence,
    panel: Sequence[PanelProblem],
    samples: Sequence[Sample],
    checkpoints: Sequence[Checkpoint],
    params: Mapping[str, Any],
) -> str:
    """The page's HTML.

    `metrics` is `metrics/evaluation.json`, `ppo` is `metrics/ppo.json`, and `iterations` are the rows of
    `plots/ppo.csv` as text. Everything that a model or a data set wrote is escaped.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        percent=percent, points=points, p_value=p_value, visible=visible, tokens=tokens, indented=_indented
    )
    return environment.get_template(TEMPLATE.name).render(
        headline=headline(metrics["test"]),
        verdict=verdict(metrics["test"]),
        metrics=metrics,
        ppo=ppo,
        iterations=iterations,
        charts=charts.ppo_charts(iterations, marked=ppo["best_iteration"] or None),
        canvas=charts,
        buckets=buckets,
        divergence=divergence,
        panel=panel,
        samples=samples,
        outcomes=OUTCOMES,
        checkpoints=checkpoints,
        params=params,
    )


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file as text."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _indented(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
