"""The data gate on raw rows and on drift: each expectation has data that fails it, and only it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.config import compose, validate
from rlhf.data import accepted, suites
from rlhf.data.expectations import Suite, evaluate
from rlhf.data.gsm8k import SPLITS, make_problem
from rlhf.data.sources import HALVES, Row, Rows
from rlhf.data.token_suites import prompts
from rlhf.errors import UserError

PARAMS = validate(compose(["data.columns.question=[body,ask]", "data.columns.gold=result"]))


def told(checks: list[Suite], place: Path) -> list[str]:
    return [str(failure) for failure in evaluate(checks, place).failures]


# --- raw rows


def raw_rows() -> Rows:
    def row(half: str, i: int) -> Row:
        return Row(f"{half}.csv row {i}", f"How many is {i}?", f"It is {i}.\n#### {i}", gold=str(i))

    return {half: [row(half, i) for i in range(1, 4)] for half in HALVES}


def test_sound_rows_pass(tmp_path: Path) -> None:
    rows = raw_rows()
    rows["train"][0] = replace(rows["train"][0], answer="An answer without a mark, such as 9.")
    verdict = evaluate(list(suites.raw(rows, PARAMS.data.columns)), tmp_path)
    assert verdict.failures == ()
    assert {half: found["rows"] for half, found in verdict.numbers["raw"].items()} == {"train": 3, "test": 3}


@pytest.mark.parametrize(
    ("broken", "expectation"),
    [
        ({"question": " "}, "column body and ask is not empty: 1 of its rows fail: test.csv row 2 ''"),
        ({"gold": "ten"}, "column result holds one number: 1 of its rows fail: test.csv row 2 'How many is 2?'"),
        ({"gold": "2 or 3"}, "column result holds one number: 1 of its rows fail: test.csv row 2 'How many is 2?'"),
        (
            {"answer": "#### 3"},
            "columns result and answer give the same number: 1 of its rows fail: test.csv row 2 'How many is 2?'",
        ),
        (
            {"answer": r"\boxed{3}"},
            "columns result and answer give the same number: 1 of its rows fail: test.csv row 2 'How many is 2?'",
        ),
    ],
)
def test_a_raw_row_is_named_with_its_file_and_column(tmp_path: Path, broken: dict[str, str], expectation: str) -> None:
    rows = raw_rows()
    rows["test"][1] = replace(rows["test"][1], **broken)
    assert told(list(suites.raw(rows, PARAMS.data.columns)), tmp_path) == [f"raw test: expected that {expectation}"]


def test_without_a_gold_column_the_answer_gives_the_number(tmp_path: Path) -> None:
    rows = {half: [replace(row, gold=None) for row in found] for half, found in raw_rows().items()}
    rows["train"][2] = replace(rows["train"][2], answer="First 2,\nthen 3.")
    columns = validate(compose([])).data.columns
    assert told(list(suites.raw(rows, columns)), tmp_path) == [
        "raw train: expected that column answer gives one number: 1 of its rows fail: train.csv row 3 'How many is 3?'"
    ]


def test_what_follows_from_raw_rows_is_not_told(tmp_path: Path) -> None:
    rows = raw_rows()
    rows["test"][1] = replace(rows["test"][1], gold="ten")
    splits = {split: [make_problem("How many is it?", "none", "test")] * 40 for split in SPLITS}
    checks = [*suites.prepared(splits, 0.0), *suites.raw(rows, PARAMS.data.columns)]
    assert [line.partition(":")[0] for line in told(checks, tmp_path)] == ["raw test"]


# --- drift


def profile(rows: float = 100, length: float = 50, magnitude: float = 20) -> suites.Profile:
    return {split: dict(zip(suites.MEASURES, (rows, length, magnitude), strict=True)) for split in SPLITS}


def test_the_measures_of_a_split() -> None:
    problems = [make_problem("12345", f"#### {gold}", "test") for gold in ("-1", "7", "1e2")]
    found = suites.profile({"train": problems})["train"]
    assert found == {
        "rows": 3,
        "question length": 5.0,
        "answer magnitude": pytest.approx((2 * 8 * 101) ** (1 / 3)),
    }


def test_what_stays_within_the_limit_is_no_drift(tmp_path: Path) -> None:
    assert told(list(suites.drift(profile(150, 34, 30), profile(), 0.5)), tmp_path) == []


@pytest.mark.parametrize(
    ("now", "row"),
    [
        (profile(rows=151), "rows '100 before, 151 now'"),
        (profile(rows=66), "rows '100 before, 66 now'"),
        (profile(length=90), "question length '50 before, 90 now'"),
        (profile(magnitude=2), "answer magnitude '20 before, 2 now'"),
    ],
)
def test_drift_names_the_measure(tmp_path: Path, now: suites.Profile, row: str) -> None:
    expected = "expected that every measure is within 50% of the data accepted last (data.max_drift)"
    assert told(list(suites.drift(now, profile(), 0.5)), tmp_path) == [
        f"drift {split}: {expected}: 1 of its rows fail: {row}" for split in SPLITS
    ]


def test_a_choice_of_data_has_its_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_STATE_DIR", str(tmp_path / "state"))

    def data(*overrides: str) -> suites.Profile | None:
        return accepted.read(validate(compose(list(overrides))).data)

    assert data() is None
    accepted.write(validate(compose([])).data, profile())
    assert data() == data("data.max_drift=9", "data.max_overlap=0.5", "data.hub.revision=other") == profile()
    assert data("data.max_train=50") is None
    (file,) = (tmp_path / "state/prepare_data").iterdir()
    for broken in ("", "[]", "{}", '{"train": {}, "validation": {}, "gate": {}, "test": {}}'):
        file.write_text(broken)
        assert data() is None


def test_what_to_do_is_told_for_each_kind(tmp_path: Path) -> None:
    checks = [*suites.drift(profile(9), profile(), 0.5), prompts("test", ["q"], [11], longest=10)]
    with pytest.raises(UserError) as caught:
        evaluate(checks, tmp_path).refuse_failures(tmp_path)
    advice = "correct the source, or accept the change with a larger data.max_drift or raise prompt.max_tokens"
    assert str(caught.value).startswith(f"data: 5 expectations failed: {advice}")
