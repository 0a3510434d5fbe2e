"""Where problems come from: sources, columns, and the form that an answer gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf.config import compose, validate
from rlhf.data.answers import is_correct
from rlhf.data.gsm8k import make_problem
from rlhf.data.sources import Row, prepare, read, split, to_problem
from rlhf.errors import UserError
from rlhf.params import Data

PUBLISHED = Path(__file__).parents[4] / "shared" / "gsm8k"
MATH_SETS = Path(__file__).parents[2] / "fixtures" / "math_sets"
ROW = {"question": "How many are 2 and 3?", "answer": "They are 2+3=<<2+3=5>>5.\n#### 5"}


def params(*overrides: str) -> Data:
    return validate(compose(["scale=smoke", *overrides])).data


def files(directory: Path, train: bytes | None = None, test: bytes | None = None) -> Data:
    default = b"".join(json.dumps(ROW | {"question": f"{ROW['question']} {i}"}).encode() + b"\n" for i in range(40))
    (directory / "train.jsonl").write_bytes(default if train is None else train)
    (directory / "test.jsonl").write_bytes(default.replace(b"How many", b"Just how many") if test is None else test)
    return params("data=files", f"data.reads='{directory}'")


def test_generator_problems_carry_careless_demonstrations_and_right_golds() -> None:
    splits = prepare(params())
    assert {split: len(rows) for split, rows in splits.items()} == {
        "train": len(splits["train"]),
        "validation": 16,
        "gate": 16,
        "test": 24,
    }
    train = splits["train"]
    assert all(is_correct(p.answer, p.gold) and p.source == "generator" for p in train)
    assert 0.2 < sum(not is_correct(p.demonstration, p.gold) for p in train) / len(train) < 0.7


def test_files_are_read(tmp_path: Path) -> None:
    splits = prepare(files(tmp_path))
    assert len(splits["test"]) == 40
    assert sum(len(rows) for rows in splits.values()) == 80
    assert splits["test"][7] == make_problem("Just how many are 2 and 3? 7", ROW["answer"], "files")


def test_null_and_odd_text_is_left_to_the_gate(tmp_path: Path) -> None:
    odd = {"question": "line\u2028separator", "answer": None, "other": 1}
    test = json.dumps(odd, ensure_ascii=False).encode() + b"\n\n" + json.dumps(ROW).encode()
    first, second = (to_problem(row, "files") for row in read(files(tmp_path, test=test))["test"])
    assert (first.question, first.answer, first.gold) == ("line\u2028separator", "", None)
    assert second.gold == "5"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "a", "answer": ', "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"question": "a"}', "has no column answer: it has question: name one with data.columns.answer"),
        (b'{"question": 5, "answer": "a"}', "column question is int"),
        (b'{"question": "\xff", "answer": "a"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    train = json.dumps(ROW).encode() + b"\n\n" + line + b"\n"
    with pytest.raises(UserError, match=rf"train\.jsonl line 3: {message}") as caught:
        read(files(tmp_path, train=train))
    assert "\n" not in str(caught.value)


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.reads: .*absent is no directory"):
        prepare(params("data=files", f"data.reads='{tmp_path / 'absent'}'"))
    data = files(tmp_path, test=b"\n")
    with pytest.raises(UserError, match=r"test\.jsonl holds no rows"):
        prepare(data)
    (tmp_path / "test.jsonl").unlink()
    with pytest.raises(UserError, match=r"test\.jsonl is missing"):
        prepare(data)


def test_an_unreachable_hub_is_one_line() -> None:
    with pytest.raises(UserError, match=r"data\.hub: openai/gsm8k@main cannot be read: .*data=files") as caught:
        prepare(params("data=gsm8k"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("split", ["validation", "gate"])
def test_an_empty_split_names_its_param(split: str) -> None:
    with pytest.raises(UserError, match=rf"the {split} split is empty: raise data\.{split}_share \(0\.0\)"):
        prepare(params(f"data.{split}_share=0.0"))


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published GSM8K is not beside this checkout")
def test_the_published_files_are_read_whole() -> None:
    uncapped = ("data.max_validation=null", "data.max_gate=null")
    rows = read(params("data=files", f"data.reads='{PUBLISHED}'", *uncapped))
    assert {half: len(found) for half, found in rows.items()} == {"train": 7473, "test": 1319}
    for row in (to_problem(row, "files") for row in [*rows["train"], *rows["test"]]):
        assert row.gold is not None
        assert str(int(row.gold)) == row.gold
        assert row.steps >= 1
        assert is_correct(row.answer, row.gold)


# --- other formats and columns


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, ending: str) -> None:
    import pandas as pd

    rows = [
        {"q": f"How many, in all, are {i} and 3?\nThink.", "a": f"Ａ \u2212 {i}\n#### {i + 3}", "n": i}
        for i in range(3)
    ]
    frame = pd.DataFrame(rows)
    for half in ("train", "test"):
        path = tmp_path / f"{half}.{ending}"
        match ending:
            case "jsonl":
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            case "json":
                path.write_text(json.dumps(rows, indent=2))
            case "csv":
                frame.to_csv(path, index=False)
            case "parquet":
                frame.to_parquet(path)
    columns = ("data.columns.question=[q]", "data.columns.answer=a", "data.columns.gold=n")
    for row, found in zip(rows, read(params("data=files", f"data.reads='{tmp_path}'", *columns))["train"], strict=True):
        assert (found.question, found.answer, found.gold) == (row["q"], row["a"], str(row["n"]))


@pytest.mark.parametrize(
    ("name", "columns", "expected"),
    [
        (
            "svamp.json",
            ["question=[Body,Question]", "answer=Answer", "rationale=Equation"],
            [
                (
                    "Mia had 9 stickers. She gave 4.0 of them away. How many stickers does she have left?",
                    "( 9.0 - 4.0 )\n#### 5",
                    "5",
                ),
                ("A shelf holds 6 rows of 7 books. How many books are on the shelf?", "( 6.0 * 7.0 )\n#### 42", "42"),
            ],
        ),
        (
            "asdiv.csv",
            ["question=[body,question]", "answer=answer"],
            [
                ("Ben has 3 red apples, and 6 green ones. How many apples does he have?", "#### 9", "9"),
                (
                    'A tank of 12 "big" litres\nis shared by 8 people. How many litres does each get?',
                    "#### 1.5",
                    "1.5",
                ),
            ],
        ),
        (
            "mawps.jsonl",
            ["question=[sQuestion]", "answer=lSolutions"],
            [
                ("Joan picked 17 pears and lost 5. How many pears are left?", "#### 12", "12"),
                ("A pie is cut in 8. What part are 2 pieces?", "#### 0.25", "0.25"),
            ],
        ),
        (
            "math.jsonl",
            ["question=[problem]", "answer=solution"],
            [
                (
                    "What is the sum of the roots of $x^2 - 3x + 2 = 0$?",
                    "The roots are $1$ and $2$,\nso the sum is $\\boxed{3}$.\n#### 3",
                    "3",
                ),
                (
                    "A die is thrown. What is the probability of a number above $4$?",
                    "Two of six faces fit: $\\frac{2}{6} = \\boxed{\\frac{1}{3}}$.\n#### 1/3",
                    "1/3",
                ),
            ],
        ),
    ],
)
def test_other_math_sets_are_read_by_their_columns(
    name: str, columns: list[str], expected: list[tuple[str, str, str]]
) -> None:
    places = ["data=files", f"data.reads='{MATH_SETS}'", f"data.train={name}", f"data.test={name}"]
    rows = read(params(*places, *(f"data.columns.{column}" for column in columns)))
    problems = [to_problem(row, "files") for row in rows["test"]]
    assert [(p.question, p.answer, p.gold) for p in problems] == expected


@pytest.mark.parametrize(
    ("row", "answer", "gold"),
    [
        (Row("", "q", "8.0"), "#### 8", "8"),
        (Row("", "q", "It is 5."), "#### 5", "5"),
        (Row("", "q", "3 to 5"), "3 to 5", None),
        (Row("", "q", "2 and 3\nare 5."), "2 and 3\nare 5.", None),  # which of them is the answer?
        (Row("", "q", "a\n#### 5"), "a\n#### 5", "5"),
        (Row("", "q", r"\boxed{x}, \boxed{\text{5 apples}}"), "\\boxed{x}, \\boxed{\\text{5 apples}}\n#### 5", "5"),
        (Row("", "q", r"so \boxed{x+1}"), "so \\boxed{x+1}", None),
        (Row("", "q", r"so \boxed{5"), "so \\boxed{5\n#### 5", "5"),
        (Row("", "q", "a\nb", gold="1,234"), "a\nb\n#### 1234", "1234"),
        (Row("", "q", "a\n#### 6", gold="6.0"), "a\n#### 6", "6"),
        (Row("", "q", "a\nb", gold=""), "a\nb", None),
        (Row("", "q", "5", rationale="2+3"), "2+3\n#### 5", "5"),
        (Row("", "q", "a\n#### 5", rationale="b\n#### 9"), "b\n#### 5", "5"),
    ],
)
def test_an_answer_gets_gsm8ks_form_where_its_number_is_sure(row: Row, answer: str, gold: str | None) -> None:
    problem = to_problem(row, "files")
    assert (problem.answer, problem.gold) == (answer, gold)


def test_files_are_found_by_their_ending_or_named(tmp_path: Path) -> None:
    data = files(tmp_path)
    (tmp_path / "test.csv").write_text("question,answer\nHow many?,3\n")
    with pytest.raises(UserError, match=r"holds test\.jsonl and test\.csv: name one of them with data\.test"):
        read(data)
    named = params("data=files", f"data.reads='{tmp_path}'", "data.test=test.csv")
    assert [row.question for row in read(named)["test"]] == ["How many?"]
    with pytest.raises(UserError, match=r"absent\.csv is missing: data\.train must name a file in data\.reads="):
        read(params("data=files", f"data.reads='{tmp_path}'", "data.train=absent.csv"))
    (tmp_path / "train.txt").write_text("x")
    with pytest.raises(UserError, match=r"train\.txt: the ending names no format: take one of \.jsonl, \.json"):
        read(params("data=files", f"data.reads='{tmp_path}'", "data.train=train.txt", "data.test=test.csv"))


def test_a_missing_column_is_named_with_file_and_row(tmp_path: Path) -> None:
    data = params(
        "data=files",
        f"data.reads='{MATH_SETS}'",
        "data.train=asdiv.csv",
        "data.test=asdiv.csv",
        "data.columns.gold=result",
    )
    place = MATH_SETS / "asdiv.csv"
    with pytest.raises(UserError) as caught:
        read(data)
    there = "id, body, question, solution_type, answer, formula"
    assert str(caught.value) == f"{place} row 1: has no column result: it has {there}: name one with data.columns.gold"


def test_caps_keep_in_memory_what_cut_would_keep() -> None:
    caps = ["data.max_train=30", "data.max_validation=5", "data.max_gate=null", "data.max_test=10"]
    capped, uncapped = params(*caps), params(*(f"{cap.partition('=')[0]}=null" for cap in caps))
    rows = read(capped)
    assert len(rows["test"]) == 10
    assert len(rows["train"]) == 30 + 5 + len(prepare(uncapped)["gate"])
    assert split(rows, capped) == split(read(uncapped), capped)
