"""The frame of a stage: outputs appear whole or not at all, a fault is one line, overrides never touch DVC's outs."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from rlhf import config, locks, machine, runtime, tracking
from rlhf import stage as stage_module
from rlhf.errors import UsageError, UserError
from rlhf.hashes import dvc_md5
from rlhf.stage import WRITERS, Stage, run_stage, write_json

ROOT = Path(__file__).resolve().parents[2]
OLD = {"models/policy/weights": "old", "models/policy/stale": "old", "metrics/ppo.json": "old"}
NEW = {"models/policy/weights": "new", "metrics/ppo.json": "new"}


class Log:
    """A tracking run that notes how it ended."""

    def __init__(self) -> None:
        self.outs: dict[str, str] = {}
        self.end = "never opened"
        self.tags: dict[str, str] = {}

    def set_tags(self, tags: dict[str, str]) -> None:
        self.tags |= tags

    def tag_outs(self, outs: dict[str, str]) -> None:
        self.outs = outs


@pytest.fixture
def log(monkeypatch) -> Log:
    log = Log()

    @contextmanager
    def fake(_stage: str, params: dict[str, object], mirror: str) -> Iterator[Log]:
        assert (params["seed"], mirror) == (0, "none")
        log.end = "open"
        try:
            yield log
        except BaseException as error:
            log.end = type(error).__name__
            raise
        log.end = "finished"

    monkeypatch.setattr(tracking, "stage_run", fake)
    return log


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Path:
    """A workspace with params and the outputs of an earlier run."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    for path, text in OLD.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(*roots: str) -> dict[str, str]:
    """The files below `roots` in the current directory, with their text."""
    found = [path for root in roots for path in Path(root).rglob("*") if path.is_file()]
    return {path.as_posix(): path.read_text() for path in found}


def outputs() -> dict[str, str]:
    return files("models", "metrics")


def write_new(stage: Stage) -> None:
    policy = stage.output("models/policy")
    policy.mkdir()
    (policy / "weights").write_text("new")
    stage.output("metrics/ppo.json").write_text("new")


