"""Asks a policy a question and prints its answer.

    python -m rlhf.ask "Tom has 3 apples ..." [--policy models/policy]

Without --policy, the registered champion answers, or the candidate as long as there is no champion; which version
it was is told on standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf import config
from rlhf.errors import UsageError, run_command


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="ask", description="Ask a policy a question.")
    parser.add_argument("question", help="the problem, as one argument")
    parser.add_argument("--policy", type=Path, help="checkpoint directory; the registered policy if left out")
    given = parser.parse_args(arguments)
    return run_command("ask", lambda: print(ask(given.question, given.policy)))


def ask(question: str, directory: Path | None) -> str:
    """The answer of the policy in `directory`, or of the registered one; raises UserError."""
    if not question.strip():
        raise UsageError('the question is empty: make ask Q="..."')
    params = config.load()
    if directory:
        return ask_directory(question, directory, params.ppo.sampling.max_new_tokens)
    from rlhf.registry.answer import ask_registered

    answer = ask_registered(params.registry.name, question)
    print(f"{answer.version} answers:", file=sys.stderr)
    return answer.text


def ask_directory(question: str, directory: Path, max_new_tokens: int) -> str:
    """The answer of the checkpoint in `directory`, as the registered policy would give it."""
    from rlhf.generation.answering import AnsweringPolicy, Settings

    (answer,) = AnsweringPolicy(directory).answer([question], Settings(max_new_tokens))
    return answer.response.text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
