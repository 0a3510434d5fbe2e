"""A registered version in a process of its own, where it runs the library that was logged with it.

    python -P rlhf/registry/worker.py MODEL_DIRECTORY

Reads requests from standard input and writes replies to standard output, a line of JSON each:

    {"questions": ["..."], "params": {"samples": 1}}   ->   {"answers": [{"text": "...", "answer": "5", ...}]}
                                                       or   {"refused": "why"}, the request's fault
                                                       or   {"failed": "why"}, the version's

The first line says {"answers": []} once the model is loaded and has answered a question, or else {"failed": "why"}. The
process ends with its input. It imports nothing of ours: that would hide the version's own library.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

WARM_UP = "What is 1 plus 1?"
NEEDED = {"text", "answer", "finished", "votes", "samples", "policy"}


def main(directory: str) -> int:
    """The command line; returns the exit code."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1) as replies:
        os.dup2(2, 1)  # what libraries print is no reply

        def say(reply: dict[str, Any]) -> None:
            print(json.dumps(reply), file=replies, flush=True)

        # MLflow asks for type hints, which would cost the signature its params, past every filter.
        warnings.showwarning = lambda *_, **__: None
        try:
            predict = load(directory)
        except Exception as error:  # whatever the code of a version raises
            say({"failed": reason(error)})
            return 1
        say({"answers": []})
        for line in sys.stdin:
            say(reply_to(json.loads(line), predict))
    return 0


def load(directory: str) -> Callable[..., list[dict[str, Any]]]:
    """The `predict` of the model in `directory`; raises ValueError where its answers are not what a server needs."""
    import mlflow

    predict: Callable[..., list[dict[str, Any]]] = mlflow.pyfunc.load_model(directory).predict
    (answer,) = predict([WARM_UP], params={"max_new_tokens": 1})
    if not isinstance(answer, dict) or not answer.keys() >= NEEDED:
        raise ValueError("it does not answer as this server expects: register the policy again")
    return predict


def reply_to(request: dict[str, Any], predict: Callable[..., list[dict[str, Any]]]) -> dict[str, Any]:
    """The reply to one request."""
    from mlflow.exceptions import MlflowException

    try:
        return {"answers": predict(request["questions"], params=request["params"])}
    except MlflowException as error:
        return {"refused" if error.get_http_status_code() == 400 else "failed": error.message}
    except Exception as error:  # as above
        return {"failed": reason(error)}


def reason(error: Exception) -> str:
    """One line about an error."""
    return " ".join(str(getattr(error, "message", error)).split())[:300] or type(error).__name__


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
