"""An iteration's rows, collected: each rank's rollout with what the models say of it, and all of them on every rank.

They are small beside the models. With all rows everywhere, whatever is worked out of them (rewards, whitening, metrics,
alarms, the KL coefficient) is the same on every rank without another word among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.distributed import ALONE, Ranks
from rlhf.models.batches import TokenBatch
from rlhf.params import Params
from rlhf.ppo.curriculum import iteration_prompts
from rlhf.ppo.rollout import Evaluated, Prompt, Rollout, sample


class Collected(NamedTuple):
    """A rollout, the task scores (B,) of its rows, and what policy, critic and reference say of them."""

    rollout: Rollout
    scores: Tensor
    evaluated: Evaluated


def sample_iteration(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    params: Params,
    iteration: int,
    ranks: Ranks = ALONE,
) -> Rollout:
    """This rank's share of the responses that `model` gives to the prompts of the iteration."""
    settings, seed = params.ppo, params.seed
    return sample(
        model,
        tokenizer,
        prompts,
        iteration_prompts(prompts, settings, seed, iteration),
        settings.samples_per_prompt,
        settings.sampling,
        exact=settings.truncation == "exact",
        seed=seed,
        iteration=iteration,
        ranks=ranks,
        sampler=params.generation.sampler,
    )


def gathered(mine: Collected, ranks: Ranks) -> Collected:
    """The rows of all ranks, in the order of ranks."""
    if ranks.size == 1:
        return mine
    parts = ranks.gather(_moved(mine, torch.device("cpu")))
    return _moved(_concatenated(parts), mine.scores.device)


def concatenate_rows(tensors: Sequence[Tensor], fill: int = 0) -> Tensor:
    """The rows of tensors (B_i, ...) in one; what is shorter than the longest is filled up at its end."""
    sizes = torch.tensor([tensor.shape[1:] for tensor in tensors]).amax(dim=0).tolist()
    return torch.cat([pad(tensor, _ends(tensor, sizes), value=fill) for tensor in tensors])


def _ends(tensor: Tensor, sizes: Sequence[int]) -> list[int]:
    """What `pad` wants to hear to bring all dimensions but the first to `sizes`: pairs, the last dimension's first."""
    missing = [size - own for size, own in zip(sizes, tensor.shape[1:], strict=True)]
    return [amount for short in reversed(missing) for amount in (0, short)]


def _concatenated(parts: Sequence[Collected]) -> Collected:
    rollouts = [part.rollout for part in parts]
    batches = [rollout.batch for rollout in rollouts]
    tokens = [int(batch.mask.sum()) for batch in batches]
    kept = [rollout.kept for rollout in rollouts if rollout.kept is not None]
    return Collected(
        rollout=Rollout(
            batch=TokenBatch(
                tokens=concatenate_rows([batch.tokens for batch in batches]),
                prompt_lengths=torch.cat([batch.prompt_lengths for batch in batches]),
                lengths=torch.cat([batch.lengths for batch in batches]),
            ),
            problems=[problem for rollout in rollouts for problem in rollout.problems],
            texts=[text for rollout in rollouts for text in rollout.texts],
            finished=torch.cat([rollout.finished for rollout in rollouts]),
            sampler_logprobs=concatenate_rows([rollout.sampler_logprobs for rollout in rollouts]),
            cut_mass=sum(r.cut_mass * n for r, n in zip(rollouts, tokens, strict=True)) / sum(tokens),
            kept=concatenate_rows(kept, fill=-1) if kept else None,
        ),
        scores=torch.cat([part.scores for part in parts]),
        evaluated=Evaluated(*map(concatenate_rows, zip(*(part.evaluated for part in parts), strict=True))),
    )


def _moved(collected: Collected, device: torch.device) -> Collected:
    rollout = collected.rollout
    return Collected(
        rollout=rollout._replace(
            batch=rollout.batch.to(device),
            finished=rollout.finished.to(device),
            sampler_logprobs=rollout.sampler_logprobs.to(device),
            kept=None if rollout.kept is None else rollout.kept.to(device),
        ),
        scores=collected.scores.to(device),
        evaluated=Evaluated(*(tensor.to(device) for tensor in collected.evaluated)),
    )
