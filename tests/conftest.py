"""What every test runs under: no network, no telemetry, few threads, and none of the user's servers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Set before any library is imported, and inherited by the processes that tests start.
os.environ |= {
    "DO_NOT_TRACK": "true",
    "DVC_NO_ANALYTICS": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "150",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}
USERS_OWN = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_RUN_ID",
    "PREFECT_API_URL",
    "PREFECT_PROFILE",
    "RLHF_PARENT_RUN_KEY",
    "RLHF_REGISTRY_LOCK",
    "RLHF_HOSTS",
)
for name in USERS_OWN:
    os.environ.pop(name, None)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job's children would ignore Ctrl-C as well
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_places(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tracking database, Prefect home and caches of a test run, away from the checkout and from the user's home."""
    place: Path = tmp_path_factory.mktemp("places")
    os.environ |= {
        "MLFLOW_TRACKING_URI": f"sqlite:///{place / 'mlflow.db'}",
        "RLHF_JOURNAL_DIR": str(place / "journal"),
        "RLHF_MIRROR_DIR": str(place / "mirror"),
        "RLHF_DOWNLOADS_DIR": str(place / "downloads"),
        "PREFECT_HOME": str(place / "prefect"),
        "HF_HOME": str(place / "huggingface"),
        "DVC_SITE_CACHE_DIR": str(place / "dvc"),
        "XDG_CACHE_HOME": str(place / "cache"),
    }


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """What runs in a test's process sets variables for its libraries: MLflow's `set_tracking_uri` does as well."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ |= before


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """A stage that runs in a test's process leaves signal handlers behind."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
