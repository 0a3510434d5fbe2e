"""Prepares the data: reads the source, cuts the splits, and lets the data gate decide whether the pipeline goes on.

python -m stages.prepare_data data.source=files data.reads=DIRECTORY
"""

from __future__ import annotations

from pathlib import Path
from shutil import rmtree

from rlhf.data import accepted, sources, suites
from rlhf.data.expectations import evaluate
from rlhf.data.gsm8k import SPLITS, Splits, write_prepared
from rlhf.params import NOTHING
from rlhf.stage import Stage, run_stage


def main(stage: Stage) -> None:
    """Writes data/prepared and metrics/data_validation.json; raises UserError where the gate refuses the data."""
    data = stage.params.data
    rows = sources.read(data)
    if data.reads != NOTHING:
        stage.log.log_dataset(Path(data.reads), "files", "source")
    splits = sources.split(rows, data)
    profile, last = suites.profile(splits), accepted.read(data)
    checks = [*suites.raw(rows, data.columns), *suites.prepared(splits, data.max_overlap)]
    checks += suites.drift(profile, last, data.max_drift) if last else []
    docs = stage.scratch("data_docs")
    verdict = evaluate(checks, docs)
    stage.log.log_artifact(docs)
    stage.log.log_text(verdict.summary(), "data_summary.md")
    stage.log.log_metrics(counts(splits))
    verdict.refuse_failures(docs)
    # Data Docs hold times, so they are no DVC output; on disk they would outlive the data that DVC swaps below them.
    stage.after_publishing(lambda: rmtree(docs))
    if stage.place == stage.workspace:  # a try with overrides decides nothing
        stage.after_publishing(lambda: accepted.write(data, profile))

    verdict.write(stage.output("metrics/data_validation.json"), ("raw", "splits"))  # drift is no property of the data
    directory = stage.output("data/prepared")
    for split in SPLITS:
        path = directory / f"{split}.parquet"
        write_prepared(path, splits[split])
        stage.log.log_dataset(path, split, split, source=stage.place / f"data/prepared/{split}.parquet")
    print(f"prepare_data: {', '.join(f'{len(splits[split])} {split}' for split in SPLITS)} rows, all expectations met")


def counts(splits: Splits) -> dict[str, float]:
    """Rows of each split, and the share of its demonstrations that end on another number than the answer."""
    rows = {f"rows.{split}": float(len(problems)) for split, problems in splits.items()}
    careless = [problem.demonstration != problem.answer for problem in splits["train"]]
    return rows | {"careless_share.train": sum(careless) / len(careless)}


if __name__ == "__main__":
    run_stage("prepare_data", main)
