"""The drill: back up, lose everything, restore; with sqlite, and with a real PostgreSQL where there is one."""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import mlflow
import pytest

from flows import pipeline
from rlhf import anchors, locks, tracking
from rlhf.errors import UserError
from rlhf.registry import champion, records, server
from rlhf.registry.records import Records
from rlhf.registry.versions import Version
from rlhf.tracking.__main__ import main as flush
from rlhf.tracking.delivery import KEY_TAG
from rlhf.tracking.journal import Writer
from rlhf.tracking.server import without_password
from tasks import backup
from tests import postgres
from tests.registered import add_version, candidate, decide, store

NAME = "m"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """Where everything lies: MLflow on sqlite with its artifacts, Prefect's database."""
    place = tmp_path / "home"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place / 'mlflow.db'}")
    monkeypatch.setenv("PREFECT_HOME", str(place / "prefect"))
    monkeypatch.setenv("RLHF_JOURNAL_DIR", str(place / ".journal"))
    for name in backup.PREFECT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(anchors, "CHECKOUT", tmp_path / "checkout")
    monkeypatch.setattr(anchors, "main_checkout", lambda *_: place)
    (place / "prefect").mkdir(parents=True)
    set_flow(place, "nightly")
    return place


@pytest.fixture(autouse=True)
def _own_client() -> Iterator[None]:
    """MLflow remembers the database that a test set."""
    yield
    mlflow.set_tracking_uri(None)


PREFECT = "prefect/prefect.db"


def set_flow(home: Path, name: str, database: str = PREFECT) -> None:
    """What the database tells."""
    with closing(sqlite3.connect(home / database)) as connection, connection:
        connection.execute("CREATE TABLE IF NOT EXISTS flow (name TEXT)")
        connection.execute("DELETE FROM flow")
        connection.execute("INSERT INTO flow VALUES (?)", (name,))


def flow(home: Path, database: str = PREFECT) -> str:
    with closing(sqlite3.connect(home / database)) as connection:
        (name,) = connection.execute("SELECT name FROM flow").fetchone()
    return str(name)


def register(policy: str, right: int) -> None:
    version = add_version(NAME, policy)
    records.file(Version(NAME, version.number, policy, {}), Records({"dvc.lock": policy.encode()}, {}))
    decide(version, candidate(right))


def told() -> dict[str, object]:
    """What the registry tells, down to the files of each version."""
    with server.server() as registry:
        model = champion.find_model(registry, NAME)
        versions = {str(version.version): version for version in registry.search_model_versions(f"name='{NAME}'")}
        kept = {number: records.read(version) for number, version in versions.items()}
        return {"aliases": dict(model.aliases), "moves": champion.moves(model), "kept": kept}


def log(key: str, status: str = "FINISHED") -> None:
    """What a run has logged, as it lies on disk; with no `status`, that of a run that goes on."""
    writer = Writer(anchors.journal_dir(), key)
    begin = {"op": "run", "name": "train_reward", "start": 1000, "parent": "", "tags": {}}
    writer.append(begin | {"server": without_password(anchors.tracking_uri())})
    for step, value in LOGGED.items():
        writer.append({"op": "points", "time": 2000 + step, "step": step, "values": {"kl": value}})
    writer.append({"op": "artifact", "path": writer.add_text("a sample", "sample.txt"), "folder": ""})
    if status:
        writer.append({"op": "end", "time": 3000, "status": status})
    writer.close()


LOGGED = {0: 0.5, 1: 0.25, 2: 0.125}


def arrived() -> dict[str, tuple[str, list[tuple[int, float]], str]]:
    """By the key of each run: its status, points and artifact in MLflow."""
    client = store()
    (experiment,) = client.search_experiments(filter_string=f"name = '{tracking.EXPERIMENT}'")
    found = {}
    for run in client.search_runs([experiment.experiment_id]):
        history = client.get_metric_history(run.info.run_id, "kl")
        text = Path(client.download_artifacts(run.info.run_id, "sample.txt")).read_text()
        found[run.data.tags[KEY_TAG]] = (run.info.status, [(point.step, point.value) for point in history], text)
    return found


