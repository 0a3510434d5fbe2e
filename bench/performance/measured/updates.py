"""One pass of PPO's update over `rows` prompts with `new_tokens` random tokens each, ours or with full logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bench.performance.measured import meter
from bench.performance.measured.setting import model_of, params_of, prompts, within
from rlhf.models.actor_critic import ActorCritic
from rlhf.models.batches import TokenBatch, micro_batches, pad
from rlhf.params import Params
from rlhf.ppo.losses import policy_losses, value_losses
from rlhf.ppo.rollout import Experience
from rlhf.ppo.update import Learner, update
from rlhf.runtime import matmul_dtype

Update = Callable[[Experience], object]


def main(settings: meter.Settings) -> meter.Numbers:
    """`way`: ours or full_logits; one step of the optimiser, after one that nobody measures, on a single row."""
    params = params_of(settings)
    model = model_of(settings)
    batch = random_batch(settings, model)
    experience = made_up(batch)
    work = (ours if settings["way"] == "ours" else full_logits)(model, params)
    work(experience.select(torch.arange(1)))
    return {**meter.timed(lambda: work(experience)), "tokens": int(batch.lengths.sum())}


def random_batch(settings: meter.Settings, model: PreTrainedModel) -> TokenBatch:
    """The prompts with random responses; `length`, where given, is what every row is cut to or filled up to."""
    rows = within(prompts(settings, settings["rows"]), model)
    if length := settings.get("length"):
        rows = [(row * length)[: length - settings["new_tokens"]] for row in rows]
    generator = torch.Generator().manual_seed(0)
    size = len(rows), settings["new_tokens"]
    return pad(rows, torch.randint(model.config.vocab_size, size, generator=generator).tolist(), 0)


def made_up(batch: TokenBatch) -> Experience:
    """An experience of the batch: what the numbers are decides nothing of what they cost."""
    mask = batch.mask.float()
    signs = torch.where(torch.arange(len(batch)) % 2 == 0, 1.0, -1.0)[:, None] * mask
    return Experience(
        batch,
        logprobs=-10 * mask,
        ref_logprobs=-10 * mask,
        values=0 * mask,
        advantages=signs,
        returns=signs,
        weights=mask,
    )


def ours(model: PreTrainedModel, params: Params) -> Update:
    """The update that PPO uses, the critic a head on the policy."""
    learner = Learner(ActorCritic(model, None, matmul_dtype(params.runtime)), params.ppo)

    def work(experience: Experience) -> object:
        coef = params.ppo.kl.coef
        return update(learner, experience, params.ppo, seed=0, iteration=0, kl_coef=coef, train_policy=True)

    return work


def full_logits(model: PreTrainedModel, params: Params) -> Update:
    """The same losses the plain way: logits of every token, their log-softmax in float32, torch's plain AdamW."""
    head = nn.Linear(model.config.hidden_size, 1)
    parameters = [*model.parameters(), *head.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=params.ppo.lr, weight_decay=params.ppo.weight_decay)
    dtype, settings = matmul_dtype(params.runtime), params.ppo

    def losses(part: Experience) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            tokens = part.batch.tokens
            out = model(tokens, attention_mask=part.batch.attention_mask, output_hidden_states=True, use_cache=False)
        values = head(out.hidden_states[-1][:, :-1].float()).squeeze(-1)
        distribution = torch.log_softmax(out.logits[:, :-1].float(), dim=-1)
        logprobs = distribution.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        trust = settings.clip_low, settings.clip_high
        policy = policy_losses(logprobs, part.logprobs, part.advantages, *trust, settings.dual_clip)
        value = value_losses(values, part.values, part.returns, settings.value_clip)
        return ((policy + settings.value_coef * value) * part.batch.mask).sum()

    def work(experience: Experience) -> object:
        tokens = int(experience.batch.mask.sum())
        for rows in micro_batches(torch.arange(len(experience.batch)), settings.micro_batch_size):
            (losses(experience.select(rows)) / tokens).backward()
        nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return None

    return work


if __name__ == "__main__":
    meter.run(main)
