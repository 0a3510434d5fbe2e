"""Registering: each policy is one version, known by the hash of its manifest; the latest one is the candidate."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf import anchors
from rlhf.errors import UserError
from rlhf.hashes import sha256_file
from rlhf.models.checkpoints import checkpoint_hash, read_manifest, verify_files
from rlhf.redaction import redact
from rlhf.registry.lookup import checkpoint_path
from rlhf.registry.server import (
    LIBRARY,
    SERVED_POLICY,
    download,
    files,
    has_model,
    lock,
    patience,
    scratch,
    server,
)
from rlhf.tracking import Run

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.models import ModelSignature
    from mlflow.models.model import ModelInfo
    from packaging.requirements import Requirement

CANDIDATE = "candidate"
"""The alias of the version that was registered last."""
REGISTERED = "registered"
"""The tag of a version that is complete."""
LOCK_FILE = anchors.CHECKOUT / "requirements.lock"
REQUIREMENTS = (
    "jinja2",
    "mlflow",
    "numpy",
    "pandas",
    "pydantic",
    "pyyaml",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
)
"""What loading a registered policy needs, at the lock file's versions."""


@dataclass(frozen=True)
class Version:
    """A version of a registered model."""

    name: str
    number: str
    policy_hash: str
    tags: Mapping[str, str] = field(compare=False)
    """Its scores and its lineage, as they were when it was registered."""


def find_version(name: str, directory: Path) -> Version | None:
    """The version of the policy in `directory` that is completely registered and has all its files.

    Raises UserError where the server cannot be reached.
    """
    policy_hash = checkpoint_hash(directory)
    with server() as registry:
        for found in _search(registry, name, policy_hash):
            if REGISTERED in found.tags and _is_whole(found, directory):
                return Version(name, str(found.version), policy_hash, found.tags)
    return None


def register_policy(
    directory: Path,
    *,
    name: str,
    metrics: Mapping[str, float],
    lineage: Mapping[str, object],
    max_new_tokens: int,
    run: Run,
) -> Version:
    """Registers the policy in `directory` as a version of the model `name`, which becomes the candidate.

    A policy that is registered already stays as it is: no second version, and the alias stays where it is. A
    registration that was interrupted is completed; where the files of a version are gone, another one is made.
    `metrics` and `lineage` become the version's tags, `run` its source run, `max_new_tokens` the default length of its
    answers. Raises UserError where the server cannot be reached or keeps other bytes than it was sent.
    """
    verify_files(directory)
    policy_hash = checkpoint_hash(directory)
    with lock("register", name), server() as registry:
        versions = _search(registry, name, policy_hash)
        found = next((version for version in versions if _is_usable(version, directory)), None)
        if found is None:
            for lost in versions:
                print(f"register: the files of {name} version {lost.version} are gone: registering it anew", flush=True)
            logged = _log_model(registry, directory, metrics, max_new_tokens, run)
            _show_maker(registry, logged, lineage)
            known = {**lineage, **metrics, "policy_hash": policy_hash}
            tags = {key: redact(str(value)) for key, value in known.items()}
            found = _create_version(registry, name, logged, tags)
            if not _has_same_bytes(found, directory):
                raise UserError(f"{name} version {found.version}: its files changed on the way: register it again")
        if REGISTERED not in found.tags:
            registry.set_registered_model_alias(name, CANDIDATE, found.version)
            registry.set_model_version_tag(name, found.version, REGISTERED, "true")
    return Version(name, str(found.version), policy_hash, found.tags)


def _log_model(
    registry: MlflowClient, directory: Path, metrics: Mapping[str, float], max_new_tokens: int, run: Run
) -> ModelInfo:
    """Uploads the policy as a logged model of `run`, which is made for it and whose metrics become the model's."""
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.models import Model

    run.log_metrics(metrics)
    if not (run.id and run.flush()):
        raise MlflowException("no run can be made")
    mlflow.set_experiment(experiment_id=registry.get_run(run.id).info.experiment_id)
    with patience(), scratch() as place, _without_links(directory) as plain:
        constraints = place / "constraints.txt"
        constraints.write_text("\n".join(map(str, _locked(LOCK_FILE))))
        return Model.log(
            None,
            flavor=mlflow.pyfunc,
            name="policy",
            run_id=run.id,
            python_model=str(SERVED_POLICY),
            artifacts={"checkpoint": str(plain)},
            code_paths=[str(LIBRARY)],
            signature=_signature(max_new_tokens),
            pip_requirements=[*_requirements(LOCK_FILE), f"-c {constraints}"],
        )