def run(*arguments: str) -> int:
    return backup.main([*arguments])


def drill(home: Path, file: Path) -> None:
    """Two versions are backed up, and two runs that MLflow has nothing of yet, one of which goes on.

    Then another version comes, a file is lost, Prefect's database changes, MLflow gets the runs, and another one waits.
    """
    register("a", 60)
    register("b", 90)
    log("left-1")
    log("goes-2", status="")
    before = told()
    assert before["kept"] == {"1": {"dvc.lock": b"a"}, "2": {"dvc.lock": b"b"}}
    assert run("save", str(file)) == 0
    assert flush(["flush"]) == 0
    log("later-3")
    register("c", 100)
    for lost in (home / "mlartifacts").rglob("dvc.lock"):
        lost.unlink()
    set_flow(home, "another")
    assert run("restore", str(file)) == 1
    assert told() != before
    assert run("restore", str(file), "--overwrite") == 0
    assert told() == before
    assert flow(home) == "nightly"
    for _ in range(2):
        assert flush(["flush"]) == 0
        points = sorted(LOGGED.items())
        assert arrived() == {
            "left-1": ("FINISHED", points, "a sample"),
            "goes-2": ("KILLED", points, "a sample"),
            "later-3": ("FINISHED", points, "a sample"),
        }
    register("d", 100)  # and it goes on
    assert told()["kept"] == {**before["kept"], "3": {"dvc.lock": b"d"}}  # type: ignore[dict-item]


def test_the_drill_with_sqlite(home, tmp_path, capfd):
    file = tmp_path / "backups/first.tar"
    store().create_experiment("elsewhere", "s3://bucket/models")
    drill(home, file)
    out, err = capfd.readouterr()
    databases = f"{home}/mlflow.db, {home}/prefect/prefect.db"
    saying = [line for line in out.splitlines() if not line.startswith("tracking: ")]
    assert saying == [
        f"{file}: {databases}, 12 artifacts and the journals of 2 runs",
        "not in it: artifacts in s3://bucket: give the bucket versions",
        f"{file} restored: {databases}, {home}/mlartifacts: "
        "python -m rlhf.tracking flush delivers what MLflow lacks of 2 runs",
    ]
    refusal = "not empty: back it up, and say overwrite=1 (--overwrite) to replace it"
    assert f"backup: {home}/mlflow.db, {home}/prefect/prefect.db, {home}/mlartifacts: {refusal}\n" in err
    assert file.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in home.iterdir()) == [
        ".cache",
        ".journal",
        "mlartifacts",
        "mlflow.db",
        "prefect",
    ]
    assert [path.name for path in (home / ".journal").iterdir()] == ["lock"]
    assert [path.name for path in file.parent.iterdir()] == ["first.tar"]


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    with postgres.running() as uri:
        yield uri


