from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from rlhf.evaluation.accuracy import Graded
from rlhf.evaluation.divergence import Divergence, Place, TokenKl
from rlhf.evaluation.length_buckets import length_buckets
from rlhf.evaluation.report import (
    Checkpoint,
    PanelRun,
    headline,
    outcome,
    panel_problems,
    pick_samples,
    points,
    render,
    results_table,
    verdict,
    visible,
)
from rlhf.evaluation.statistics import compare

ATTACK = "<script>alert('x')</script><img src=https://example.org/x.png>"
LOADING = {"src", "srcset", "href", "data", "action", "poster", "xlink:href", "background"}


class Page(HTMLParser):
    """The page's text, its tags, and every attribute that makes a browser load something or run a script."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.active: list[tuple[str, str]] = []
        self.text = ""
        self._skipped = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.active += [(tag, name) for name, _ in attributes if name in LOADING or name.startswith("on")]
        self._skipped = tag if tag == "style" else ""

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        self._skipped = ""


def graded(question: str, correct: bool, response: str = "#### 1") -> Graded:
    return Graded(question, "1", response, correct, correct, correct, True, True, [3], [5] * 7, False)


# Of ten problems: three gained, two lost, one wrong both times, four right both times.
SFT = [graded(f"question {i}", i in (3, 4, 6, 7, 8, 9), f"#### 1{i}") for i in range(10)]
POLICY = [graded(f"question {i}", i in (0, 1, 2, 6, 7, 8, 9), f"#### 2{i}") for i in range(10)]
CHECKPOINTS = [
    Checkpoint("SFT", "a" * 64, {"kind": "sft", "source": "tiny:", "parents": {"fetched": "b" * 64}, "files": {}}),
    Checkpoint("Policy", "c" * 64, {"kind": "policy", "source": "tiny:", "parents": {"sft": "a" * 64}, "seed": 0}),
]
ITERATIONS = [
    {"iteration": "0", "score": "", "accuracy": "", "kl_sequence": "", "validation_accuracy": "0.3"},
    {"iteration": "1", "score": "0.41", "accuracy": "0.4", "kl_sequence": "0.5", "validation_accuracy": "0.6"},
]


LENGTHS = [30, 31, 32, 33, 34, 45, 46, 47, 48, 49]
KL = Divergence(
    sequence=1.25,
    token=0.0125,
    tokens=[TokenKl(" 12\n", 40, 0.5, 0.8)],
    places=[Place("How many?", "3 + 9 =", " 12", " apples", 2.5, [(" 11", 0.75)], [(" 12", 0.9375)])],
)
PANEL = [
    {"iteration": str(i), "question": "panel question", "gold": "7", "response": text, "correct": right}
    for i, text, right in ((0, "#### 8", "False"), (3, "#### 7", "True"), (6, "#### 7", "True"), (9, "#### 8", "False"))
]


def page(**changes: Any) -> str:
    arguments: dict[str, Any] = {
        "metrics": {split: compare(SFT, POLICY, "strict", 0.95) for split in ("gate", "test")},
        "ppo": {"best_iteration": 1},
        "iterations": ITERATIONS,
        "buckets": length_buckets(LENGTHS, SFT, POLICY, [0.5] * 5 + [2.0] * 5, 0.95),
        "divergence": KL,
        "panel": panel_problems(PANEL),
        "samples": pick_samples(SFT, POLICY, 10),
        "checkpoints": CHECKPOINTS,
        "params": {"seed": 0, "ppo": {"lr": 0.0003}},
    }
    return render(**{**arguments, **changes})


TEST = {
    "n": 500,
    "confidence": 0.95,
    "sft": {"accuracy": 0.312},
    "policy": {"accuracy": 0.746},
    "gain": 0.434,
    "gain_low": 0.391,
    "gain_high": 0.476,
}


def test_headline() -> None:
    assert headline(TEST) == "SFT 31.2 % → policy 74.6 % on 500 test problems, gain 43.4 points [39.1, 47.6]"
    worse = {**TEST, "gain": -0.02, "gain_low": -0.051, "gain_high": 0.0113}
    assert headline(worse).endswith("gain −2.0 points [−5.1, 1.1]")


def test_a_gain_that_rounds_to_zero_has_no_sign() -> None:
    assert points(-0.0001) == "0.0"


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.001, 0.2, "is better"),
        (0.0, 0.2, "No difference is shown"),
        (-0.1, 0.2, "No difference"),
        (-0.2, -0.1, "worse"),
    ],
)
def test_verdict_follows_the_interval(low: float, high: float, words: str) -> None:
    text = verdict({**TEST, "gain_low": low, "gain_high": high})
    assert words in text
    assert "95 % interval" in text


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    samples = pick_samples([graded(ATTACK, True, ATTACK)], [graded(ATTACK, False, ATTACK)], 1)
    places = [Place(ATTACK, ATTACK, ATTACK, ATTACK, 2.5, [(ATTACK, 0.5)], [(ATTACK, 0.5)])]
    moved = Divergence(1.0, 0.1, [TokenKl(ATTACK, 1, 1.0, 1.0)], places)
    panel = panel_problems([{**PANEL[0], "question": ATTACK, "gold": ATTACK, "response": ATTACK}])
    html = page(samples=samples, params={"prompt": ATTACK}, divergence=moved, panel=panel)
    parsed = Page(html)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(parsed.tags)
    assert parsed.active == []
    assert not re.search(r"@import|url\(", html)
    assert "default-src 'none'" in html


def test_what_models_write_is_shown_as_text() -> None:
    samples = pick_samples([graded("a < b?", True, ATTACK)], [graded("a < b?", False, "</pre></div>1 < 2 & 3")], 1)
    text = Page(page(samples=samples)).text
    assert "a < b?" in text
    assert ATTACK in text
    assert "</pre></div>1 < 2 & 3" in text


def test_the_page_says_what_a_reader_looks_for() -> None:
    metrics = {split: compare(SFT, POLICY, "strict", 0.95) for split in ("gate", "test")}
    text = " ".join(Page(page()).text.split())
    assert headline(metrics["test"]) in text
    assert "SFT 60.0 % → policy 70.0 % on 10 test problems, gain 10.0 points" in text
    for cell in ("3 gained, 30.0 %", "2 lost, 20.0 %", "1 both wrong, 10.0 %", "4 both right, 40.0 %"):
        assert cell in text
    for title in ("Reward", "KL to the reference", "Accuracy"):
        assert title in text
    assert "The policy is that of PPO iteration 1, the best on validation." in text
    assert "rollouts 40.0 %" in text
    assert "validation 60.0 %" in text
    for lineage in ("a" * 64, "b" * 64, "c" * 64, '"lr": 0.0003'):
        assert lineage in text
    for row in SFT + POLICY:
        assert row.question in text
        assert row.response in text


def test_gain_and_kl_by_length() -> None:
    text = " ".join(Page(page()).text.split())
    assert "30–31 tokens 100.0 [" in text and "32–34 tokens −33.3 [" in text
    assert "30–312 0.0 % → 100.0 % 0.0 % → 0.0 % 7.0 → 7.0 0.50" in text
    assert "32–343 66.7 % → 33.3 % 0.0 % → 0.0 % 7.0 → 7.0 0.50" in text
    assert "47–493 100.0 % → 100.0 % 0.0 % → 0.0 % 7.0 → 7.0 2.00" in text
    assert "1.25 nats an answer, 0.0125 a token" in text


def test_the_tokens_and_places_with_most_kl() -> None:
    text = " ".join(Page(page()).text.split())
    assert "␣12↵400.50080.0 %" in text
    assert "2.50 natsHow many? 3 + 9 =␣12 apples" in text
    assert "SFT would write ␣11 75.0 %" in text
    assert "Policy would write ␣12 93.8 %" in text
    same = " ".join(Page(page(divergence=Divergence(0.0, 0.0, [], []))).text.split())
    assert "The two models are the same." in same and "would write" not in same
    assert visible("") == "∅"


def test_equal_answers_of_the_panel_in_a_row_are_one() -> None:
    (problem,) = panel_problems(PANEL)
    assert (problem.question, problem.gold) == ("panel question", "7")
    assert problem.runs == [
        PanelRun(0, 0, "#### 8", False),
        PanelRun(3, 6, "#### 7", True),
        PanelRun(9, 9, "#### 8", False),
    ]
    text = " ".join(Page(page(ppo={"best_iteration": 6})).text.split())
    assert "iterations 3 to 6 ✓ right selected #### 7" in text
    assert "through training" not in page(panel=[])


def test_no_selected_iteration_reads_as_no_gain() -> None:
    text = " ".join(Page(page(ppo={"best_iteration": 0})).text.split())
    assert "No PPO iteration beat the start on validation" in text
    assert "is the selected one" not in text
    assert 'class="mark"' in page()
    assert 'class="mark"' not in page(ppo={"best_iteration": 0})


def test_no_samples_leave_no_empty_section() -> None:
    assert "both answers" in page()
    assert "both answers" not in page(samples=[])


def test_flaws_of_a_response_are_named() -> None:
    row = graded("q", False)
    flawed = replace(row, parsed=False, finished=False)
    text = Page(page(samples=pick_samples([flawed], [replace(row, too_long=True)], 1))).text
    assert "no number found" in text
    assert "cut off" in text
    assert "prompt too long" in text


def test_the_same_input_gives_the_same_page() -> None:
    assert page() == page()


def test_tags_are_balanced() -> None:
    html = page()
    for tag in ("div", "section", "table", "figure", "svg", "g", "details", "article", "span", "text", "tspan", "dl"):
        assert len(re.findall(rf"<{tag}[ >]", html)) == html.count(f"</{tag}>"), tag


def test_samples_are_balanced_over_the_outcomes() -> None:
    picked = [sample.outcome for sample in pick_samples(SFT, POLICY, 8)]
    assert picked == ["gained"] * 3 + ["lost"] * 2 + ["both_wrong"] + ["both_right"] * 2
    assert [sample.outcome for sample in pick_samples(SFT, POLICY, 3)] == ["gained", "lost", "both_wrong"]
    assert len(pick_samples(SFT, POLICY, 50)) == 10
    assert pick_samples(SFT, POLICY, 0) == []


def test_samples_do_not_depend_on_the_order_of_the_file() -> None:
    turned = pick_samples(SFT[::-1], POLICY[::-1], 6)
    assert turned == pick_samples(SFT, POLICY, 6)
    assert all(sample.sft.question == sample.policy.question for sample in turned)
    assert all(outcome(sample.sft, sample.policy) == sample.outcome for sample in turned)


def test_the_table_of_results_holds_every_problem() -> None:
    sft = graded('a "quoted", question\nin two lines', False, "none")
    policy = replace(sft, correct=True, response="#### 1")
    columns, rows = results_table({"gate": [sft], "test": [sft, sft]}, {"gate": [policy], "test": [sft, policy]})
    assert dict(zip(columns, rows[0], strict=True)) == {
        "split": "gate",
        "question": 'a "quoted", question\nin two lines',
        "gold": "1",
        "outcome": "gained",
        "too_long": False,
        "sft_response": "none",
        "sft_correct": False,
        "sft_parsed": True,
        "sft_finished": True,
        "sft_length": 7,
        "policy_response": "#### 1",
        "policy_correct": True,
        "policy_parsed": True,
        "policy_finished": True,
        "policy_length": 7,
    }
    assert [(row[0], row[3]) for row in rows] == [("gate", "gained"), ("test", "both_wrong"), ("test", "gained")]