def ended(main: Callable[[Stage], None], capsys, arguments: tuple[str, ...] = ()) -> tuple[int, str]:
    """Exit code and standard error of a stage that fails; nothing may be left of it."""
    with pytest.raises(SystemExit) as caught:
        run_stage("train_ppo", main, arguments)
    assert list(Path().glob(".partial/*")) == []
    error = capsys.readouterr().err
    assert error.startswith("train_ppo: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    assert isinstance(caught.value.code, int)
    return caught.value.code, error


# --- setting up


def test_a_stage_that_declares_no_runtime_does_not_load_torch_for_it(workspace, log, monkeypatch):
    configured = []
    monkeypatch.setattr(runtime, "configure", lambda *given: configured.append(given))
    run_stage("register", lambda _: None, ())
    assert configured == []
    run_stage("train_ppo", write_new, ("runtime.threads=3",))
    ((settings, seed),) = configured
    assert (settings.threads, seed) == (3, 0)


# --- success


def test_outputs_replace_the_old_ones_and_are_hashed(workspace, log):
    def main(stage: Stage) -> None:
        write_new(stage)
        assert outputs() == OLD

    run_stage("train_ppo", main, ())
    assert outputs() == NEW
    assert log.outs == {path: dvc_md5(workspace / path) for path in ("models/policy", "metrics/ppo.json")}
    assert log.tags == machine.tags()
    assert log.end == "finished"
    assert list(workspace.glob(".partial/*")) == []


def test_outputs_appear_where_there_were_none(workspace, log):
    shutil.rmtree("models")
    shutil.rmtree("metrics")
    run_stage("train_ppo", write_new, ())
    assert outputs() == NEW


def test_a_file_may_replace_a_directory_and_the_other_way(workspace, log):
    def main(stage: Stage) -> None:
        stage.output("models/policy").write_text("file")
        stage.output("metrics/ppo.json").mkdir()
        (stage.output("metrics/ppo.json") / "inner").write_text("dir")

    run_stage("train_ppo", main, ())
    assert outputs() == {"models/policy": "file", "metrics/ppo.json/inner": "dir"}


def test_published_files_have_the_usual_permissions(workspace, log):
    before = {path: (workspace / path).stat().st_mode for path in ("models/policy", "metrics/ppo.json")}
    run_stage("train_ppo", write_new, ())
    assert {path: (workspace / path).stat().st_mode for path in before} == before


def test_outputs_of_parts_lie_in_one_directory(workspace, log):
    def main(stage: Stage) -> None:
        for split in ("train", "validation"):
            stage.output(f"data/preferences/{split}.parquet").write_text(split)

    run_stage("collect_preferences", main, ())
    assert files("data") == {f"data/preferences/{split}.parquet": split for split in ("train", "validation")}


@pytest.fixture
def other_disk() -> Iterator[Path]:
    """A directory on a file system that renames from the tests' own do not reach."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or memory.stat().st_dev == Path.cwd().stat().st_dev:
        pytest.skip("no second file system here")
    with TemporaryDirectory(dir=memory) as place:
        yield Path(place)


def test_outputs_of_a_directory_on_another_disk_are_whole_as_well(workspace, log, other_disk, monkeypatch):
    """`models` on a disk of its own: a mount, or a link."""
    shutil.move("models", other_disk)
    Path("models").symlink_to(other_disk / "models")
    seen = []
    rename = stage_module._rename

    def watched(source: Path, target: Path) -> None:
        rename(source, target)
        seen.append(files("models/policy"))

    monkeypatch.setattr(stage_module, "_rename", watched)
    run_stage("train_ppo", write_new, ())
    published = files("models/policy", "metrics")
    assert published == NEW
    new = {path: text for path, text in NEW.items() if path.startswith("models")}
    assert [state for state in seen if state not in ({}, new)] == []
    assert Path("models").is_symlink()
    assert list(other_disk.glob("models/.partial/*")) == list(workspace.glob(".partial/*")) == []


def test_a_failed_stage_leaves_nothing_on_the_other_disk(workspace, log, other_disk, capsys):
    shutil.move("models", other_disk)
    Path("models").symlink_to(other_disk / "models")
    ended(raising(ValueError("bad")), capsys)
    assert files("models/policy", "metrics") == OLD
    assert list(other_disk.glob("models/.partial/*")) == []


def test_after_publishing_runs_once_the_outputs_are_in_place(workspace, log):
    seen = []

    def main(stage: Stage) -> None:
        stage.after_publishing(lambda: seen.append(outputs()))
        write_new(stage)

    run_stage("train_ppo", main, ())
    assert seen == [NEW]


def test_what_is_held_is_let_go_after_the_outputs_are_in_place(workspace, log):
    seen = []

    def main(stage: Stage) -> None:
        stage.held.callback(lambda: seen.append(outputs()))
        write_new(stage)

    run_stage("train_ppo", main, ())
    assert seen == [NEW]


def test_a_kill_while_outputs_are_renamed_shows_no_half_directory(workspace, log, monkeypatch, capsys):
    """Between any two steps of publishing, each output is whole: the old one, the new one, or none for a moment."""
    seen = []
    rename = stage_module._rename

    def watched(source: Path, target: Path) -> None:
        seen.append(files("models/policy"))
        rename(source, target)
        seen.append(files("models/policy"))

    monkeypatch.setattr(stage_module, "_rename", watched)
    run_stage("train_ppo", write_new, ())
    old, new = ({path: text for path, text in version.items() if path.startswith("models")} for version in (OLD, NEW))
    assert [state for state in seen if state not in (old, new, {})] == []
    assert seen[0] == old
    assert seen[-1] == new


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_outputs_are_renamed_waits(workspace, log, monkeypatch, number):
    rename = stage_module._rename

    def signalled(source: Path, target: Path) -> None:
        os.kill(os.getpid(), number)
        rename(source, target)

    monkeypatch.setattr(stage_module, "_rename", signalled)
    run_stage("train_ppo", write_new, ())
    assert outputs() == NEW
    assert log.end == "finished"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_the_outputs_and_the_exit_is_too_late(workspace, number):
    """A real process, to its very end: a stage whose outputs are in place must not look like one that failed."""
    script = f"""
import atexit, contextlib, os
from rlhf import runtime, stage, tracking
def signal_itself(*_): os.kill(os.getpid(), {int(number)})
class Log:
    set_tags = lambda *_: None
    tag_outs = signal_itself
@contextlib.contextmanager
def stage_run(*_):
    yield Log()
    signal_itself()
tracking.stage_run = stage_run
runtime.configure = lambda *_: None
atexit.register(signal_itself)
def main(run):
    run.output("metrics/ppo.json").write_text("new")
    run.after_publishing(signal_itself)
stage.run_stage("train_ppo", main)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert outputs() == OLD | {"metrics/ppo.json": "new"}


# --- failure


def raising(error: BaseException) -> Callable[[Stage], None]:
    def main(stage: Stage) -> None:
        stage.after_publishing(lambda: pytest.fail("called after a failure"))
        write_new(stage)
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("models/sft: broken: fetch it again"), 1, "models/sft: broken: fetch it again"),
        (UserError("two\nlines"), 1, "two lines"),
        (UsageError("runtime.device=cuda: no GPU"), 2, "runtime.device=cuda: no GPU"),
        (KeyboardInterrupt(), 1, "interrupted: nothing half-written is left"),
        (OSError(errno.ENOSPC, "No space left on device", "models/x"), 1, "models/x: No space left on device: make"),
        (OSError(errno.EROFS, "Read-only file system"), 1, "the disk of this workspace: Read-only file system: make"),
        (PermissionError(errno.EACCES, "Permission denied", "a"), 1, "a: Permission denied: make room or access"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 1, "the disk of this workspace: No space"),
    ],
    ids=str,
)
def test_a_failed_stage_changes_nothing_and_says_why(workspace, log, capsys, error, code, message):
    result, text = ended(raising(error), capsys)
    assert (result, outputs()) == (code, OLD)
    assert text.startswith(f"train_ppo: {message}")
    assert log.end == type(error).__name__
    assert log.outs == {}
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("bad\nsecond line"), "ValueError: bad: not expected, please report it with"),
        (AssertionError(), "AssertionError: AssertionError: not expected"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), "FileNotFoundError: [Errno 2]"),
        (RuntimeError("Permission denied (publickey)"), "RuntimeError: Permission denied"),
    ],
    ids=str,
)
def test_an_unexpected_error_leaves_its_traceback_in_a_file(workspace, log, capsys, error, message):
    code, text = ended(raising(error), capsys)
    assert (code, outputs()) == (1, OLD)
    assert text.startswith(f"train_ppo: {message}")
    assert text.endswith("runs/train_ppo-error.log\n")
    kept = Path("runs/train_ppo-error.log").read_text()
    assert "Traceback" in kept
    assert "in main" in kept
    assert type(error).__name__ in kept


