"""What is wrong with a checkpoint is told at once, and base models get a template: tiny models made here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel

from rlhf import machine
from rlhf.data.prompts import render_prompt
from rlhf.errors import Problems, UserError
from rlhf.generation.answering import AnsweringPolicy, Settings
from rlhf.models import checkpoints, preflight, templates
from rlhf.models.checkpoints import Manifest, load_policy, load_tokenizer, save_checkpoint
from rlhf.models.preflight import Wanted, check
from rlhf.models.sources import fetch
from rlhf.models.tiny import make_tiny
from rlhf.params import Prompt, Tiny

PROMPT = Prompt(system="", template="{question}", max_tokens=40)
WANTED = Wanted(PROMPT, {"ppo.sampling.max_new_tokens": 24})


@pytest.fixture
def plain(shape: Tiny, tmp_path: Path) -> Path:
    (tmp_path / "plain").mkdir()
    checkpoints.write_model(tmp_path / "plain", *make_tiny(shape, seed=4))
    return tmp_path / "plain"


def set_config(directory: Path, **values: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | values))


def set_template(directory: Path, text: str) -> None:
    (directory / "chat_template.jinja").write_text(text)


def spoil_weight(directory: Path) -> None:
    model = checkpoints.read_model(directory, "AutoModelForCausalLM")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    model.save_pretrained(directory)


def overflow(directory: Path) -> None:
    """Finite weights whose product is not."""
    model = checkpoints.read_model(directory, "AutoModelForCausalLM")
    with torch.no_grad():
        model.model.norm.weight.fill_(1e38)
        model.model.embed_tokens.weight.mul_(1e3)
    model.save_pretrained(directory)


def see_the_future(directory: Path) -> None:
    """A masked language model, which transformers loads as a causal one."""
    size = checkpoints.read_model(directory, "AutoModelForCausalLM").config.vocab_size
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    BertLMHeadModel(
        BertConfig(vocab_size=size, max_position_embeddings=64, initializer_range=0.5, **shape)
    ).save_pretrained(directory)


def test_a_sound_checkpoint_passes(plain: Path, shape: Tiny) -> None:
    passed = check(plain, WANTED)
    assert passed.parameters == make_tiny(shape, 4)[0].num_parameters() == preflight.weights(plain)
    assert (passed.stop_token, passed.notes) == ("<|end|>", [])


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (spoil_weight, "its weight model.layers.1.mlp.up_proj.weight holds values that are not finite"),
        (overflow, "its logits are not finite"),
        (see_the_future, "it looks at later tokens: take a causal language model"),
        (
            lambda place: set_config(place, max_position_embeddings=63),
            "its context holds 63 tokens, fewer than prompt.max",
        ),
        (lambda place: set_template(place, "{{ raise_exception('no') }}"), r"does not render a prompt \(no\)"),
        (lambda place: set_template(place, "{% if %}"), "does not render a prompt .*: set sft.chat_template"),
        (lambda place: set_template(place, "hello"), "a prompt's tokens do not read as the question"),
        (lambda place: set_config(place, quantization_config={"quant_method": "gptq"}), "its weights are quantised"),
    ],
)
def test_one_problem_is_one_line(plain: Path, spoil: Callable[[Path], None], fault: str) -> None:
    spoil(plain)
    with pytest.raises(Problems, match=fault) as caught:
        check(plain, WANTED)
    assert len(caught.value.problems) == str(caught.value).count("\n") + 1 == 1


def test_all_problems_are_told_at_once_by_one_load(
    plain: Path, shape: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_weight(plain)
    set_config(plain, max_position_embeddings=48)
    (plain / "chat_template.jinja").unlink()
    loads = []
    load = checkpoints.read_model
    monkeypatch.setattr(checkpoints, "read_model", lambda *args: loads.append(args) or load(*args))
    with pytest.raises(Problems) as caught:
        fetch(str(plain), tmp_path / "fetched", tiny=shape, seed=0, wanted=WANTED)
    lines = str(caught.value).splitlines()
    assert [line.removeprefix(f"sft.source={plain}: ")[:30] for line in lines] == [
        "its tokenizer has no chat temp",
        "its context holds 48 tokens, f",
        "its weight model.layers.1.mlp.",
        "3 problems, each on a line abo",
    ]
    assert len(loads) == 1


def test_a_model_beyond_the_memory_is_not_loaded(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = preflight.weights(plain)
    monkeypatch.setattr(machine, "memory", lambda: 4 * count)
    (note,) = check(plain, WANTED).notes
    assert note.startswith("training all weights takes about 0.0 GB, and this machine has 0.0 GB: ppo.lora.rank=8")
    monkeypatch.setattr(machine, "memory", lambda: 4 * count - 1)
    monkeypatch.setattr(checkpoints, "read_model", lambda *_: pytest.fail("loaded"))
    with pytest.raises(Problems, match="its weights take 0.0 GB in float32 and this machine has 0.0 GB"):
        check(plain, WANTED)


def test_code_that_comes_with_a_checkpoint_is_told_of_and_never_run(plain: Path, tmp_path: Path) -> None:
    (plain / "modeling_mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    set_config(plain, auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    (note,) = check(plain, WANTED).notes
    assert (
        note
        == "it comes with code of its own (modeling_mine.Mine), which is never run: transformers' own class is used"
    )
    set_config(plain, model_type="mine", auto_map={"AutoConfig": "modeling_mine.Mine"})
    with pytest.raises(Problems, match=r"code of its own \(modeling_mine.Mine\), which is never run: take one without"):
        check(plain, WANTED)
    assert not (tmp_path / "ran").exists()


# --- base models


@pytest.fixture
def base(plain: Path) -> Path:
    """A checkpoint without template and end: `<|assistant|>` is the token that its text ends with."""
    (plain / "chat_template.jinja").unlink()
    config = json.loads((plain / "tokenizer_config.json").read_text())
    del config["eos_token"], config["pad_token"]
    (plain / "tokenizer_config.json").write_text(json.dumps(config))
    return plain


def test_a_base_model_gets_a_template_that_its_checkpoints_carry(base: Path, shape: Tiny, tmp_path: Path) -> None:
    fetched = tmp_path / "fetched"
    given = {"chat_template": "plain", "eos_token": "<|user|>"}
    manifest = fetch(str(base), fetched, tiny=shape, seed=0, wanted=WANTED, **given)
    assert (manifest.stop_token, manifest.params) == ("<|user|>", given)
    tokenizer = load_tokenizer(fetched)
    assert tokenizer.eos_token == tokenizer.pad_token == "<|user|>"
    rendered = tokenizer.decode(render_prompt(tokenizer, "1+1?", PROMPT.model_copy(update={"system": "Think."})))
    assert rendered == "Think.\n\nQuestion: 1+1?\nAnswer:\n"

    trained = Manifest(kind="policy", source="directory", prompt=PROMPT.model_dump(), stop_token=tokenizer.eos_token)
    save_checkpoint(tmp_path / "policy", load_policy(fetched), tokenizer, trained)
    generation = json.loads((tmp_path / "policy" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|user|>")
    (answer,) = AnsweringPolicy(tmp_path / "policy").answer(["1+1?"], Settings(max_new_tokens=4))
    assert len(answer.responses) == 1


def test_a_template_in_jinja_replaces_the_checkpoints_own(plain: Path) -> None:
    own = "<|user|>{{ messages[-1]['content'] }}!<|assistant|>"
    assert templates.give(plain, own, "") == {"chat_template": own}
    tokenizer = checkpoints.read_tokenizer(plain)
    assert tokenizer.decode(render_prompt(tokenizer, "1+1?", PROMPT)) == "<|user|>1+1?!<|assistant|>"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|pad|>")


def test_nothing_given_changes_nothing(plain: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in plain.iterdir()}
    assert templates.give(plain, "", "") == {}
    assert {path.name: path.stat().st_mtime_ns for path in plain.iterdir()} == before


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (("", "<|im_end|>"), r"sft.eos_token=<\|im_end\|>: no token of its vocabulary"),
        (("chatml", ""), "sft.chat_template=chatml: no template: write plain, or Jinja"),
    ],
)
def test_what_cannot_be_given_is_refused(base: Path, given: tuple[str, str], fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        templates.give(base, *given)
