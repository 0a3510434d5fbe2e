"""One iteration's experience: sample, score, and everything that the update needs, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.data.gsm8k import Problem
from rlhf.data.prompts import decode_response
from rlhf.distributed import ALONE, Ranks
from rlhf.generation.engine import Sample
from rlhf.generation.responses import sample_responses
from rlhf.models.actor_critic import ActorCritic, Reference
from rlhf.models.batches import TokenBatch, by_length, pad
from rlhf.params import Ppo, Sampler, Sampling
from rlhf.ppo.advantages import gae, moments, whiten
from rlhf.ppo.kl import estimates
from rlhf.ppo.losses import importance_weights
from rlhf.ppo.rewards import token_rewards
from rlhf.streams import Purpose, token_uniforms


@dataclass(frozen=True)
class Prompt:
    """A problem and its prompt's tokens."""

    problem: Problem
    tokens: list[int]


class Rollout(NamedTuple):
    """Sampled responses.

    Attributes:
        batch: prompts and responses as tokens.
        problems, texts: the problem and the decoded response of each row.
        finished: (B,) whether the response ended by itself.
        sampler_logprobs: float32 (B, T-1), 0 off the response mask.
        cut_mass: mean probability that top-p and top-k cut off, 0 without them.
        kept: int (B, T-1, K) ids that each token was drawn from, padded with -1; None where all of the distribution
            counts.
    """

    batch: TokenBatch
    problems: list[Problem]
    texts: list[str]
    finished: Tensor
    sampler_logprobs: Tensor
    cut_mass: float = 0.0
    kept: Tensor | None = None


class Experience(NamedTuple):
    """What the update reads; but for batch and `kept` every tensor is float32 (B, T-1) and 0 off the response mask.

    Attributes:
        logprobs, values: of the policy that sampled, in the trainer's precision.
        ref_logprobs: the reference's.
        advantages, returns: of each action.
        weights: what a token's policy loss counts, for a sampler that differs from the trainer; else 1.
        kept: see Rollout.
    """

    batch: TokenBatch
    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    weights: Tensor
    kept: Tensor | None = None

    def select(self, rows: Tensor) -> Experience:
        """The rows, cut to their own longest length."""
        batch = self.batch.select(rows)
        actions = batch.tokens.shape[1] - 1

        def cut(tensor: Tensor) -> Tensor:
            return tensor[rows, :actions]

        return Experience(
            batch=batch,
            logprobs=cut(self.logprobs),
            ref_logprobs=cut(self.ref_logprobs),
            values=cut(self.values),
            advantages=cut(self.advantages),
            returns=cut(self.returns),
            weights=cut(self.weights),
            kept=None if self.kept is None else cut(self.kept),
        )


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    numbers: NDArray[np.int64],
    samples_per_prompt: int,
    settings: Sampling,
    *,
    exact: bool,
    seed: int,
    iteration: int,
    ranks: Ranks = ALONE,
    sampler: Sampler = "transformers",
) -> Rollout:
    """Samples `samples_per_prompt` responses for each of the prompts with these numbers in the train split; of all
    these rows this rank's share.

    A number may come twice, where an iteration reaches into the next epoch: its responses are counted on. With `exact`,
    log-probabilities are those of the distribution that top-p and top-k left.
    """
    rows = np.repeat(numbers, samples_per_prompt)
    which = np.array([np.count_nonzero(rows[:place] == row) for place, row in enumerate(rows)])
    share = ranks.share(len(rows))
    rows, which = rows[share], which[share]
    chosen = [prompts[row] for row in rows.tolist()]
    samples = sample_responses(
        model,
        tokenizer,
        [prompt.tokens for prompt in chosen],
        token_uniforms(seed, Purpose.ROLLOUT, iteration, rows, which, settings.max_new_tokens),
        temperature=settings.temperature,
        batch_size=settings.batch_size,
        top_k=settings.top_k,
        top_p=settings.top_p,
        exact=exact,
        stop=settings.stop,
        sampler=sampler,
    )
    batch = pad([p.tokens for p in chosen], [s.tokens for s in samples], tokenizer.eos_token_id).to(model.device)
    flat = torch.tensor([value for s in samples for value in s.logprobs], device=model.device)
    return Rollout(
        batch=batch,
        problems=[prompt.problem for prompt in chosen],
        texts=[decode_response(tokenizer, s.tokens) for s in samples],
        finished=torch.tensor([s.finished for s in samples], device=model.device),
        sampler_logprobs=torch.zeros(batch.mask.shape, device=model.device).masked_scatter(batch.mask, flat),
        cut_mass=1 - sum(s.kept_mass * len(s.tokens) for s in samples) / len(flat),
        kept=_kept_ids(samples, batch),
    )


