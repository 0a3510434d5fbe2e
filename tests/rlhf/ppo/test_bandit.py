"""PPO where the optimum is known: pi* is proportional to pi_ref exp(r / beta) over whole responses.

The policy is a small GPT-2 over six tokens; experience, update and its losses are the real ones. A batch that holds
every response once, each weighed by its probability, turns the sampled gradient into the expected one, so nothing here
depends on luck; the last test samples, through the real loop.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from rlhf.config import compose, validate
from rlhf.data.gsm8k import Problem
from rlhf.models.actor_critic import ActorCritic, Reference
from rlhf.models.batches import TokenBatch, pad
from rlhf.params import Params
from rlhf.ppo.kl import estimates
from rlhf.ppo.panel import Validation
from rlhf.ppo.rollout import Prompt, Rollout, build_experience, evaluate_actions, whiten_advantages
from rlhf.ppo.trainer import Loop, Progress, lr_share, train
from rlhf.ppo.update import Learner, update
from tests.tiny_models import EOS, tiny_tokenizer

TOKENS = 6
BETA = 0.5
CLOSE = 0.02
"""Total variation from the optimum that counts as reaching it."""
PROMPT = [2]
BANDIT = pad([PROMPT] * TOKENS, [[token] for token in range(TOKENS)], EOS)
BANDIT_SCORES = torch.tensor([0.0, 1.0, 0.3, -0.5, 0.8, -1.0])
LANGUAGE = pad([PROMPT] * TOKENS**2, [[one, two] for one in range(TOKENS) for two in range(TOKENS)], EOS)
LANGUAGE_SCORES = torch.rand(TOKENS**2, generator=torch.Generator().manual_seed(1)) * 2 - 1
IN_REWARD = ("ppo.kl.place=reward", "ppo.kl.estimator=k1")


def in_loss(form: str) -> tuple[str, str]:
    return "ppo.kl.place=loss", f"ppo.kl.estimator={form}"


@cache
def settings(*overrides: str) -> Params:
    """Exact Monte Carlo advantages (lambda 1), and whole batches, so that the gradient is the expected one."""
    choices = (
        "ppo.iterations=120",
        "ppo.epochs=2",
        "ppo.minibatches=1",
        "ppo.micro_batch_size=512",
        "ppo.lr=0.01",
        "ppo.lr_schedule=cosine",
        "ppo.lam=1",
        "ppo.whiten_advantages=false",
        f"ppo.kl.coef={BETA}",
    )
    return validate(compose(["scale=smoke", *choices, *overrides]))


def small_model() -> PreTrainedModel:
    """Its positions are learned, so that it tells a token from the same token in the prompt."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        shape = {"vocab_size": TOKENS, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
        config = GPT2Config(**shape, bos_token_id=None, eos_token_id=EOS, pad_token_id=0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.eval()


def reference() -> Reference:
    return Reference(small_model(), torch.float32)


def probabilities(model: ActorCritic | Reference, batch: TokenBatch) -> Tensor:
    """(B,) float64 probability of each response."""
    with torch.no_grad():
        logprobs = model(batch, 1.0).logprobs if isinstance(model, ActorCritic) else model.logprobs(batch, 1.0)
    return logprobs.sum(dim=1).double().exp()


def learned(params: Params, batch: TokenBatch, scores: Tensor, kl_as_score: str | None = None) -> Tensor:
    """(B,) the response probabilities that PPO ends with, by expected gradients."""
    ppo = params.ppo
    ref = reference()
    actor_critic = ActorCritic(small_model(), None, torch.float32)
    learner = Learner(actor_critic, ppo)
    finished = torch.ones(len(batch), dtype=torch.bool)
    in_reward = BETA if ppo.kl.place == "reward" and kl_as_score is None else 0.0
    for iteration in range(ppo.iterations):
        evaluated = evaluate_actions(actor_critic, ref, batch, 1.0, ppo.micro_batch_size)
        rollout = Rollout(batch, [], [], finished, evaluated.logprobs)
        task = scores
        if kl_as_score is not None:
            task = scores - BETA * getattr(estimates(evaluated.logprobs, evaluated.ref_logprobs), kl_as_score).sum(
                dim=1
            )
        experience = build_experience(rollout, evaluated, task, ppo, in_reward)
        if ppo.whiten_advantages:
            experience, _ = whiten_advantages(experience, task, None)
        weights = len(batch) * evaluated.logprobs.sum(dim=1, keepdim=True).exp() * batch.mask
        learner.set_policy_lr(ppo.lr * lr_share(ppo, iteration))
        update(
            learner,
            experience._replace(weights=weights),
            ppo,
            seed=0,
            iteration=iteration,
            kl_coef=BETA,
            train_policy=True,
        )
    return probabilities(actor_critic, batch)


def softmax_optimum(ref: Tensor, scores: Tensor, beta: float = BETA) -> Tensor:
    """The distribution that maximises E[score] - beta KL(. || ref)."""
    return torch.softmax(ref.log() + scores.double() / beta, dim=0)


def distance(one: Tensor, other: Tensor) -> float:
    """Total variation."""
    assert float(one.sum()) == pytest.approx(1, abs=1e-5) and float(other.sum()) == pytest.approx(1, abs=1e-5)
    return 0.5 * float((one - other).abs().sum())


def forward_kl_optimum(ref: Tensor, scores: Tensor) -> Tensor:
    """The distribution that maximises E[score] - beta KL(ref || .): beta ref / (c - score) with c that makes it sum to
    1, found by bisection."""
    low, high = float(scores.max()) + 1e-9, float(scores.max()) + BETA
    for _ in range(100):
        middle = (low + high) / 2
        too_large = float((BETA * ref / (middle - scores.double())).sum()) > 1
        low, high = (middle, high) if too_large else (low, middle)
    return BETA * ref / (high - scores.double())


def per_state_optimum(ref: Tensor, scores: Tensor) -> Tensor:
    """Where each state's KL is weighed in that state alone: the second token is the softmax optimum of its state, the
    first one is that of the mean score that follows, whatever KL its successors cost."""
    ref, scores = ref.view(TOKENS, TOKENS), scores.double().view(TOKENS, TOKENS)
    first = ref.sum(dim=1)
    second = torch.softmax((ref / first[:, None]).log() + scores / BETA, dim=1)
    return (torch.softmax(first.log() + (second * scores).sum(dim=1) / BETA, dim=0)[:, None] * second).flatten()


@pytest.mark.parametrize(
    "choices",
    [IN_REWARD, in_loss("ratio_k1"), in_loss("ratio_k3"), (*in_loss("k2"), "ppo.epochs=1")],
    ids=["k1 in the reward", "ratio_k1 in the loss", "ratio_k3 in the loss", "k2 in the loss, on-policy"],
)
def test_the_softmax_optimum_of_a_bandit_is_reached(choices: tuple[str, ...]) -> None:
    ref = probabilities(reference(), BANDIT)
    optimum = softmax_optimum(ref, BANDIT_SCORES)
    assert distance(ref, optimum) > 0.3
    policy = learned(settings(*choices), BANDIT, BANDIT_SCORES)
    assert distance(policy, optimum) < CLOSE
    assert float((policy * BANDIT_SCORES).sum()) >= 0.99 * float((optimum * BANDIT_SCORES).sum())


def test_bare_k3_in_the_loss_ends_at_the_optimum_of_the_forward_kl_instead() -> None:
    ref = probabilities(reference(), BANDIT)
    policy = learned(settings(*in_loss("k3"), "ppo.epochs=1"), BANDIT, BANDIT_SCORES)
    optimum = softmax_optimum(ref, BANDIT_SCORES)
    assert distance(policy, optimum) > 2 * CLOSE
    assert float((policy * BANDIT_SCORES).sum()) < 0.99 * float((optimum * BANDIT_SCORES).sum())
    assert distance(policy, forward_kl_optimum(ref, BANDIT_SCORES)) < 1e-3


@pytest.mark.parametrize("form", ["k2", "k3"])
def test_k2_and_k3_in_the_reward_miss_the_optimum(form: str) -> None:
    """Why params refuse them there."""
    optimum = softmax_optimum(probabilities(reference(), BANDIT), BANDIT_SCORES)
    assert distance(learned(settings(), BANDIT, BANDIT_SCORES, form), optimum) > 5 * CLOSE


def test_whitening_leaves_the_coefficient_of_kl_in_the_reward() -> None:
    """The advantages hold score and KL, which are divided alike."""
    policy = learned(settings(*IN_REWARD, "ppo.whiten_advantages=true"), BANDIT, BANDIT_SCORES)
    assert distance(policy, softmax_optimum(probabilities(reference(), BANDIT), BANDIT_SCORES)) < CLOSE


def test_whitening_multiplies_the_coefficient_of_kl_in_the_loss_by_the_advantages_deviation() -> None:
    """Over the batch, which holds every arm once: the advantages are the scores less one value."""
    ref = probabilities(reference(), BANDIT)
    policy = learned(settings(*in_loss("ratio_k1"), "ppo.whiten_advantages=true"), BANDIT, BANDIT_SCORES)
    deviation = float(BANDIT_SCORES.std(correction=0))
    assert distance(policy, softmax_optimum(ref, BANDIT_SCORES, BETA * deviation)) < CLOSE
    assert distance(policy, softmax_optimum(ref, BANDIT_SCORES)) > CLOSE


def test_kl_in_the_reward_reaches_the_optimum_over_sequences() -> None:
    optimum = softmax_optimum(probabilities(reference(), LANGUAGE), LANGUAGE_SCORES)
    policy = learned(settings(*IN_REWARD), LANGUAGE, LANGUAGE_SCORES)
    assert distance(policy, optimum) < CLOSE
    assert float((policy * LANGUAGE_SCORES).sum()) >= 0.99 * float((optimum * LANGUAGE_SCORES).sum())


@pytest.mark.parametrize("form", ["ratio_k1", "ratio_k3"])
def test_kl_in_the_loss_reaches_the_optimum_of_each_state_alone(form: str) -> None:
    """Which is another one: the first token does not pay for the KL of what follows."""
    ref = probabilities(reference(), LANGUAGE)
    policy = learned(settings(*in_loss(form)), LANGUAGE, LANGUAGE_SCORES)
    optimum = per_state_optimum(ref, LANGUAGE_SCORES)
    assert distance(policy, optimum) < CLOSE
    assert float((policy * LANGUAGE_SCORES).sum()) >= 0.99 * float((optimum * LANGUAGE_SCORES).sum())
    assert distance(policy, softmax_optimum(ref, LANGUAGE_SCORES)) > 5 * CLOSE


def test_the_sampled_loop_finds_the_optimum_over_sequences() -> None:
    """`train` itself, on responses of at most two tokens: an end at once, a token and the end, or two tokens that the
    length limit cuts off, which score 0. Whitened advantages hold the KL as well, and leave the optimum."""
    others = [token for token in range(TOKENS) if token != EOS]
    responses = [[EOS], *([token, EOS] for token in others), *([one, two] for one in others for two in others)]
    every = pad([PROMPT] * len(responses), responses, EOS)
    scores = torch.tensor([-0.5, 1.5, 0.3, -1.0, 1.0, 0.5] + [0.0] * len(others) ** 2)

    def scorer(problems: object, texts: object, batch: TokenBatch) -> Tensor:
        ended = batch.tokens[:, 1] == EOS
        return torch.where(ended, scores[0], scores[1 + batch.tokens[:, 1] - (batch.tokens[:, 1] > EOS).long()])

    params = settings(
        *IN_REWARD,
        "ppo.iterations=100",
        "ppo.prompts_per_iteration=1",
        "ppo.samples_per_prompt=512",
        "ppo.minibatches=2",
        "ppo.whiten_advantages=true",
        "ppo.eval_every=100",
        "ppo.sampling.max_new_tokens=2",
        "ppo.sampling.batch_size=512",
    )
    learner = Learner(ActorCritic(small_model(), None, torch.float32), params.ppo)
    loop = Loop(
        params=params,
        learner=learner,
        reference=reference(),
        scorer=scorer,
        tokenizer=tiny_tokenizer(),
        prompts=[Prompt(Problem("question", "#### 1", "1", "#### 1", 1, "test"), PROMPT)],
        demonstrations=[],
        validate=lambda actor_critic: Validation({"validation_accuracy": 0.0}),
        on_iteration=lambda row: None,
        save=lambda progress: None,
    )
    train(loop, Progress())
    ref = probabilities(reference(), every)
    optimum, policy = softmax_optimum(ref, scores), probabilities(learner.actor_critic, every)
    assert distance(ref, optimum) > 0.3
    assert distance(policy, optimum) < CLOSE
    assert float((policy * scores).sum()) >= 0.99 * float((optimum * scores).sum())
