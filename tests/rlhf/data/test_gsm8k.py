"""Rows, splits and prepared files."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from rlhf.config import compose, validate
from rlhf.data.gsm8k import Problem, cut, make_problem, question_hash, read_prepared, write_prepared
from rlhf.errors import UserError
from rlhf.params import Data


def params(*overrides: str) -> Data:
    return validate(compose(["scale=smoke", *overrides])).data


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
