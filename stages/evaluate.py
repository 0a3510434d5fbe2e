"""Evaluates the SFT start and the PPO policy on the same problems: accuracies, paired gain, KL between them, report.

    python -m stages.evaluate [key=value ...]

Test decides nothing; the gate split decides about promotion. Both models decode greedily. A killed evaluation goes on
behind the last part that was done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf import resuming, runtime, tracking
from rlhf.data.gsm8k import Problem, read_prepared
from rlhf.errors import UserError
from rlhf.evaluation import divergence, report
from rlhf.evaluation.accuracy import Graded, evaluate_model
from rlhf.evaluation.chunks import Chunks, Row
from rlhf.evaluation.length_buckets import buckets_csv, length_buckets
from rlhf.evaluation.right_answers import right_answers_csv
from rlhf.evaluation.statistics import accuracies_csv, compare, flat
from rlhf.generation import decoders
from rlhf.models import checkpoints
from rlhf.models.actor_critic import sampling_copy
from rlhf.stage import Stage, run_stage, write_json

SPLITS = ("gate", "test")
MODELS = {"sft": "SFT", "policy": "Policy"}

Grades = dict[str, list[Graded]]
"""Split -> its problems, graded."""


def main(stage: Stage) -> None:
    params = stage.params
    problems = {split: _problems(stage, split) for split in SPLITS}
    directories = {name: stage.input(f"models/{name}") for name in MODELS}
    ppo = stage.read_json("metrics/ppo.json", lambda ppo: {"best_iteration": int(ppo["best_iteration"])})
    curve, panel = (report.read_rows(stage.input(f"plots/{name}.csv")) for name in ("ppo", "panel"))
    if not curve:
        raise UserError("plots/ppo.csv: no rows: run dvc repro train_ppo")
    chunks = _chunks(
        stage, [stage.input(f"data/prepared/{split}.parquet") for split in SPLITS] + list(directories.values())
    )
    tokenizers = {name: checkpoints.load_tokenizer(directory) for name, directory in directories.items()}
    device, dtype = runtime.device(params.runtime), runtime.matmul_dtype(params.runtime)
    models = {name: checkpoints.load_policy(directory).to(device) for name, directory in directories.items()}
    sft, policy = (
        _evaluate(stage, chunks, name, sampling_copy(models[name], dtype), tokenizers[name], problems)
        for name in MODELS
    )
    tokenizer = tokenizers["policy"]
    pair = divergence.Pair(**models, tokenizer=tokenizer, temperature=params.ppo.sampling.temperature, dtype=dtype)
    kls = _state_kls(stage, pair, policy["test"])
    method, confidence = params.verifier.method, params.evaluation.confidence
    metrics = {split: compare(sft[split], policy[split], method, confidence) for split in SPLITS}
    moved = divergence.summarise(pair, policy["test"], kls)
    metrics["test"]["kl"] = {"sequence": moved.sequence, "token": moved.token}
    lengths = [len(tokenizer.encode(problem.answer, add_special_tokens=False)) for problem in problems["test"]]
    buckets = length_buckets(lengths, sft["test"], policy["test"], [sum(states) for states in kls], confidence)

    write_json(stage.output("metrics/evaluation.json"), metrics)
    stage.output("plots/accuracy.csv").write_text(accuracies_csv(metrics))
    stage.output("plots/length_buckets.csv").write_text(buckets_csv(buckets))
    stage.output("reports/evaluation/gate.csv").write_text(right_answers_csv(policy["gate"]))
    page = stage.output("reports/evaluation/index.html")
    html = report.render(
        metrics=metrics,
        ppo=ppo,
        iterations=curve,
        buckets=buckets,
        divergence=moved,
        panel=report.panel_problems(panel),
        samples=report.pick_samples(sft["test"], policy["test"], params.evaluation.samples),
        checkpoints=[_lineage(name, directory) for name, directory in directories.items()],
        params=tracking.params_of(stage.name, params.model_dump()),
    )
    page.write_text(html, encoding="utf-8")

    stage.log.log_metrics(flat(metrics))
    stage.log.log_artifact(page, "evaluation")
    stage.log.log_table(*report.results_table(sft, policy), "eval_results_table.json")
    print(report.headline(metrics["test"]))


def _problems(stage: Stage, split: str) -> list[Problem]:
    path = stage.input(f"data/prepared/{split}.parquet")
    stage.log.log_dataset(path, split, "evaluation")
    return read_prepared(path)


def _chunks(stage: Stage, inputs: Sequence[Path]) -> Chunks:
    """Where this very evaluation keeps its parts, held until the outputs are in place."""
    params = stage.params
    kernels = decoders.kernels(params.generation.sampler, runtime.device(params.runtime))
    settings = tracking.params_of(stage.name, params.model_dump())
    identity = resuming.identity(stage.name, settings, inputs, stage.workspace, kernels)
    directory = resuming.directory(stage.name, identity)
    stage.resume_from(directory)
    return Chunks(directory, params.evaluation.batch_size)


def _evaluate(
    stage: Stage,
    chunks: Chunks,
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Mapping[str, list[Problem]],
) -> Grades:
    """One model on every split."""
    with runtime.progress(f"evaluate {MODELS[name]}", sum(map(len, problems.values()))) as bar:

        def graded(part: Sequence[Problem]) -> list[Row]:
            return [asdict(row) for row in evaluate_model(model, tokenizer, part, stage.params, on_rows=bar.advance)]

        return {
            split: [Graded(**row) for row in chunks.rows(f"{name}-{split}", rows, graded, on_kept=bar.advance)]
            for split, rows in problems.items()
        }


def _state_kls(stage: Stage, pair: divergence.Pair, answers: list[Graded]) -> list[list[float]]:
    with runtime.progress("evaluate KL", len(answers)) as bar:
        return divergence.state_kls(pair, answers, stage.params.ppo.micro_batch_size, on_rows=bar.advance)


def _lineage(name: str, directory: Path) -> report.Checkpoint:
    manifest = checkpoints.read_manifest(directory).model_dump(mode="json")
    return report.Checkpoint(MODELS[name], checkpoints.checkpoint_hash(directory), manifest)


if __name__ == "__main__":
    run_stage("evaluate", main)