def _kept_ids(samples: Sequence[Sample], batch: TokenBatch) -> Tensor | None:
    """Int32 (B, T-1, K) ids that each response token was drawn from, padded with -1; None where it was all of them."""
    ids = [torch.tensor(kept, dtype=torch.int32) for sample in samples for kept in sample.kept or []]
    if not ids:
        return None
    flat = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-1).to(batch.tokens.device)
    kept = torch.full((*batch.mask.shape, flat.shape[1]), -1, dtype=torch.int32, device=batch.tokens.device)
    kept[batch.mask] = flat
    return kept


class Evaluated(NamedTuple):
    """What the models say of a batch's actions; every tensor is float32 (B, T-1) and 0 off the response mask.

    Attributes:
        logprobs, values: of the policy that sampled, and of its critic.
        ref_logprobs: the reference's.
    """

    logprobs: Tensor
    values: Tensor
    ref_logprobs: Tensor


@torch.no_grad()
def evaluate_actions(
    actor_critic: ActorCritic,
    reference: Reference,
    batch: TokenBatch,
    temperature: float,
    micro_batch_size: int,
    kept: Tensor | None = None,
    sampled: Tensor | None = None,
) -> Evaluated:
    """What policy, critic and reference say of all actions; `sampled` (B, T-1) are the policy's log-probabilities where
    they are known already."""
    columns = Evaluated(*(torch.zeros(batch.mask.shape, device=batch.tokens.device) for _ in Evaluated._fields))
    for rows in by_length(batch, torch.arange(len(batch), device=batch.tokens.device), micro_batch_size):
        part = batch.select(rows)
        width = part.tokens.shape[1] - 1
        among = None if kept is None else kept[rows, :width]
        if sampled is None:
            actions = actor_critic(part, temperature, kept=among)
            logprobs, values = actions.logprobs, actions.values
        else:
            logprobs, values = sampled[rows, :width], actor_critic.state_values(part)
        pieces = logprobs, values, reference.logprobs(part, temperature, among)
        for column, piece in zip(columns, pieces, strict=True):
            column[rows, :width] = piece
    return columns


def build_experience(
    rollout: Rollout, evaluated: Evaluated, scores: Tensor, settings: Ppo, kl_coef: float
) -> Experience:
    """Rewards, advantages (not whitened yet) and returns, from task scores (B,); `kl_coef` weighs the KL in the
    reward, 0 where it stands in the loss. The weights are 1: see `correct_for_sampler`."""
    kl = estimates(evaluated.logprobs, evaluated.ref_logprobs)
    rewards = token_rewards(scores, kl.k1, rollout.batch, kl_coef)
    advantages, returns = gae(rewards, evaluated.values, rollout.batch.mask, settings.gamma, settings.lam)
    return Experience(
        batch=rollout.batch,
        logprobs=evaluated.logprobs,
        ref_logprobs=evaluated.ref_logprobs,
        values=evaluated.values,
        advantages=advantages,
        returns=returns,
        weights=rollout.batch.mask.float(),
        kept=rollout.kept,
    )


def correct_for_sampler(experience: Experience, rollout: Rollout, cap: float) -> Experience:
    """The experience with truncated importance weights min(pi_trainer / pi_sampler, cap) on the response actions."""
    weights = importance_weights(experience.logprobs, rollout.sampler_logprobs, cap) * experience.batch.mask
    return experience._replace(weights=weights)


def whiten_advantages(
    experience: Experience, scores: Tensor, last_std: float | None
) -> tuple[Experience, float | None]:
    """The experience with whitened advantages, and the deviation to remember.

    Where all task scores are equal, the advantages hold only KL and value noise; dividing by their own deviation
    would blow that up to full size, so the last deviation of an iteration with different scores is taken (1 if none).
    """
    mask = experience.batch.mask
    mean, std = moments(experience.advantages, mask)
    if float(scores.max()) == float(scores.min()):
        std = last_std if last_std is not None else 1.0
    else:
        last_std = std
    return experience._replace(advantages=whiten(experience.advantages, mask, mean, std)), last_std
