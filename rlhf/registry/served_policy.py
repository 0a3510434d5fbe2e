"""The registered policy as MLflow serves it: questions in, answers out.

MLflow keeps this file beside the checkpoint, with the library that it imports, and runs it where the model is loaded.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from mlflow.exceptions import MlflowException
from mlflow.models import set_model
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.pyfunc import PythonModel

from rlhf.errors import UserError
from rlhf.generation.answering import AnsweringPolicy, Settings
from rlhf.models.checkpoints import checkpoint_hash

REGISTERED_AS = "registered_model_meta"
"""The file in which MLflow says which version it fetched."""


class ServedPolicy(PythonModel):
    """A checkpoint directory behind MLflow's `predict`."""

    policy: AnsweringPolicy
    identity: dict[str, str | None]

    def load_context(self, context: Any) -> None:
        """Called by MLflow with the place where it put the checkpoint."""
        checkpoint = Path(context.artifacts["checkpoint"])
        self.policy = AnsweringPolicy(checkpoint)
        self.identity = {
            "version": registered_version(checkpoint.parents[1]),
            "policy": checkpoint_hash(checkpoint)[:12],
        }

    # No type hint on model_input: MLflow would derive the signature from it and drop the parameters of ours.
    def predict(self, context, model_input, params: dict[str, Any] | None = None) -> list[dict[str, Any]]:  # type: ignore[no-untyped-def]  # noqa: ARG002
        """One answer a question; `params` are the fields of Settings, with the signature's defaults.

        An answer is {text, answer, finished, votes, samples: [{text, answer, finished}], version, policy}. Raises
        MlflowException (HTTP 400) for questions and settings that cannot be answered.
        """
        questions = model_input.iloc[:, 0] if hasattr(model_input, "iloc") else model_input
        try:
            answers = self.policy.answer([str(question) for question in questions], Settings(**(params or {})))
        except UserError as error:
            raise MlflowException(str(error), INVALID_PARAMETER_VALUE) from None
        return [
            {
                **asdict(answer.response),
                "votes": answer.votes,
                "samples": [asdict(response) for response in answer.responses],
                **self.identity,
            }
            for answer in answers
        ]


def registered_version(directory: Path) -> str | None:
    """NAME/NUMBER of the registered version that MLflow fetched into `directory`; None for a model without one."""
    file = directory / REGISTERED_AS
    if not file.is_file():
        return None
    registered = yaml.safe_load(file.read_text(encoding="utf-8"))
    return f"{registered['model_name']}/{registered['model_version']}"


set_model(ServedPolicy())
