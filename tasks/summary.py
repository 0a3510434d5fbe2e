"""What a pipeline run comes to: a few lines for the terminal and a page for the Prefect UI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf import anchors, tracking
from rlhf.evaluation.wording import accuracy, gain, p_value, percent
from rlhf.stage import read_json

NO_RUN = "none: the tracking server was out of reach"
METRICS = "metrics/evaluation.json"
REPORT = Path("reports/evaluation/index.html")
SPLITS = ("gate", "test")
MLFLOW_UI_PORT = 5000
"""Where `make ui` serves MLflow's page."""


@dataclass(frozen=True)
class Summary:
    """The outcome of a pipeline run."""

    evaluation: Mapping[str, Any]
    """metrics/evaluation.json."""
    registered: str
    """The registered model and its version, in words."""
    run_id: str
    """The pipeline's MLflow run; empty where no server could be reached."""
    unchanged: tuple[str, ...]
    """Stages that DVC skipped or restored."""
    new: bool
    """Whether any stage before `register` had something to do."""


def read_evaluation(workspace: Path) -> dict[str, Any]:
    """The splits of metrics/evaluation.json; raises UserError where it is missing or broken."""
    return read_json(workspace, METRICS, lambda evaluation: {split: evaluation[split] for split in SPLITS})


def as_text(summary: Summary) -> str:
    """The lines for the terminal."""
    test = summary.evaluation["test"]
    models = f"SFT {percent(test['sft']['accuracy'])} → policy {accuracy(test['policy'])}, {test['n']} problems"
    rows = [
        ("accuracy on test", models),
        ("gain", f"{gain(test)} points, {test['confidence']:.0%} intervals"),
        ("registered", summary.registered),
        ("report", str(REPORT)),
        ("MLflow run", summary.run_id or NO_RUN),
        ("look at the runs", "make ui"),
        ("ask the policy", 'make ask Q="Tom has 3 apples. Kim gives Tom 4 more. How many apples does Tom have?"'),
    ]
    if summary.unchanged:
        rows.insert(0, ("unchanged", ", ".join(summary.unchanged)))
    return "\n".join(f"{label:18}{text}" for label, text in rows)


def as_markdown(summary: Summary) -> str:
    """The page for the Prefect UI."""
    lines = [
        "# Pipeline run" if summary.new else "# Pipeline run: nothing new",
        "",
        "| split | problems | SFT | policy | gain in points | p |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for split in SPLITS:
        row = summary.evaluation[split]
        lines.append(
            f"| {split} | {row['n']} | {accuracy(row['sft'])} | {accuracy(row['policy'])} "
            f"| {gain(row)} | {p_value(row['p_value'])} |"
        )
    run = f"[{summary.run_id}]({run_link(summary.run_id)})" if summary.run_id else NO_RUN
    lines += [
        "",
        f"Intervals: {summary.evaluation['test']['confidence']:.0%}. Nothing is decided by test.",
        "",
        f"- registered: {summary.registered}",
        f"- MLflow run: {run}",
        f"- report: `{REPORT}`, also among the artifacts of the MLflow run of `evaluate`",
        f"- unchanged stages: {', '.join(summary.unchanged) or 'none'}",
    ]
    return "\n".join(lines) + "\n"


def run_link(run_id: str, artifact: str = "") -> str:
    """The run's page in the MLflow UI, or that of one of its artifacts: the tracking server's, or `make ui`'s."""
    uri = anchors.tracking_uri()
    base = uri.rstrip("/") if anchors.is_remote(uri) else f"http://127.0.0.1:{MLFLOW_UI_PORT}"
    if artifact and (experiment := tracking.experiment_id()):
        return f"{base}/#/experiments/{experiment}/runs/{run_id}/artifacts/{artifact}"
    return f"{base}/#/runs/{run_id}"
