"""Train the policy with PPO, resumable: a killed run goes on from its last iteration.

python -m stages.train_ppo [key=value ...]         for example ppo.reward.source=reward_model

With distributed.processes=N it starts N processes; torchrun --standalone --nproc_per_node=N -m stages.train_ppo does
as well. With RLHF_HOSTS they are on several hosts: docs/scaling.md.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf import hosts, resuming
from rlhf.data.gsm8k import read_prepared
from rlhf.generation import decoders
from rlhf.models.checkpoints import (
    Manifest,
    checkpoint_hash,
    load_tokenizer,
    read_manifest,
    write_manifest,
    write_model,
)
from rlhf.models.lora import has_adapter, merged, write_adapter
from rlhf.params import NOTHING, Params
from rlhf.ppo import debug, setup, state
from rlhf.ppo.metrics import Row
from rlhf.ppo.panel import PanelAnswer
from rlhf.ppo.trainer import Loop, Progress, train
from rlhf.ppo.update import Learner
from rlhf.runtime import device, progress
from rlhf.stage import Stage, run_stage, write_json

# fmt: off
CURVE = (
    "iteration", "score", "accuracy", "validation_accuracy", "kl_token", "kl_sequence", "kl_k2", "kl_k3",
    "kl_k2_sequence", "kl_k3_sequence", "approx_kl", "clip_fraction", "policy_loss", "value_loss",
    "explained_variance", "entropy", "response_length", "cut_off", "lr", "kl_coef", "mismatch",
    "importance", "cut_mass", "ptx_loss", "steps", "validation_score",
)
# fmt: on


def main(stage: Stage) -> None:
    params, settings = stage.params, stage.params.ppo
    sft, train_split = (stage.input("models/sft"), stage.input("data/prepared/train.parquet"))
    validation_split = stage.input("data/prepared/validation.parquet")
    reward_model = None if settings.reward.reads == NOTHING else stage.input(settings.reward.reads)

    inputs = [sft, train_split, validation_split] + ([reward_model] if reward_model else [])
    kernels = decoders.kernels(params.generation.sampler, device(params.runtime))
    identity = resuming.identity(stage.name, deciding(params), inputs, stage.workspace, kernels)
    hosts.require_alike(stage.ranks.gather(identity), "give all hosts the same commit, params and inputs")
    directory = resuming.directory(stage.name, identity)
    if stage.ranks.first:
        stage.resume_from(directory)
    stage.ranks.barrier()  # nobody reads a state that another run still writes

    stage.log.log_dataset(train_split, "train", "training")
    stage.log.log_dataset(validation_split, "validation", "selection")
    tokenizer = load_tokenizer(sft)
    problems, validation = read_prepared(train_split), read_prepared(validation_split)
    prompts = setup.prompts(problems, tokenizer, params)
    stage.log.log_metrics({"too_long": len(problems) - len(prompts)})
    learner = Learner(setup.actor_critic(sft, reward_model, params), settings, stage.ranks)
    done = state.load(directory, learner)
    reached = stage.ranks.gather({"training state": done.iteration})
    hosts.require_alike(reached, f"let all hosts share RLHF_STATE_DIR, or remove {directory}")
    if done.rows:
        print(f"train_ppo: resumed after iteration {done.iteration}", flush=True)
    for row in done.rows:  # where it was killed between a state and its points
        stage.log.log_metrics(row, step=int(row["iteration"]))

    judge = setup.selection_scorer(reward_model, params)
    with progress(stage.name, settings.iterations) as bar:
        bar.advance(done.iteration)

        def report(row: Row) -> None:
            stage.log.log_metrics(row, step=int(row["iteration"]))
            shown = {"score": "score", "kl": "kl_sequence", "length": "response_length", "valid": "validation_accuracy"}
            bar.advance(int(row["iteration"] > 0), **{name: row[key] for name, key in shown.items() if key in row})

        loop = Loop(
            params=params,
            learner=learner,
            reference=setup.reference(sft, learner.actor_critic.policy, params),
            scorer=setup.scorer(reward_model, params),
            tokenizer=tokenizer,
            prompts=prompts,
            demonstrations=setup.demonstrations(prompts, tokenizer) if settings.ptx_coef else [],
            validate=setup.validation(validation, tokenizer, judge, params, stage.ranks),
            on_iteration=report,
            save=lambda now: state.save(directory, learner, now),
            on_alarm=debug.Recorder(stage.workspace / "runs" / "debug", learner, params, checkpoint_hash(sft)),
        )
        done = train(loop, done)
    learner.restore(done.best_weights)
    policy, value_head = setup.whole_policy(sft, learner.actor_critic)
    if stage.ranks.first:
        write_policy(stage, sft, reward_model, policy, value_head, tokenizer, done)
        write_metrics(stage, done)


def processes(params: Params) -> int:
    """How many processes run the stage."""
    return params.distributed.processes


def deciding(params: Params) -> dict[str, object]:
    """The params that decide the result, for the state's key and the manifest."""
    sections = params.model_dump(include={"seed", "runtime", "generation", "distributed", "prompt", "verifier", "ppo"})
    return sections | {"evaluation": {"batch_size": params.evaluation.batch_size}}


def write_policy(
    stage: Stage,
    sft: Path,
    reward_model: Path | None,
    policy: PreTrainedModel,
    value_head: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    done: Progress,
) -> None:
    """The selected policy with its value head; an adapter is merged, and lies beside it as well."""
    parents = {"sft": checkpoint_hash(sft)} | ({"reward": checkpoint_hash(reward_model)} if reward_model else {})
    manifest = Manifest(
        **read_manifest(sft).model_dump(include={"source", "revision", "license", "stop_token"}),
        kind="policy",
        parents=parents,
        params=deciding(stage.params),
        seed=stage.params.seed,
        prompt=stage.params.prompt.model_dump(),
        extra={"best_iteration": done.best_iteration},
    )
    directory = stage.output("models/policy")
    directory.mkdir()
    write_model(directory, merged(policy), tokenizer, {"value_head.safetensors": value_head})
    if has_adapter(policy):
        write_adapter(directory / "adapter", policy)
    write_manifest(directory, manifest)


def write_metrics(stage: Stage, done: Progress) -> None:
    """Metrics, the curve, the panel's answers, and a line for people."""
    best = validated(done.rows[done.best_iteration])
    metrics = {
        "iterations": done.iteration,
        "best_iteration": done.best_iteration,
        "best": best,
        "initial": validated(done.rows[0]),
        "final": {name: round(value, 6) for name, value in done.rows[-1].items() if math.isfinite(value)},
    }
    write_json(stage.output("metrics/ppo.json"), metrics)
    with stage.output("plots/ppo.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, CURVE, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        table.writerows({name: f"{value:.8g}" for name, value in row.items()} for row in done.rows)
    with stage.output("plots/panel.csv").open("w", encoding="utf-8", newline="") as file:
        answers = csv.DictWriter(file, list(PanelAnswer.__annotations__), lineterminator="\n")
        answers.writeheader()
        answers.writerows(done.panel)
    accuracy = best["validation_accuracy"]
    stage.log.log_metrics({"best_iteration": done.best_iteration, "best_validation_accuracy": accuracy})
    gain = "" if done.best_iteration else ": no gain over the start"
    print(f"train_ppo: best validation accuracy {accuracy:.3f} at iteration {done.best_iteration}{gain}")


def validated(row: Row) -> dict[str, float]:
    """What a validation saw."""
    return {name: round(value, 6) for name, value in row.items() if name.startswith("validation_")}


if __name__ == "__main__":
    run_stage("train_ppo", main, processes=processes)
