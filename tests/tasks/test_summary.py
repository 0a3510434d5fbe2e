"""The summary from a fixture of metrics/evaluation.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import UserError
from tasks.summary import Summary, as_markdown, as_text, read_evaluation, run_link

REFUSED = "gsm8k-policy version 3, policy 0123456789ab: refused by the gate: gain on gate -1.0 points, below 0"


def split(n: int, sft: float, policy: float) -> dict[str, Any]:
    return {
        "n": n,
        "method": "strict",
        "confidence": 0.95,
        "sft": {"accuracy": sft, "low": sft - 0.04, "high": sft + 0.04},
        "policy": {"accuracy": policy, "low": policy - 0.03, "high": policy + 0.03},
        "gain": policy - sft,
        "gain_low": policy - sft - 0.05,
        "gain_high": policy - sft + 0.05,
        "p_value": 0.0 if n == 500 else 0.000012,
        "parse_failures": {"sft": 0.01, "policy": 0.0},
        "cut_off": {"sft": 0.0, "policy": 0.0},
    }


@pytest.fixture
def summary() -> Summary:
    return Summary(
        evaluation={"gate": split(400, 0.3, 0.72), "test": split(500, 0.312, 0.744)},
        registered=REFUSED,
        run_id="abc",
        unchanged=("prepare_data", "fetch_sft"),
        new=True,
    )


def test_the_lines_for_the_terminal(summary: Summary) -> None:
    lines = as_text(summary).splitlines()
    assert lines[0] == "unchanged         prepare_data, fetch_sft"
    assert lines[1] == "accuracy on test  SFT 31.2 % → policy 74.4 % [71.4, 77.4], 500 problems"
    assert lines[2] == "gain              +43.2 [+38.2, +48.2] points, 95% intervals"
    assert lines[3] == f"registered        {REFUSED}"
    assert lines[4] == "report            reports/evaluation/index.html"
    assert lines[5] == "MLflow run        abc"
    assert "make ui" in lines[6]
    assert 'make ask Q="' in lines[7]
    assert len(lines) == 8


def test_a_loss_is_shown_as_one(summary: Summary) -> None:
    worse = Summary({"gate": split(10, 0.5, 0.4), "test": split(10, 0.5, 0.4)}, "none", "", (), new=False)
    text = as_text(worse)
    assert "-10.0 [-15.0, -5.0] points" in text
    assert "MLflow run        none: the tracking server was out of reach" in text
    assert not text.startswith("unchanged")


def test_the_page_has_a_row_a_split_and_the_links(summary: Summary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example:5000/")
    page = as_markdown(summary)
    rows = [line for line in page.splitlines() if line.startswith(("| gate", "| test"))]
    assert rows == [
        "| gate | 400 | 30.0 % [26.0, 34.0] | 72.0 % [69.0, 75.0] | +42.0 [+37.0, +47.0] | 1.2e-05 |",
        "| test | 500 | 31.2 % [27.2, 35.2] | 74.4 % [71.4, 77.4] | +43.2 [+38.2, +48.2] | < 1e-06 |",
    ]
    assert "[abc](http://mlflow.example:5000/#/runs/abc)" in page
    assert "`reports/evaluation/index.html`" in page
    assert "unchanged stages: prepare_data, fetch_sft" in page


def test_a_run_in_the_local_database_is_linked_to_the_page_of_make_ui(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////tmp/mlflow.db")
    assert run_link("abc") == "http://127.0.0.1:5000/#/runs/abc"


def test_evaluation_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics/evaluation.json"
    path.parent.mkdir()
    evaluation = {"gate": split(1, 0.0, 1.0), "test": split(2, 0.0, 1.0)}
    path.write_text(json.dumps(evaluation))
    assert read_evaluation(tmp_path) == evaluation


@pytest.mark.parametrize("content", [None, "{", "[]", '{"gate": {}}'])
def test_an_evaluation_that_cannot_be_read_is_one_line(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "metrics/evaluation.json"
    path.parent.mkdir()
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match="run dvc repro evaluate"):
        read_evaluation(tmp_path)
