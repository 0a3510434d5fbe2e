"""Tracking: runs log to a journal on disk (`runs`, `journal`); a thread brings it to MLflow (`sender`, `delivery`).

`questions` asks it.
"""

from rlhf.tracking.questions import experiment_id, find_run_by_outs
from rlhf.tracking.runs import (
    PARENT_VARIABLE,
    Run,
    SilentRun,
    cached_child,
    dataset_digest,
    evaluation_run,
    git_tags,
    pipeline_run,
    stage_run,
)
from rlhf.tracking.sections import SECTIONS, flatten, params_of
from rlhf.tracking.server import EXPERIMENT

__all__ = [
    "EXPERIMENT",
    "PARENT_VARIABLE",
    "SECTIONS",
    "Run",
    "SilentRun",
    "cached_child",
    "dataset_digest",
    "evaluation_run",
    "experiment_id",
    "find_run_by_outs",
    "flatten",
    "git_tags",
    "params_of",
    "pipeline_run",
    "stage_run",
]
