"""Computes the update of a debug bundle again, minibatch by minibatch, and shows what differs from what was recorded.

    python -m rlhf.ppo.replay runs/debug/train_ppo-7-ratio [key=value ...]      for example runtime.device=cpu

It needs the bundle and `models/sft`, from which tokenizer, reference and frozen weights come. No weight moves: every
minibatch is seen with the weights of the bundle.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf import runtime
from rlhf.data.prompts import decode_response
from rlhf.errors import UsageError, UserError, run_command
from rlhf.models.actor_critic import ActorCritic
from rlhf.models.checkpoints import checkpoint_hash, load_tokenizer
from rlhf.params import Params
from rlhf.ppo import debug, setup
from rlhf.ppo.debug import Bundle
from rlhf.ppo.kl import estimates
from rlhf.ppo.rollout import Experience, evaluate_actions
from rlhf.ppo.update import Learner, UpdateStats, update
from rlhf.training.optimisation import clip_gradients

ROWS_SHOWN, TEXT_SHOWN = 5, 120


@dataclass(frozen=True)
class Minibatch:
    """What the replay saw of a minibatch: means over its tokens, the largest log ratio, the gradient's norm."""

    tokens: int
    means: dict[str, float]
    log_ratio: float
    grad_norm: float


@dataclass(frozen=True)
class Difference:
    """How far a tensor that was computed again is from the recorded one, over the response actions."""

    largest: float
    mean: float


@dataclass
class Replay:
    """What a replay found; `not_finite` names tensors, the gradients among them by parameter."""

    minibatches: list[Minibatch] = field(default_factory=list)
    differences: dict[str, Difference] = field(default_factory=dict)
    not_finite: list[str] = field(default_factory=list)


class Observer(Learner):
    """A learner that measures gradients and takes no step."""

    def __init__(self, actor_critic: ActorCritic, params: Params) -> None:
        super().__init__(actor_critic, params.ppo)
        self.norms: list[float] = []
        self.not_finite: list[str] = []

    def step(self, max_grad_norm: float) -> float:
        """The largest gradient norm of policy and critic, NaN if one is; the gradients are then forgotten."""
        gradients = {name: p.grad for name, p in self.actor_critic.trained_parameters() if p.grad is not None}
        self.not_finite += [f"gradient {len(self.norms) + 1}: {name}" for name in not_finite(gradients)]
        groups = [[p for group in o.param_groups for p in group["params"]] for o in self.optimisers]
        self.norms.append(float(torch.tensor([clip_gradients(group, max_grad_norm) for group in groups]).max()))
        self.drop()
        return self.norms[-1]


