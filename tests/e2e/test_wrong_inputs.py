"""Wrong things, for real: one line that names the fault, the exit code, and outputs as they were."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhf import config
from rlhf.data.gsm8k import write_prepared
from rlhf.data.sources import prepare
from rlhf.models import sources
from rlhf.models.tiny import make_tiny
from tests.e2e import workspaces

OLD = {
    "data/prepared/train.parquet": "old data",
    "metrics/data_validation.json": "old verdict",
    "models/fetched/manifest.json": "old checkpoint",
    "models/sft/manifest.json": "old policy",
    "models/policy/manifest.json": "old winner",
}
HEAVY = ("torch", "transformers", "mlflow", "great_expectations", "datasets", "prefect", "dvc")


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return workspaces.environment(tmp_path_factory.mktemp("tracking"))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workspaces.copy_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture
def workspace(checkout: Path) -> Path:
    """The checkout with the outputs of an earlier run."""
    return with_old_outputs(checkout)


def with_old_outputs(checkout: Path) -> Path:
    for name in ("data", "metrics", "models"):
        shutil.rmtree(checkout / name, ignore_errors=True)
    for path, text in OLD.items():
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).write_text(text)
    return checkout


def outputs(workspace: Path) -> dict[str, str]:
    found = [path for name in ("data", "metrics", "models") for path in (workspace / name).rglob("*") if path.is_file()]
    return {path.relative_to(workspace).as_posix(): path.read_text(errors="replace") for path in found}


def compose(workspace: Path, *overrides: str) -> None:
    config.write(config.compose(["scale=smoke", "runtime.threads=1", *overrides]), workspace / "params.yaml")


def complaint(workspace: Path, environ: dict[str, str], *command: str, code: int = 1) -> str:
    """The one line that a failed module prints, the module's name taken off; nothing it was to write may be there."""
    done = workspaces.run(["python", "-m", *command], workspace, environ)
    assert done.returncode == code, done.stdout + done.stderr
    return one_line(done.stderr, command[0], workspace)


def one_line(error: str, module: str, workspace: Path) -> str:
    assert error.count("\n") == 1, error
    assert error.endswith("\n")
    assert "Traceback" not in error
    assert outputs(workspace) == OLD
    assert not list(workspace.glob(".partial/*"))
    name = f"{module.rpartition('.')[2]}: "
    assert error.startswith(name)
    return error.removeprefix(name).strip()


# --- usage


