"""Training state that survives a kill: one safetensors file and its metadata, replaced whole.

It lives outside DVC's outs, under a key of everything that decides the result, so that no changed param, input, line of
code or library ever resumes an old state (DESIGN, "Training state is no DVC out").
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf import anchors, faults, locks
from rlhf.errors import UserError, first_line
from rlhf.hashes import dvc_md5
from rlhf.models.sharding import part_like, whole
from rlhf.ppo.trainer import Progress
from rlhf.ppo.update import Learner

STATE_FILE = "state.safetensors"


def identity(settings: Mapping[str, object], inputs: list[Path], project: Path, kernels: str = "") -> dict[str, object]:
    """What decides a run's result: params, the inputs' hashes, code, lock file, torch with threads and processor.

    `kernels` says what computes beside torch.
    """
    code = sorted([*(project / "rlhf").rglob("*.py"), project / "stages" / "train_ppo.py"])
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


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Holds the state's directory; raises UserError with the holder's process id where another run has it."""
    with locks.exclusive(anchors.state_lock(directory), f"is training this very run, {directory}: wait for it"):
        yield


def save(directory: Path, learner: Learner, progress: Progress) -> None:
    """Writes the state beside the old one and renames it over: at any moment there is one whole state.

    For all ranks to call; the first one writes.
    """
    tensors = {f"weight/{name}": p.detach() for name, p in learner.actor_critic.trained_parameters()}
    tensors |= {f"best/{name}": weight for name, weight in progress.best_weights.items()}
    tensors |= dict(_optimiser_tensors(learner))
    contiguous = {}
    for name, tensor in tensors.items():
        complete = whole(tensor)
        if learner.ranks.first:
            contiguous[name] = complete.contiguous()
    if not learner.ranks.first:
        return
    meta = vars(progress) | {"best_weights": None, "bad_steps": learner.bad_steps}
    temporary = directory / f".{STATE_FILE}.new"
    faults.reach("state.begun")
    save_file(contiguous, temporary, metadata={"progress": json.dumps(meta)})
    faults.reach("state.written")
    _sync(temporary)
    faults.reach("state.synced")
    temporary.replace(directory / STATE_FILE)
    faults.reach("state.renamed")
    _sync(directory)
    faults.reach("state.safe")


def load(directory: Path, learner: Learner) -> Progress:
    """The state in `directory`, put into the learner; a fresh one where there is none.

    Raises UserError where the file is broken or not this run's.
    """
    path = directory / STATE_FILE
    if not path.is_file():
        return Progress()
    try:
        return _read(path, learner)
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{path}: no whole training state of this run ({first_line(error)}): remove it to train from the start"
        ) from error


def _read(path: Path, learner: Learner) -> Progress:
    with safe_open(path, framework="pt", device="cpu") as file:
        meta = json.loads(file.metadata()["progress"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    prefix = "weight/"
    learner.restore({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})
    _restore_optimisers(learner, tensors)
    learner.bad_steps = meta.pop("bad_steps")
    device = learner.actor_critic.policy.device
    parameters = dict(learner.actor_critic.trained_parameters())
    whole_best = {name.removeprefix("best/"): t for name, t in tensors.items() if name.startswith("best/")}
    best = {name: part_like(parameters[name], tensor).to(device) for name, tensor in whole_best.items()}
    return Progress(**(meta | {"best_weights": best}))


def discard(directory: Path) -> None:
    """Removes the state once the outputs are in place."""
    shutil.rmtree(directory, ignore_errors=True)


def _optimiser_tensors(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    for number, optimiser in enumerate(learner.optimisers):
        for place, values in optimiser.state_dict()["state"].items():
            for key, value in values.items():
                yield f"optimiser/{number}/{place}/{key}", value


def _restore_optimisers(learner: Learner, tensors: Mapping[str, Tensor]) -> None:
    for number, optimiser in enumerate(learner.optimisers):
        state: dict[int, dict[str, Tensor]] = {}
        parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        for name, tensor in tensors.items():
            kind, *place = name.split("/")
            if kind == "optimiser" and place[0] == str(number):
                state.setdefault(int(place[1]), {})[place[2]] = part_like(parameters[int(place[1])], tensor)
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
