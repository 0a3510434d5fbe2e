"""Moving the champion by hand from the Prefect UI: the same functions as `make promote` and `make rollback`."""

from __future__ import annotations

from typing import Annotated

from prefect import flow
from prefect.logging import get_run_logger
from pydantic import Field

from rlhf.registry import champion

Model = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="The registered model")]
Reason = Annotated[
    str,
    Field(min_length=1, max_length=champion.LONGEST_REASON, description="Why: it is recorded with the move"),
]
MODEL = "gsm8k-policy"


@flow(name="promote", persist_result=False)
def promote(
    version: Annotated[int, Field(ge=1, description="Number of the version that is to serve")],
    reason: Reason,
    model: Model = MODEL,
) -> None:
    """Makes a registered version champion by hand. Raises UserError where there is none, or its files are gone."""
    get_run_logger().info(champion.promote(model, str(version), reason))


@flow(name="rollback", persist_result=False)
def rollback(reason: Reason, model: Model = MODEL) -> None:
    """Makes the previous champion champion again, and withdraws the present one. Raises UserError where none was."""
    get_run_logger().info(champion.rollback(model, reason))
