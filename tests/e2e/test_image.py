"""The image's steps and its command, without a container engine: image_steps.py says what is done and what is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.servers import HOST, free_port
from tests import programs
from tests.e2e import servers, workspaces
from tests.e2e.image_steps import Build, Image, is_sent, parse

pytestmark = [pytest.mark.servers, pytest.mark.xdist_group("image")]

UV = Path(sys.executable).parent / "uv"
# Before the tests' own places take XDG_CACHE_HOME: set-up filled this cache.
CACHE = subprocess.run([UV, "cache", "dir"], check=True, capture_output=True, text=True).stdout.strip()
CHOICES = ("scale=smoke", "runtime.threads=1")


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    if os.geteuid() != 0:
        pytest.skip("only root can run the image's command as another user")
    if not shutil.which("setpriv"):
        programs.missing("setpriv (util-linux)")
    place = Path(tempfile.mkdtemp(prefix="image-"))  # pytest's own directories are closed to other users
    place.chmod(0o755)
    try:
        context = workspaces.copy_checkout(place / "context")
        workspaces.commit(context)
        (context / ".env").write_text("RLHF_PASSWORD=not for images\n")
        yield Build(context, place, {"UV_CACHE_DIR": CACHE}).run()
    except subprocess.CalledProcessError as error:
        if "network was disabled" not in error.stderr.lower():
            raise AssertionError(f"{error}\n{error.stderr}") from None
        pytest.skip(f"uv's cache {CACHE} lacks packages of requirements.lock: {error.stderr.strip()[-300:]}")
    finally:
        shutil.rmtree(place)


def test_the_image_has_what_is_committed_and_belongs_to_a_user_without_rights(image: Image) -> None:
    project, (uid, _) = image.stage.directory, image.stage.user.split(":")
    assert project.stat().st_uid == (project / "params.yaml").stat().st_uid == int(uid) != 0
    assert not (project / ".env").exists()
    assert (project / ".git").is_dir() and not workspaces.succeed(["git", "remote"], project, dict(os.environ) | SAFE)
    own = [path for path in project.rglob("*") if ".venv" not in path.parts and path.stat().st_uid != int(uid)]
    assert own == []


SAFE = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}


def test_its_command_runs_the_pipeline_and_its_health_check_says_so(image: Image, tmp_path: Path) -> None:
    project, (uid, _) = image.stage.directory, image.stage.user.split(":")
    with started(image.entrypoint(*CHOICES), tmp_path / "log", project) as command:
        prepared = project / "data/prepared/test.parquet"
        servers.wait_for(command, prepared.exists, tmp_path / "log")
        assert _owners(project) == {int(uid)} == {prepared.stat().st_uid}
        well = subprocess.run(image.health_check(), check=False, cwd=project, capture_output=True, text=True)
        assert (well.returncode, well.stdout + well.stderr) == (0, "")
    assert command.returncode == 1
    assert "pipeline: interrupted: every stage that was done stays done" in (tmp_path / "log").read_text()
    assert _owners(project) == set()


@contextmanager
def started(command: list[str], log: Path, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """The image's command, which gets its TERM on leaving, as from `docker stop`."""
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=directory, stdout=output, stderr=output, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(servers.END_SECONDS)


def _owners(directory: Path) -> set[int]:
    """The users whose processes work in a directory."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == directory:
                found.add(process.stat().st_uid)
        except OSError:  # it has ended
            continue
    return found


def test_its_health_check_fails_where_a_server_is_down(image: Image) -> None:
    down = f"http://{HOST}:{free_port()}"
    command = image.health_check(MLFLOW_TRACKING_URI=down)
    ill = subprocess.run(command, check=False, cwd=image.stage.directory, capture_output=True, text=True)
    assert ill.returncode == 1
    assert ill.stderr.startswith(f"health: MLFLOW_TRACKING_URI={down}")


def test_a_dockerignore_whose_last_fitting_pattern_decides() -> None:
    ignore = "# all\n*\n!.git\n!requirements*.lock\n"
    assert is_sent(".git", ignore) and is_sent("requirements-cpu.lock", ignore)
    assert not is_sent(".env", ignore) and not is_sent("mlflow.db", ignore)
    assert is_sent("README.md", "*.txt\n")


def test_a_dockerfile_in_instructions() -> None:
    first, second = parse(
        "# syntax=x\nFROM python AS base\nRUN --mount=type=cache,target=/c \\\n    # why\n    a \\\n    && b\n"
    )
    assert (first.name, first.options, first.text) == ("FROM", {}, "python AS base")
    assert (second.options, second.text) == ({"mount": "type=cache,target=/c"}, "a && b")
