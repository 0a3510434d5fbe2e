"""Makes what every program reads, once: the policy's checkpoint, a reward model on it, problems and their prompts.

data/model, data/reward, data/problems.json, data/prompts.json
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch

from bench.performance.measured import meter
from bench.performance.measured.setting import params_of
from rlhf.data.prompts import encode_prompts
from rlhf.data.sources import read, to_problem
from rlhf.models import sources
from rlhf.models.checkpoints import Manifest, load_policy, load_tokenizer, reward_pad_token, save_checkpoint
from rlhf.models.reward_model import from_policy


def main(settings: meter.Settings) -> meter.Numbers:
    """`count`: problems, the first of test that fit into the params' longest prompt."""
    params = params_of(settings)
    target = Path(settings["data"])
    place = target.with_name(f".{target.name}.new")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    sources.fetch(params.sft.source, place / "model", tiny=params.sft.tiny, seed=params.seed)
    make_reward_model(place)
    tokenizer = load_tokenizer(place / "model")
    rows = read(params.data.model_copy(update={"max_test": None}))["test"]
    test = [to_problem(row, params.data.source) for row in rows]
    encoded = encode_prompts(tokenizer, [problem.question for problem in test], params.prompt)
    chosen = [(p, tokens) for p, tokens in zip(test, encoded, strict=True) if tokens][: settings["count"]]
    (place / "problems.json").write_text(json.dumps([asdict(problem) for problem, _ in chosen]))
    (place / "prompts.json").write_text(json.dumps([tokens for _, tokens in chosen]))
    place.replace(target)
    return {}


def make_reward_model(place: Path) -> None:
    """A reward model on the policy's trunk with a random head: what it says is worth nothing and costs the same."""
    policy, tokenizer = load_policy(place / "model"), load_tokenizer(place / "model")
    pad = reward_pad_token(tokenizer)
    model = from_policy(policy, tokenizer.convert_tokens_to_ids(pad))
    torch.nn.init.normal_(model.score.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    manifest = Manifest(
        kind="reward",
        source="random",
        stop_token=tokenizer.eos_token,
        extra={"normalisation": {"mean": 0.0, "std": 1.0}},
    )
    tokenizer.pad_token = pad
    save_checkpoint(place / "reward", model, tokenizer, manifest)


if __name__ == "__main__":
    meter.run(main)
