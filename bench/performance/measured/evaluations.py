"""Our evaluation of `rows` problems, greedily."""

from __future__ import annotations

import json
from pathlib import Path

from bench.performance.measured import meter
from bench.performance.measured.setting import DTYPES, model_of, params_of, problems
from rlhf.evaluation.accuracy import evaluate_model
from rlhf.models.checkpoints import load_tokenizer


def main(settings: meter.Settings) -> meter.Numbers:
    """Writes the answers to `answers`, as [{"response": ..., "correct": ...}, ...]."""
    params = params_of(settings)
    model = model_of(settings).to(DTYPES[settings["dtype"]])
    tokenizer = load_tokenizer(Path(settings["data"], "model"))
    watch = meter.Watch()
    graded = evaluate_model(model, tokenizer, problems(settings, settings["rows"]), params)
    numbers = watch.read()
    answers = [{"response": row.response, "correct": row.strict} for row in graded]
    Path(settings["answers"]).write_text(json.dumps(answers))
    return {**numbers, "tokens": sum(row.length for row in graded)}


if __name__ == "__main__":
    meter.run(main)