def test_the_drill_with_postgresql(home, postgresql, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", postgresql.replace("postgresql:", "postgresql+psycopg2:"))
    drill(home, tmp_path / "first.tar")
    psql = ["psql", "--quiet", "--tuples-only", "--no-align", f"--dbname={postgresql}"]
    broken = tmp_path / "broken.tar"
    with tarfile.open(tmp_path / "first.tar") as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    with (tmp_path / "unpacked/mlflow.dump").open("a") as dump:
        dump.write("SELECT nonsense;\n")
    pack(tmp_path / "unpacked", broken)
    subprocess.run([*psql, "--command=CREATE TABLE of_later (name TEXT)"], check=True)
    before = told()
    assert run("restore", str(broken), "--overwrite") == 1
    assert told() == before
    assert 'ERROR: column "nonsense" does not exist' in capfd.readouterr().err
    assert run("restore", str(tmp_path / "first.tar"), "--overwrite") == 0
    tables = subprocess.run([*psql, "--command=\\dt"], check=True, capture_output=True, text=True).stdout
    assert "model_versions" in tables and "of_later" not in tables


def pack(unpacked: Path, to: Path) -> None:
    """A backup of these files, its manifest renewed."""
    manifest = json.loads((unpacked / "manifest.json").read_text())
    manifest["files"]["mlflow.dump"] = backup.sha256_file(unpacked / "mlflow.dump")
    (unpacked / "manifest.json").write_text(json.dumps(manifest))
    with tarfile.open(to, "w") as tar:
        for path in unpacked.iterdir():
            tar.add(path, path.name)


@pytest.fixture
def filled(home, monkeypatch) -> None:
    """Small databases that only the backup knows, and a run's journal."""
    monkeypatch.setattr(backup, "model_names", lambda: [NAME])
    monkeypatch.setattr(backup, "artifact_stores", list)
    log("left-1")
    (home / "mlartifacts/1").mkdir(parents=True)
    (home / "mlartifacts/1/weights").write_bytes(b"weights")
    shutil.copy(home / "prefect/prefect.db", home / "mlflow.db")


@pytest.fixture
def saved(home, filled, tmp_path) -> Path:
    """A backup, after which everything was lost."""
    file = tmp_path / "first.tar"
    assert run("save", str(file)) == 0
    for lost in (home / "mlflow.db", home / "prefect/prefect.db"):
        lost.unlink()
    for lost in (home / "mlartifacts", home / ".journal"):
        shutil.rmtree(lost)
    return file


def contents(home: Path) -> dict[str, bytes]:
    files = (path for path in home.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {path.relative_to(home).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "text", "directory", "gone"])
def test_a_damaged_backup_restores_nothing(home, saved, capfd, damage):
    whole = saved.read_bytes()
    place = whole.index(b"SQLite format 3") + 4000
    damaged = {
        "cut": whole[: len(whole) // 2],
        "changed": whole[:place] + b"?" + whole[place + 1 :],
        "empty": b"",
        "text": b"no tar",
    }
    saved.unlink()
    if damage in damaged:
        saved.write_bytes(damaged[damage])
    if damage == "directory":
        saved.mkdir()
    before = contents(home)
    assert run("restore", str(saved)) == 1
    assert contents(home) == before
    assert capfd.readouterr().err.startswith(f"backup: {saved}: {'no such file' if damage == 'gone' else 'no whole'}")


def changed(saved: Path, change: Callable[[dict[str, bytes]], None], **special: bytes) -> None:
    """Writes a backup again with other members; those that are no plain files get the type in `special`."""
    with tarfile.open(saved) as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}
    change(members)
    with tarfile.open(saved, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.type = len(content), special.get(name, tarfile.REGTYPE)
            info.linkname = "/etc/passwd" if name in special else ""
            tar.addfile(info, io.BytesIO(content))


def manifest_with(**values: object) -> Callable[[dict[str, bytes]], None]:
    def change(members: dict[str, bytes]) -> None:
        members["manifest.json"] = json.dumps(json.loads(members["manifest.json"]) | values).encode()

    return change


def manifest_as(text: str) -> Callable[[dict[str, bytes]], None]:
    return lambda members: members.update({"manifest.json": text.encode()})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (manifest_as("[]"), "no whole backup (manifest.json: Input should be an object)"),
        (manifest_as("{"), "no whole backup (manifest.json: Invalid JSON: EOF while parsing an object"),
        (manifest_as("\xe9"), "no whole backup (manifest.json: Invalid JSON: "),
        (manifest_with(format=2), "no whole backup (manifest.json.format: Input should be 1)"),
        (manifest_with(models="m"), "no whole backup (manifest.json.models: Input should be a valid array)"),
        (manifest_with(files=[]), "no whole backup (manifest.json.files: Input should be an object)"),
        (manifest_with(kinds={"../x": "sqlite"}), "no whole backup (manifest.json.kinds.../x.[key]: Input should be "),
        (manifest_with(kinds={}), "no whole backup (its files are not those of its manifest)"),
        (manifest_with(files={"../x": "0"}), "no whole backup (its files are not those of its manifest)"),
        (lambda members: members.pop("manifest.json"), "manifest.json is missing: name a file that make backup wrote"),
        (lambda members: members.update({"../x": b""}), "no backup of ours (it has '../x')"),
        (lambda members: members.update({"artifacts/../../x": b""}), "no backup of ours (it has 'artifacts/../../x')"),
        (lambda members: members.update({"/x": b""}), "no backup of ours (it has '/x')"),
        (lambda members: members.update({"conf/x": b""}), "no backup of ours (it has 'conf/x')"),
        (lambda members: members.update({"artifacts/1/weights": b""}), "no whole backup (its files are not those of"),
        (lambda members: members.update({"artifacts/1/weights/x": b""}), "no whole backup ("),
    ],
)
def test_a_backup_that_somebody_changed_restores_nothing(home, saved, tmp_path, capfd, change, fault):
    assert run("restore", str(saved)) == 0
    set_flow(home, "later")
    changed(saved, change)
    around = {path for path in tmp_path.rglob("*") if path.suffix != ".lock"}
    before = contents(home)
    capfd.readouterr()
    assert run("restore", str(saved), "--overwrite") == 1
    error = capfd.readouterr().err
    assert error.startswith(f"backup: {saved}: {fault}") and error.count("\n") == 1
    assert contents(home) == before
    assert {path for path in tmp_path.rglob("*") if path.suffix != ".lock"} == around


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_a_backup_holds_nothing_but_plain_files(home, saved, capfd, kind):
    changed(saved, lambda members: members.update({"artifacts/link": b""}), **{"artifacts/link": kind})
    assert run("restore", str(saved)) == 1
    assert capfd.readouterr().err == f"backup: {saved}: no backup of ours (it has 'artifacts/link'): take another one\n"


