"""Judged pairs: the forms in which they come, and those that are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config import compose, validate
from rlhf.data.human_preferences import CAUSES, Judged, keep, read
from rlhf.data.preferences import Pair
from rlhf.errors import UserError
from rlhf.params import Preferences

SETS = Path(__file__).parents[2] / "fixtures" / "preference_sets"


def settings(path: Path, *overrides: str) -> Preferences:
    source = (f"preferences.source='{path}'", f"preferences.reads='{path}'")
    return validate(compose(["scale=smoke", *source, *overrides])).preferences


def test_transcripts_are_read() -> None:
    assert list(read(settings(SETS / "hh.jsonl"))) == [
        Judged("How many are 2 and 3?", "They are 5.", "I like numbers."),
        Judged(
            "Human: Give me a number.\n\nAssistant: 7.\n\nHuman: A larger one,\n\nplease.",
            "70.",
            "No.",
        ),
        Judged(None, "Two miles.", "Two hours."),
    ]


def test_messages_are_read() -> None:
    assert list(read(settings(SETS / "ultrafeedback.json"))) == [
        Judged("How many legs have two cats?", "Eight.", "Four."),
        Judged("System: Be short.\n\nHuman: Name a prime.", "11", "12"),
    ]
    named = read(settings(SETS / "ultrafeedback.json", "preferences.columns.question=prompt"))
    assert [one.question for one in named] == ["How many legs have two cats?", "Name a prime."]


def test_answers_alone_are_read_beside_their_question(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("q,good,bad\nHow many?, Two. ,Many.\n")
    columns = [f"preferences.columns.{key}" for key in ("question=q", "chosen=good", "rejected=bad")]
    assert list(read(settings(path, *columns))) == [Judged("How many?", "Two.", "Many.")]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"chosen": "a"}, "column chosen is neither transcript nor messages: name the question's column with"),
        ({"rejected": "b"}, "has no column chosen: it has rejected: name one with preferences.columns.chosen"),
        ({"chosen": "\n\nHuman: How?"}, "column chosen must end with an answer by the assistant, after a question"),
        ({"chosen": "\n\nAssistant: So."}, "column chosen must end with an answer by the assistant, after a question"),
        ({"chosen": 5}, "column chosen is int: write a transcript or a list of messages"),
        ({"chosen": [{"role": "tool", "content": "x"}]}, "column chosen holds a message without role"),
        ({"chosen": ["x"]}, "column chosen holds a message without role"),
    ],
)
def test_a_row_in_no_known_form_is_named(tmp_path: Path, row: dict[str, Any], fault: str) -> None:
    path = tmp_path / "pairs.jsonl"
    good = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}
    path.write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n")
    with pytest.raises(UserError) as caught:
        list(read(settings(path)))
    assert str(caught.value).startswith(f"{path} line 2: {fault}")


def test_a_missing_file_and_an_unreachable_hub_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"preferences\.source=.*absent\.csv is no file: name one, or hf://"):
        list(read(settings(tmp_path / "absent.csv")))
    hub = validate(compose(["preferences.source=hf://org/pairs@v1"])).preferences
    with pytest.raises(UserError, match=r"preferences\.source: org/pairs@v1 cannot be read: .*preferences\.reads=FILE"):
        list(read(hub))


def left_out(*judged: Judged, max_pairs: int = 4, max_questions: int = 100) -> tuple[list[Pair], dict[str, int]]:
    def fits(pair: Pair) -> bool:
        return "long" not in pair.rejected

    secret = ["How many are 2.5 and 3, in all?"]
    pairs, counts = keep(judged, secret, fits, max_pairs=max_pairs, max_questions=max_questions)
    assert tuple(counts) == CAUSES
    assert len(pairs) + sum(counts.values()) == len(judged)
    return pairs, {cause: count for cause, count in counts.items() if count}


GOOD = Judged("q", "a", "b")


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (Judged(None, "a", "b"), "different_questions"),
        (Judged(" ", "a", "b"), "empty"),
        (Judged("q", "", "b"), "empty"),
        (Judged("q", "a", ""), "empty"),
        (Judged("q", "a", "a"), "equal"),
        (GOOD, "twice"),
        (Judged("how many are 2.5  and 3 in all", "a", "b"), "contaminated"),
        (Judged("Human: How many are 2.5 and 3, in all?\n\nAssistant: Six.\n\nHuman: Sure?", "a", "b"), "contaminated"),
        (Judged("q", "a", "long"), "cut"),
    ],
)
def test_every_cause_leaves_out_a_pair_alone(bad: Judged, cause: str) -> None:
    assert left_out(GOOD, bad) == ([Pair("q", "a", "b", "human")], {cause: 1})


def test_other_numbers_make_another_question() -> None:
    assert left_out(Judged("How many are 25 and 3, in all?", "a", "b"))[1] == {}


def test_caps_keep_the_first_pairs_of_the_questions_with_the_lowest_hashes() -> None:
    judged = [Judged(f"q{i % 4}", f"a{i}", "b") for i in range(12)]
    pairs, counts = left_out(*judged, max_pairs=2, max_questions=3)
    assert counts == {"over_max_pairs": 4, "over_questions": 2}
    assert len({pair.question for pair in pairs}) == 3
    assert {pair.chosen for pair in pairs} <= {f"a{i}" for i in range(8)}
    fewer, _ = left_out(*judged[::-1], max_pairs=2, max_questions=3)
    assert {pair.question for pair in fewer} == {pair.question for pair in pairs}
