"""The Hugging Face hub: which commit a branch or tag stands for, and its errors in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from tenacity import retry, retry_if_exception, stop_after_attempt, wait_exponential

from rlhf.errors import UserError

TIMEOUT_SECONDS = 10.0
ATTEMPTS = 3
_COMMIT = re.compile(r"[0-9a-f]{40}")

Kind = Literal["model", "dataset"]


class OutOfReachError(UserError):
    """The hub does not answer; the message is the reason."""


def commit(kind: Kind, repo: str, revision: str) -> str:
    """The commit that `revision` of a repository stands for; a commit stands for itself and asks nobody.

    Raises UserError where the hub refuses, and OutOfReachError where it does not answer.
    """
    if _COMMIT.fullmatch(revision):
        return revision
    with faults(repo, revision):
        return ask(kind, repo, revision)


@contextmanager
def faults(repo: str, revision: str) -> Iterator[None]:
    """Turns what the hub's client raises into UserError, and into OutOfReachError where the hub does not answer."""
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError:
        raise UserError(f"{repo} is gated: ask its owners for access and set HF_TOKEN") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise UserError(f"the hub shows no {repo}: check the name, or set HF_TOKEN if it is private") from None
    except RevisionNotFoundError:
        raise UserError(f"{repo} has no revision {revision}: name a commit, tag or branch") from None
    except (HTTPError, ConnectionError, LocalEntryNotFoundError) as error:
        raise OutOfReachError(" ".join(str(error).split())[:160]) from None


def _worth_a_retry(error: BaseException) -> bool:
    """Lost connections, timeouts and overload; neither a refusal nor the hub's offline mode."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # the HTTP library's

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, HTTPError)


@retry(
    retry=retry_if_exception(_worth_a_retry),
    stop=stop_after_attempt(ATTEMPTS),
    wait=wait_exponential(max=4),
    reraise=True,
)
def ask(kind: Kind, repo: str, revision: str) -> str:
    """The commit by the hub's own word, asked a few times at most; raises what the hub's client raises.

    Worth asking before any download, which tries files again but would wait for ever on this question.
    """
    from huggingface_hub import HfApi

    info = HfApi().dataset_info if kind == "dataset" else HfApi().model_info
    return str(info(repo, revision=revision, timeout=TIMEOUT_SECONDS).sha)