def test_a_path_below_a_file_is_none(home, saved, capfd):
    assert run("restore", str(saved / "x")) == 1
    missing = "no such file: name a file that make backup wrote"
    assert capfd.readouterr().err == f"backup: {saved}/x: {missing}\n"
    assert run("restore", str(saved)) == 0
    assert run("save", str(saved / "x")) == 1
    place = "a file is where its directory would be: name another place: make backup to=FILE"
    assert capfd.readouterr().err == f"backup: {saved}/x: {place}\n"


def test_what_fails_at_the_end_is_undone(home, saved, monkeypatch, capfd):
    assert run("restore", str(saved)) == 0
    set_flow(home, "later")
    (home / "mlflow.db").write_bytes(b"no database, which is why a backup is wanted")
    (home / "mlartifacts/1/weights").write_bytes(b"others")
    before = contents(home)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "mlartifacts")

    with monkeypatch.context() as patch:
        patch.setattr(backup, "move_aside", fail)
        assert run("restore", str(saved), "--overwrite") == 1
    assert "No space left on device" in capfd.readouterr().err
    assert {name: before[name] for name in ("mlflow.db", "mlartifacts/1/weights")}.items() <= contents(home).items()
    assert contents(home).keys() == before.keys()
    assert flow(home) == "later"
    assert run("restore", str(saved), "--overwrite") == 0
    assert contents(home)["mlartifacts/1/weights"] == b"weights"
    assert flow(home) == "nightly"


def test_a_database_in_use_is_not_replaced(home, saved, capfd):
    assert run("restore", str(saved)) == 0
    with closing(sqlite3.connect(home / "prefect/prefect.db")) as connection:
        set_flow(home, "later", "mlflow.db")
        connection.execute("BEGIN IMMEDIATE")
        assert run("restore", str(saved), "--overwrite") == 1
        assert flow(home, "mlflow.db") == "later"
    assert f"{home}/prefect/prefect.db: database is locked: stop what uses it" in capfd.readouterr().err


def test_a_running_pipeline_keeps_its_data(home, saved, capfd):
    assert backup.PIPELINE_LOCK == pipeline.LOCK
    with locks.exclusive(anchors.CHECKOUT / pipeline.LOCK, ""):
        assert run("restore", str(saved)) == 1
    assert "is running a pipeline here: wait for it or stop it" in capfd.readouterr().err
    assert not (home / "mlflow.db").exists()


