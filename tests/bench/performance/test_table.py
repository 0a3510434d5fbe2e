"""The page's tables and plot."""

from __future__ import annotations

from bench.performance.cases import FULL, Case, Row, rows
from bench.performance.table import figure, markdown
from tests.bench.performance.test_records import made

PEER, OURS = Case("theirs", "rollouts", {"engine": "generate"}), Case("ours", "rollouts", {}, against=("theirs", "no"))
ROW = Row("a", "A row", [PEER, OURS])
GROWING = Row("b", "Growing", [Case(f"{size}", "updates", {}, size=size) for size in (8, 64)], once=True)

KEYS = {"a": "k", "b": "k"}


def test_a_row_compares_with_its_peers() -> None:
    known = [made("a", "theirs", n, 6.0) for n in (1, 2, 3)]
    known += [made("a", "ours", n, 2.0, first_seconds=0.5, floor=1.0, decode_floor=0.75) for n in (1, 2, 3)]
    page = markdown([ROW, GROWING], known, "a machine, 2 cores", KEYS).splitlines()
    assert page[0].startswith("Measured on a machine, 2 cores. Its peaks")
    assert "1 GFLOP/s in float32 and 2 in bfloat16" in page[0]
    assert "3 GB/s copied" in page[0]
    assert page[2] == "### A row"
    assert page[6:8] == [
        "| theirs | 6 | 12 | 600 |  |  |",
        "| ours | 2 | 4 | 200 | 2.00, decoding 2.00 | 3.00 × as fast as theirs, 0.33 of its memory |",
    ]
    assert page[-1] == "Medians of 3 rounds in turns."


def test_the_cells_of_a_peer_that_is_not_there_are_empty() -> None:
    page = markdown([ROW], [made("a", "ours", 1, 2.0)], "a machine", KEYS)
    assert "| theirs |  |  |  |  |  |" in page
    assert "| ours | 2 | 4 | 200 |  |  |" in page
    assert page.endswith("One round.")


def test_what_grows_has_its_exponent() -> None:
    known = [made("b", "8", 1, 2.0), made("b", "64", 1, 16.0)._replace(note="And a note.")]
    page = markdown([ROW, GROWING], known, "a machine", KEYS)
    assert page.endswith("One round. Time grows with the power 1.00 of the size. And a note.")
    assert "A row" not in page


def test_a_row_that_is_out_of_date_says_so() -> None:
    assert "other code" not in markdown([ROW], [made("a", "ours", 1)], "a machine", KEYS)
    assert "other code" in markdown([ROW], [made("a", "ours", 1)], "a machine", {"a": "another"})


def test_every_row_has_a_panel() -> None:
    known = [made("a", "ours", 1), made("b", "8", 1), made("b", "64", 1)]
    titles = [panel.get_title(loc="left") for panel in figure([ROW, GROWING], known).axes]
    assert titles == ["A row", "Growing"]


def test_rows_and_contenders_have_names_of_their_own_and_peers_that_exist() -> None:
    every = rows(FULL)
    assert len({row.name for row in every}) == len(every)
    for row in every:
        names = [case.contender for case in row.cases]
        assert len(set(names)) == len(names)
        assert {peer for case in row.cases for peer in case.against} <= set(names)
