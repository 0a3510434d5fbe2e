"""Prepares the data: reads the source, cuts the splits, and lets the data gate decide whether the pipeline goes on.

python -m stages.prepare_data data.source=files data.reads=DIRECTORY
"""

from __future__ import annotations

from shutil import rmtree

from rlhf.data.expectations import validate
from rlhf.data.gsm8k import SPLITS, Splits, write_prepared
from rlhf.data.sources import prepare
from rlhf.stage import Stage, run_stage


def main(stage: Stage) -> None:
    """Writes data/prepared and metrics/data_validation.json; raises UserError where the gate refuses the data."""
    splits = prepare(stage.params.data)
    docs = stage.scratch("data_docs")
    verdict = validate(splits, docs)
    stage.log.log_artifact(docs)
    stage.log.log_metrics(counts(splits))
    verdict.refuse_failures(docs)
    # Data Docs hold times, so they are no DVC output; on disk they would outlive the data that DVC swaps below them.
    stage.after_publishing(lambda: rmtree(docs))

    verdict.write(stage.output("metrics/data_validation.json"))
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
