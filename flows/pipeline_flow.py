"""The flow of the whole pipeline: params, the stages in the order of dvc.yaml, the summary."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from rlhf import config, tracking
from rlhf.anchors import CHECKOUT
from rlhf.evaluation.statistics import flat
from rlhf.params import Params
from tasks import summary
from tasks.dvc_stages import RETRY_DELAY_SECONDS, Outcome, mend_rwlock, retries, run_stage, upstream
from tasks.summary import Summary


@flow(name="pipeline", persist_result=False)
def pipeline(overrides: list[str]) -> Summary:
    """Composes params.yaml from Hydra `overrides` (`scale=tiny`, `ppo.kl.coef=0.02`) and brings every stage up to date.

    To be called with the checkout's lock held. Raises UsageError for wrong overrides, UserError where params.yaml is
    changed meanwhile, and StageFailedError for the first stage that fails.
    """
    raw = config.compose(overrides)
    params = config.validate(raw)
    config.write(raw, CHECKOUT / config.PARAMS_FILE)
    mend_rwlock(CHECKOUT)
    tags = {"overrides": " ".join(overrides), "prefect.flow_run": flow_run.name or ""}
    with tracking.pipeline_run(raw, tags) as run:
        is_tracked = bool(run.id)
        if not is_tracked:
            get_run_logger().warning("the tracking server is out of reach: register fails unless it is back by then")
        run.log_artifact(CHECKOUT / config.PARAMS_FILE)
        outcomes = _run_stages(raw, params, run.key, is_tracked)
        evaluation = summary.read_evaluation(CHECKOUT)
        run.log_metrics(flat(evaluation))
        run.log_artifact(CHECKOUT / "dvc.lock")
        result = Summary(
            evaluation=evaluation,
            registered=outcomes["register"].last_line.removeprefix("register: "),
            run_id=run.id,
            unchanged=tuple(name for name, outcome in outcomes.items() if not outcome.ran),
        )
        create_markdown_artifact(summary.as_markdown(result), key="pipeline-summary", description="Accuracies, links")
    return result


def _run_stages(raw: dict[str, Any], params: Params, parent: str, is_tracked: bool) -> dict[str, Outcome]:
    """Runs one stage after the other, for a DVC workspace takes one at a time; Prefect draws what depends on what."""
    states: dict[str, Any] = {}
    outcomes = {}
    for name, needed in upstream(CHECKOUT / "dvc.yaml", raw).items():
        config.require_unchanged(raw, CHECKOUT / config.PARAMS_FILE)
        attempt = run_stage.with_options(
            retries=retries(name, params, is_tracked), retry_delay_seconds=RETRY_DELAY_SECONDS
        )
        waits = [states[stage] for stage in needed]
        states[name] = attempt(name, parent, wait_for=waits, return_state=True)
        outcomes[name] = states[name].result()
    return outcomes
