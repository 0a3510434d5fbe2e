"""One run of bench/baselines.py, a process of its own in the workspace of a seed.

    python -m bench.baseline_runs rejection DIRECTORY rounds=N epochs=N [key=value ...]
    python -m bench.baseline_runs rloo DIRECTORY [key=value ...]
    python -m bench.baseline_runs answer CHECKPOINT FILE      greedy answers to the test problems
    python -m bench.baseline_runs sample FILE                 the SFT policy's sampled answers to the test problems

The first two train from models/sft and write DIRECTORY/policy and DIRECTORY/training.json.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedModel

from bench import best_of_n
from bench.baseline_methods import Task, train_by_rejection, train_by_rloo
from bench.workspaces import write_text
from rlhf import config, runtime
from rlhf.data.answers import canonical, extract_answer
from rlhf.data.gsm8k import Problem, read_prepared
from rlhf.data.prompts import decode_response
from rlhf.errors import UsageError, run_command
from rlhf.evaluation.accuracy import accuracy, evaluate_model
from rlhf.models.actor_critic import Reference
from rlhf.models.checkpoints import (
    checkpoint_hash,
    load_policy,
    load_tokenizer,
    read_manifest,
    save_checkpoint,
)
from rlhf.params import Params
from rlhf.ppo import setup
from rlhf.runtime import matmul_dtype
from rlhf.stage import write_json

SFT = Path("models/sft")
SAMPLES = 32
"""Sampled answers to each test problem."""


class Selection:
    """Keeps the weights that validate best: strictly greater wins and the start is eligible, as PPO has it."""

    def __init__(self, model: PreTrainedModel, validate: Callable[[PreTrainedModel], float]) -> None:
        self._model, self._validate = model, validate
        self.accuracies: list[float] = []
        self.best = 0
        self.look()

    def look(self) -> None:
        """Validates the model as it is now."""
        value = self._validate(self._model)
        if not self.accuracies or value > self.accuracies[self.best]:
            self.best = len(self.accuracies)
            self._weights = {name: weight.clone() for name, weight in self._model.state_dict().items()}
        self.accuracies.append(value)

    def restore(self) -> None:
        """Puts the best weights back."""
        self._model.load_state_dict(self._weights)


def main(arguments: Sequence[str]) -> None:
    """Does one run."""
    match list(arguments):
        case ["rejection", directory, rounds, epochs, *overrides]:
            counts = _number("rounds", rounds), _number("epochs", epochs)
            train(Path(directory), configured(overrides), lambda task, model: train_by_rejection(task, model, *counts))
        case ["rloo", directory, *overrides]:
            params = configured(overrides)
            reference = Reference(load_policy(SFT).to(runtime.device(params.runtime)), matmul_dtype(params.runtime))
            train(Path(directory), params, lambda task, model: train_by_rloo(task, model, reference))
        case ["answer", checkpoint, file]:
            write_text(Path(file), json.dumps(answer(Path(checkpoint), configured([]))))
        case ["sample", file]:
            write_text(Path(file), json.dumps(sample_answers(configured([]))))
        case _:
            raise UsageError(f"{' '.join(arguments) or 'nothing'}: no such run: see the head of bench/baseline_runs.py")


def configured(overrides: Sequence[str]) -> Params:
    """The workspace's params with the overrides, for which this process is set up."""
    params = config.load(overrides)
    runtime.configure(params.runtime, params.seed)
    return params


def train(directory: Path, params: Params, method: Callable[[Task, PreTrainedModel], int]) -> None:
    """Trains the SFT policy by the method and writes the policy that validated best, the directory whole at its end."""
    tokenizer, model = load_tokenizer(SFT), load_policy(SFT).to(runtime.device(params.runtime))
    validation = problems("validation")
    selection = Selection(model, lambda policy: accuracy(evaluate_model(policy, tokenizer, validation, params)))
    prompts = setup.prompts(problems("train"), tokenizer, params)
    steps = method(Task(params, tokenizer, prompts, selection.look), model)
    selection.restore()
    written = directory.with_name(f".{directory.name}.new")
    shutil.rmtree(written, ignore_errors=True)
    written.mkdir(parents=True)
    sft = read_manifest(SFT)
    manifest = sft.model_copy(update={"kind": "policy", "parents": {"sft": checkpoint_hash(SFT)}, "params": {}})
    save_checkpoint(written / "policy", model, tokenizer, manifest)
    write_json(
        written / "training.json",
        {"steps": steps, "validation": selection.accuracies, "selected": selection.best},
    )
    written.replace(directory)


def answer(checkpoint: Path, params: Params) -> list[dict[str, object]]:
    """The checkpoint's greedy answers to the test problems, graded."""
    model = load_policy(checkpoint).to(runtime.device(params.runtime))
    return [asdict(row) for row in evaluate_model(model, load_tokenizer(checkpoint), problems("test"), params)]


def sample_answers(params: Params) -> list[dict[str, object]]:
    """The gold number of each test problem and the numbers of `SAMPLES` answers to it, sampled as PPO samples its
    start: canonical text, null where none was read or where the prompt is too long."""
    test, tokenizer = problems("test"), load_tokenizer(SFT)
    sampled = best_of_n.sample_answers(SFT, test, SAMPLES, params)
    answers: dict[str, list[str | None]] = {problem.question: [None] * SAMPLES for problem in test}
    for place, problem in enumerate(sampled.problems):
        texts = (
            decode_response(tokenizer, sample.tokens)
            for sample in sampled.samples[place * SAMPLES : (place + 1) * SAMPLES]
        )
        numbers = (extract_answer(text, params.verifier.method) for text in texts)
        answers[problem.question] = [None if number is None else canonical(number) for number in numbers]
    return [{"gold": problem.gold, "answers": answers[problem.question]} for problem in test]


def problems(split: str) -> list[Problem]:
    """A split of the workspace's data."""
    return read_prepared(Path("data/prepared") / f"{split}.parquet")


def _number(name: str, word: str) -> int:
    key, _, value = word.partition("=")
    if key != name or not value.isdecimal():
        raise UsageError(f"{word}: {name}=N is expected here: write {name} and a number")
    return int(value)


if __name__ == "__main__":
    sys.exit(run_command("baseline_runs", lambda: main(sys.argv[1:])))
