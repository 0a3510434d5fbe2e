"""Our verdicts beside the harness's: what it read is given by hand."""

from __future__ import annotations

import pytest

from bench.verdicts import Verdict, difference, tables, verdict
from rlhf.data.answers import Method


@pytest.mark.parametrize(
    ("response", "method", "read", "why"),
    [
        ("#### 18.", "strict", "18.", ""),
        ("#### 1,200", "strict", "1,200", ""),
        ("no number", "strict", "", ""),
        ("#### $5", "strict", "", "behind marker"),
        ("#### 140 / 140 = 1", "strict", "140", "behind marker"),
        ("#### 12, 5, 4", "strict", "12,", "refused"),
        ("5 + 5", "flexible", "5", "refused"),
        ("#### 9\n\nThe answer is 9.\n#### 3", "flexible", "3", "marker"),
        ("so he has 3/4", "flexible", "4", "whole number"),
        ("so he has 18", "flexible", "18", ""),
    ],
)
def test_why_two_numbers_differ(response: str, method: Method, read: str, why: str) -> None:
    assert difference(response, method, read) == why


def test_a_row_and_its_place_in_the_tables() -> None:
    row = {"response": "in all\n#### $5", "gold": "5"}
    one = verdict("as it comes", 3, "strict", row, {"right": False, "read": "[invalid]"})
    expected = ("as it comes", 3, "strict", "5", True, False, "5", "", "behind marker", "in all #### $5")
    assert one == Verdict(*expected)
    other = verdict("as it comes", 3, "flexible", row, {"right": True, "read": "5"})
    assert (other.ours, other.harness, other.difference, other.end) == (True, True, "", "")
    text = tables([one, other])
    assert "| as it comes | strict | 0 | 1 | 0 | 0 |" in text
    assert "| as it comes | flexible | 1 | 0 | 0 | 0 |" in text
    assert "| behind marker | 1 | 0 |" in text