def test_an_unexpected_error_is_one_line_even_if_no_log_can_be_written(workspace, log, capsys):
    Path("runs").write_text("a file in the way")
    code, text = ended(raising(ValueError("bad")), capsys)
    assert code == 1
    assert "ValueError: bad: not expected" in text


@pytest.mark.parametrize(("override", "refused"), [("ppo.lr=0.5", True), ("sft.finetune.lr=0.5", False)])
def test_a_result_of_other_params_than_the_file_has_now_is_not_kept(workspace, log, capsys, override, refused):
    """DVC would record it under the params that the file has when the stage ends."""

    def main(stage: Stage) -> None:
        write_new(stage)
        config.write(config.compose([override]))

    if refused:
        code, text = ended(main, capsys)
        assert (code, text) == (1, "train_ppo: params.yaml was changed while train_ppo ran: run it again\n")
        assert (outputs(), log.outs) == (OLD, {})
    else:
        run_stage("train_ppo", main, ())
        assert outputs() == NEW


def test_a_real_full_disk_is_told_in_one_line(workspace, log, capsys):
    if not Path("/dev/full").is_char_device():
        pytest.skip("no /dev/full here")

    def main(stage: Stage) -> None:
        write_new(stage)
        with Path("/dev/full").open("w") as file:
            file.write("x" * 10**6)

    code, text = ended(main, capsys)
    assert code == 1
    assert "No space left on device" in text
    assert outputs() == OLD


