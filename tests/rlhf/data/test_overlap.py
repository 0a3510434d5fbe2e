"""Overlap of texts."""

from __future__ import annotations

import pytest

from rlhf.data.overlap import all_grams, folded, shared

TEXT = "one two three four five six seven eight nine"


@pytest.mark.parametrize(
    "same",
    ["How MANY are 2,000 + 3?", "how many\nare  2,000 + 3", "(How many) are: 2,000 + 3!", "Ｈow many are ２,000 + 3"],
)
def test_case_spacing_punctuation_and_unicode_form_make_no_difference(same: str) -> None:
    assert folded(same) == "how many are 2,000 + 3"


@pytest.mark.parametrize("other", ["How many are 2.000 + 3?", "How many are 2,000 - 3?", "How many is 2,000 + 3?"])
def test_numbers_signs_and_words_make_one(other: str) -> None:
    assert folded(other) != folded("How many are 2,000 + 3?")


def test_the_share_of_grams_that_were_seen() -> None:
    seen = all_grams([TEXT, "ten eleven"])
    assert len(seen) == 2
    assert shared(TEXT.upper(), seen) == 1.0
    assert shared("zero " + TEXT.rpartition(" ")[0], seen) == 0.5  # one of its two grams
    assert shared("nine eight seven six five four three two one", seen) == 0.0
    assert shared("one two three four five six seven", seen) == 0.0  # too short to say
