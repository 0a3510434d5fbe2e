"""collect_preferences from judged pairs, on a tiny policy: what is kept, counted and refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf.config import compose, validate
from rlhf.data.gsm8k import make_problem, write_prepared
from rlhf.data.preferences import Pair, read_pairs
from rlhf.errors import UserError
from stages.collect_preferences import main
from tests.policies import save_policy


class Log:
    """A tracking run that keeps what it is given."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.datasets: list[tuple[Path, str, str]] = []

    def log_artifact(self, path: Path) -> None:
        assert (path / "index.html").is_file()

    def log_text(self, text: str, name: str) -> None:
        assert text.startswith("# Data: ")

    def log_metrics(self, values: dict[str, float], step: int | None = None) -> None:
        self.metrics |= values

    def log_dataset(self, path: Path, name: str, context: str) -> None:
        self.datasets.append((path, name, context))


class FakeStage:
    """Inputs and outputs in one place."""

    def __init__(self, place: Path, *overrides: str) -> None:
        self.params = validate(compose(["scale=smoke", *overrides]))
        self.place, self.log = place, Log()

    def input(self, path: str) -> Path:
        return self.place / path

    def scratch(self, path: str) -> Path:
        shutil.rmtree(self.place / "runs" / path, ignore_errors=True)
        return self.place / "runs" / path

    def after_publishing(self, action: Callable[[], None]) -> None:
        """Nothing is published."""

    def output(self, path: str) -> Path:
        target = self.place / path
        target.parent.mkdir(parents=True, exist_ok=True)
        return target


def transcripts(question: str, chosen: str, rejected: str) -> dict[str, str]:
    return {
        side: f"\n\nHuman: {question}\n\nAssistant: {text}"
        for side, text in (("chosen", chosen), ("rejected", rejected))
    }


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("workspace")
    save_policy(place / "models" / "sft")
    for split in ("train", "validation", "gate", "test"):
        write_prepared(
            place / f"data/prepared/{split}.parquet", [make_problem(f"What is in {split}?", "#### 1", "test")]
        )
    return place


def run(workspace: Path, rows: list[dict[str, Any]], *overrides: str) -> FakeStage:
    path = workspace / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = FakeStage(workspace, f"preferences.source='{path}'", f"preferences.reads='{path}'", *overrides)
    main(stage)  # type: ignore[arg-type]
    return stage


def test_judged_pairs_are_kept_counted_and_split(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = [transcripts(f"What is {n} + 1?", str(n + 1), str(n)) for n in range(10)]
    bad = [
        transcripts("what is in GATE", "1", "2"),
        transcripts("Why?", "So.", "So. "),
        transcripts("Why?", "So.", "0 " * 1000),  # longer than the context
        transcripts("0 " * 1000, "1", "2"),  # longer than prompt.max_tokens
        good[3],
    ]
    stage = run(workspace, good + bad, "preferences.validation_share=0.2")
    train, validation = (
        read_pairs(workspace / f"data/preferences/{split}.parquet") for split in ("train", "validation")
    )
    assert (len(train), len(validation)) == (8, 2)
    assert sorted([*train, *validation], key=lambda pair: pair.question) == [
        Pair(f"What is {n} + 1?", str(n + 1), str(n), "human") for n in range(10)
    ]
    counts = {
        key.removeprefix("left_out."): n for key, n in stage.log.metrics.items() if key.startswith("left_out.") and n
    }
    assert counts == {"contaminated": 1, "equal": 1, "cut": 2, "twice": 1}
    assert (stage.log.metrics["train_pairs"], stage.log.metrics["validation_pairs"]) == (8, 2)
    assert stage.log.datasets == [(workspace / "pairs.jsonl", "judged_pairs", "preferences")]
    assert "pairs left out: 1 equal, 1 twice, 1 contaminated, 2 cut" in capsys.readouterr().out


def test_a_set_of_which_nothing_is_left_is_refused(workspace: Path) -> None:
    with pytest.raises(UserError, match=r"pairs\.jsonl: no pair is left; left out: 2 equal"):
        run(workspace, [transcripts("Why?", "So.", "So.")] * 2)
