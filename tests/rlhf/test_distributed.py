"""What ranks share: parts of the work, sums, and whatever they gather."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.distributed import ALONE, Ranks
from tests.ranks import in_ranks


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 12])
def test_shares_are_contiguous_cover_everything_and_differ_by_one_at_most(size: int, count: int) -> None:
    things = list(range(count))
    shares = [things[Ranks(rank, size).share(count)] for rank in range(size)]
    assert [thing for share in shares for thing in share] == things
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_process_alone_needs_no_group() -> None:
    assert ALONE.first
    assert ALONE.gather("mine") == ["mine"]
    assert ALONE.sum([1.0, 2.0]) == [1.0, 2.0] and ALONE.max([3.0]) == [3.0]
    ALONE.barrier()


def test_ranks_gather_in_order_and_add_up_in_float64(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> object:
        ranks.barrier()
        mine = float(ranks.rank + 1)
        return (
            ranks.first,
            ranks.gather(f"from {ranks.rank}"),
            ranks.sum([mine, 2.0**53 * (1 - ranks.rank)]),
            ranks.max([-mine]),
        )

    first, second = in_ranks(tmp_path, work)
    assert first == (True, ["from 0", "from 1"], [3.0, 2.0**53], [-1.0])
    assert second == (False, *first[1:])