def _show_maker(registry: MlflowClient, logged: ModelInfo, lineage: Mapping[str, object]) -> None:
    """Lists the model among the outputs of the run that trained it, and names that run beside the model's metrics."""
    from mlflow.entities import LoggedModelOutput

    if trained := str(lineage.get("train_ppo_run_id", "")):
        registry.log_outputs(trained, [LoggedModelOutput(logged.model_id, step=0)])
        registry.set_logged_model_tags(logged.model_id, {"train_ppo_run_id": trained})


def _signature(max_new_tokens: int) -> ModelSignature:
    """Questions in, answers out, and the settings with their defaults: see ServedPolicy.predict."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
    from mlflow.types.schema import Array, Object, Property

    response = [
        Property("text", DataType.string),
        Property("answer", DataType.string, required=False),
        Property("finished", DataType.boolean),
    ]
    answer = [ColSpec(part.dtype, part.name, required=part.required) for part in response]
    answer += [
        ColSpec(DataType.long, "votes"),
        ColSpec(Array(Object(response)), "samples"),
        ColSpec(DataType.string, "version", required=False),
        ColSpec(DataType.string, "policy"),
    ]
    settings = [
        ParamSpec("max_new_tokens", DataType.long, max_new_tokens),
        ParamSpec("samples", DataType.long, 1),
        ParamSpec("temperature", DataType.double, 0.0),
        ParamSpec("seed", DataType.long, 0),
    ]
    return ModelSignature(Schema([ColSpec(DataType.string)]), Schema(answer), ParamSchema(settings))


def _create_version(registry: MlflowClient, name: str, logged: ModelInfo, tags: dict[str, str]) -> ModelVersion:
    from mlflow.exceptions import MlflowException

    try:
        registry.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    return registry.create_model_version(name, logged.model_uri, logged.run_id, tags, model_id=logged.model_id)


def _search(registry: MlflowClient, name: str, policy_hash: str) -> Sequence[ModelVersion]:
    """The versions of that policy: more than one where the files of an earlier one are gone."""
    return registry.search_model_versions(f"name='{name}' and tags.policy_hash='{policy_hash}'")


def _is_usable(version: ModelVersion, directory: Path) -> bool:
    """Whether the version has the policy's files; those of an interrupted registration are read to the last byte."""
    return _is_whole(version, directory) and (REGISTERED in version.tags or _has_same_bytes(version, directory))


def _is_whole(version: ModelVersion, directory: Path) -> bool:
    """Whether the version still has the files that it was registered with, those of `directory` by name and size."""
    if not has_model(version):
        return False
    checkpoint = checkpoint_path(version)
    for folder in {path.parent for path in directory.rglob("*") if path.is_file()}:
        sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
        if not sizes.items() <= files(version, str(checkpoint / folder.relative_to(directory))).items():
            return False
    return True


def _has_same_bytes(version: ModelVersion, directory: Path) -> bool:
    """Whether what the server keeps is, by hash, what the manifest in `directory` lists."""
    wanted = read_manifest(directory).files | {"manifest.json": checkpoint_hash(directory)}
    with scratch() as place:
        copy = download(version, str(checkpoint_path(version)), place)
        return all((copy / name).is_file() and sha256_file(copy / name) == digest for name, digest in wanted.items())


@contextmanager
def _without_links(directory: Path) -> Iterator[Path]:
    """`directory`, or a copy of it where its files are links into DVC's cache (cache.type symlink): MLflow refuses."""
    if not any(path.is_symlink() for path in (directory, *directory.rglob("*"))):
        yield directory
        return
    with scratch() as place:
        yield Path(shutil.copytree(directory, place / directory.name))


def _requirements(lock_file: Path) -> list[str]:
    """The lines of REQUIREMENTS in the lock file that hold for this Python, without hashes."""
    return [
        f"{item.name}{item.specifier}"
        for item in _locked(lock_file)
        if item.name in REQUIREMENTS and (item.marker is None or item.marker.evaluate())
    ]


def _locked(lock_file: Path) -> list[Requirement]:
    """Every line of the lock file, without hashes."""
    from packaging.requirements import Requirement

    lines = lock_file.read_text(encoding="utf-8").splitlines()
    return [Requirement(line.rstrip(" \\")) for line in lines if line[:1].isalnum()]
