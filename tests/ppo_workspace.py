"""A workspace with all that `train_ppo` reads, at smoke scale, for tests that run the stage by itself."""

from __future__ import annotations

from pathlib import Path

from rlhf import config
from rlhf.data.gsm8k import Problem, write_prepared
from tests.policies import save_policy

ROOT = Path(__file__).resolve().parents[1]


def fill(place: Path) -> Path:
    """Puts the code, params, prepared data and SFT checkpoint into `place`, the same everywhere; returns it."""
    place.mkdir(exist_ok=True)
    for name in ("rlhf", "stages", "requirements.lock"):
        (place / name).symlink_to(ROOT / name)
    overrides = ["scale=smoke", "runtime.threads=1", "runtime.device=cpu", "ppo.sampling.max_new_tokens=8"]
    config.write(config.compose(overrides), place / "params.yaml")
    problems = [
        Problem(f"What is {n} + 1?", f"#### {n + 1}", str(n + 1), f"#### {n + 1}", 1, "test") for n in range(24)
    ]
    for split in ("train", "validation"):
        write_prepared(place / "data/prepared" / f"{split}.parquet", problems)
    save_policy(place / "models" / "sft")
    return place
