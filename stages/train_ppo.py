"""Train the policy with PPO, resumable: a killed run goes on from its last iteration.

python -m stages.train_ppo [key=value ...]         for example ppo.reward.source=reward_model
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rlhf import anchors
from rlhf.data.gsm8k import Problem, read_prepared
from rlhf.data.prompts import encode_prompts
from rlhf.errors import UserError
from rlhf.evaluation.accuracy import accuracy, evaluate_model
from rlhf.models.actor_critic import ActorCritic, Reference, sampling_copy
from rlhf.models.checkpoints import (
    Manifest,
    checkpoint_hash,
    load_policy,
    load_reward_model,
    load_tokenizer,
    read_manifest,
    save_checkpoint,
)
from rlhf.models.reward_model import Normalisation
from rlhf.ppo import state
from rlhf.ppo.rewards import MixtureScorer, RewardModelScorer, Scorer, VerifierScorer
from rlhf.ppo.rollout import Prompt
from rlhf.ppo.trainer import Loop, Progress, Row, train
from rlhf.ppo.update import Learner
from rlhf.runtime import device, matmul_dtype, progress
from rlhf.stage import Stage, run_stage

CSV_COLUMNS = (
    "iteration score accuracy validation_accuracy kl_token kl_sequence kl_k2 kl_k3 approx_kl clip_fraction policy_loss "
    "value_loss explained_variance entropy response_length cut_off lr kl_coef mismatch"
).split()


def main(stage: Stage) -> None:
    params = stage.params
    sft, train_split = stage.input("models/sft"), stage.input("data/prepared/train.parquet")
    validation_split = stage.input("data/prepared/validation.parquet")
    inputs = [sft, train_split, validation_split]
    if params.ppo.reward.source != "verifier":
        inputs.append(stage.input("models/reward"))
    stage.log.log_dataset(train_split, "train", "training")
    stage.log.log_dataset(validation_split, "validation", "selection")
    tokenizer = load_tokenizer(sft)
    key = state.fingerprint(relevant(stage), inputs, stage.workspace)
    directory = anchors.state_dir() / "train_ppo" / key
    stage.held.enter_context(state.exclusive(directory))
    stage.after_publishing(lambda: state.discard(directory))
    learner = Learner(build_actor_critic(stage, sft), params.ppo)
    done = state.load(directory, learner)
    if done.rows:
        print(f"train_ppo: resumed after iteration {done.iteration}", flush=True)
    validation = read_prepared(validation_split)
    with progress("train_ppo", params.ppo.iterations) as bar:
        bar.advance(done.iteration)
        loop = Loop(
            params=params,
            learner=learner,
            reference=Reference(load_policy(sft).to(device(params.runtime)), matmul_dtype(params.runtime)),
            scorer=build_scorer(stage),
            tokenizer=tokenizer,
            prompts=encode(stage, read_prepared(train_split), tokenizer),
            validate=lambda model: validate(stage, model, tokenizer, validation),
            on_iteration=lambda row: report(stage, row, bar),
            save=lambda now: state.save(directory, learner, now),
        )
        done = train(loop, done)
    write_outputs(stage, sft, learner, tokenizer, done)


def relevant(stage: Stage) -> dict[str, object]:
    """The params that decide the result, for the state's key."""
    return stage.params.model_dump(include={"seed", "runtime", "prompt", "verifier", "ppo"})


def build_actor_critic(stage: Stage, sft: Path) -> ActorCritic:
    """The policy from SFT, with the critic that params ask for."""
    place, dtype = device(stage.params.runtime), matmul_dtype(stage.params.runtime)
    critic = load_policy(sft).to(place) if stage.params.ppo.critic.kind == "separate" else None
    return ActorCritic(load_policy(sft).to(place), critic, dtype)


