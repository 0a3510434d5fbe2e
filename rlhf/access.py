"""The password of the Prefect and MLflow servers: set $RLHF_PASSWORD and they ask for it, leave it out and they do not.

Servers that this project starts take it from here and so do its clients, so that it is set once. Who logs in is `rlhf`.
Other servers have log-ins of their own: PREFECT_API_AUTH_STRING, MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD
in the environment win.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from urllib.request import getproxies_environment

from rlhf.errors import UsageError

USER = "rlhf"
VARIABLE = "RLHF_PASSWORD"
SHORTEST = 12
"""Characters that MLflow wants a password to have."""
THIS_HOST = ("127.0.0.1", "localhost")
NO_PROXY = ("no_proxy", "NO_PROXY")
"""Programs read the one or the other; who reads both takes the first."""


def password() -> str:
    """The password; empty where the servers ask for none. Raises UsageError for one that MLflow would refuse."""
    given = os.environ.get(VARIABLE, "")
    if given and len(given) < SHORTEST:
        raise UsageError(f"{VARIABLE}: has {len(given)} characters: MLflow wants {SHORTEST} or more")
    return given


def for_clients() -> dict[str, str]:
    """The environment of a process that talks to the servers."""
    if not (given := password()):
        return {}
    return {
        "PREFECT_API_AUTH_STRING": f"{USER}:{given}",
        "MLFLOW_TRACKING_USERNAME": USER,
        "MLFLOW_TRACKING_PASSWORD": given,
    }


def past_proxies() -> None:
    """Has this process and its children reach servers of this host directly, whatever proxy HTTP_PROXY names.

    A proxy would look for them on its own host. HTTP_PROXY is what companies set for the way outside.
    """
    proxies = getproxies_environment()
    excepted = [host.strip() for host in proxies.pop("no", "").split(",") if host.strip()]
    if proxies and "*" not in excepted:
        os.environ |= dict.fromkeys(NO_PROXY, ",".join(dict.fromkeys([*excepted, *THIS_HOST])))


def for_prefect() -> dict[str, str]:
    """The environment of a Prefect server."""
    return {"PREFECT_SERVER_API_AUTH_STRING": f"{USER}:{given}"} if (given := password()) else {}


def for_mlflow(directory: Path) -> dict[str, str]:
    """The environment of an MLflow server with `--app-name basic-auth`, whose users are kept in `directory`.

    An empty directory makes the password what it is now; MLflow leaves that of a user alone whom it knows already.
    """
    users = directory / "users.ini"
    database = f"sqlite:///{directory / 'users.db'}"
    # A password's hash is slow to compare on purpose; without the cache each request would do it.
    users.write_text(f"[mlflow]\ndefault_permission = READ\ndatabase_uri = {database}\nauth_cache_ttl_seconds = 60\n")
    return {
        "MLFLOW_AUTH_CONFIG_PATH": str(users),
        "MLFLOW_AUTH_ADMIN_USERNAME": USER,
        "MLFLOW_AUTH_ADMIN_PASSWORD": password(),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(),
    }
