"""Three iterations at toy size, one thread: the curve that the installed versions of torch and transformers give.

    python -m tests.rlhf.ppo.golden_curve    after `make lock upgrade=1`, or after an intended change of PPO

writes the present curve and tells how far it is from those that are there. The instruction sets of a processor
(ATEN_CPU_CAPABILITY, and those of MKL and oneDNN) move it by less than 1e-6, a change of lr, lambda or
a clip by a few per cent by more than TOLERANCE: so one file serves all processors.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from rlhf.ppo.metrics import Row
from rlhf.ppo.trainer import Progress, train
from tests.rlhf.ppo.toy import Toy, toy_params

DIRECTORY = Path(__file__).with_name("golden")
COMMAND = "python -m tests.rlhf.ppo.golden_curve"
TOLERANCE = 1e-4
CHOICES = ("kl=adaptive", "ppo.epochs=2", "ppo.eval_every=1", "ppo.lr=0.003")
# fmt: off
NUMBERS = (
    "score", "response_length", "kl_token", "kl_sequence", "kl_coef", "explained_variance", "policy_loss", "value_loss",
    "entropy", "approx_kl", "clip_fraction", "grad_norm", "validation_accuracy",
)
# fmt: on


def golden_file() -> Path:
    """The file of the versions that are installed, whatever processor they were built for."""
    torch_version = torch.__version__.partition("+")[0]
    return DIRECTORY / f"torch-{torch_version}-transformers-{transformers.__version__}.json"


def curve(*overrides: str) -> list[Row]:
    """One row an iteration."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = train(Toy(toy_params(*CHOICES, *overrides)).loop(), Progress()).rows
    finally:
        torch.set_num_threads(threads)
    return [{name: float(f"{row[name]:.8g}") for name in NUMBERS if name in row} for row in rows]


def differences(one: list[Row], other: list[Row]) -> dict[str, float]:
    """The largest difference of each number over the iterations, relative where it is above 1; the largest first."""
    assert len(one) == len(other)
    found = {
        name: max(_difference(*(row.get(name, 0.0) for row in rows)) for rows in zip(one, other, strict=True))
        for name in NUMBERS
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _difference(one: float, other: float) -> float:
    change = abs(one - other) / max(1.0, abs(other))
    return change if change == change else float("inf")


def main() -> None:
    rows, target = curve(), golden_file()
    for other in sorted(DIRECTORY.glob("*.json")):
        name, change = next(iter(differences(rows, json.loads(other.read_text())).items()))
        print(f"{other.stem}: largest difference {change:.1e}, of {name}")
    DIRECTORY.mkdir(exist_ok=True)
    target.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{target.name} written; remove the files of versions that the lock no longer has")


if __name__ == "__main__":
    main()
