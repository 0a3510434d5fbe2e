"""A run that logs a few points to the mirror that its first argument names; its key is in the file of the second."""

from __future__ import annotations

import sys
from pathlib import Path

from rlhf import tracking

STEPS = 5
PARAMS = {"seed": 3, "ppo": {"lr": 0.5}}

if __name__ == "__main__":
    with tracking.stage_run("train_ppo", PARAMS, sys.argv[1]) as run:  # type: ignore[arg-type]
        run.log_metrics({"too_long": 2})
        run.resume(Path(sys.argv[2]))
        for step in range(STEPS):
            run.log_metrics({"kl": step / 8}, step)
