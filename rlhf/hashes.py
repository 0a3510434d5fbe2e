"""The hashes by which files are known: DVC's md5 for the pipeline's outputs, sha256 inside manifests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from rlhf.errors import UserError


def sha256_file(path: Path) -> str:
    """The file's sha256 as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def dvc_md5(path: Path) -> str:
    """The md5 that `dvc.lock` has for `path`: of a file's bytes, or of a directory's listing, then ending in `.dir`.

    A directory's listing is the JSON of its files' md5 and relative path, sorted by path, as DVC 3 writes it. A path
    that `.dvcignore` excludes counts here all the same: outputs hold none. Raises UserError where nothing is there.
    """
    if path.is_file():
        return _md5_file(path)
    if not path.is_dir():
        raise UserError(f"{path} is missing: nothing to hash: run the stage that writes it")
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    listing = [{"md5": _md5_file(files[name]), "relpath": name} for name in sorted(files)]
    return hashlib.md5(json.dumps(listing, sort_keys=True).encode()).hexdigest() + ".dir"


def _md5_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