def test_an_announced_output_that_was_not_written_changes_nothing(workspace, log, capsys):
    def main(stage: Stage) -> None:
        write_new(stage)
        stage.output("plots/ppo.csv")

    code, text = ended(main, capsys)
    assert code == 1
    assert "train_ppo announced plots/ppo.csv and did not write it" in text
    assert outputs() == OLD


@pytest.fixture
def _foreground():
    """The handler of a foreground process: a background job inherits an ignored SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.usefixtures("_foreground")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_changes_nothing(workspace, log, capsys, number):
    def main(stage: Stage) -> None:
        write_new(stage)
        os.kill(os.getpid(), number)
        pytest.fail("the signal did not arrive")

    assert ended(main, capsys) == (1, "train_ppo: interrupted: nothing half-written is left\n")
    assert outputs() == OLD


def test_a_terminated_process_ends_with_1_and_one_line(workspace):
    """A real process, as the supervisor ends it."""
    script = """
import contextlib, time
from rlhf import runtime, stage, tracking
class Log: set_tags = lambda *_: None
tracking.stage_run = lambda *_: contextlib.nullcontext(Log())
runtime.configure = lambda *_: None
def main(run):
    run.output("metrics/ppo.json").write_text("new")
    print("ready", flush=True)
    time.sleep(60)
stage.run_stage("train_ppo", main)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    _, error = child.communicate(timeout=60)
    assert (child.returncode, error) == (1, "train_ppo: interrupted: nothing half-written is left\n")
    assert outputs() == OLD
    assert list(Path().glob(".partial/*")) == []


def test_what_a_stage_writes_is_locked_as_long_as_it_runs(workspace, log):
    """By which `make gc` tells it from a leftover."""

    def main(stage: Stage) -> None:
        (place,) = Path(".partial").iterdir()
        assert place.name.partition("-")[0] == "train_ppo"
        with pytest.raises(UserError, match=f"process {os.getpid()} is there"):
            locks.exclusive(place / ".lock", "is there").__enter__()
        write_new(stage)

    run_stage("train_ppo", main, ())


def test_a_leftover_of_a_killed_process_is_no_obstacle(workspace, log):
    Path(".partial/train_ppo-b_2/models/policy").mkdir(parents=True)
    run_stage("train_ppo", write_new, ())
    assert outputs() == NEW


# --- params and overrides


def test_wrong_overrides_start_nothing(workspace, log, capsys):
    code, text = ended(lambda _stage: pytest.fail("started"), capsys, ("ppo.lrr=3",))
    assert code == 2
    assert "ppo.lrr: unknown key" in text
    assert log.end == "never opened"
    assert not Path(".partial").exists()


def test_missing_params_are_a_usage_error(workspace, log, capsys):
    Path("params.yaml").unlink()
    code, text = ended(lambda _stage: pytest.fail("started"), capsys)
    assert code == 2
    assert "params.yaml is missing" in text


def test_overrides_write_beside_dvcs_outs_and_say_where(workspace, log, capsys):
    def main(stage: Stage) -> None:
        assert stage.params.ppo.lr == 1e-5
        assert stage.input("models/policy/weights").read_text() == "old"
        write_new(stage)

    run_stage("train_ppo", main, ("ppo.lr=1e-5",))
    assert outputs() == OLD
    (place,) = Path("runs/train_ppo").iterdir()
    assert files(str(place)) == {f"{place}/{path}": text for path, text in NEW.items()}
    assert f"go to {place}, not to DVC's" in capsys.readouterr().out
    assert log.outs["metrics/ppo.json"] == dvc_md5(place / "metrics/ppo.json")


