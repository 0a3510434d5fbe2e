"""The health check: silent where all is well, else one line that names what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flows import health, servers
from rlhf import anchors


def test_it_asks_the_servers_that_are_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "health").write_text("true")
    monkeypatch.setattr(anchors, "main_checkout", lambda: tmp_path)
    port = servers.free_port()
    address = f"http://{servers.HOST}:{port}/api"
    monkeypatch.setenv("PREFECT_API_URL", address)
    assert health.main() == 1
    assert capsys.readouterr().err.startswith(f"health: PREFECT_API_URL={address}: ")
    command = [sys.executable, "-m", "http.server", str(port), "--bind", servers.HOST, "--directory", str(tmp_path)]
    with servers.server("files", command, f"{address}/health") as own:
        own.wait()
        assert health.main() == 0
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{servers.HOST}:{port}/")  # has no /health
        assert health.main() == 1
    assert (
        f"health: MLFLOW_TRACKING_URI=http://{servers.HOST}:{port}/: File not found: start" in capsys.readouterr().err
    )


def test_it_wants_to_write(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != anchors.CHECKOUT)
    assert health.main() == 1
    assert capsys.readouterr().err.startswith(f"health: {anchors.CHECKOUT}: cannot be written: let user ")
