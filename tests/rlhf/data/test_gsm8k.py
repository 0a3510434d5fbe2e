"""Sources, splits and prepared files."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from rlhf.config import compose, validate
from rlhf.data import gsm8k
from rlhf.data.answers import is_correct
from rlhf.data.gsm8k import Problem, cut, make_problem, prepare, question_hash, read_prepared, write_prepared
from rlhf.errors import UserError
from rlhf.params import Data

PUBLISHED = Path(__file__).parents[4] / "shared" / "gsm8k"
ROW = {"question": "How many are 2 and 3?", "answer": "They are 2+3=<<2+3=5>>5.\n#### 5"}


def params(*overrides: str) -> Data:
    return validate(compose(["scale=smoke", *overrides])).data


def files(directory: Path, train: bytes | None = None, test: bytes | None = None) -> Data:
    default = b"".join(json.dumps(ROW | {"question": f"{ROW['question']} {i}"}).encode() + b"\n" for i in range(40))
    (directory / "train.jsonl").write_bytes(default if train is None else train)
    (directory / "test.jsonl").write_bytes(default.replace(b"How many", b"Just how many") if test is None else test)
    return params("data=files", f"data.reads='{directory}'")


def problems(count: int, first: int = 0) -> list[Problem]:
    return [make_problem(f"question {i}", f"It is {i}.\n#### {i}", "test") for i in range(first, first + count)]


def test_a_row_is_prepared() -> None:
    problem = make_problem("q", "One.\n\nTwo.\n#### 1,080.0", "files")
    assert problem == Problem("q", "One.\n\nTwo.\n#### 1,080.0", "1080", "One.\n\nTwo.\n#### 1,080.0", 2, "files")
    assert make_problem("q", "no number", "files").gold is None
    assert make_problem("q", "a\n#### 1", "generator", demonstration="b\n#### 2").demonstration == "b\n#### 2"


def test_the_hash_is_the_first_53_bits_of_sha256_and_depends_on_the_purpose() -> None:
    digest = int(sha256(b"\nquestion").hexdigest()[:16], 16)
    assert question_hash("question") == (digest >> 11) / 2**53
    assert question_hash("question", "preferences") != question_hash("question")


def test_cut_goes_by_the_hash_alone() -> None:
    data = params("data.validation_share=0.2", "data.gate_share=0.1", "data.max_validation=null", "data.max_gate=null")
    splits = cut(problems(1000), problems(50, first=5000), data)
    for split, low, high in (("validation", 0, 0.2), ("gate", 0.2, 0.3), ("train", 0.3, 1)):
        assert all(low <= question_hash(p.question) < high for p in splits[split])
        assert len(splits[split]) == pytest.approx(1000 * (high - low), abs=50)
    assert sum(len(splits[split]) for split in ("train", "validation", "gate")) == 1000
    assert splits["test"] == problems(50, first=5000)


def test_new_rows_move_no_other_row() -> None:
    data = params("data.validation_share=0.2", "data.gate_share=0.2", "data.max_validation=null", "data.max_gate=null")
    before = cut(problems(300), [], data)
    after = cut([*problems(300, first=1000), *reversed(problems(300))], [], data)
    for split in ("train", "validation", "gate"):
        assert {p.question for p in before[split]} <= {p.question for p in after[split]}


def test_a_cap_keeps_the_lowest_hashes_in_order() -> None:
    uncapped = cut(problems(200), problems(200, first=500), params("data.max_test=null"))
    capped = cut(problems(200), problems(200, first=500), params("data.max_train=50", "data.max_test=20"))
    for split, limit in (("train", 50), ("test", 20)):
        lowest = sorted(uncapped[split], key=lambda p: question_hash(p.question))[:limit]
        assert capped[split] == [p for p in uncapped[split] if p in lowest]


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


def test_prepared_files_are_byte_identical_and_read_back(tmp_path: Path) -> None:
    rows = [*problems(20), make_problem("no gold", "x", "test")]
    for name in ("a", "b"):
        write_prepared(tmp_path / f"{name}.parquet", rows)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    assert read_prepared(tmp_path / "a.parquet") == rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.parquet", "b.parquet"]


def test_damaged_prepared_files_are_refused(tmp_path: Path) -> None:
    from rlhf.data.preferences import Pair, write_pairs

    damaged = tmp_path / "damaged.parquet"
    with pytest.raises(UserError, match=r"damaged.parquet is missing"):
        read_prepared(damaged)
    write_prepared(damaged, problems(20))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"damaged.parquet cannot be read as Parquet"):
        read_prepared(damaged)
    write_pairs(damaged, [Pair("q", "a", "b", "gold")])
    with pytest.raises(UserError, match=r"has no column answer, gold, demonstration, steps, source"):
        read_prepared(damaged)


def test_files_are_read(tmp_path: Path) -> None:
    splits = prepare(files(tmp_path))
    assert len(splits["test"]) == 40
    assert sum(len(rows) for rows in splits.values()) == 80
    assert splits["test"][7] == make_problem("Just how many are 2 and 3? 7", ROW["answer"], "files")


def test_null_and_odd_text_is_left_to_the_gate(tmp_path: Path) -> None:
    odd = {"question": "line\u2028separator", "answer": None, "other": 1}
    test = json.dumps(odd, ensure_ascii=False).encode() + b"\n\n" + json.dumps(ROW).encode()
    first, second = gsm8k.from_files(files(tmp_path, test=test))["test"]
    assert (first.question, first.answer, first.gold) == ("line\u2028separator", "", None)
    assert second.gold == "5"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "a", "answer": ', "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"question": "a"}', "has no key answer"),
        (b'{"question": 5, "answer": "a"}', "question is int"),
        (b'{"question": "\xff", "answer": "a"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    train = json.dumps(ROW).encode() + b"\n\n" + line + b"\n"
    with pytest.raises(UserError, match=rf"train\.jsonl line 3: {message}") as caught:
        gsm8k.from_files(files(tmp_path, train=train))
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
    data = params("data=files", f"data.reads='{PUBLISHED}'")
    splits = gsm8k.from_files(data)
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 7473, "test": 1319}
    for row in [*splits["train"], *splits["test"]]:
        assert row.gold is not None
        assert str(int(row.gold)) == row.gold
        assert row.steps >= 1
        assert is_correct(row.answer, row.gold)
