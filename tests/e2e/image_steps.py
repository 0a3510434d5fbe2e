"""The Dockerfile's steps in a fresh directory, for machines without a container engine.

Carried out as they stand: every stage after `base` with its COPY (the context as .dockerignore leaves it), RUN, ENV and
WORKDIR, then the command and the health check as another user, with the image's environment and nothing else.
Not as they stand, because only a container could:

- `base` (apt-get, useradd): git and Python are this machine's, the user is `nobody` instead of 10001.
- /home is a directory of the test's own; other directories, processes and the network are not fenced off.
- pip's download of uv: the same version is taken from the environment of the test. uv then installs the lock offline
  from its cache, as links: a copy would take 8 GB. So files of the environment keep their owner.
"""

from __future__ import annotations

import fnmatch
import os
import pwd
import re
import shlex
import shutil
import string
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

USER = "nobody"
IMAGE_USER = "10001:10001"


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile, its lines joined and its options (`--from=project`) apart."""

    name: str
    options: dict[str, str]
    text: str


@dataclass
class Stage:
    """What a stage's instructions have set so far."""

    name: str
    environ: dict[str, str] = field(default_factory=dict)
    directory: Path = Path("/")
    user: str = "0:0"
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Image:
    """What a build has made."""

    stage: Stage
    python: Path
    """The interpreter that stands in for the base image's."""
    own: Path
    """What stands in for its /tmp and /var."""

    def entrypoint(self, *arguments: str, **environ: str) -> list[str]:
        """The command line of `docker run --env ... IMAGE arguments`."""
        return self._as_user([*self.stage.command, *arguments], environ)

    def health_check(self, **environ: str) -> list[str]:
        return self._as_user(self.stage.health, environ)

    def _as_user(self, command: list[str], environ: dict[str, str]) -> list[str]:
        # A container's /tmp and /var are its own.
        places = dict.fromkeys(("TMPDIR", "DVC_SITE_CACHE_DIR"), str(self.own))
        library = {"LD_LIBRARY_PATH": str(self.python.parent.parent / "lib"), "USER": USER}
        given = {**places, **library, **self.stage.environ, **environ}
        clean = ["env", "--ignore-environment", *(f"{name}={value}" for name, value in given.items())]
        return [*as_user(self.stage.user), *clean, *command]


def as_user(user: str) -> list[str]:
    """The command that runs another one as `UID:GID`, without a way back."""
    uid, gid = user.split(":")
    return ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs", "--inh-caps=-all"]


