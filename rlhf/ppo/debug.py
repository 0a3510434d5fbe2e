"""Debug bundles: all that an iteration's update worked on, kept when an alarm rings, for `python -m rlhf.ppo.replay`.

runs/debug/train_ppo-<iteration>-<alarm>/
    batch.safetensors      tokens, log-probabilities, values, advantages and so on (`batch_tensors`)
    weights.safetensors    the trained weights at that moment
    params.yaml            the run's params
    bundle.json            the alarm, the row of metrics so far, versions, the SFT checkpoint's hash
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf import config
from rlhf.errors import UserError, first_line
from rlhf.models.batches import TokenBatch
from rlhf.models.sharding import is_sharded, whole
from rlhf.params import Params
from rlhf.ppo.guards import Alarm
from rlhf.ppo.metrics import Row
from rlhf.ppo.rollout import Experience, Rollout
from rlhf.ppo.update import Learner

BUNDLES_KEPT = 4
"""The newest ones; each is little more than the trained weights in float32."""
BATCH, WEIGHTS, PARAMS, BUNDLE = "batch.safetensors", "weights.safetensors", "params.yaml", "bundle.json"


@dataclass(frozen=True)
class Case:
    """One iteration's update, before or while it is made.

    Attributes:
        iteration: iterations done before it.
        row: its metrics as far as they are known.
        experience: with the advantages that the update sees.
        scores: (B,) task scores.
    """

    iteration: int
    row: Row
    rollout: Rollout
    experience: Experience
    scores: Tensor
    kl_coef: float
    train_policy: bool
    demonstrations: TokenBatch | None


@dataclass(frozen=True)
class Bundle:
    """A bundle as read back: see Case; `sft` is the `checkpoint_hash` of the SFT checkpoint."""

    alarm: Alarm
    iteration: int
    row: Row
    kl_coef: float
    train_policy: bool
    sft: str
    versions: dict[str, str]
    params: Params
    experience: Experience
    demonstrations: TokenBatch | None
    scores: Tensor
    finished: Tensor
    weights: dict[str, Tensor]


class Recorder:
    """Keeps a bundle the first time that an alarm rings in this run; training goes on where it cannot.

    Of several ranks, which all have the iteration's whole experience, the first one does so.
    """

    def __init__(self, directory: Path, learner: Learner, params: Params, sft: str) -> None:
        self._directory, self._learner, self._params, self._sft = directory, learner, params, sft
        self._seen: set[str] = set()

    def __call__(self, alarm: Alarm, case: Case) -> None:
        alone = alarm.name == "error" and is_sharded(self._learner.actor_critic)  # the other ranks give no parts to it
        if alarm.name in self._seen or alone:
            return
        self._seen.add(alarm.name)
        trained = self._learner.actor_critic.trained_parameters()
        weights = {name: whole(parameter.detach()) for name, parameter in trained}  # all ranks put them together
        if not self._learner.ranks.first:
            return
        target = self._directory / f"train_ppo-{case.iteration + 1}-{alarm.name}"
        try:
            write(target, alarm, case, weights, self._params, self._sft)
            prune(self._directory)
        except (OSError, SafetensorError, UserError) as error:
            print(f"train_ppo: {target}: no debug bundle: {first_line(error)}", flush=True)
        else:
            print(f"train_ppo: replay it with python -m rlhf.ppo.replay {_shown(target)}", flush=True)


def write(directory: Path, alarm: Alarm, case: Case, weights: Mapping[str, Tensor], params: Params, sft: str) -> None:
    """Writes a bundle, which appears whole; raises OSError where it would take more than half of the free disk."""
    partial = directory.with_name(f".{directory.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    batch = batch_tensors(case)
    size = sum(tensor.nbytes for tensor in [*batch.values(), *weights.values()])
    if 2 * size > shutil.disk_usage(partial).free:
        shutil.rmtree(partial)
        raise OSError(f"its {size / 2**20:.0f} MiB are too much for this disk")
    for name, tensors in ((BATCH, batch), (WEIGHTS, weights)):
        save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, partial / name)
    config.write(params.model_dump(), partial / PARAMS)
    told = {
        "alarm": asdict(alarm),
        "iteration": case.iteration,
        "row": case.row,
        "kl_coef": case.kl_coef,
        "train_policy": case.train_policy,
        "sft": sft,
        "versions": versions(),
    }
    (partial / BUNDLE).write_text(json.dumps(told, indent=2) + "\n")  # a NaN is what it may be about
    shutil.rmtree(directory, ignore_errors=True)
    partial.replace(directory)


def batch_tensors(case: Case) -> dict[str, Tensor]:
    """The tensors of a case by name; those of the demonstrations begin with `ptx_`."""
    experience = case.experience
    tensors = {name: tensor for name, tensor in experience._asdict().items() if isinstance(tensor, Tensor)}
    tensors |= vars(experience.batch)
    tensors |= {"scores": case.scores, "finished": case.rollout.finished}
    tensors["sampler_logprobs"] = case.rollout.sampler_logprobs
    if case.demonstrations is not None:
        tensors |= {f"ptx_{name}": tensor for name, tensor in vars(case.demonstrations).items()}
    return tensors


def read(directory: Path, overrides: Sequence[str] = ()) -> Bundle:
    """The bundle in `directory`, its params for one process and with `key=value` overrides.

    Raises UserError where it is none.
    """
    missing = [name for name in (BATCH, WEIGHTS, PARAMS, BUNDLE) if not (directory / name).is_file()]
    if missing:
        raise UserError(f"{directory / missing[0]} is missing: name a directory of runs/debug/")
    told = json.loads((directory / BUNDLE).read_text())
    tensors = load_file(directory / BATCH)
    fields = {name: tensors[name] for name in Experience._fields if name in tensors}
    ptx = {name.removeprefix("ptx_"): tensor for name, tensor in tensors.items() if name.startswith("ptx_")}
    return Bundle(
        **(told | {"alarm": Alarm(**told["alarm"])}),
        params=config.load(["distributed.processes=1", *overrides], directory / PARAMS),
        experience=Experience(_token_batch(tensors), **fields),
        demonstrations=_token_batch(ptx) if ptx else None,
        scores=tensors["scores"],
        finished=tensors["finished"],
        weights=load_file(directory / WEIGHTS),
    )


def prune(directory: Path) -> None:
    """Removes all bundles but the newest."""
    bundles = sorted(directory.glob("train_ppo-*"), key=lambda path: path.stat().st_mtime_ns)
    for old in bundles[:-BUNDLES_KEPT]:
        shutil.rmtree(old)


def versions() -> dict[str, str]:
    """What computed."""
    processor = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": processor,
    }


def _token_batch(tensors: Mapping[str, Tensor]) -> TokenBatch:
    return TokenBatch(tensors["tokens"], tensors["prompt_lengths"], tensors["lengths"])


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