def build_scorer(stage: Stage) -> Scorer:
    """The scorer that `ppo.reward.source` names."""
    settings = stage.params.ppo.reward
    verifier = VerifierScorer(stage.params.verifier.method, settings.format_bonus)
    if settings.source == "verifier":
        return verifier
    path = stage.input(settings.reads)
    model = load_reward_model(path).to(device(stage.params.runtime))
    normalisation = Normalisation(**read_manifest(path).extra["normalisation"])
    dtype = matmul_dtype(stage.params.runtime)
    scorer = RewardModelScorer(model, normalisation, stage.params.ppo.micro_batch_size, dtype)
    if settings.source == "reward_model":
        return scorer
    return MixtureScorer([(settings.verifier_weight, verifier), (settings.reward_model_weight, scorer)])


def encode(stage: Stage, problems: list[Problem], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The problems whose prompt fits; counts the others."""
    encoded = encode_prompts(tokenizer, [problem.question for problem in problems], stage.params.prompt)
    prompts = [Prompt(p, tokens) for p, tokens in zip(problems, encoded, strict=True) if tokens is not None]
    if not prompts:
        raise UserError(f"prompt.max_tokens={stage.params.prompt.max_tokens}: no train problem fits: raise it")
    stage.log.log_metrics({"too_long": len(problems) - len(prompts)})
    return prompts


def validate(
    stage: Stage, actor_critic: ActorCritic, tokenizer: PreTrainedTokenizerBase, problems: list[Problem]
) -> float:
    """Accuracy on the validation split, as `evaluate` measures it."""
    model = sampling_copy(actor_critic.policy, actor_critic.dtype)
    return accuracy(evaluate_model(model, tokenizer, problems, stage.params))


def report(stage: Stage, row: Row, bar) -> None:  # type: ignore[no-untyped-def]
    """Logs an iteration and moves the bar."""
    stage.log.log_metrics(row, step=int(row["iteration"]))
    names = {"score": "score", "kl_sequence": "kl", "validation_accuracy": "validation", "response_length": "length"}
    bar.advance(int(row["iteration"] > 0), **{short: row[name] for name, short in names.items() if name in row})


def write_outputs(
    stage: Stage, sft: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase, done: Progress
) -> None:
    """The best policy with its value head, the metrics and the curve."""
    actor_critic = learner.actor_critic
    with torch.no_grad():
        for name, parameter in actor_critic.named_parameters():
            parameter.copy_(done.best_weights[name])
    parents = {"sft": checkpoint_hash(sft)}
    if stage.params.ppo.reward.source != "verifier":
        parents["reward"] = checkpoint_hash(stage.input("models/reward"))
    manifest = Manifest(
        **read_manifest(sft).model_dump(include={"source", "revision", "license", "stop_token"}),
        kind="policy",
        parents=parents,
        params=relevant(stage),
        seed=stage.params.seed,
        prompt=stage.params.prompt.model_dump(),
        extra={"best_iteration": done.best_iteration},
    )
    head = {name: weight.detach().cpu() for name, weight in actor_critic.value_head.state_dict().items()}
    save_checkpoint(
        stage.output("models/policy"), actor_critic.policy, tokenizer, manifest, {"value_head.safetensors": head}
    )
    validated = [row for row in done.rows if "validation_accuracy" in row]
    metrics = {
        "iterations": done.iteration,
        "best_iteration": done.best_iteration,
        "best": {"validation_accuracy": round(done.best_accuracy, 6)},
        "initial": {"validation_accuracy": round(validated[0]["validation_accuracy"], 6)},
        "final": {name: round(value, 6) for name, value in done.rows[-1].items() if value == value},
    }
    stage.output("metrics/ppo.json").write_text(json.dumps(metrics, indent=2, sort_keys=True) + "\n")
    with stage.output("plots/ppo.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        table.writerows({name: f"{value:.8g}" for name, value in row.items()} for row in done.rows)
    stage.log.log_metrics({"best_iteration": done.best_iteration, "best_validation_accuracy": done.best_accuracy})
    gain = "" if done.best_iteration else ": no gain"
    print(f"train_ppo: best validation accuracy {done.best_accuracy:.3f} at iteration {done.best_iteration}{gain}")


if __name__ == "__main__":
    run_stage("train_ppo", main)