def parse(text: str) -> Iterator[Instruction]:
    """The instructions of a Dockerfile."""
    lines = "\n".join(line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n\s*", "", lines).splitlines():
        name, rest = line.split(maxsplit=1)
        options = {}
        while found := re.match(r"--([\w-]+)=(\S+)\s+", rest):
            options[found[1]], rest = found[2], rest[found.end() :]
        yield Instruction(name, options, rest)


def is_sent(path: str, ignore: str) -> bool:
    """Whether .dockerignore leaves a top-level file or directory in the context: the last pattern that fits decides."""
    sent = True
    for pattern in ignore.splitlines():
        if pattern.strip() and not pattern.startswith("#") and fnmatch.fnmatch(path, pattern.lstrip("!")):
            sent = pattern.startswith("!")
    return sent


class Build:
    """`docker build CONTEXT`, with the image's /home below `place`."""

    def __init__(self, context: Path, place: Path, environ: dict[str, str]) -> None:
        """`environ` is what uv runs under: its cache, its index."""
        self.context, self.root, self.done = context, place / "image", place / "stages"
        self.environ = environ | {"UV_OFFLINE": "1", "UV_LINK_MODE": _link_mode(environ["UV_CACHE_DIR"], place)}
        account = pwd.getpwnam(USER)
        self.user = f"{account.pw_uid}:{account.pw_gid}"
        self.python = _reachable_python(place, self.user)
        self.done.mkdir()

    def run(self) -> Image:
        """Carries out every stage; raises CalledProcessError for a command that failed."""
        text = (self.context / "Dockerfile").read_text()
        text = text.replace("/home/", f"{self.root}/home/").replace(IMAGE_USER, self.user)
        stage = Stage("")
        for each in parse(text):
            if each.name == "FROM":
                if stage.name not in ("", "base"):
                    self.root.rename(self.done / stage.name)  # the next stage has to find /home empty
                self.root.mkdir(exist_ok=True)
                stage = Stage(each.text.partition(" AS ")[2])
            elif stage.name != "base":
                getattr(self, f"_{each.name.lower()}")(stage, each)
        uid, gid = map(int, self.user.split(":"))
        own = self.root / "tmp"
        own.mkdir()
        for directory in (own, stage.environ["HOME"]):  # useradd would have made the home
            os.chown(directory, uid, gid)
        return Image(stage, self.python, own)

    def _arg(self, stage: Stage, each: Instruction) -> None:
        name, _, value = each.text.partition("=")
        if value:
            stage.environ[name] = value

    def _env(self, stage: Stage, each: Instruction) -> None:
        text = string.Template(each.text).substitute({"PATH": "/usr/local/bin:/usr/bin:/bin"})
        stage.environ |= dict(pair.split("=", 1) for pair in shlex.split(text))

    def _workdir(self, stage: Stage, each: Instruction) -> None:
        stage.directory = Path(each.text)
        stage.directory.mkdir(parents=True, exist_ok=True)

    def _user(self, stage: Stage, each: Instruction) -> None:
        stage.user = each.text

    def _entrypoint(self, stage: Stage, each: Instruction) -> None:
        stage.command = [part.strip('"') for part in re.findall(r'"[^"]*"', each.text)]

    def _healthcheck(self, stage: Stage, each: Instruction) -> None:
        stage.health = [part.strip('"') for part in re.findall(r'"[^"]*"', each.text)]

    def _copy(self, stage: Stage, each: Instruction) -> None:
        name, goal = string.Template(each.text).substitute(stage.environ).split()
        target = stage.directory / goal
        if "from" in each.options:
            # Moved: nothing else wants it.
            _move(self.done / each.options["from"] / Path(name).relative_to(self.root), target)
        else:
            assert is_sent(name, (self.context / ".dockerignore").read_text()), f"COPY {name}: .dockerignore has it"
            _copy(self.context / name, target)
        if "chown" in each.options:
            _own(target, each.options["chown"])

    def _run(self, stage: Stage, each: Instruction) -> None:
        for command in re.split(r"\s*&&\s*", each.text):
            outside = [
                path
                for path in re.findall(r"(?:^|\s|://)(/\w\S*)", command)
                if not Path(path).is_relative_to(self.root)
            ]
            assert not outside, f"RUN {command}: {outside} are this machine's own"
            if "-m pip install" in command:
                _install_uv(stage.directory / ".venv")
                continue
            command = re.sub(r"^python ", f"{self.python} ", command)
            library = {"LD_LIBRARY_PATH": str(self.python.parent.parent / "lib")}
            subprocess.run(
                ["sh", "-c", command],
                check=True,
                cwd=stage.directory,
                env={**os.environ, **stage.environ, **self.environ, **library},
                capture_output=True,
                text=True,
            )


def _link_mode(cache: str, place: Path) -> str:
    return "hardlink" if Path(cache).stat().st_dev == place.stat().st_dev else "symlink"


def _reachable_python(place: Path, user: str) -> Path:
    """This interpreter's installation where `user` may run it, else links to all of it below `place`."""
    own = Path(sys._base_executable).resolve()  # type: ignore[attr-defined]
    may_run = [*as_user(user), "test", "-x", str(own)]
    if subprocess.run(may_run, check=False, cwd="/").returncode == 0:
        return own
    skip = shutil.ignore_patterns("site-packages", "test", "__pycache__")
    shutil.copytree(sys.base_prefix, place / "python", ignore=skip, copy_function=_link, symlinks=True)
    return place / "python" / own.relative_to(Path(sys.base_prefix).resolve())


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy(source, target)


def _install_uv(environment: Path) -> None:
    """uv in the version of the lock, as pip would unpack it."""
    (packages,) = environment.glob("lib/python*/site-packages")
    for file in metadata.files("uv") or []:
        if file.suffix != ".pyc":
            target = packages / file
            target.resolve().parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(file.locate()), target.resolve())


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy(source, target)


def _move(source: Path, target: Path) -> None:
    """COPY of a directory is a copy of its contents into the target."""
    target.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir():
        entry.rename(target / entry.name)


def _own(top: Path, user: str) -> None:
    """chown --recursive, but for files with another name elsewhere: those are uv's cache."""
    uid, gid = map(int, user.split(":"))
    for directory, _, files in os.walk(top):
        os.chown(directory, uid, gid)
        for path in (Path(directory) / name for name in files):
            if path.lstat().st_nlink == 1:
                os.chown(path, uid, gid, follow_symlinks=False)
