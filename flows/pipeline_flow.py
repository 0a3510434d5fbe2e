"""The pipeline's flow: params, the stages in the order of dvc.yaml, the summary.

A deployment's run has a workspace of its own (`tasks/workspaces.py`); `make run` works in its checkout.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed

from flows.parameters import Choices
from rlhf import config, environments, tracking
from rlhf.anchors import CHECKOUT
from rlhf.errors import UserError
from rlhf.evaluation.statistics import flat
from rlhf.hub import OutOfReachError
from rlhf.params import Params
from rlhf.redaction import redacted_errors
from tasks import disk, references, summary, workspaces
from tasks.dvc_stages import RETRIES, RETRY_DELAY_SECONDS, Outcome, mend_rwlock, retries, run_stage, upstream
from tasks.processes import run_lines
from tasks.summary import Summary
from tasks.workspaces import Workspace

DEFAULTS = Choices()
NOTHING_NEW = "Nothing new"
"""Name of the final state of a run in which every stage was unchanged."""


@flow(name="pipeline", persist_result=False)
def pipeline(choices: Choices = DEFAULTS) -> State[Summary]:
    """Runs the whole pipeline in a workspace of its own and registers the policy.

    Completed runs in which nothing had to be computed are called "Nothing new". Raises UserError for choices that do
    not fit together or a checkout with uncommitted changes, and StageFailedError for the first stage that fails.
    """
    overrides = choices.hydra(flow_run.scheduled_start_time or datetime.now(UTC))
    name = workspaces.name_of(flow_run.name or "", flow_run.id or "")
    try:
        with workspaces.workspace(name, choices.revision, choices.allow_dirty) as workspace:
            get_run_logger().info("commit %s in %s", workspace.commit, workspace.path)
            raw = config.compose(overrides, workspace.path / "conf")
            disk.require_room(config.validate(raw).limits)
            _make_environment(workspace)
            result = _run(_pin(raw), overrides, workspace)
    except Exception:
        if (kept := workspaces.directory() / name).is_dir():
            get_run_logger().error("kept for a look, until make gc: %s", kept)
        raise
    return _final_state(result)


@flow(name="pipeline", persist_result=False)
def pipeline_in_place(overrides: list[str]) -> Summary:
    """Runs the pipeline with Hydra `overrides` (`scale=tiny`, `ppo.kl.coef=0.02`) in this checkout.

    To be called with the checkout's lock held. Raises UsageError for wrong overrides, UserError where params.yaml is
    changed meanwhile, and StageFailedError for the first stage that fails.
    """
    return _run(config.compose(overrides), overrides, Workspace(CHECKOUT))


@redacted_errors()
def _run(raw: dict[str, Any], overrides: Sequence[str], workspace: Workspace) -> Summary:
    """Writes params.yaml and brings every stage of the workspace up to date."""
    params, path = config.validate(raw), workspace.path
    config.check_sources(raw, path)
    config.write(raw, path / config.PARAMS_FILE)
    mend_rwlock(path)
    tags = {"overrides": " ".join(overrides), "prefect.flow_run": flow_run.name or ""}
    tags |= {"workspace.commit": workspace.commit} if workspace.commit else {}
    tags |= {"uncommitted": "true"} if workspace.patch else {}
    with tracking.pipeline_run(raw, tags) as run:
        is_tracked = bool(run.id)
        if not is_tracked:
            get_run_logger().warning("the tracking server is out of reach: register fails unless it is back by then")
        run.log_artifact(path / config.PARAMS_FILE)
        if workspace.patch:
            run.log_artifact(workspace.patch)
        outcomes = _run_stages(raw, params, path, run.key, is_tracked)
        evaluation = summary.read_evaluation(path)
        run.log_metrics(flat(evaluation))
        run.log_artifact(path / "dvc.lock")
        result = Summary(
            evaluation=evaluation,
            registered=outcomes["register"].last_line.removeprefix("register: "),
            run_id=run.id,
            unchanged=tuple(name for name, outcome in outcomes.items() if not outcome.ran),
            new=any(outcome.ran for name, outcome in outcomes.items() if name != "register"),
        )
        create_markdown_artifact(summary.as_markdown(result), key="pipeline-summary", description="Accuracies, links")
    return result


def _run_stages(
    raw: dict[str, Any], params: Params, workspace: Path, parent: str, is_tracked: bool
) -> dict[str, Outcome]:
    """Runs one stage after the other, for a DVC workspace takes one at a time; Prefect draws what depends on what."""
    states: dict[str, Any] = {}
    outcomes = {}
    for name, needed in upstream(workspace / "dvc.yaml", raw).items():
        config.require_unchanged(raw, workspace / config.PARAMS_FILE)
        attempt = run_stage.with_options(
            retries=retries(name, params, is_tracked), retry_delay_seconds=RETRY_DELAY_SECONDS
        )
        waits = [states[stage] for stage in needed]
        states[name] = attempt(name, parent, workspace, wait_for=waits, return_state=True)
        outcomes[name] = states[name].result()
    return outcomes


def _final_state(result: Summary) -> State[Summary]:
    """How the run ends in Prefect's list."""
    if result.new:
        return Completed(message=f"registered: {result.registered}", data=result)
    message = f"nothing new: every stage unchanged, and no version made: {result.registered}"
    get_run_logger().info(message)
    return Completed(name=NOTHING_NEW, message=message, data=result)


def _out_of_reach(_task: Any, _run: Any, state: State[Any]) -> bool:
    return isinstance(state.result(raise_on_failure=False), OutOfReachError)


@task(
    name="pin references",
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAY_SECONDS,
    retry_condition_fn=_out_of_reach,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def _pin(raw: dict[str, Any]) -> dict[str, Any]:
    """The params with commits in place of the hub's branches."""
    fixed, pins = references.pin(raw)
    for pin in pins:
        get_run_logger().info(pin)
    return fixed


def _make_environment(workspace: Workspace) -> None:
    """Installs the workspace's packages where it locks others than this checkout."""
    logger = get_run_logger()

    def run(command: list[str]) -> None:
        logger.info("this revision locks other packages: %s", " ".join(command[2:5]))
        if code := run_lines(command, logger.info, directory=workspace.path, environ={}):
            raise UserError(f"the environment of {workspace.path}: {' '.join(command[2:5])} ended with {code}")

    environments.make(workspace.path, run)
