"""lm-evaluation-harness judges answers that somebody else wrote, in the peers' environment, from local files alone.

    python -m bench.judged_by_harness ANSWERS MODEL FILE

ANSWERS holds rows of prompt, user, answer and response: the text that the model was given, the user's part of it,
GSM8K's own answer, what the model wrote. The harness runs its GSM8K task as it ships it, filters, metric and stop
strings included, without examples, against a model that gives these responses to these prompts and to no other one.
FILE gets for each row what `strict-match` and `flexible-extract` read and whether they call it right.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lm_eval.tasks
import yaml
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.tasks import TaskManager, get_task_dict
from transformers import AutoTokenizer

FILTERS = {"strict": "strict-match", "flexible": "flexible-extract"}
TASK = "gsm8k"


class Replayed(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """A model that has answered before."""

    def __init__(self, responses: dict[str, str], model: Path) -> None:
        super().__init__()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self._responses = responses

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        """The response to each prompt, cut at the task's stop strings; KeyError where a prompt is another one."""
        return [
            postprocess_generated_text(self._responses[prompt], settings["until"], None)
            for prompt, settings in (request.args for request in requests)
        ]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text = self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        assert isinstance(text, str)
        return text

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path)

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    def tok_encode(self, string: str, **_: Any) -> list[int]:
        return list(self.tokenizer.encode(string, add_special_tokens=False))

    def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
        raise NotImplementedError

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        raise NotImplementedError


def task(file: Path) -> dict[str, Any]:
    """The harness's own GSM8K on the problems in `file`, asked as we ask, without examples."""
    shipped = yaml.safe_load((Path(lm_eval.tasks.__file__).with_name("gsm8k") / "gsm8k.yaml").read_text())
    for key in ("tag", "dataset_name", "training_split", "fewshot_split"):
        del shipped[key]
    return {
        **shipped,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "doc_to_text": "{{user}}",
        "num_fewshot": 0,
    }


def main(answers: Path, model: Path, target: Path) -> None:
    """Judges the rows of `answers` and writes the verdicts."""
    rows = json.loads(answers.read_text())
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "problems.jsonl")
        file.write_text("".join(json.dumps({"user": row["user"], "answer": row["answer"]}) + "\n" for row in rows))
        tasks = get_task_dict([task(file)], TaskManager(include_defaults=False))
        replayed = Replayed({row["prompt"]: row["response"] for row in rows}, model)
        results: Any = evaluate(replayed, tasks, apply_chat_template=True, bootstrap_iters=0, log_samples=True)
    verdicts: list[dict[str, Any]] = [{} for _ in rows]
    names = {name: method for method, name in FILTERS.items()}
    for sample in results["samples"][TASK]:
        method = names[sample["filter"]]
        verdicts[sample["doc_id"]][method] = {
            "right": bool(sample["exact_match"]),
            "read": sample["filtered_resps"][0],
        }
    target.write_text(json.dumps(verdicts))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
