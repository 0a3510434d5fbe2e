"""The container files as their linter, their schema and a careful reader see them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.anchors import CHECKOUT

PROGRAMS = Path(sys.executable).parent
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((CHECKOUT / "compose.yaml").read_text())["services"]
SERVERS = ("postgres", "store", "mlflow", "prefect", "worker")


def test_hadolint_has_nothing_to_say_of_the_dockerfile() -> None:
    done = subprocess.run(
        [PROGRAMS / "hadolint", "--no-color", CHECKOUT / "Dockerfile"], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")


def check_compose(file: Path) -> subprocess.CompletedProcess[str]:
    command = [PROGRAMS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", file]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_the_compose_file_keeps_to_the_compose_specifications_schema(tmp_path: Path) -> None:
    done = check_compose(CHECKOUT / "compose.yaml")
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((CHECKOUT / "compose.yaml").read_text().replace("depends_on:", "depends_upon:"))
    assert check_compose(wrong).returncode == 1


def test_ports_are_on_loopback_alone() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("name", SERVERS)
def test_every_server_is_watched_and_starts_again(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    # A service of the project's image without a check of its own has the image's.
    assert "healthcheck" in service or service["image"] == "gsm8k-rlhf"


def test_no_secret_is_written_down_and_every_one_has_its_line_in_the_example() -> None:
    text = (CHECKOUT / "compose.yaml").read_text()
    wanted = set(re.findall(r"\$\{(\w+):\?put it into \.env\}", text))
    assert set(re.findall(r"\$\{(\w+)", text)) == wanted
    example = dict(re.findall(r"^(\w+)=(.*)$", (CHECKOUT / ".env.example").read_text(), re.MULTILINE))
    assert example == dict.fromkeys(wanted, "")
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if name.endswith(("PASSWORD", "_KEY", "AUTH_STRING")):
                assert re.fullmatch(r"(rlhf:)?\$\{\w+:\?put it into \.env\}", value), name
    ignored = subprocess.run(["git", "check-ignore", ".env"], check=False, cwd=CHECKOUT, capture_output=True, text=True)
    assert ignored.stdout == ".env\n"


def test_every_data_directory_is_in_a_named_volume() -> None:
    volumes = yaml.safe_load((CHECKOUT / "compose.yaml").read_text())["volumes"]
    mounted = {each.partition(":")[0] for service in SERVICES.values() for each in service.get("volumes", [])}
    assert {each for each in mounted if not each.startswith("./")} == set(volumes)
    assert all((CHECKOUT / each).is_file() for each in mounted if each.startswith("./"))


def test_services_know_each_other_by_the_names_they_have() -> None:
    hosts = set(re.findall(r"(?:@|http://)([a-z]+):\d+", (CHECKOUT / "compose.yaml").read_text()))
    assert hosts <= set(SERVICES)
    waited_for = {name for service in SERVICES.values() for name in service.get("depends_on", {})}
    assert waited_for <= set(SERVICES)
    config = (CHECKOUT / SERVICES["mlflow"]["environment"]["MLFLOW_AUTH_CONFIG_PATH"]).read_text()
    place = SERVICES["mlflow"]["volumes"][0].partition(":")[2]
    assert f"sqlite:///{place}/" in config
