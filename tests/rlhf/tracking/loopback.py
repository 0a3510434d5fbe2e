"""A real MLflow server on loopback that misbehaves on demand: absent, slow, failing, silent, or losing its answers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from mlflow.server import ARTIFACTS_DESTINATION_ENV_VAR, SERVE_ARTIFACTS_ENV_VAR, app, handlers
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

Mode = Literal["well", "absent", "slow", "fails", "silent", "loses"]
"""`loses` does what it is asked for and then breaks the connection off."""
DELAY_SECONDS = 0.05


class Quiet(WSGIRequestHandler):
    def log(self, *arguments: Any) -> None:
        pass


class Loopback:
    """MLflow's server over the database at `uri`; `answered` counts the requests that it has answered well."""

    def __init__(self, uri: str, artifacts: Path, environ: Callable[[str, str], None]) -> None:
        environ(SERVE_ARTIFACTS_ENV_VAR, "true")
        environ(ARTIFACTS_DESTINATION_ENV_VAR, str(artifacts))
        handlers._tracking_store = handlers._artifact_repo = None
        handlers._get_tracking_store(uri, "mlflow-artifacts:/")
        environ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        self._environ = environ
        self.mode: Mode = "absent"
        self.answered = 0
        self._port = 0
        self._server: BaseWSGIServer | None = None
        self._released = threading.Event()
        self.be("well")
        self.uri = f"http://127.0.0.1:{self._port}"

    def be(self, mode: Mode) -> None:
        """From now on it behaves like that; requests that it was silent about fail."""
        self.mode = mode
        self._environ("MLFLOW_HTTP_REQUEST_TIMEOUT", "1" if mode == "silent" else "60")
        self._released.set()
        self._released = threading.Event()
        if mode == "absent":
            self.close()
        elif self._server is None:
            self._server = make_server("127.0.0.1", self._port, self._answer, threaded=True, request_handler=Quiet)
            self._port = self._server.port
            threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        """Nothing listens any more."""
        self._released.set()
        if self._server:
            self._server.shutdown()
            self._server.server_close()
        self._server = None

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        match self.mode:
            case "silent":
                self._released.wait()
                start_response("503 Service Unavailable", [])
                return []
            case "fails":
                start_response("500 Internal Server Error", [])
                return []
            case "slow":
                time.sleep(DELAY_SECONDS)
            case "loses":
                app(environ, lambda *_: lambda _: None)
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                raise ConnectionAbortedError
        self.answered += 1
        return app(environ, start_response)
