"""The schema: help, bounds, refusals by name, and that every key is read somewhere."""

from __future__ import annotations

import copy
import itertools
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlhf.config import compose, describe, validate
from rlhf.errors import UsageError
from rlhf.params import Params, Section

DEFAULTS = compose()


def leaves(section: type[BaseModel] = Params, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


LEAVES = dict(leaves())


def changed(**values: object) -> dict[str, Any]:
    """The defaults with values under dotted keys, written `section__key`."""
    raw = copy.deepcopy(DEFAULTS)
    for dotted, value in values.items():
        *path, name = dotted.split("__")
        block = raw
        for step in path:
            block = block[step]
        block[name] = value
    return raw


def refusal(**values: object) -> str:
    with pytest.raises(UsageError) as caught:
        validate(changed(**values))
    return str(caught.value)


def types_of(annotation: object) -> set[object]:
    """The plain types in an annotation such as `Annotated[int, ...] | None`."""
    if typing.get_origin(annotation) is Annotated:
        return types_of(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is Literal:
        return {Literal}
    parts = typing.get_args(annotation)
    return set().union(*map(types_of, parts)) if parts else {annotation}


def test_every_key_has_one_line_of_help():
    helps = dict(describe())
    assert list(helps) == list(LEAVES)
    for key, text in helps.items():
        assert text.strip() == text and text.endswith(".") and "\n" not in text, f"{key}: {text!r}"


def test_every_value_has_a_known_type():
    known = [{int}, {float}, {bool}, {str}, {Literal}, {int, type(None)}, {float, type(None)}, {list, str}]
    for key, field in LEAVES.items():
        assert types_of(field.annotation) in known, key


NUMBERS = [key for key, field in LEAVES.items() if types_of(field.annotation) & {int, float}]


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_has_bounds(key):
    """No number takes infinity, not-a-number, true or text; all but one refuse what is far below zero; counts end."""
    name = key.replace(".", "__")
    for nonsense in (float("inf"), float("nan"), True, "many", [1], {}):
        assert f"{key}: " in refusal(**{name: nonsense})
    if key != "ppo.reward.cut_off_score":
        assert f"{key}: " in refusal(**{name: -(10**9)})
    if int in types_of(LEAVES[key].annotation):
        assert f"{key}: " in refusal(**{name: 10**10})
    assert f"{key}: " in refusal(**{name: 1e39})  # more than float32 holds


@pytest.mark.parametrize("key", [key for key, field in LEAVES.items() if types_of(field.annotation) == {Literal}])
def test_a_choice_lists_its_choices(key):
    assert f"{key}: Input should be '" in refusal(**{key.replace(".", "__"): "maybe"})


@pytest.mark.parametrize(
    "key",
    ["data__reads", "data__columns__answer", "data__hub__repo", "data__hub__revision", "sft__source", "registry__name"],
)
def test_what_must_name_something_is_not_empty(key):
    assert f"{key.replace('__', '.')}: String should" in refusal(**{key: ""})


def test_sections_are_classes_of_their_own():
    """So that a read of `(class, name)` tells the whole key: the test of unread keys builds on it."""
    classes = leaves(Section)
    sections = [
        field.annotation
        for section in classes
        for field in section.model_fields.values()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    ]
    assert len(sections) == len(set(sections))
    assert {*sections, Params} == set(classes)


def leaves(section):
    """The classes below that nothing derives from."""
    below = section.__subclasses__()
    return [leaf for one in below for leaf in leaves(one)] if below else [section]


@pytest.mark.parametrize("section", ["", "ppo", "ppo.reward", "sft.finetune", "data.hub", "registry"])
def test_an_unknown_key_is_refused_by_its_full_name(section):
    key = f"{section}.lrr".lstrip(".")
    assert f" {key}: unknown key" in refusal(**{key.replace(".", "__"): 1})


def test_a_missing_key_is_named():
    raw = copy.deepcopy(DEFAULTS)
    del raw["ppo"]["kl"]["coef"], raw["seed"]
    with pytest.raises(UsageError, match=r"seed: missing; ppo\.kl\.coef: missing"):
        validate(raw)


def test_all_faults_are_told_at_once_in_one_line():
    text = refusal(seed=-1, ppo__gamma=2, ppo__kl__horizen=3, data__source="web", prompt__template="no place")
    for part in ("seed: ", "ppo.gamma: ", "ppo.kl.horizen: unknown key", "data.source: ", "prompt: template must"):
        assert part in text
    assert "\n" not in text
    assert text.startswith("params.yaml: ")


@pytest.mark.parametrize("value", ["1e-5", "1E-5", 1e-5, "0.00001"])
def test_a_small_number_given_as_text_is_a_number(value):
    """YAML 1.1 reads 1e-5 without a dot as text."""
    assert validate(changed(ppo__lr=value)).ppo.lr == 1e-5


def test_whole_floats_are_integers_and_others_are_not():
    assert validate(changed(ppo__epochs=2.0)).ppo.epochs == 2
    assert "ppo.epochs: " in refusal(ppo__epochs=2.5)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"data__source": "files"}, "data: reads must name the directory"),
        ({"data__reads": "data/gsm8k"}, "data: reads must name the directory"),
        ({"data__validation_share": 0.5, "data__gate_share": 0.5}, "data: validation_share + gate_share must stay"),
        ({"sft__tiny__heads": 3}, "sft.tiny: hidden_size must be a multiple"),
        ({"sft__source": "models/mine"}, "sft: reads must be models/mine with source=models/mine"),
        ({"sft__reads": "models/mine"}, "sft: reads must be conf/nothing with source=tiny:"),
        ({"preferences__source": "a.csv"}, "preferences: reads must be a.csv with source=a.csv"),
        ({"preferences__source": "s3://a/b"}, "preferences: source=s3://a/b: name a file, or a data set of the hub"),
        (
            {"ppo__reward__source": "reward_model"},
            "ppo: reward.reads must be models/reward with reward.source=reward_model",
        ),
        ({"ppo__reward__reads": "models/reward"}, "ppo: reward.reads must be conf/nothing with reward.source=verifier"),
        ({"ppo__reward__source": "rm"}, "ppo.reward.source: write reward_model for rm"),
        ({"ppo__critic__start": "reward_model"}, "ppo.critic: start=reward_model needs a trunk of its own"),
        (
            {"ppo__critic__kind": "separate", "ppo__critic__start": "reward_model"},
            "ppo: reward.reads must be models/reward with critic.start=reward_model",
        ),
        ({"ppo__selection": "reward_model"}, "ppo: reward.reads must be models/reward with selection=reward_model"),
        ({"ppo__kl__estimator": "k2"}, "ppo.kl: estimator=k2 has no place in the reward"),
        ({"ppo__kl__estimator": "k3"}, "ppo.kl: estimator=k3 has no place in the reward"),
        ({"ppo__kl__place": "loss"}, "ppo.kl: estimator=k1 in the loss has a gradient of mean zero"),
        ({"ppo__kl__kind": "adaptive", "ppo__kl__coef": 0}, "ppo.kl: kind=adaptive multiplies the coefficient"),
        (
            {"ppo__iterations": 3, "ppo__critic__warmup_iterations": 3},
            "ppo: critic.warmup_iterations=3 leaves no iteration that trains the policy: take fewer than iterations=3",
        ),
        (
            {"ppo__kl__kind": "adaptive", "ppo__kl__horizon": 51.2},
            "ppo: kl.horizon=51.2 would let one iteration turn the coefficient negative: take more than 0.2 x",
        ),
        (
            {
                "ppo__reward__source": "mixture",
                "ppo__reward__reads": "models/reward",
                "ppo__reward__verifier_weight": 0,
                "ppo__reward__reward_model_weight": 0,
            },
            "ppo.reward: a mixture needs",
        ),
        ({"ppo__minibatches": 7}, "ppo: minibatches must divide prompts_per_iteration x samples_per_prompt = 256"),
        ({"prompt__template": "?"}, "prompt: template must contain {question}"),
        ({"data__max_train": 0}, "data.max_train: "),
        ({"preferences__max_pairs": 5}, "preferences.max_pairs: "),
        ({"ppo__reward__format_bonus": 0.5}, "ppo.reward.format_bonus: "),
        ({"evaluation__confidence": 1.0}, "evaluation.confidence: "),
        ({"registry__name": "a/b"}, "registry.name: "),
        ({"registry__name": "a" * 201}, "registry.name: "),
        ({"seed": 2**32}, "seed: "),
        ({"ppo": 3}, "ppo: "),
        ({"ppo": None}, "ppo: "),
    ],
)
def test_nonsense_is_refused_by_name(values, part):
    assert part in refusal(**values)


