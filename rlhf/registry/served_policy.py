"""The registered policy as MLflow serves it: questions in, answers out, decoded greedily as the evaluation does.

MLflow keeps this file beside the checkpoint and runs it where the model is loaded, so it imports nothing of ours.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from mlflow.exceptions import MlflowException
from mlflow.models import set_model
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.pyfunc import PythonModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


class QuestionTooLong(ValueError):
    """A question that is longer than those that the policy was trained and evaluated on."""


class ServedPolicy(PythonModel):
    """A checkpoint directory behind MLflow's `predict`."""

    tokenizer: Any
    model: Any
    manifest: dict[str, Any]

    def load_context(self, context: Any) -> None:
        """Called by MLflow with the place where it put the checkpoint."""
        self.load(Path(context.artifacts["checkpoint"]))

    def load(self, directory: Path) -> None:
        """Loads the checkpoint in `directory`, whose files must be what its manifest says."""
        self.manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        for name, digest in self.manifest["files"].items():
            with (directory / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise MlflowException(f"{directory / name} is not what manifest.json says: fetch the model again")
        logging.disable_progress_bar()
        self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    # No type hint on model_input: MLflow would derive the signature from it and drop the parameters of ours.
    def predict(self, context, model_input, params: dict[str, Any] | None = None) -> list[str]:  # type: ignore[no-untyped-def]  # noqa: ARG002
        """One answer a question; `params["max_new_tokens"]` is the longest answer in tokens.

        Raises MlflowException (HTTP 400) for a question that is too long.
        """
        questions = model_input.iloc[:, 0] if hasattr(model_input, "iloc") else model_input
        limit = (params or {})["max_new_tokens"]
        try:
            return [self.answer(str(question), limit) for question in questions]
        except QuestionTooLong as error:
            raise MlflowException(str(error), INVALID_PARAMETER_VALUE) from None

    def answer(self, question: str, max_new_tokens: int) -> str:
        """The policy's greedy answer; raises QuestionTooLong."""
        prompt = self._prompt(question)
        longest = self.manifest["prompt"]["max_tokens"]
        if len(prompt) > longest:
            raise QuestionTooLong(f"the question takes {len(prompt)} tokens: this policy reads at most {longest}")
        tokens = torch.tensor([prompt], device=self.model.device)
        stop = self.tokenizer.convert_tokens_to_ids(self.manifest["stop_token"])
        # A checkpoint that PPO did not train names no stop strings.
        texts = self.manifest["params"].get("ppo", {}).get("sampling", {}).get("stop", [])
        with torch.inference_mode():
            output = self.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=stop,
                pad_token_id=stop,
                **({"stop_strings": texts, "tokenizer": self.tokenizer} if texts else {}),
            )
        text: str = self.tokenizer.decode(
            output[0, len(prompt) :], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _prompt(self, question: str) -> list[int]:
        prompt = self.manifest["prompt"]
        messages = [{"role": "system", "content": prompt["system"]}] if prompt["system"] else []
        messages.append({"role": "user", "content": prompt["template"].replace("{question}", question)})
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


set_model(ServedPolicy())