def replay(bundle: Bundle, sft: Path) -> Replay:
    """Computes the bundle's update again; raises UserError where `sft` or the params do not fit the bundle."""
    params = bundle.params
    if checkpoint_hash(sft) != bundle.sft:
        raise UserError(f"{sft}: not the checkpoint that the bundle was made with: check out that one")
    reward_model = Path(params.ppo.reward.reads) if params.ppo.critic.start == "reward_model" else None
    learner = Observer(setup.actor_critic(sft, reward_model, params), params)
    names = {name for name, _ in learner.actor_critic.trained_parameters()}
    if odd := sorted(names ^ bundle.weights.keys()):
        raise UserError(
            f"the params: {odd[0]} is not trained in both bundle and replay: leave ppo.critic and ppo.lora as they were"
        )
    learner.restore(bundle.weights)
    device = runtime.device(params.runtime)
    experience = _to(bundle.experience, device)
    temperature, size = params.ppo.sampling.temperature, params.ppo.micro_batch_size
    found = Replay()
    evaluated = evaluate_actions(
        learner.actor_critic,
        setup.reference(sft, learner.actor_critic.policy, params),
        experience.batch,
        temperature,
        size,
        experience.kept,
    )
    again = evaluated._asdict()
    for name, tensor in again.items():
        change = (tensor - getattr(experience, name))[experience.batch.mask].abs()
        found.differences[name] = Difference(float(change.max()), float(change.mean()))

    seen_of: list[UpdateStats] = []
    update(
        learner,
        experience,
        params.ppo.model_copy(update={"target_kl": None}),
        seed=params.seed,
        iteration=bundle.iteration,
        kl_coef=bundle.kl_coef,
        train_policy=bundle.train_policy,
        demonstrations=None if bundle.demonstrations is None else bundle.demonstrations.to(device),
        on_minibatch=lambda _, seen: seen_of.append(seen),
    )
    found.minibatches = [
        Minibatch(seen.tokens, seen.means(), seen.log_ratio, norm)
        for seen, norm in zip(seen_of, learner.norms, strict=True)
    ]
    recorded = {name: tensor for name, tensor in experience._asdict().items() if isinstance(tensor, Tensor)}
    places = {"recorded": recorded | {"scores": bundle.scores}, "weight": bundle.weights, "again": again}
    found.not_finite = [f"{place}: {name}" for place, tensors in places.items() for name in not_finite(tensors)]
    found.not_finite += learner.not_finite
    return found


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors with a NaN or an infinity in them, and how many."""
    counts = {name: int((~tensor.isfinite()).sum()) for name, tensor in tensors.items()}
    return [f"{name} ({count} of {tensors[name].numel()})" for name, count in counts.items() if count]


def tables(bundle: Bundle, found: Replay, tokenizer: PreTrainedTokenizerBase) -> Iterator[Table | str]:
    """What `main` prints."""
    yield f"iteration {bundle.iteration + 1}, alarm {bundle.alarm.name}: {escape(bundle.alarm.text)}"
    here = debug.versions()
    yield ", ".join(f"{name} {then}{_now(then, here[name])}" for name, then in bundle.versions.items())
    if moved := int(bundle.row.get("steps", 0)):
        yield f"the weights are those of minibatch {moved + 1}: log ratios to the rollout's policy need not be 0"
    yield _minibatches(found, bundle.params.ppo.minibatches)
    yield _differences(bundle, found)
    yield "not finite: " + (escape("; ".join(found.not_finite)) or "nothing")
    yield _rows(bundle, tokenizer)


def _minibatches(found: Replay, per_epoch: int) -> Table:
    measured = ("policy loss", "value loss", "KL", "clipped", "entropy", "log ratio", "gradient")
    table = Table("epoch", "part", "tokens", *measured, title="minibatches, computed again", box=SIMPLE)
    for number, one in enumerate(found.minibatches):
        means = [one.means[name] for name in ("policy_loss", "value_loss", "approx_kl", "clip_fraction", "entropy")]
        place = str(number // per_epoch + 1), str(number % per_epoch + 1)
        numbers = [*means, one.log_ratio, one.grad_norm]
        table.add_row(*place, str(one.tokens), *(f"{value:.3g}" for value in numbers))
    return table


def _differences(bundle: Bundle, found: Replay) -> Table:
    table = Table("", "largest", "mean", title="difference from what was recorded", box=SIMPLE)
    for name, difference in found.differences.items():
        table.add_row(name, f"{difference.largest:.3g}", f"{difference.mean:.3g}")
    recorded = bundle.row.get("first_log_ratio")
    table.add_row("first log ratio", "not reached" if recorded is None else f"{recorded:.3g} then", "")
    return table


def _rows(bundle: Bundle, tokenizer: PreTrainedTokenizerBase) -> Table:
    batch = bundle.experience.batch
    kl = estimates(bundle.experience.logprobs, bundle.experience.ref_logprobs).k1.sum(dim=1).nan_to_num(torch.inf)
    table = Table("row", "KL", "score", "tokens", "finished", "response", title="rows with most KL", box=SIMPLE)
    for row in kl.argsort(descending=True, stable=True)[:ROWS_SHOWN].tolist():
        start, end = int(batch.prompt_lengths[row]), int(batch.lengths[row])
        text = decode_response(tokenizer, batch.tokens[row, start:end].tolist())
        finished = "yes" if bundle.finished[row] else "no"
        table.add_row(
            str(row), f"{kl[row]:.3g}", f"{bundle.scores[row]:.3g}", str(end - start), finished, _one_line(text)
        )
    return table


def _one_line(text: str) -> str:
    return escape(" / ".join(text.splitlines())[:TEXT_SHOWN])


def _now(then: str, now: str) -> str:
    return "" if then == now else f" (now {now})"


def _to(experience: Experience, device: torch.device) -> Experience:
    tensors = {name: t.to(device) for name, t in experience._asdict().items() if t is not None}
    return experience._replace(**tensors)


def main(arguments: Sequence[str], sft: Path = Path("models/sft")) -> None:
    """The command line; raises UserError."""
    if {"-h", "--help"} & set(arguments):
        print((__doc__ or "").strip())
        return
    if not arguments or arguments[0].startswith("-"):
        raise UsageError("name a bundle: python -m rlhf.ppo.replay runs/debug/NAME [key=value ...]")
    bundle = debug.read(Path(arguments[0]), arguments[1:])
    runtime.configure(bundle.params.runtime, bundle.params.seed)
    tokenizer = load_tokenizer(sft)
    found = replay(bundle, sft)
    console = Console()
    for shown in tables(bundle, found, tokenizer):
        console.print(shown)


if __name__ == "__main__":
    sys.exit(run_command("replay", lambda: main(sys.argv[1:])))
