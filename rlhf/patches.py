"""What a checkout has beyond its commit, as one patch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rlhf import anchors
from rlhf.errors import UserError

OWN = ("dvc.lock", "params.yaml")
"""Files that the pipeline itself writes: no change of anybody's."""


def changes(checkout: Path, new: Sequence[str] = (".",)) -> bytes:
    """What the files that git knows have beyond the commit, and new ones in `new`, as `git apply` takes it.

    OWN and what git ignores are left out. Empty without git or a commit. Raises UserError where git fails.
    """
    index = anchors.git("rev-parse", "--path-format=absolute", "--git-path", "index", directory=checkout)
    if not index or anchors.git("rev-parse", "HEAD", directory=checkout) is None:
        return b""
    with TemporaryDirectory() as place:
        own_index = Path(place, "index")  # new files are announced in a copy, so that the user's index stays as it is
        if Path(index).is_file():
            shutil.copy(index, own_index)
        there = [name for name in new if (checkout / name).is_dir()]
        _git(checkout, own_index, "add", "--intent-to-add", "--", *there)
        plain = ["--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/"]
        plain += ["--unified=3", "--submodule=short"]  # whatever the user's own settings say
        rest = ("HEAD", "--", ".", *(f":!{name}" for name in OWN))
        return _git(checkout, own_index, "diff", "--binary", "--full-index", *plain, *rest)


def _git(checkout: Path, index: Path, *arguments: str) -> bytes:
    command = ["git", "-C", str(checkout), *arguments]
    environ = anchors.git_environment() | {"GIT_INDEX_FILE": str(index)}
    done = subprocess.run(command, check=False, env=environ, stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode:
        fault = " ".join(done.stderr.decode(errors="replace").split())
        raise UserError(f"{checkout}: git {arguments[0]}: {fault}: mend the repository, and run this again")
    return done.stdout
