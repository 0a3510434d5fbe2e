"""The data gate on prepared splits, and what is told of it: each expectation has data that fails it, and only it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.data import suites
from rlhf.data.expectations import Suite, Verdict, evaluate
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
OVERLAPS = "at most 25.0% of the questions share 80% of their 8-grams with train (data.max_overlap)"


def rows(split: str, count: int) -> list[Problem]:
    return [make_problem(f"How many is {split} {i}?", f"It is {i}.\n#### {i}", "test") for i in range(count)]


def sound() -> Splits:
    return {split: rows(split, suites.MIN_ROWS[split]) for split in SPLITS}


def validate(splits: Splits, docs: Path) -> Verdict:
    return evaluate(list(suites.prepared(splits, max_overlap=0.25)), docs)


def failures_told(verdict: Verdict) -> dict[tuple[str, str], tuple[int, list[int]]]:
    return {
        (f.title, f.expectation): (f.count, [int(name.removeprefix("row ")) for name, _ in f.rows])
        for f in verdict.failures
    }


def failures(verdict: Verdict) -> dict[tuple[str, str], tuple[int, list[int]]]:
    found = failures_told(verdict)
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
        assert numbers["rows"] == suites.MIN_ROWS[split]
        leaks = (
            {f"the question is not in {', '.join(SPLITS[: SPLITS.index(split)])}", OVERLAPS}
            if split != "train"
            else set()
        )
        assert set(numbers["expectations"]) == {check.format(rows=suites.MIN_ROWS[split]) for check in CHECKS} | leaks
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


@pytest.mark.parametrize(("leaked", "passes"), [(2, True), (3, False)])
def test_more_overlap_with_train_than_the_threshold_fails(tmp_path: Path, leaked: int, passes: bool) -> None:
    splits = sound()
    story = "Tom had many red apples in a box and gave some of them away to his sister"  # 17 words, ten 8-grams
    splits["train"][0] = replace(splits["train"][0], question=f"{story}.")
    for i in range(leaked):
        splits["test"][i] = replace(splits["test"][i], question=f"{story} {i}!")  # one gram of eleven is new
    found = failures_told(validate(splits, tmp_path))
    assert found == ({} if passes else {("test", OVERLAPS): (leaked, list(range(leaked)))})


def test_a_question_that_shares_less_is_another_question(tmp_path: Path) -> None:
    splits = sound()
    story = "Tom had many red apples in a box and gave some of them away to his sister"
    splits["train"][0] = replace(splits["train"][0], question=f"{story}.")
    for i in range(8):
        splits["test"][i] = replace(splits["test"][i], question=f"{story} {i} days ago, in the evening, did he not?")
    assert failures_told(validate(splits, tmp_path)) == {}


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
        validate(sound(), tmp_path / f"docs-{name}").write(tmp_path / f"{name}.json", ["splits"])
    text = (tmp_path / "a.json").read_text()
    assert text == (tmp_path / "b.json").read_text()
    assert text.endswith("}\n")
    assert json.loads(text)["success"] is True
    assert str(tmp_path) not in text


def test_an_expectation_that_cannot_be_evaluated_is_an_error(tmp_path: Path) -> None:
    import great_expectations.expectations.core as gxe
    from pandas import DataFrame

    check = gxe.ExpectColumnValuesToNotBeNull(column="absent", notes="it is there")
    suite = Suite("splits", "train", DataFrame({"question": ["a"]}), [check], lambda row: (f"row {row}", "a"))
    with pytest.raises(UserError, match=r"train: it is there: cannot be evaluated: .*absent"):
        evaluate([suite], tmp_path)


def test_the_summary_tells_counts_failures_and_what_is_within_its_threshold(tmp_path: Path) -> None:
    splits = sound()
    splits["gate"][0] = replace(splits["gate"][0], gold="many")
    story = "Tom had many red apples in a box and gave some of them away."
    splits["train"][0] = replace(splits["train"][0], question=story)
    splits["test"][0] = replace(splits["test"][0], question=f"So {story}")
    verdict = validate(splits, tmp_path)
    text = verdict.summary()
    assert text.startswith("# Data: 1 expectations failed\n\n| kind | table | rows | expectations met |\n")
    assert "\n| splits | train | 32 | 10 of 10 |\n" in text
    assert "\n| splits | gate | 8 | 11 of 12 |\n" in text
    assert f"\n- {verdict.failures[0]}\n" in text
    assert f"Within their thresholds:\n\n- splits test, 1 rows do not: {OVERLAPS}\n" in text
    assert validate(sound(), tmp_path / "docs").summary().startswith("# Data: all expectations met\n")
