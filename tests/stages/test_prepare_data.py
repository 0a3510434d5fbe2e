"""prepare_data with a stage that only remembers: what it writes, logs and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.config import compose, validate
from rlhf.data.gsm8k import SPLITS, question_hash, read_prepared
from rlhf.errors import UserError
from rlhf.params import Params
from stages.prepare_data import main


class Log:
    """A tracking run that keeps what it is given."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.artifacts: list[Path] = []
        self.datasets: list[tuple[Path, str, str]] = []
        self.texts: dict[str, str] = {}

    def log_text(self, text: str, name: str) -> None:
        self.texts[name] = text

    def log_metrics(self, values: dict[str, float], step: int | None = None) -> None:
        self.metrics |= values

    def log_artifact(self, path: Path, folder: str = "") -> None:
        assert (path / "index.html").is_file()
        self.artifacts.append(path)

    def log_dataset(self, path: Path, name: str, context: str, source: Path | None = None) -> None:
        assert path.exists()
        self.datasets.append((source or path, name, context))


class FakeStage:
    """Outputs aside until `main` is done, and scratch."""

    def __init__(self, place: Path, params: Params) -> None:
        self.place, self.workspace, self.params, self.log = place, place, params, Log()
        self.actions: list[Callable[[], None]] = []

    def output(self, path: str) -> Path:
        target = self.place / "aside" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def scratch(self, path: str) -> Path:
        target = self.place / "runs" / path
        target.mkdir(parents=True)
        return target

    def after_publishing(self, action: Callable[[], None]) -> None:
        self.actions.append(action)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_STATE_DIR", str(tmp_path / "state"))


def prepared(place: Path, *overrides: str) -> FakeStage:
    stage = FakeStage(place, validate(compose(["scale=smoke", *overrides])))
    main(stage)  # type: ignore[arg-type]
    for made in (place / "aside").iterdir():
        made.rename(place / made.name)
    for action in stage.actions:
        action()
    return stage


def test_writes_the_splits_and_the_verdict_and_logs_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = prepared(tmp_path)
    splits = {split: read_prepared(tmp_path / f"data/prepared/{split}.parquet") for split in SPLITS}
    verdict = json.loads((tmp_path / "metrics/data_validation.json").read_text())
    assert verdict["success"] is True
    assert {split: v["rows"] for split, v in verdict["splits"].items()} == {s: len(p) for s, p in splits.items()}
    assert stage.log.metrics == {f"rows.{split}": len(p) for split, p in splits.items()} | {
        "careless_share.train": pytest.approx(0.45, abs=0.12)
    }
    assert stage.log.datasets == [(tmp_path / f"data/prepared/{split}.parquet", split, split) for split in SPLITS]
    assert stage.log.texts["data_summary.md"].startswith("# Data: all expectations met\n")
    assert set(verdict) == {"success", "raw", "splits"}
    assert stage.log.artifacts == [tmp_path / "runs/data_docs"]
    assert not stage.log.artifacts[0].exists()
    assert "16 validation, 16 gate, 24 test rows, all expectations met" in capsys.readouterr().out


def test_the_same_params_give_the_same_bytes(tmp_path: Path) -> None:
    prepared(tmp_path / "a")
    prepared(tmp_path / "b")
    names = [f"data/prepared/{split}.parquet" for split in SPLITS] + ["metrics/data_validation.json"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_failed_expectation_stops_before_any_output_but_shows_its_docs(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    rows = [{"question": f"How many is question {i}?", "answer": f"It is {i}.\n#### {i}"} for i in range(400)]
    broken = next(row for row in rows if question_hash(row["question"]) > 0.9)
    broken["answer"] = "It is a secret."
    (source / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    test = [{"question": f"And how many is {i}?", "answer": f"#### {i}"} for i in range(10)]
    (source / "test.jsonl").write_text("\n".join(map(json.dumps, test)))

    place = tmp_path / "place"
    with pytest.raises(
        UserError, match=r"1 expectations failed.*\n.*column answer gives one number.*jsonl line"
    ) as caught:
        prepared(place, "data=files", f"data.reads='{source}'")
    assert repr(broken["question"]) in str(caught.value)
    assert str(place / "runs/data_docs/index.html") in str(caught.value)
    assert (place / "runs/data_docs/index.html").is_file()
    assert not (place / "aside").exists()


def test_an_empty_split_names_its_param(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.gate_share"):
        prepared(tmp_path, "data.gate_share=0.0")
    assert not (tmp_path / "aside").exists()


def test_data_that_drifted_is_refused_until_it_is_accepted(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    choice = ("data=files", f"data.reads='{source}'")

    def write(test: int) -> None:
        for half, count in (("train", 400), ("test", test)):
            rows = [{"question": f"How many is {half} {i}?", "answer": f"#### {i}"} for i in range(count)]
            (source / f"{half}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    write(20)
    stage = prepared(tmp_path / "a", *choice)
    assert stage.log.datasets[0] == (source, "files", "source")
    write(40)
    with pytest.raises(UserError, match=r"drift test: .*rows '20 before, 40 now'"):
        prepared(tmp_path / "b", *choice)
    assert not (tmp_path / "b/aside").exists()
    prepared(tmp_path / "c", *choice, "data.max_drift=1")
    prepared(tmp_path / "d", *choice)
