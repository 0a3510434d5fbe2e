"""Train the reward model on the preferences, from the SFT policy's trunk.

python -m stages.train_reward [key=value ...]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.data.preferences import Pair, read_pairs
from rlhf.data.prompts import encode_prompts, encode_response
from rlhf.errors import UserError
from rlhf.evaluation import preferences
from rlhf.evaluation.preferences import ScoredAnswer, ScoredPair
from rlhf.generation.responses import sample_responses
from rlhf.models import reward_model
from rlhf.models.actor_critic import sampling_copy
from rlhf.models.batches import pad
from rlhf.models.checkpoints import (
    Manifest,
    checkpoint_hash,
    load_policy,
    load_tokenizer,
    read_manifest,
    reward_pad_token,
    save_checkpoint,
)
from rlhf.runtime import device, matmul_dtype, progress
from rlhf.stage import Stage, run_stage, write_json
from rlhf.streams import Purpose, shuffled_slice, token_uniforms
from rlhf.training.reward_model import TokenPair, fit, score_all


def main(stage: Stage) -> None:
    params, settings = stage.params, stage.params.reward_model
    sft, dtype = stage.input("models/sft"), matmul_dtype(params.runtime)
    tokenizer = load_tokenizer(sft)
    policy = load_policy(sft).to(device(params.runtime))
    tokenizer.pad_token = reward_pad_token(tokenizer)
    model = reward_model.from_policy(policy, tokenizer.pad_token_id)
    training = tokenise(stage, "train", tokenizer)
    if not training:
        raise UserError("data/preferences/train.parquet: no question fits prompt.max_tokens: raise it")
    steps = settings.epochs * -(-len(training) // settings.batch_size)
    with progress("train_reward", steps) as bar:

        def on_step(step: int, numbers: dict[str, float]) -> None:
            stage.log.log_metrics(numbers, step=step + 1)
            bar.advance(1, loss=numbers["loss"], pair_accuracy=numbers["pair_accuracy"])

        fit(
            model,
            list(training.values()),
            settings,
            seed=params.seed,
            pad_id=tokenizer.pad_token_id,
            dtype=dtype,
            on_step=on_step,
        )
    normalisation = normalise(stage, model, policy, tokenizer, list(training))
    manifest = Manifest(
        **read_manifest(sft).model_dump(include={"source", "revision", "license", "prompt", "stop_token"}),
        kind="reward",
        parents={"sft": checkpoint_hash(sft)},
        params=settings.model_dump(),
        seed=params.seed,
        extra={"normalisation": normalisation._asdict()},
    )
    save_checkpoint(stage.output("models/reward"), model, tokenizer, manifest)
    measure(stage, model, tokenizer)


def tokenise(stage: Stage, split: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[TokenPair]]:
    """The pairs of a split by question, as tokens; without those whose question exceeds prompt.max_tokens."""
    path = stage.input(f"data/preferences/{split}.parquet")
    stage.log.log_dataset(path, f"preferences_{split}", "training" if split == "train" else "validation")
    pairs: list[Pair] = read_pairs(path)
    prompts = encode_prompts(tokenizer, [pair.question for pair in pairs], stage.params.prompt)
    by_question: dict[str, list[TokenPair]] = {}
    for pair, prompt in zip(pairs, prompts, strict=True):
        if prompt is not None:
            chosen, rejected = (encode_response(tokenizer, pair.chosen), encode_response(tokenizer, pair.rejected))
            by_question.setdefault(pair.question, []).append(TokenPair(prompt, chosen, rejected))
    return by_question


def measure(stage: Stage, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes, logs and says how the model orders the held-out pairs."""
    level, held_out = stage.params.evaluation.confidence, score_held_out(stage, model, tokenizer)
    metrics = preferences.measure(held_out, level)
    stage.log.log_metrics(preferences.flat(metrics))
    write_json(stage.output("metrics/reward_model.json"), metrics)
    table = preferences.calibration(preferences.pair_margins(held_out), level)
    stage.output("plots/reward_calibration.csv").write_text(preferences.calibration_csv(table))
    if held_out:
        right, low, high = (100 * metrics[f"pair_accuracy{end}"] for end in ("", "_low", "_high"))
        share = f"{right:.1f} % [{low:.1f}, {high:.1f}] of {len(held_out)} held-out pairs in the right order"
        print(f"train_reward: {share}, log loss {metrics['log_loss']:.3f} (a coin's is 0.693)")
    else:
        print("train_reward: no held-out question fits prompt.max_tokens: nothing was measured")


def score_held_out(stage: Stage, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[ScoredPair]:
    """The held-out pairs with the model's raw scores."""
    by_question = tokenise(stage, "validation", tokenizer)
    pairs = [(question, pair) for question, pairs in by_question.items() for pair in pairs]
    size, dtype = stage.params.reward_model.micro_batch_size, matmul_dtype(stage.params.runtime)
    scores = score_all(model, [pair for _, pair in pairs], size, tokenizer.pad_token_id, dtype)
    return [
        ScoredPair(question, ScoredAnswer(tuple(pair.chosen), chosen), ScoredAnswer(tuple(pair.rejected), rejected))
        for (question, pair), (chosen, rejected) in zip(pairs, scores, strict=True)
    ]


@torch.no_grad()
def normalise(
    stage: Stage,
    model: PreTrainedModel,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
) -> reward_model.Normalisation:
    """Mean and deviation of the score over finished SFT samples at PPO's sampling settings."""
    settings, sampling, seed = (stage.params.reward_model, stage.params.ppo.sampling, stage.params.seed)
    dtype = matmul_dtype(stage.params.runtime)
    places = np.arange(settings.normalisation_samples)
    rows = shuffled_slice(seed, Purpose.NORMALISATION, 0, len(places), len(questions))
    encoded = encode_prompts(tokenizer, [questions[row] for row in rows], stage.params.prompt)
    prompts = [prompt for prompt in encoded if prompt is not None]
    with progress("train_reward: normalisation", len(prompts)) as bar:
        samples = sample_responses(
            sampling_copy(policy, dtype),
            tokenizer,
            prompts,
            token_uniforms(seed, Purpose.NORMALISATION, 1, rows, places // len(questions), sampling.max_new_tokens),
            temperature=sampling.temperature,
            batch_size=sampling.batch_size,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            stop=sampling.stop,
            on_rows=bar.advance,
            sampler=stage.params.generation.sampler,
        )
    finished = [(prompt, s.tokens) for prompt, s in zip(prompts, samples, strict=True) if s.finished]
    if len(finished) < 2:
        print("train_reward: fewer than two SFT samples ended by themselves: the score is not normalised", flush=True)
        return reward_model.Normalisation(0.0, 1.0)
    scores = []
    for start in range(0, len(finished), settings.micro_batch_size):
        part = finished[start : start + settings.micro_batch_size]
        batch = pad([prompt for prompt, _ in part], [tokens for _, tokens in part], tokenizer.pad_token_id)
        scores.append(reward_model.raw_scores(model, batch.to(model.device), dtype))
    values = torch.cat(scores).double()
    return reward_model.Normalisation(float(values.mean()), max(float(values.std(correction=0)), 1e-6))


if __name__ == "__main__":
    run_stage("train_reward", main)