@pytest.mark.parametrize("raw", [None, [], "text", 3])
def test_params_that_are_no_mapping_are_refused(raw):
    with pytest.raises(UsageError, match=r"params\.yaml: params: "):
        validate(raw)


def test_params_are_frozen():
    params = validate(DEFAULTS)
    with pytest.raises(ValueError, match="frozen"):
        params.ppo.lr = 1.0  # type: ignore[misc]


def test_a_null_cap_keeps_all():
    caps = validate(changed(data__max_train=None, data__max_test=7)).data
    assert (caps.max_train, caps.max_test) == (None, 7)


SCALES = ("smoke", "tiny", "smollm2-135m", "smollm2-words", "qwen2.5-0.5b")
GROUPS = {
    "data": ("generator", "gsm8k", "files"),
    "reward": ("verifier", "reward_model", "mixture"),
    "critic": ("shared", "separate"),
    "kl": ("fixed", "adaptive", "loss"),
}


def test_the_groups_here_are_those_of_conf():
    from rlhf.config import CONF_DIR

    there = {d.name: {f.stem for f in d.glob("*.yaml")} for d in CONF_DIR.iterdir() if d.is_dir()}
    assert there == {"scale": set(SCALES)} | {group: set(choices) for group, choices in GROUPS.items()}


@pytest.mark.parametrize("scale", SCALES)
def test_every_combination_of_groups_composes(scale):
    for choice in itertools.product(*GROUPS.values()):
        params = validate(compose([f"scale={scale}", *(f"{g}={c}" for g, c in zip(GROUPS, choice, strict=True))]))
        source = "hub" if choice[0] == "gsm8k" else choice[0]
        kl = "loss" if params.ppo.kl.place == "loss" else params.ppo.kl.kind
        assert (params.data.source, params.ppo.reward.source, params.ppo.critic.kind, kl) == (source, *choice[1:])
