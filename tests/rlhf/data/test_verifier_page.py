"""The tables of docs/verifier.md, row by row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf.data.answers import canonical, extract_answer

PAGE = Path(__file__).parents[3] / "docs" / "verifier.md"


def rows(title: str) -> list[tuple[str, str]]:
    """The code in the first and in the second cell of each row below a title; empty where a cell has none."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    cells = ([cell.strip() for cell in re.split(r"(?<= )\|(?= )", line.strip("|") + " ")] for line in lines)
    return [(first.strip("`"), second.strip("`")) for first, second, *_ in cells]


@pytest.mark.parametrize(("text", "number"), rows("What is read"))
def test_what_is_read(text: str, number: str) -> None:
    read = extract_answer(f"#### {text}")
    assert read is not None and canonical(read) == number


@pytest.mark.parametrize(("text", "why"), rows("What is refused"))
def test_what_is_refused(text: str, why: str) -> None:
    assert why and extract_answer(f"#### {text}") is None


@pytest.mark.parametrize(("text", "number"), rows("Flexible"))
def test_what_is_read_without_a_marker(text: str, number: str) -> None:
    read = extract_answer(text, "flexible")
    assert ("" if read is None else canonical(read)) == number
    assert extract_answer(text) is None


def test_no_table_was_overlooked() -> None:
    assert [len(rows(title)) for title in ("What is read", "What is refused", "Flexible")] == [35, 19, 6]
