"""Training state that survives a kill: one safetensors file and its metadata, replaced whole.

It lives in the stage's directory of `rlhf.resuming`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf import faults
from rlhf.errors import UserError, first_line
from rlhf.files import sync
from rlhf.models.sharding import part_like, whole
from rlhf.ppo.trainer import Progress
from rlhf.ppo.update import Learner

STATE_FILE = "state.safetensors"


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
    sync(temporary)
    faults.reach("state.synced")
    temporary.replace(directory / STATE_FILE)
    faults.reach("state.renamed")
    sync(directory)
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