def test_the_same_params_share_a_place_and_others_have_their_own(workspace, log):
    def places(*arguments: str) -> set[Path]:
        run_stage("train_ppo", write_new, arguments)
        return set(Path("runs/train_ppo").iterdir())

    first = places("seed=0", "ppo.epochs=2")
    assert places("ppo.epochs=2") == first
    second = places("ppo.epochs=2", "ppo.epochs=1")
    assert len(second) == 2
    assert len(places("ppo.epochs=1", "ppo.epochs=2")) == 2
    params = Path("params.yaml").read_text()
    Path("params.yaml").write_text(params.replace("gamma: 1.0", "gamma: 0.9"))
    assert len(places("ppo.epochs=2")) == 3


# --- paths


def make_stage(workspace: Path) -> Stage:
    from contextlib import ExitStack

    from rlhf.config import load

    return Stage("evaluate", load(), Log(), workspace, workspace, ExitStack(), workspace / ".partial")  # type: ignore[arg-type]


def test_a_missing_input_names_the_stage_that_makes_it(workspace):
    stage = make_stage(workspace)
    with pytest.raises(UserError, match=r"^data/prepared/test\.parquet is missing: run dvc repro prepare_data$"):
        stage.input("data/prepared/test.parquet")
    with pytest.raises(UserError, match=r"^data/own is missing: check the path$"):
        stage.input("data/own")
    assert stage.input("models/policy") == workspace / "models/policy"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "JSONDecodeError"),
        (b'{"best_iteration": 3', "JSONDecodeError"),
        (b"\xff\xfe\x00", "UnicodeDecodeError"),
        (b"[]", "TypeError"),
        (b"{}", "KeyError"),
        (b'{"best_iteration": null}', "TypeError"),
    ],
    ids=str,
)
def test_a_damaged_input_names_the_stage_that_makes_it(workspace, content, fault):
    (workspace / "metrics/ppo.json").write_bytes(content)
    with pytest.raises(UserError, match=rf"^metrics/ppo\.json: .*\({fault}\): run dvc repro train_ppo$"):
        make_stage(workspace).read_json("metrics/ppo.json", lambda ppo: int(ppo["best_iteration"]))


def test_json_is_read_and_a_missing_file_is_named(workspace):
    stage = make_stage(workspace)
    write_json(workspace / "metrics/ppo.json", {"best_iteration": 3})
    assert stage.read_json("metrics/ppo.json", lambda ppo: ppo["best_iteration"]) == 3
    with pytest.raises(UserError, match=r"^metrics/evaluation\.json is missing: run dvc repro evaluate$"):
        stage.read_json("metrics/evaluation.json", dict)


def test_the_writers_are_those_of_the_pipeline():
    """Every path that one stage reads and another makes is in the table, under the stage that makes it."""
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]

    def made(block: dict[str, list[str | dict[str, object]]]) -> list[str]:
        outs = [*block.get("outs", []), *block.get("metrics", []), *block.get("plots", [])]
        return [next(iter(out)) if isinstance(out, dict) else out for out in outs]

    makers = {out: stage for stage, block in stages.items() for out in made(block)}
    read = {dep for block in stages.values() for dep in block["deps"] if dep.startswith(("data/", "models/", "m", "p"))}
    wanted = {
        out: stage for out, stage in makers.items() if any(dep == out or dep.startswith(f"{out}/") for dep in read)
    }
    assert {path: stage for path, stage in WRITERS.items() if path in wanted} == wanted
    assert {path: makers[path] for path in WRITERS} == WRITERS


def test_scratch_is_emptied_and_lies_where_nothing_is_taken_for_an_output(workspace):
    stage = make_stage(workspace)
    (stage.scratch("data_docs") / "old").write_text("old")
    place = stage.scratch("data_docs")
    assert place == workspace / "runs/evaluate/data_docs"
    assert list(place.iterdir()) == []


def test_json_is_the_same_bytes_for_the_same_values(tmp_path):
    write_json(tmp_path / "one", {"b": 1, "a": [0.5]})
    assert (tmp_path / "one").read_text() == '{\n  "a": [\n    0.5\n  ],\n  "b": 1\n}\n'
    with pytest.raises(ValueError):
        write_json(tmp_path / "two", {"a": float("nan")})
