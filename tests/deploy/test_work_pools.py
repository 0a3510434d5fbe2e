"""The base job templates in deploy/ against the schemas that Prefect has for its work pools."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import prefect.server.api.collections as collections
import pytest

from rlhf.anchors import CHECKOUT

VIEWS = json.loads(
    (Path(collections.__file__).parent / "collections_data/views/aggregate-worker-metadata.json").read_text()
)
TYPES = {"docker": VIEWS["prefect-docker"]["docker"], "kubernetes": VIEWS["prefect-kubernetes"]["kubernetes"]}


def template(kind: str) -> dict[str, Any]:
    return json.loads((CHECKOUT / "deploy" / f"{kind}-work-pool.json").read_text())


@pytest.mark.parametrize("kind", TYPES)
def test_a_template_has_all_that_the_pools_own_has_with_the_same_types(kind: str) -> None:
    own, standard = template(kind), TYPES[kind]["default_base_job_configuration"]
    assert own["job_configuration"].keys() == standard["job_configuration"].keys()
    ours, theirs = own["variables"]["properties"], standard["variables"]["properties"]
    assert theirs.keys() <= ours.keys()
    for name, wanted in theirs.items():
        assert ours[name] | {"default": None} == wanted | {"default": None}


@pytest.mark.parametrize("kind", TYPES)
def test_every_placeholder_is_a_variable_and_every_variable_is_used(kind: str) -> None:
    own = template(kind)
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(own["job_configuration"])))
    assert used == set(own["variables"]["properties"])


@pytest.mark.parametrize("kind", TYPES)
def test_the_defaults_are_what_the_variables_allow(kind: str) -> None:
    variables = template(kind)["variables"]
    defaults = {name: given["default"] for name, given in variables["properties"].items() if "default" in given}
    jsonschema.validate(defaults, variables)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(defaults | {"image_pull_policy": "Sometimes"}, variables)
