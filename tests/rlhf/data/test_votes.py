"""The majority's vote, by hand."""

from __future__ import annotations

from rlhf.data.votes import majority


def test_the_majority_and_its_ties() -> None:
    assert majority(["3", "4", "4", "3"]) == "3"
    assert majority(["3", "4", None, "4", None, None]) == "4"
    assert majority([None, None]) is None
