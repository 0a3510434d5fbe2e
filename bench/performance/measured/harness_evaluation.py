"""lm-evaluation-harness on `rows` problems with its `hf` model, in the peers' environment, from local files alone."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager, get_task_dict

from bench.performance.measured import meter

TASK = "problems"
NUMBER = r"#### (\-?[0-9\.\,]+)"
"""What GSM8K's strict match of the harness reads."""


def main(settings: meter.Settings) -> meter.Numbers:
    """Writes the answers to `answers`, as [{"response": ..., "correct": ...}, ...]; only `evaluate` is timed."""
    torch.set_num_threads(settings["threads"])
    data = Path(settings["data"])
    model = HFLM(
        pretrained=str(data / "model"), dtype=settings["dtype"], batch_size=settings["batch_size"], device="cpu"
    )
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "problems.jsonl")
        file.write_text("\n".join(json.dumps(row) for row in rows(settings)))
        tasks = get_task_dict([task(file, settings["new_tokens"])], TaskManager(include_defaults=False))
        watch = meter.Watch()
        results: Any = evaluate(model, tasks, apply_chat_template=True, bootstrap_iters=0, log_samples=True)
        numbers = watch.read()
    samples = sorted(results["samples"][TASK], key=lambda sample: sample["doc_id"])
    answers = [{"response": s["resps"][0][0], "correct": bool(s["exact_match"])} for s in samples]
    Path(settings["answers"]).write_text(json.dumps(answers))
    return {**numbers, "tokens": sum(len(model.tok_encode(answer["response"])) for answer in answers)}


def rows(settings: meter.Settings) -> list[dict[str, str]]:
    """The problems as the task reads them."""
    problems = json.loads(Path(settings["data"], "problems.json").read_text())[: settings["rows"]]
    template = settings["template"]
    return [{"text": template.replace("{question}", p["question"]), "gold": p["gold"]} for p in problems]


def task(file: Path, new_tokens: int) -> dict[str, Any]:
    """The harness's GSM8K, strict match, without examples, on the problems in `file`."""
    return {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{gold}}",
        "num_fewshot": 0,
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": new_tokens},
        "filter_list": [
            {
                "name": "strict",
                "filter": [{"function": "regex", "regex_pattern": NUMBER}, {"function": "take_first"}],
            }
        ],
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": True,
                "ignore_punctuation": False,
                "regexes_to_ignore": [",", "\\$", "\\.$"],
            }
        ],
    }


if __name__ == "__main__":
    meter.run(main)
