"""One iteration of PPO's own loop: sampling, scoring, estimates, update; in `processes` processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from bench.performance.measured import meter
from bench.performance.measured.setting import params_of, problems
from rlhf import distributed
from rlhf.distributed import Ranks
from rlhf.errors import UserError
from rlhf.hosts import Hosts
from rlhf.models.checkpoints import load_tokenizer
from rlhf.params import NOTHING
from rlhf.ppo import setup
from rlhf.ppo.metrics import Row
from rlhf.ppo.panel import Validation
from rlhf.ppo.trainer import Loop, Progress, train
from rlhf.ppo.update import Learner

SHORTEST = 0.99
"""Share of the longest response that the mean one has to reach: else the two sides did not do the same work."""


def main(settings: meter.Settings) -> meter.Numbers:
    """The params come from `words`; each of `rows` problems gets one response of `new_tokens`."""
    processes = settings.get("processes", 1)
    if processes > 1 and not distributed.is_rank():
        command = [sys.executable, "-m", "bench.performance.measured.iterations", json.dumps(dict(settings))]
        sys.exit(distributed.launch(command, processes, Hosts()))
    with distributed.joined(processes, gpu=False) as ranks:
        return one_iteration(settings, ranks)


def one_iteration(settings: meter.Settings, ranks: Ranks) -> meter.Numbers:
    """What the iteration took, in peak memory what all ranks took together."""
    params = params_of(settings)
    data = Path(settings["data"])
    sft, reward_model = data / "model", None if params.ppo.reward.reads == NOTHING else data / "reward"
    tokenizer = never_ending(load_tokenizer(sft))
    prompts = setup.prompts(problems(settings, settings["rows"]), tokenizer, params)
    learner = Learner(setup.actor_critic(sft, reward_model, params), params.ppo, ranks)
    watches: list[meter.Watch] = []
    rows: list[Row] = []
    numbers: meter.Numbers = {}

    def on_iteration(row: Row) -> None:
        numbers.update(watches[-1].read() if watches else {})
        watches.append(meter.Watch())
        rows.append(row)

    train(
        Loop(
            params=params,
            learner=learner,
            reference=setup.reference(sft, learner.actor_critic.policy, params),
            scorer=setup.scorer(reward_model, params),
            tokenizer=tokenizer,
            prompts=prompts,
            demonstrations=[],
            validate=lambda _: Validation({"validation_accuracy": 0.0}),
            on_iteration=on_iteration,
            save=lambda _: None,
        ),
        Progress(),
    )
    length = rows[-1]["response_length"]
    if length < SHORTEST * settings["new_tokens"]:
        raise UserError(f"responses of {length:.0f} tokens instead of {settings['new_tokens']}: take another model")
    cpu, peak = ranks.sum([numbers["cpu_seconds"], meter.peak_mb()])
    return {**numbers, "cpu_seconds": cpu, "peak_mb": peak, "tokens": round(length * settings["rows"])}


def never_ending(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer with another end-of-sequence: the last special token, which chat models all but never produce."""
    special = [str(token) for _, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    tokenizer.eos_token = special[-1]
    return tokenizer


if __name__ == "__main__":
    if os.environ.get("RANK", "0") == "0":
        meter.run(main)
    else:
        main(json.loads(sys.argv[1]))
