"""Evaluates a registered version again, on any split. Test and gate decide nothing here: the gate judged already.

The policy answers as it was trained to: prompt, stop strings, length and verifier are those of its manifest. The
numbers go to an MLflow run of their own and to the version's logged model; the version's tag `evaluated.SPLIT_run_id`
names the run. A split counts as the version's own if its hash is the one that the version's `dvc.lock` has.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf import runtime, tracking
from rlhf.data.gsm8k import Problem, read_prepared
from rlhf.errors import UserError, first_line
from rlhf.evaluation import wording
from rlhf.evaluation.accuracy import Graded, evaluate_model
from rlhf.evaluation.report import answers_table
from rlhf.evaluation.statistics import describe, flat
from rlhf.hashes import dvc_md5
from rlhf.models import checkpoints
from rlhf.models.actor_critic import sampling_copy
from rlhf.models.checkpoints import Manifest
from rlhf.params import Params, Prompt, Verifier
from rlhf.registry import records
from rlhf.registry.lookup import fetch_checkpoint, find
from rlhf.registry.server import scratch, server
from rlhf.tracking import Run, dataset_digest

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

Split = Literal["validation", "gate", "test"]
EVALUATED = "evaluated.{}_run_id"
"""The tags of a version that name the latest run on each split."""


@dataclass(frozen=True)
class Data:
    """The file with a split's problems."""

    path: Path
    name: str
    """Its path in a workspace."""
    kind: Literal["own", "other", "unknown"]
    """Whether it is the one that the version was made or evaluated with; unknown where the version kept no hashes."""


@dataclass(frozen=True)
class Evaluation:
    """What came of it."""

    version: str
    """NAME/NUMBER."""
    split: str
    data: str
    """`Data.kind`."""
    metrics: Mapping[str, float]
    """By the names that the pipeline's own evaluation has in MLflow: `test/policy_accuracy`."""
    run_id: str
    line: str
    """All of it in words."""


def evaluate(
    name: str,
    wanted: str,
    split: Split,
    params: Params,
    workspace: Path,
    cache: Path | None = None,
    other_data: bool = False,
) -> Evaluation:
    """Evaluates the version of the model `name` with the number or alias `wanted` on the problems of `split`.

    They are the workspace's where it has the version's own, or else those that the directory `cache` keeps as DVC does
    by hash. With `other_data` the workspace's are taken whatever they are. Of `params` the runtime, batch size and
    confidence count. Raises UserError for what is missing and for a server that is out of reach.
    """
    with server() as registry, scratch() as place:
        version = find(registry, name, wanted)
        data = split_file(version, split, workspace, cache, other_data)
        problems = read_prepared(data.path)
        checkpoint = fetch_checkpoint(version, place)
        label = f"{name}/{version.version}"
        params = as_trained(params, checkpoints.read_manifest(checkpoint))
        tags = {"version": label, "policy_hash": checkpoints.checkpoint_hash(checkpoint), "split": split}
        with tracking.evaluation_run(params.model_dump(), tags | {"data": data.kind}) as run:
            run.log_dataset(data.path, split, "evaluation", source=Path(data.name))
            graded = _answers(checkpoint, problems, params, label)
            described = describe(graded, params.verifier.method, params.evaluation.confidence)
            run.log_table(*answers_table(split, graded), "eval_results_table.json")
            metrics = flat({split: described})
            run_id = _record(version, run, data, split, metrics)
    before = version.tags.get(f"{split}.policy_accuracy") if data.kind == "own" else None
    return Evaluation(label, split, data.kind, metrics, run_id, _line(label, split, described, data, before))


def split_file(version: ModelVersion, split: Split, workspace: Path, cache: Path | None, other_data: bool) -> Data:
    """The file to read the split from; raises UserError where it is missing, or is not the version's own."""
    name = f"data/prepared/{split}.parquet"
    here = workspace / name
    wanted = records.data_read(records.read(version)).get(name)
    kept = cache / wanted[:2] / wanted[2:] if cache and wanted else None
    found = dvc_md5(here) if here.is_file() else None
    if found and (found == wanted or wanted is None):
        return Data(here, name, "own" if wanted else "unknown")
    if found and other_data:
        return Data(here, name, "other")
    if kept and kept.is_file() and dvc_md5(kept) == wanted:
        return Data(kept, name, "own")
    label = f"{version.name} version {version.version}"
    if found:
        raise UserError(
            f"{name}: not the problems of {label} (md5 {found}, its run had {wanted}): prepare those with its params, "
            "name DVC's cache (--cache), or say that other problems are meant (--other-data)"
        )
    raise UserError(f"{name} is missing{f' (md5 {wanted})' if wanted else ''}: run dvc repro prepare_data")


def as_trained(params: Params, manifest: Manifest) -> Params:
    """`params` with the prompt, verifier, stop strings and length that the policy of `manifest` was trained with.

    Raises UserError where the manifest does not say them.
    """
    trained = manifest.params
    try:
        decoding = {key: trained["ppo"]["sampling"][key] for key in ("max_new_tokens", "stop")}
        prompt, verifier = Prompt.model_validate(manifest.prompt), Verifier.model_validate(trained["verifier"])
    except (LookupError, TypeError, ValueError) as error:
        reason = f"its manifest does not say how it is to answer ({first_line(error)})"
        raise UserError(f"{reason}: take a version that this pipeline registered") from None
    sampling = params.ppo.sampling.model_copy(update=decoding)
    ppo = params.ppo.model_copy(update={"sampling": sampling})
    return params.model_copy(update={"prompt": prompt, "verifier": verifier, "ppo": ppo})


def _answers(checkpoint: Path, problems: Sequence[Problem], params: Params, label: str) -> list[Graded]:
    device, dtype = runtime.device(params.runtime), runtime.matmul_dtype(params.runtime)
    model = sampling_copy(checkpoints.load_policy(checkpoint).to(device), dtype)
    with runtime.progress(f"evaluate {label}", len(problems)) as bar:
        return evaluate_model(model, checkpoints.load_tokenizer(checkpoint), problems, params, on_rows=bar.advance)


def _record(version: ModelVersion, run: Run, data: Data, split: Split, metrics: Mapping[str, float]) -> str:
    """Puts the numbers into the run and into the version's logged model, which MLflow then links; the run's id."""
    from mlflow.entities import LoggedModelInput, Metric
    from mlflow.exceptions import MlflowException

    if not (run.id and run.flush()):
        raise MlflowException("no run can be made")
    model, now, digest = version.source.removeprefix("models:/"), time.time_ns() // 1_000_000, dataset_digest(data.path)
    points = [Metric(key, value, now, 0, model, split, digest, run.id) for key, value in metrics.items()]
    with server() as registry:
        registry.log_inputs(run.id, models=[LoggedModelInput(model)])
        registry.log_batch(run.id, metrics=points)
        registry.set_model_version_tag(version.name, version.version, EVALUATED.format(split), run.id)
    return run.id


def _line(label: str, split: Split, described: Mapping[str, Any], data: Data, before: str | None) -> str:
    words = f"{label} on {split}: {wording.accuracy(described['policy'])} right of {described['n']} problems"
    if before:
        words += f"; when it was registered {wording.percent(float(before))}"
    return (
        words
        + {
            "own": "",
            "other": "; not the problems of its run",
            "unknown": "; it kept no dvc.lock to tell whether these were its problems",
        }[data.kind]
    )
