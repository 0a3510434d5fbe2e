"""Prefect task: evaluates a registered version in a child process, and shows the numbers as artifacts."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import Any

from prefect import task
from prefect.artifacts import create_link_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from rlhf import anchors, config
from rlhf.errors import UserError
from rlhf.redaction import redacted_errors
from tasks.artifacts import ProgressArtifact, slug
from tasks.devices import lock_files
from tasks.processes import Terms, over_limit, run_lines, without_a_word
from tasks.summary import run_link
from tasks.supervisor import OWN_LINE, TIMED_OUT
from tasks.workspaces import cache_dir

OWN_WORD = "registry: "
"""How the command's errors begin."""


@task(task_run_name="evaluate {version} on {split}", cache_policy=NO_CACHE, persist_result=False)
@redacted_errors()
def evaluate_version(model: str, version: str, split: str, other_data: bool) -> dict[str, Any]:
    """What `python -m rlhf.registry evaluate --json` says; it waits for the device that the params name.

    Raises UserError with the command's last line where it fails, and at the limit that `evaluate` has.
    """
    logger, said = get_run_logger(), [""]
    params = config.load((), anchors.CHECKOUT / config.PARAMS_FILE)
    holder = f"evaluate_registered of {flow_run.name}"
    terms = Terms(locks=lock_files(["runtime"], params), holder=holder, limit=params.limits.evaluate_seconds)
    words = ["--split", split, "--cache", str(cache_dir() / "files/md5"), "--json"]
    words += ["--other-data"] if other_data else []
    command = [sys.executable, "-m", "rlhf.registry", "--name", model, "evaluate", *words, "--", version]
    progress = ProgressArtifact(f"{version}-{split}")

    def on_line(line: str) -> None:
        said.append(line)
        if not line.startswith("{"):
            logger.info(line.removeprefix(OWN_LINE))
            progress.show(line)

    with closing(progress):
        code = run_lines(command, on_line, directory=anchors.CHECKOUT, environ=anchors.environment(), terms=terms)
    if code == TIMED_OUT:
        raise UserError(over_limit("evaluate", terms))
    if code:
        raise UserError(said[-1].removeprefix(OWN_WORD) or without_a_word(code))
    done: dict[str, Any] = json.loads(said[-1])
    name = slug(f"{model}-{version}-{split}")
    create_table_artifact(_rows(done), f"evaluation-{name}", done["line"])
    create_link_artifact(run_link(done["run_id"]), f"MLflow run {done['run_id']}", f"mlflow-{name}")
    return done


def _rows(done: dict[str, Any]) -> list[dict[str, Any]]:
    about = {key: done[key] for key in ("version", "split", "data")}
    return [{"metric": key, "value": value} for key, value in (about | done["metrics"]).items()]
