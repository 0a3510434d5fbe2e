"""The registry from the Prefect UI: the same functions as `python -m rlhf.registry` has.

Where no model is named it is the one of the checkout's params.yaml, `registry.name`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from prefect import flow
from prefect.logging import get_run_logger
from pydantic import BaseModel, ConfigDict, Field

from rlhf import anchors, config
from rlhf.redaction import redacted_errors
from rlhf.registry import champion
from tasks.evaluations import evaluate_version

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
Model = Annotated[
    str | None,
    Field(pattern=NAME, max_length=200, description="The registered model; left out, registry.name of params.yaml"),
]
Reason = Annotated[
    str,
    Field(min_length=1, max_length=champion.LONGEST_REASON, description="Why: it is recorded with the move"),
]


class Evaluation(BaseModel):
    """What to evaluate again."""

    model_config = ConfigDict(extra="forbid")

    version: str = Field(
        default="champion",
        pattern=NAME,
        max_length=200,
        description="Number of the version, or an alias: champion, previous, candidate",
    )
    split: Literal["validation", "gate", "test"] = Field(
        default="test",
        description="The problems: validation chose the iteration, gate decided on the champion, test decided nothing",
    )
    other_data: bool = Field(
        default=False,
        description="Take the checkout's problems even where they are not those of the version's own run; the result "
        "says so. Otherwise the version's own are taken, from the checkout or DVC's cache",
    )
    model: Model = None


DEFAULTS = Evaluation()


@flow(name="evaluate_registered", persist_result=False)
def evaluate_registered(evaluation: Evaluation = DEFAULTS) -> None:
    """Evaluates a registered version again, as an MLflow run that is linked to it; it moves no alias.

    Raises UserError where the version or its problems are missing.
    """
    with redacted_errors():  # no decorator: Prefect would look for the parameters' types in the wrong module
        model = _model(evaluation.model)
        done = evaluate_version(model, evaluation.version, evaluation.split, evaluation.other_data)
    get_run_logger().info(done["line"])


@flow(name="promote", persist_result=False)
def promote(
    version: Annotated[int, Field(ge=1, description="Number of the version that is to serve")],
    reason: Reason,
    model: Model = None,
) -> None:
    """Makes a registered version champion by hand. Raises UserError where there is none, or its files are gone."""
    with redacted_errors():
        done = champion.promote(_model(model), str(version), reason)
    get_run_logger().info(done)


@flow(name="rollback", persist_result=False)
def rollback(reason: Reason, model: Model = None) -> None:
    """Makes the previous champion champion again, and withdraws the present one. Raises UserError where none was."""
    with redacted_errors():
        done = champion.rollback(_model(model), reason)
    get_run_logger().info(done)


def _model(name: str | None) -> str:
    return name or config.load((), anchors.CHECKOUT / config.PARAMS_FILE).registry.name
