"""Where a stage keeps what it has done between a kill and the next run.

It lives outside DVC's outs, under a key of everything that decides the result, so that no changed param, input, line of
code or library ever resumes an old state (DESIGN, "Training state is no DVC out").
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from rlhf import anchors, locks
from rlhf.hashes import dvc_md5


def identity(
    stage: str, settings: Mapping[str, object], inputs: Sequence[Path], project: Path, kernels: str = ""
) -> dict[str, object]:
    """What decides the result of the stage: params, the inputs' hashes, code, lock file, torch, threads and processor.

    `kernels` says what computes beside torch.
    """
    import torch

    code = sorted([*(project / "rlhf").rglob("*.py"), project / "stages" / f"{stage}.py"])
    return {
        "params": settings,
        "inputs": {path.name: dvc_md5(path) for path in inputs},
        "code": {str(path.relative_to(project)): sha256(path.read_bytes()).hexdigest() for path in code},
        "lock": sha256((project / "requirements.lock").read_bytes()).hexdigest(),
        "torch": [torch.__version__, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()],
        "kernels": kernels,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def fingerprint(identity: Mapping[str, object]) -> str:
    """The key of the run with this identity."""
    return sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]


def directory(stage: str, identity: Mapping[str, object]) -> Path:
    """Where the run of the stage with this identity keeps its state."""
    return anchors.state_dir() / stage / fingerprint(identity)


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Holds the state's directory; raises UserError with the holder's process id where another run has it."""
    with locks.exclusive(anchors.state_lock(directory), f"is at this very run, {directory}: wait for it"):
        yield


def discard(directory: Path) -> None:
    """Removes the state once the outputs are in place."""
    shutil.rmtree(directory, ignore_errors=True)
