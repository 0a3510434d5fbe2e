"""Local servers: they answer once `wait` returns, say why they ended, and are gone afterwards."""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import httpx
import pytest
import requests

from flows import servers, ui
from rlhf import anchors
from rlhf.errors import UserError


@pytest.fixture(autouse=True)
def _logs_in_a_place_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "main_checkout", lambda: tmp_path)


def test_a_server_answers_while_it_is_needed_and_no_longer() -> None:
    port = servers.free_port()
    address = f"http://{servers.HOST}:{port}/"
    command = [sys.executable, "-m", "http.server", str(port), "--bind", servers.HOST]
    with servers.server("files", command, address) as own:
        own.wait()
        own.check()
        with urlopen(address) as answer:
            assert answer.status == 200
        with pytest.raises(UserError, match=f"port {port} is taken"):
            servers.require_free(port)
    with pytest.raises(URLError):
        urlopen(address)
    servers.require_free(port)


def test_any_answer_of_a_configured_server_will_do(tmp_path: Path) -> None:
    port = servers.free_port()
    address = f"http://{servers.HOST}:{port}/"
    command = [sys.executable, "-m", "http.server", str(port), "--bind", servers.HOST, "--directory", str(tmp_path)]
    with servers.server("files", command, address) as own:
        own.wait()
        servers.require_answer(f"{address}api")  # 404
    with pytest.raises(UserError, match="PREFECT_API_URL=nonsense"):
        servers.require_answer("nonsense")


def test_a_proxy_for_the_way_outside_is_not_asked_for_servers_of_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://{servers.HOST}:{servers.free_port()}")  # nobody answers there
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "inside.example")
    port = servers.free_port()
    address = f"http://{servers.HOST}:{port}/"
    command = [sys.executable, "-m", "http.server", str(port), "--bind", servers.HOST, "--directory", str(tmp_path)]
    with servers.server("files", command, address) as own:
        servers.set_prefect_environment()
        own.wait()
        servers.require_answer(address)
        assert httpx.get(address).status_code == 200  # Prefect's client
        assert requests.get(address, timeout=9).status_code == 200  # MLflow's
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "inside.example,127.0.0.1,localhost"


def test_a_server_that_ends_says_why() -> None:
    command = [sys.executable, "-c", "import sys; print('loading'); sys.exit('the database is locked')"]
    address = f"http://{servers.HOST}:{servers.free_port()}/"
    reason = "the files server: ended with 'the database is locked'"
    with servers.server("files", command, address) as own, pytest.raises(UserError, match=reason):
        own.wait()


def test_the_port_of_a_server_is_a_number_or_a_line_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_SERVER_API_PORT", raising=False)
    assert servers.port("PREFECT_SERVER_API_PORT", 4200) == 4200
    monkeypatch.setenv("PREFECT_SERVER_API_PORT", "4300")
    assert servers.port("PREFECT_SERVER_API_PORT", 4200) == 4300
    for wrong in ("0", "65536", "-1", "http"):
        monkeypatch.setenv("PREFECT_SERVER_API_PORT", wrong)
        with pytest.raises(UserError, match=f"^PREFECT_SERVER_API_PORT={wrong}: no port: "):
            servers.port("PREFECT_SERVER_API_PORT", 4200)


def test_prefects_page_is_not_moved_to_mlflows_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_SERVER_API_PORT", "5000")
    with ExitStack() as running, pytest.raises(UserError, match="^PREFECT_SERVER_API_PORT=5000: MLflow's page"):
        ui.start_prefect(running)


def test_a_configured_prefect_server_is_not_started_but_has_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.context import refresh_global_settings_context

    address = f"http://{servers.HOST}:{servers.free_port()}/api"
    monkeypatch.setenv("PREFECT_API_URL", address)
    refresh_global_settings_context()
    try:
        with (
            servers.prefect_api() as wait,
            pytest.raises(UserError, match=rf"^PREFECT_API_URL={address}: .*refused: start that server"),
        ):
            wait()
        assert os.environ["PREFECT_API_URL"] == address
    finally:
        monkeypatch.undo()
        refresh_global_settings_context()


def test_prefects_database_is_in_the_main_checkout_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / ".prefect").mkdir(parents=True)
    (home / ".prefect" / "profiles.toml").touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("PREFECT_PROFILES_PATH", raising=False)

    monkeypatch.setenv("PREFECT_HOME", "/the/users/own")
    servers.set_prefect_environment()
    assert os.environ["PREFECT_HOME"] == "/the/users/own"
    assert "PREFECT_PROFILES_PATH" not in os.environ

    monkeypatch.delenv("PREFECT_HOME")
    monkeypatch.setenv("PREFECT_PROFILES_PATH", "placeholder, which monkeypatch takes back afterwards")
    del os.environ["PREFECT_PROFILES_PATH"]
    servers.set_prefect_environment()
    assert os.environ["PREFECT_HOME"] == str(tmp_path / ".prefect")
    assert os.environ["PREFECT_PROFILES_PATH"] == str(home / ".prefect" / "profiles.toml")


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_file_in_the_place_of_prefects_database_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PREFECT_HOME", f"{tmp_path}/file{below}")
    with pytest.raises(UserError, match=f"^PREFECT_HOME={tmp_path}/file{below}: no directory: Prefect keeps"):
        servers.set_prefect_environment()
    monkeypatch.setenv("PREFECT_HOME", "")
    (tmp_path / ".prefect").touch()
    with pytest.raises(UserError, match=f"^PREFECT_HOME={tmp_path}/.prefect: no directory: Prefect keeps"):
        servers.set_prefect_environment()


@pytest.mark.parametrize(("home", "place"), [(None, ".prefect"), ("the user's", "runs/servers")])
def test_a_read_only_checkout_is_told_in_one_line(
    home: str | None, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_only(path: Path, *_arguments: object, **_options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    if home is None:
        monkeypatch.delenv("PREFECT_HOME")
    monkeypatch.setattr(servers, "require_free", lambda _port: None)
    monkeypatch.setattr(Path, "mkdir", read_only)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert ui.main() == 1
    error = capsys.readouterr().err
    assert error.startswith(f"ui: {tmp_path / place}: Read-only file system: make room or access there")
    assert error.count("\n") == 1