@pytest.fixture(scope="module")
def light(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which importing a heavy library is an error."""
    traps = tmp_path_factory.mktemp("traps")
    for name in HEAVY:
        (traps / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')\n")
    return environ | {"PYTHONPATH": str(traps)}


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        (("rlhf.config", "compose", "ppo.klcoef=1"), "ppo.klcoef=1: "),
        (("flows.pipeline", "ppo.klcoef=1"), "ppo.klcoef=1: "),
        (("stages.prepare_data", "data.sauce=hub"), "params.yaml with data.sauce=hub: data.sauce: unknown key"),
    ],
    ids=str,
)
def test_an_unknown_param_is_refused_before_anything_heavy_is_imported(
    workspace: Path, light: dict[str, str], command: tuple[str, ...], fault: str
) -> None:
    compose(workspace)
    assert complaint(workspace, light, *command, code=2).startswith(fault)


# --- data


def test_a_missing_gsm8k_directory(workspace: Path, environ: dict[str, str]) -> None:
    compose(workspace, "data=files", "data.reads=nowhere")
    line = complaint(workspace, environ, "stages.prepare_data")
    assert line == "data.reads: nowhere is no directory: it must hold train.jsonl and test.jsonl"


def test_a_broken_jsonl_line(workspace: Path, environ: dict[str, str], tmp_path: Path) -> None:
    row = json.dumps({"question": "How many are 2 and 3?", "answer": "It is 2+3=5.\n#### 5"}) + "\n"
    (tmp_path / "test.jsonl").write_text(row)
    (tmp_path / "train.jsonl").write_text(f'{row}{row}{{"question": "How many?", "answ\n{row}')
    compose(workspace, "data=files", f"data.reads={tmp_path}")
    line = complaint(workspace, environ, "stages.prepare_data")
    assert line.startswith(f"{tmp_path / 'train.jsonl'} line 3: not valid JSON")


@pytest.mark.parametrize(
    ("override", "stage", "fault"),
    [
        ("data=gsm8k", "prepare_data", "data.hub: openai/gsm8k@main cannot be read: "),
        ("sft.source=hf://some/model@main", "fetch_sft", "sft.source=hf://some/model@main: the hub is out of reach"),
    ],
)
def test_an_unreachable_hub(workspace: Path, environ: dict[str, str], override: str, stage: str, fault: str) -> None:
    compose(workspace, override)
    assert complaint(workspace, environ | {"HF_HUB_OFFLINE": "1"}, f"stages.{stage}").startswith(fault)


# --- checkpoints


REMEDIES = {
    "chat template": "write one in sft.chat_template",
    "end-of-sequence token": "name a token in sft.eos_token",
}


@pytest.mark.parametrize("lacking", REMEDIES)
def test_a_checkpoint_that_is_no_chat_model(
    workspace: Path, environ: dict[str, str], tmp_path: Path, lacking: str
) -> None:
    compose(workspace, f"sft.source={tmp_path}", f"sft.reads={tmp_path}")
    model, tokenizer = make_tiny(config.load((), workspace / "params.yaml").sft.tiny, seed=0)
    setattr(tokenizer, {"chat template": "chat_template", "end-of-sequence token": "eos_token"}[lacking], None)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    line = complaint(workspace, environ, "stages.fetch_sft")
    assert line == f"sft.source={tmp_path}: its tokenizer has no {lacking}: take a chat model, or {REMEDIES[lacking]}"


# --- the machine


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small disk cannot be mounted here: {getattr(error, 'stderr', '') or error}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("stage", ["fetch_sft", "prepare_data"])
def test_a_full_disk(small_disk: Path, environ: dict[str, str], stage: str) -> None:
    workspace = with_old_outputs(workspaces.copy_checkout(small_disk))
    compose(workspace)
    (workspace / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    assert shutil.disk_usage(small_disk).free == 0
    line = complaint(workspace, environ | {"PYTHONDONTWRITEBYTECODE": "1"}, f"stages.{stage}")
    assert "No space left on device" in line


@contextmanager
def started(module: str, workspace: Path, environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """The module as a process, which does not outlive the block."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children would ignore it
    command, pipe = ["python", "-m", module], subprocess.PIPE
    child = subprocess.Popen(command, cwd=workspace, env=environ, text=True, stdout=pipe, stderr=pipe)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def end_of(child: subprocess.Popen[str], after: str, number: signal.Signals) -> tuple[int, str]:
    """Sends the signal once the child has printed a line with `after`; returns exit code and standard error."""
    assert child.stdout is not None
    assert after in child.stdout.readline()
    child.send_signal(number)
    _, error = child.communicate(timeout=workspaces.PATIENCE_SECONDS)
    return child.returncode, error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_libraries_are_loading(
    workspace: Path, environ: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "torch.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(600)\n")
    compose(workspace)
    with started("stages.train_ppo", workspace, environ | {"PYTHONPATH": str(tmp_path)}) as child:
        code, error = end_of(child, "loading", number)
    assert code == 1
    assert one_line(error, "stages.train_ppo", workspace) == "interrupted while loading: nothing was written"


def test_ctrl_c(workspace: Path, environ: dict[str, str]) -> None:
    compose(workspace, "sft.finetune.steps=1000000")
    params = config.load((), workspace / "params.yaml")
    for path in ("models/fetched", "data/prepared"):
        shutil.rmtree(workspace / path)
    sources.fetch("tiny:", workspace / "models/fetched", tiny=params.sft.tiny, seed=0)
    write_prepared(workspace / "data/prepared/train.parquet", prepare(params.data)["train"])
    before = outputs(workspace)
    with started("stages.finetune_sft", workspace, environ) as child:
        ended = end_of(child, "loss", signal.SIGINT)  # at its first line of progress
    assert ended == (1, "finetune_sft: interrupted: nothing half-written is left\n")
    assert outputs(workspace) == before
    assert not list(workspace.glob(".partial/*"))
