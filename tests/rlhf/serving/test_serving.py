"""`python -m rlhf.serving` on loopback, with registered versions of a tiny policy."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rlhf import anchors, tracking
from rlhf.generation.answering import AnsweringPolicy, Settings
from rlhf.registry import versions
from rlhf.serving.__main__ import main
from tests.policies import save_policy
from tests.served import SECONDS, serving, wait_for

NAME = "served"
QUESTION = "Tom has 3 apples and eats 2. How many are left?"


def children(process: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_the_champion_answers_and_hands_over_to_the_next(tmp_path_factory) -> None:
    place = tmp_path_factory.mktemp("policies")
    policies = [save_policy(place / str(seed) / "policy", seed) for seed in range(2)]
    for policy in policies:
        with tracking.stage_run("register", {}) as run:
            versions.register_policy(policy, name=NAME, metrics={}, lineage={}, max_new_tokens=12, run=run)
    store = MlflowClient(anchors.tracking_uri())
    store.set_registered_model_alias(NAME, "champion", "1")
    asked = {"questions": [QUESTION], "samples": 3, "temperature": 1.0, "seed": 7}

    with serving(NAME) as (process, client):
        health = wait_for(client, ready=True)
        assert (health["version"], health["fault"]) == ({"name": NAME, "number": "1", "alias": "champion"}, None)
        for number, policy in enumerate(policies, start=1):
            store.set_registered_model_alias(NAME, "champion", str(number))
            wait_for(client, number=str(number))
            reply = client.post("/answers", json=asked).json()
            assert reply["version"]["number"] == str(number)
            (answer,) = reply["answers"]
            (expected,) = AnsweringPolicy(policy).answer([QUESTION], Settings(12, 3, 1.0, 7))
            assert [sample["text"] for sample in answer["samples"]] == [r.text for r in expected.responses]
            assert (answer["text"], answer["votes"]) == (expected.response.text, expected.votes)
        refused = client.post("/answers", json={"questions": ["word " * 390]})
        assert (refused.status_code, "this policy reads at most" in refused.json()["error"]) == (400, True)

        broken = store.create_model_version(NAME, f"file://{place}/nothing").version
        store.set_registered_model_alias(NAME, "champion", broken)
        health = wait_for(
            client,
            fault=f"{NAME} version {broken} (champion) does not load: {NAME} version {broken}: its files are gone",
        )
        assert health["version"]["number"] == "2"
        assert client.post("/answers", json={"questions": [QUESTION]}).json()["version"]["number"] == "2"

        (worker,) = children(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
        assert process.stdout and process.stdout.read().splitlines()[-1] == "serving: stopped"
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


def test_a_port_that_is_taken_is_told_in_one_line(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--name", NAME, "--port", str(port)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(
        rf"serving: 127\.0\.0\.1:{port}: .*Address already in use.*: choose another --host or --port\n", err
    )


@pytest.mark.parametrize(
    ("option", "fault"),
    [
        ("--queue=0", "'0': write a whole number from 1 on"),
        ("--batch=x", "'x': write a whole number from 1 on"),
        ("--timeout=0", "'0': write a number above 0"),
        ("--poll=nan", "'nan': write a number above 0"),
        ("--port=x", "invalid int value: 'x'"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(option: str, fault: str, capsys) -> None:
    with pytest.raises(SystemExit, match="^2$"):
        main([option])
    assert f"argument {option.partition('=')[0]}: {fault}" in capsys.readouterr().err
