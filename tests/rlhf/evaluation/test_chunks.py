from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rlhf import faults
from rlhf.evaluation.chunks import Chunks, Row


class Killed(Exception):
    """In place of a kill."""


class Work:
    """Squares numbers and remembers what it was asked for."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []

    def __call__(self, numbers: Sequence[int]) -> list[Row]:
        self.parts.append(list(numbers))
        return [{"square": number / 10 * number} for number in numbers]


SQUARES = [{"square": number / 10 * number} for number in range(7)]


def test_parts_are_two_batches_and_done_once(tmp_path: Path) -> None:
    work, again, told = Work(), Work(), []
    assert Chunks(tmp_path, 2).rows("sft", range(7), work) == SQUARES
    assert work.parts == [[0, 1, 2, 3], [4, 5, 6]]
    assert Chunks(tmp_path, 2).rows("sft", range(7), again, on_kept=told.append) == SQUARES
    assert (again.parts, told) == ([], [4, 3])
    assert Chunks(tmp_path, 2).rows("policy", range(7), again) == SQUARES
    assert len(again.parts) == 2


@pytest.mark.parametrize(("batch_size", "sizes"), [(3, [6, 1]), (1, [2, 2, 2, 1]), (4, [7]), (9, [7])])
def test_a_part_holds_as_many_items_as_rows_fit(tmp_path: Path, batch_size: int, sizes: list[int]) -> None:
    work = Work()
    Chunks(tmp_path, batch_size).rows("sft", range(7), work)
    assert [len(part) for part in work.parts] == sizes


@pytest.mark.parametrize("visit", [1, 2, 3, 4])
def test_killed_behind_a_part_it_goes_on_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visit: int
) -> None:
    visits = iter(range(1, 5))

    def reach(point: str) -> None:
        if next(visits) == visit:
            raise Killed(point)

    monkeypatch.setattr(faults, "reach", reach)
    first, second = Work(), Work()
    with pytest.raises(Killed):
        Chunks(tmp_path, 1).rows("sft", range(7), first)
    monkeypatch.setattr(faults, "reach", lambda _: None)
    assert Chunks(tmp_path, 1).rows("sft", range(7), second) == SQUARES
    assert first.parts + second.parts == [[0, 1], [2, 3], [4, 5], [6]]
    assert len(first.parts) == visit


def test_what_was_half_written_is_not_taken_for_a_part(tmp_path: Path) -> None:
    (tmp_path / ".sft-0.json.123").write_text('[{"squa')
    work = Work()
    assert Chunks(tmp_path, 4).rows("sft", range(7), work) == SQUARES
    assert work.parts == [list(range(7))]