def test_it_goes_back_to_where_its_artifacts_belong(home, saved, capfd, tmp_path):
    assert run("--artifacts", str(tmp_path / "elsewhere"), "restore", str(saved)) == 1
    assert f"its artifacts belong to {home}/mlartifacts, not to {tmp_path}/elsewhere" in capfd.readouterr().err


def test_a_dump_fits_its_own_kind_of_database(home, saved, monkeypatch, capfd):
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "postgresql+asyncpg://user:secret@127.0.0.1:9/base")
    assert run("restore", str(saved)) == 1
    err = capfd.readouterr().err
    assert "its prefect.dump is sqlite's, and postgresql+asyncpg://user:***@127.0.0.1:9/base is none" in err
    assert "secret" not in err


@pytest.mark.parametrize(
    ("uri", "fault"),
    [
        ("http://user:secret@127.0.0.1:9", "http://user:***@127.0.0.1:9: no database that is dumped here"),
        ("postgresql://user:secret@127.0.0.1:9/base", "postgresql+psycopg2://user:***@127.0.0.1:9/base: "),
        ("sqlite:////nowhere.db", "/nowhere.db is empty: nothing to back up: set MLFLOW_TRACKING_URI"),
        ("sqlite:////nowhere/mlflow.db", "MLFLOW_TRACKING_URI=sqlite:////nowhere/mlflow.db: /nowhere is no directory"),
    ],
)
def test_what_cannot_be_backed_up_is_one_line(home, monkeypatch, tmp_path, capfd, uri, fault):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert run("save", str(tmp_path / "file.tar")) == 1
    err = capfd.readouterr().err
    assert err.startswith(f"backup: {fault}") and err.count("\n") == 1
    assert "secret" not in err
    assert not list(tmp_path.glob("*file.tar*"))


def test_a_backup_is_never_overwritten(home, saved, capfd):
    assert run("restore", str(saved)) == 0
    before = saved.read_bytes()
    assert run("save", str(saved)) == 1
    assert f"{saved} is there already: name a new file" in capfd.readouterr().err
    assert saved.read_bytes() == before


def test_nothing_is_freed_while_it_reads(home, filled, monkeypatch, tmp_path):
    seen = []

    def during(step: str) -> None:
        read = getattr(backup, step)

        def tried(*arguments: object) -> object:
            with pytest.raises(UserError, match="copies"), locks.exclusive(anchors.gc_lock(), "copies"):
                pytest.fail("gc would go on")
            seen.append(step)
            return read(*arguments)

        monkeypatch.setattr(backup, step, tried)

    during("_files")
    during("_write")
    assert run("save", str(tmp_path / "file.tar")) == 0
    assert seen == ["_files", "_files", "_write"]
    with locks.exclusive(anchors.gc_lock(), "copies"):
        pass


def test_a_run_that_logs_keeps_its_journal(home, saved, capfd):
    writer = Writer(anchors.journal_dir(), "left-1")
    assert run("restore", str(saved)) == 1
    writer.close()
    assert f"uses the journal {home}/.journal/left-1: wait for it or stop it" in capfd.readouterr().err
    assert not (home / "mlflow.db").exists()


def test_artifacts_that_the_server_keeps_are_named(home, filled, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(backup, "artifact_stores", lambda: [backup.SERVERS_OWN])
    assert run("save", str(tmp_path / "with.tar")) == 0
    assert "not in it" not in capfd.readouterr().out
    (home / "mlartifacts/1/weights").unlink()
    assert run("save", str(tmp_path / "without.tar")) == 0
    assert "not in it: what MLflow's server keeps: name its directory, --artifacts DIR" in capfd.readouterr().out


@pytest.mark.parametrize("words", [["save"], ["restore"]])
def test_a_file_that_is_not_named_is_a_usage_error(words, capsys):
    assert backup.main([*words, "--", ""]) == 2  # as make has it without to= or from=
    assert capsys.readouterr().err == "backup: no file is named: make backup to=FILE, make restore from=FILE\n"
