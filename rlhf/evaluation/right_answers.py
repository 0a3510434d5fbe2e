"""Which problems of a split a policy got right: small enough to go with it, for paired tests with later policies.

    problem,strict,flexible          one row a problem; 1 where the answer is right by that method of the verifier

A problem is known by a hash of its question and its right answer, so that two files can be compared wherever they share
problems, and a problem whose right answer was corrected is another one.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

from rlhf.evaluation.statistics import PairedTable, paired_table

if TYPE_CHECKING:
    from rlhf.evaluation.accuracy import Graded

METHODS = ("strict", "flexible")

RightAnswers = Mapping[str, bool]
"""Problem → whether the policy got it right."""


def problem_id(question: str, gold: str) -> str:
    """By what a problem is known: 16 hexadecimal digits."""
    return sha256(f"{question}\n{gold}".encode()).hexdigest()[:16]


def right_answers_csv(graded: Sequence[Graded]) -> str:
    """The file's text, problems in their order."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["problem", *METHODS])
    writer.writerows([problem_id(row.question, row.gold), int(row.strict), int(row.flexible)] for row in graded)
    return text.getvalue()


def read_right_answers(text: str, method: str) -> dict[str, bool]:
    """What the file says under `verifier.method`; raises ValueError where it is none."""
    rows = list(csv.DictReader(io.StringIO(text)))
    if not rows or any(row.get(method) not in ("0", "1") or not row.get("problem") for row in rows):
        raise ValueError(f"no rows of problem,{','.join(METHODS)} with 0 and 1")
    return {row["problem"]: row[method] == "1" for row in rows}


def compare_common(before: RightAnswers, after: RightAnswers) -> PairedTable:
    """Counts over the problems that both have answered; of none where they share none."""
    common = sorted(before.keys() & after.keys())
    return paired_table([before[problem] for problem in common], [after[problem] for problem in common])
