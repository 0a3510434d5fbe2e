"""The data gate: each expectation has data that fails it, and only it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.data.expectations import MIN_ROWS, Verdict, validate
from rlhf.data.gsm8k import SPLITS, Problem, Splits, make_problem
from rlhf.errors import UserError

CHECKS = {
    "there are at least {rows} rows",
    "question is not empty",
    "answer is not empty",
    "demonstration is not empty",
    "the answer ends in a readable number",
    "the question has 10 to 4000 characters",
    "no question comes twice",
    "gold is a number",
    "the answer holds exactly one ####",
    "the demonstration ends in a #### line",
}


def rows(split: str, count: int) -> list[Problem]:
    return [make_problem(f"How many is {split} {i}?", f"It is {i}.\n#### {i}", "test") for i in range(count)]


def sound() -> Splits:
    return {split: rows(split, MIN_ROWS[split]) for split in SPLITS}


def failures(verdict: Verdict) -> dict[tuple[str, str], tuple[int, list[int]]]:
    found = {(f.split, f.expectation): (f.count, [number for number, _ in f.rows]) for f in verdict.failures}
    for split, numbers in verdict.numbers["splits"].items():
        for name, result in numbers["expectations"].items():
            assert result["success"] is ((split, name) not in found)
            assert result["unexpected"] == found.get((split, name), (0,))[0]
    assert verdict.numbers["success"] is not bool(found)
    return found


def test_sound_data_passes_every_expectation(tmp_path: Path) -> None:
    verdict = validate(sound(), tmp_path / "docs")
    verdict.refuse_failures(tmp_path / "docs")
    assert failures(verdict) == {}
    for split in SPLITS:
        numbers = verdict.numbers["splits"][split]
        assert numbers["rows"] == MIN_ROWS[split]
        leaks = {f"the question is not in {', '.join(SPLITS[: SPLITS.index(split)])}"} if split != "train" else set()
        assert set(numbers["expectations"]) == {check.format(rows=MIN_ROWS[split]) for check in CHECKS} | leaks
    assert (tmp_path / "docs" / "index.html").is_file()


@pytest.mark.parametrize(
    ("broken", "expectation"),
    [
        ({"question": ""}, "question is not empty"),
        ({"question": " \n\t\u00a0"}, "question is not empty"),
        ({"question": "2+3?"}, "the question has 10 to 4000 characters"),
        ({"question": "a" * 4001}, "the question has 10 to 4000 characters"),
        ({"question": "How many is gate 0?"}, "no question comes twice"),
        ({"gold": None}, "the answer ends in a readable number"),
        ({"gold": "twelve"}, "gold is a number"),
        ({"gold": "1,234"}, "gold is a number"),
        ({"gold": "12 dollars"}, "gold is a number"),
        ({"answer": "It is 5."}, "the answer holds exactly one ####"),
        ({"answer": "#### 5\n#### 5"}, "the answer holds exactly one ####"),
        ({"demonstration": ""}, "demonstration is not empty"),
        ({"demonstration": "It is 5."}, "the demonstration ends in a #### line"),
        ({"demonstration": "#### 5\nIt is 5."}, "the demonstration ends in a #### line"),
        ({"demonstration": "It is 5.\n#### five"}, "the demonstration ends in a #### line"),
    ],
)
def test_each_expectation_has_data_that_fails_it_alone(
    tmp_path: Path, broken: dict[str, str | None], expectation: str
) -> None:
    splits = sound()
    splits["gate"][3] = replace(splits["gate"][3], **broken)  # type: ignore[arg-type]
    at_fault = (2, [0, 3]) if expectation == "no question comes twice" else (1, [3])
    assert failures(validate(splits, tmp_path)) == {("gate", expectation): at_fault}


def test_an_empty_answer_fails_twice(tmp_path: Path) -> None:
    splits = sound()
    splits["test"][2] = replace(splits["test"][2], answer=" ")
    found = failures(validate(splits, tmp_path))
    assert set(found) == {("test", "answer is not empty"), ("test", "the answer holds exactly one ####")}


@pytest.mark.parametrize(
    ("split", "other", "earlier"),
    [
        ("validation", "train", "train"),
        ("gate", "train", "train, validation"),
        ("test", "train", "train, validation, gate"),
        ("test", "gate", "train, validation, gate"),
    ],
)
def test_a_question_in_an_earlier_split_fails(tmp_path: Path, split: str, other: str, earlier: str) -> None:
    splits = sound()
    leaked = splits[other][1].question.upper().replace(" ", "  ")
    splits[split][5] = replace(splits[split][5], question=leaked)
    assert failures(validate(splits, tmp_path)) == {(split, f"the question is not in {earlier}"): (1, [5])}


def test_too_few_rows_fail(tmp_path: Path) -> None:
    splits = sound()
    splits["test"] = splits["test"][:-1]
    verdict = validate(splits, tmp_path)
    assert failures(verdict) == {("test", "there are at least 8 rows"): (0, [])}
    with pytest.raises(UserError, match=r"test: expected that there are at least 8 rows: there are 7"):
        verdict.refuse_failures(tmp_path)


def message(splits: Splits, docs: Path) -> Sequence[str]:
    with pytest.raises(UserError) as caught:
        validate(splits, docs).refuse_failures(docs)
    return str(caught.value).splitlines()


def test_the_message_names_expectation_split_count_and_rows(tmp_path: Path) -> None:
    splits = sound()
    for i in range(4, 9):
        splits["train"][i] = replace(splits["train"][i], demonstration="x", question=f"Question {i} " + "long " * 30)
    splits["gate"][0] = replace(splits["gate"][0], gold="many")
    first, train, gate = message(splits, tmp_path)
    page = tmp_path / "index.html"
    assert first == f"data: 2 expectations failed: correct these rows ({page} shows more)"
    assert train == (
        "  train: expected that the demonstration ends in a #### line: 5 of its rows fail: "
        "row 4 'Question 4 long long long long long long long long long lon\u2026', "
        "row 5 'Question 5 long long long long long long long long long lon\u2026', "
        "row 6 'Question 6 long long long long long long long long long lon\u2026', and 2 more"
    )
    assert gate == "  gate: expected that gold is a number: 1 of its rows fail: row 0 'How many is gate 0?'"


def test_the_verdict_is_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        validate(sound(), tmp_path / f"docs-{name}").write(tmp_path / f"{name}.json")
    text = (tmp_path / "a.json").read_text()
    assert text == (tmp_path / "b.json").read_text()
    assert text.endswith("}\n")
    assert json.loads(text)["success"] is True
    assert str(tmp_path) not in text


def test_an_expectation_that_cannot_be_evaluated_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import great_expectations.expectations.core as gxe
    from great_expectations.expectations.expectation import Expectation

    def unknown_column(split: str, min_rows: int) -> list[Expectation]:
        return [gxe.ExpectColumnValuesToNotBeNull(column="absent", notes=f"{split} {min_rows}")]

    monkeypatch.setattr("rlhf.data.expectations.expectations", unknown_column)
    with pytest.raises(UserError, match=r"train: train 32: cannot be evaluated: .*absent"):
        validate(sound(), tmp_path)
