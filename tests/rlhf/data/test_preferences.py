"""Pairs of right and wrong answers."""

from __future__ import annotations

from pathlib import Path

from rlhf.data.preferences import Pair, make_pairs, read_pairs, split_pairs, write_pairs


def pairs(right: list[str], wrong: list[str], max_pairs: int = 4, gold_stand_in: bool = True) -> list[tuple[str, str]]:
    made = make_pairs("q", right, wrong, "gold", max_pairs=max_pairs, gold_stand_in=gold_stand_in)
    assert all(pair.question == "q" and pair.origin == ("sampled" if right else "gold") for pair in made)
    return [(pair.chosen, pair.rejected) for pair in made]


def test_every_text_comes_into_its_turn_before_one_is_used_again() -> None:
    assert pairs(["a", "b"], ["x", "y", "z"]) == [("a", "x"), ("b", "y"), ("a", "z"), ("b", "x")]
    assert pairs(["a", "b", "c"], ["x"]) == [("a", "x"), ("b", "x"), ("c", "x")]
    assert pairs(["a", "b", "c"], ["x", "y"], max_pairs=2) == [("a", "x"), ("b", "y")]


def test_no_pair_comes_twice() -> None:
    made = pairs(["a", "b", "a"], ["x", "x", "y"], max_pairs=100)
    assert sorted(made) == [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]


def test_gold_stands_in_only_where_no_sample_is_right() -> None:
    assert pairs([], ["x", "y"]) == [("gold", "x"), ("gold", "y")]
    assert pairs([], ["x", "y"], gold_stand_in=False) == []
    assert pairs(["a"], ["x"]) == [("a", "x")]
    assert pairs(["a"], []) == []
    assert pairs([], []) == []


def sampled(count: int) -> list[Pair]:
    return [Pair(f"question {i // 2}", f"right {i}", f"wrong {i}", "sampled") for i in range(count)]


def test_split_is_by_question_and_independent_of_order() -> None:
    train, validation = split_pairs(sampled(100), 0.2)
    assert (len(train), len(validation)) == (80, 20)
    assert not {p.question for p in train} & {p.question for p in validation}
    backwards = split_pairs(sampled(100)[::-1], 0.2)
    assert (sorted(train, key=repr), sorted(validation, key=repr)) == tuple(sorted(s, key=repr) for s in backwards)


def test_split_keeps_both_sides_where_it_can() -> None:
    assert [len(side) for side in split_pairs(sampled(4), 0.01)] == [2, 2]
    assert [len(side) for side in split_pairs(sampled(4), 1.0)] == [2, 2]
    assert [len(side) for side in split_pairs(sampled(4), 0.0)] == [4, 0]
    assert [len(side) for side in split_pairs(sampled(2), 0.5)] == [2, 0]
    assert split_pairs([], 0.5) == ([], [])


def test_files_are_byte_identical_and_read_back(tmp_path: Path) -> None:
    made = [*sampled(3), Pair("q", "gold", "x", "gold")]
    write_pairs(tmp_path / "a.parquet", made)
    write_pairs(tmp_path / "b.parquet", made)
    assert read_pairs(tmp_path / "a.parquet") == made
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
