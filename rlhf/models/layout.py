"""What a checkpoint consists of, and taking it out of whatever holds it: a directory, an archive, a GGUF file."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from rlhf.errors import UserError
from rlhf.hashes import sha256_file
from rlhf.models import archives, checkpoints, gguf
from rlhf.models.checkpoints import Manifest

WEIGHTS = "model*.safetensors"
INDEX = "model.safetensors.index.json"
PLAIN = (
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
)
"""Files of a checkpoint that have one name each."""
FILES = (WEIGHTS, INDEX, *PLAIN, "tokenizer*", "chat_template.*")
MODEL_CARD = "README.md"
SINGLE = (".gguf", *archives.SUFFIXES)
"""How the name of a file ends that is a whole checkpoint."""

Held = tuple[str | None, dict[str, str]]
"""License and parents of a checkpoint, as its card and manifest tell."""


@dataclass(frozen=True)
class Origin:
    """What the manifest says of where the files came from."""

    source: str
    revision: str | None = None
    license: str | None = None
    parents: dict[str, str] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None


def is_part(name: str) -> bool:
    """Whether a checkpoint's directory has a file of that name."""
    return "/" not in name and any(fnmatch(name, pattern) for pattern in FILES)


def fill(directory: Path, found: Path, name: str = "") -> Held:
    """Copies the checkpoint in the directory, GGUF file or archive `found`, whose name is `name`, to `directory`.

    Raises UserError where it is none, or has pickled weights.
    """
    name = name or found.name
    if found.is_dir():
        return _from_directory(directory, found)
    require_single(name)
    if name.endswith(".gguf"):
        checkpoints.refuse_disguised_pickle(found)
        return _from_gguf(directory, found), {}
    with tempfile.TemporaryDirectory(prefix=".unpacked-", dir=directory.parent) as place:
        archives.unpack(found, name, Path(place))
        return _from_directory(directory, _root(Path(place)))


def require_single(name: str) -> None:
    """Raises UserError where a file of that name is no whole checkpoint."""
    checkpoints.refuse_pickles([name])
    if not name.endswith(SINGLE):
        raise UserError(f"{name} is no checkpoint by its name: take a directory, or a file that ends in {_or(SINGLE)}")


def parts(names: Iterable[str]) -> list[str]:
    """Those files of a directory that make a checkpoint; raises UserError where weights or config are missing."""
    names = sorted(names)
    if not any(fnmatch(name, WEIGHTS) for name in names):
        checkpoints.refuse_pickles(names)
        raise UserError("no model.safetensors: take a checkpoint whose weights are safetensors")
    if "config.json" not in names:
        raise UserError("no config.json: take a checkpoint in the Hugging Face layout")
    return [name for name in names if is_part(name)]


def copy_parts(origin: Path, directory: Path) -> None:
    """Copies what a checkpoint consists of and nothing else; raises UserError where something is missing."""
    for name in parts(path.name for path in origin.iterdir() if path.is_file()):
        if fnmatch(name, WEIGHTS):
            checkpoints.refuse_disguised_pickle(origin / name)
        shutil.copyfile(origin / name, directory / name)
    require_shards(directory)


def require_shards(directory: Path) -> None:
    """Raises UserError where the index of sharded weights lists a file that is not there."""
    index = directory / INDEX
    try:
        listed = sorted(set(json.loads(index.read_bytes())["weight_map"].values())) if index.exists() else []
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{INDEX} is no index of weights: take it as transformers writes it") from None
    missing = [name for name in listed if not (directory / str(name)).is_file()]
    if missing:
        raise UserError(f"{missing[0]} is missing: {INDEX} lists {len(listed)} files: fetch all of them")


def verified(origin: Path) -> tuple[Manifest, dict[str, str]]:
    """The manifest of a checkpoint of ours, which holds, and what it is as a parent."""
    checkpoints.verify_files(origin)
    manifest = checkpoints.read_manifest(origin)
    return manifest, {manifest.kind: checkpoints.checkpoint_hash(origin)}


def content_hash(directory: Path) -> str:
    """One hash over the names and contents of all files."""
    listing = {path.name: sha256_file(path) for path in directory.iterdir()}
    return sha256(json.dumps(listing, sort_keys=True).encode()).hexdigest()


def card_license(directory: Path) -> str | None:
    """The license in the front matter of the model card, if there is one."""
    card = directory / MODEL_CARD
    if not card.is_file():
        return None
    front = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    found = re.search(r"^license:\s*['\"]?([\w.+-]+)", front[1], re.MULTILINE) if front else None
    return found[1] if found else None


def _from_directory(directory: Path, origin: Path) -> Held:
    license_name = card_license(origin)
    parents: dict[str, str] = {}
    if (origin / checkpoints.MANIFEST).exists():
        parent, parents = verified(origin)
        license_name = license_name or parent.license
    copy_parts(origin, directory)
    return license_name, parents


def _from_gguf(directory: Path, file: Path) -> str | None:
    """Writes the model in a GGUF file, whatever the cache calls it; returns its license."""
    with tempfile.TemporaryDirectory(prefix="rlhf-gguf-") as place:
        link = Path(place, "model.gguf")
        link.symlink_to(file.absolute())
        checkpoints.write_model(directory, *gguf.dequantise(link))
        return gguf.license_of(link)


def _root(place: Path) -> Path:
    """The one directory of an archive that holds a checkpoint."""
    found = sorted(path.parent for path in place.rglob("config.json"))
    if len(found) > 1:
        names = " and ".join(str(PurePosixPath(path.relative_to(place))) for path in found[:2])
        raise UserError(f"the archive holds several checkpoints, in {names}: pack one")
    if not found:
        checkpoints.refuse_pickles(path.name for path in place.rglob("*"))
        raise UserError("the archive holds no config.json: pack a checkpoint in the Hugging Face layout")
    return found[0]


def _or(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}"
