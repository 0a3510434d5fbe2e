from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf.errors import UserError
from rlhf.models import checkpoints
from rlhf.models.checkpoints import Manifest, load_policy, load_reward_model, load_tokenizer, save_checkpoint
from rlhf.models.tiny import make_tiny
from rlhf.params import Tiny

Pair = tuple[PreTrainedModel, PreTrainedTokenizerBase]
SHAPE = Tiny(hidden_size=16, layers=1, heads=2, intermediate_size=32, context=64, vocabulary=270)
MANIFEST = Manifest(kind="sft", source="tiny:", parents={"fetched": "f" * 64}, seed=3, stop_token="<|end|>")
IDS = torch.tensor([[2, 40, 50, 60, 3]])


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_tiny(SHAPE, seed=0)


@pytest.fixture
def saved(pair: Pair, tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "sft", pair[0], pair[1], MANIFEST)
    return tmp_path / "sft"


def reward_model(pad: int, labels: int = 1) -> LlamaForSequenceClassification:
    config = LlamaConfig(
        vocab_size=270,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=pad,
        bos_token_id=None,
        eos_token_id=1,
    )
    config.num_labels = labels
    model: LlamaForSequenceClassification = LlamaForSequenceClassification(config)
    model.eval()
    return model


def test_a_policy_comes_back_in_float32_and_evaluation_mode(pair: Pair, saved: Path) -> None:
    model = load_policy(saved)
    assert model.dtype == torch.float32
    assert not model.training
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, pair[0](IDS).logits)
    weights = model.state_dict()
    assert weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()
    assert load_tokenizer(saved).encode("a 42") == pair[1].encode("a 42")


def test_a_bfloat16_checkpoint_loads_in_float32(pair: Pair, tmp_path: Path) -> None:
    half = make_tiny(SHAPE, seed=0)[0]
    half.bfloat16()
    save_checkpoint(tmp_path / "half", half, pair[1], MANIFEST)
    assert load_policy(tmp_path / "half").dtype == torch.float32


def test_tied_weights_are_stored_once(saved: Path) -> None:
    assert "lm_head.weight" not in load_file(saved / "model.safetensors")


def test_the_same_checkpoint_gives_the_same_bytes_and_none_holds_a_path(
    pair: Pair, saved: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    save_checkpoint(tmp_path / "elsewhere" / "again", load_policy(saved), load_tokenizer(saved), MANIFEST)
    names = sorted(path.name for path in saved.iterdir())
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja", "manifest.json"} <= set(names)
    for name in names:
        content = (saved / name).read_bytes()
        assert content == (tmp_path / "elsewhere" / "again" / name).read_bytes(), name
        assert str(tmp_path).encode() not in content, name


def test_the_manifest_holds_the_hash_of_every_other_file(pair: Pair, saved: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    others = {path.name for path in saved.iterdir()} - {"manifest.json"}
    assert manifest["files"] == {name: hashlib.sha256((saved / name).read_bytes()).hexdigest() for name in others}
    assert (manifest["kind"], manifest["seed"], manifest["parents"]) == ("sft", 3, {"fetched": "f" * 64})
    assert checkpoints.checkpoint_hash(saved) == hashlib.sha256((saved / "manifest.json").read_bytes()).hexdigest()
    assert checkpoints.read_manifest(saved) == Manifest.model_validate(manifest)


def test_everybody_may_read_the_weights(saved: Path) -> None:
    assert (saved / "model.safetensors").stat().st_mode == (saved / "config.json").stat().st_mode


def test_extra_tensors_travel_along_and_plain_transformers_ignores_them(pair: Pair, tmp_path: Path) -> None:
    head = {"weight": torch.arange(6.0).reshape(2, 3).T, "bias": torch.ones(1)}
    save_checkpoint(tmp_path / "policy", pair[0], pair[1], MANIFEST, {"value_head.safetensors": head})
    loaded = load_file(tmp_path / "policy" / "value_head.safetensors")
    assert torch.equal(loaded["weight"], torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))
    assert "value_head.safetensors" in checkpoints.read_manifest(tmp_path / "policy").files
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
        assert torch.equal(plain(IDS).logits, pair[0](IDS).logits)


def test_generation_is_greedy_and_stops_at_the_stop_token_by_default(saved: Path) -> None:
    written = json.loads((saved / "generation_config.json").read_text())
    assert (written["do_sample"], written["eos_token_id"], written["pad_token_id"]) == (False, 1, 0)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_missing_or_changed_file_is_named(saved: Path, name: str) -> None:
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=f"{name} is not what manifest.json says"):
        load_policy(saved)
    (saved / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        load_policy(saved)


def test_the_tokenizer_is_checked_without_the_weights(saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(b"changed")
    load_tokenizer(saved)
    (saved / "chat_template.jinja").write_text("changed")
    with pytest.raises(UserError, match="chat_template.jinja is not what"):
        load_tokenizer(saved)


def test_pickles_and_strangers_are_refused(saved: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="notes.txt is not in manifest.json"):
        load_policy(saved)
    (saved / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="pytorch_model.bin: pickled weights are never loaded: .*save_pretrained"):
        load_policy(saved)


def test_a_checkpoint_without_manifest_is_not_complete(saved: Path, tmp_path: Path) -> None:
    (saved / "manifest.json").unlink()
    for directory in (saved, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="manifest.json is missing"):
            load_policy(directory)


@pytest.mark.parametrize(("text", "fault"), [("{", "JSON"), ('{"kind": "other"}', "kind")])
def test_a_broken_manifest_says_where(saved: Path, text: str, fault: str) -> None:
    (saved / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=fault):
        checkpoints.read_manifest(saved)


def test_weights_that_do_not_fit_the_configuration_are_refused(pair: Pair, saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(UserError, match="missing weights, first model.layers.1"):
        checkpoints.read_model(saved, "AutoModelForCausalLM")
    (saved / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(UserError, match="does not load|mismatched"):
        checkpoints.read_model(saved, "AutoModelForCausalLM")
    (saved / "config.json").write_text(json.dumps(config | {"model_type": "nobody_knows"}))
    with pytest.raises(UserError, match="does not load as AutoModelForCausalLM: .*nobody_knows"):
        checkpoints.read_model(saved, "AutoModelForCausalLM")


def test_loading_prints_nothing(saved: Path) -> None:
    load = (
        f"from pathlib import Path; from rlhf.models.checkpoints import load_policy; load_policy(Path({str(saved)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", load], check=True, capture_output=True, text=True)
    assert done.stdout + done.stderr == ""


def test_an_interrupted_load_prints_no_report(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PreTrainedModel, "_initialize_missing_keys", interrupt)
    weights = load_file(saved / "model.safetensors")
    save_file({"model.norm.weight": weights["model.norm.weight"]}, saved / "model.safetensors")
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            checkpoints.read_model(saved, "AutoModelForCausalLM")
    finally:
        logger.removeHandler(handler)
    assert said == []


def test_remote_code_is_never_run(saved: Path, tmp_path: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    remote = {"model_type": "mine", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (saved / "config.json").write_text(json.dumps(config | remote))
    (saved / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError, match="does not load"):
        checkpoints.read_model(saved, "AutoModelForCausalLM")
    assert not (tmp_path / "ran").exists()


def test_a_reward_model_scores_alike_through_plain_transformers(pair: Pair, tmp_path: Path) -> None:
    model = reward_model(pad=0)
    save_checkpoint(tmp_path / "reward", model, pair[1], MANIFEST.model_copy(update={"kind": "reward"}))
    padded = torch.tensor([[2, 40, 3, 50, 1, 0, 0]])
    with torch.no_grad():
        expected = model(padded[:, :5]).logits
        for loaded in (
            load_reward_model(tmp_path / "reward"),
            AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward"),
        ):
            torch.testing.assert_close(loaded(padded).logits, expected)
    assert not (tmp_path / "reward" / "generation_config.json").exists()


@pytest.mark.parametrize(("pad", "labels", "fault"), [(1, 1, "pad_token_id is 1"), (0, 2, "2 labels")])
def test_a_reward_model_that_would_score_wrongly_is_refused(
    pair: Pair, tmp_path: Path, pad: int, labels: int, fault: str
) -> None:
    save_checkpoint(tmp_path / "reward", reward_model(pad, labels), pair[1], MANIFEST)
    with pytest.raises(UserError, match=fault):
        load_reward_model(tmp_path / "reward")


def tokenizer_with(saved: Path, **special: str | None) -> PreTrainedTokenizerBase:
    tokenizer = checkpoints.read_tokenizer(saved)
    for name, token in special.items():
        setattr(tokenizer, name, token)
    return tokenizer


def test_the_reward_pad_token_is_any_special_token_but_the_end(saved: Path) -> None:
    assert checkpoints.reward_pad_token(tokenizer_with(saved)) == "<|pad|>"
    assert checkpoints.reward_pad_token(tokenizer_with(saved, pad_token="<|end|>", unk_token="<|user|>")) == "<|user|>"
    assert checkpoints.reward_pad_token(tokenizer_with(saved, pad_token="<|end|>")) == "<|pad|>"


def test_a_tokenizer_with_one_special_token_cannot_pad_a_reward_model() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    alone = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="<e>", pad_token="<e>")
    with pytest.raises(UserError, match="no special token but its end-of-sequence token '<e>'"):
        checkpoints.reward_pad_token(alone)


def test_a_tokenizer_without_pad_token_pads_with_the_end(saved: Path) -> None:
    path = saved / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["pad_token"]
    path.write_text(json.dumps(config))
    assert checkpoints.read_tokenizer(saved).pad_token == "<|end|>"


def test_a_full_disk_is_one_line(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(type(pair[0]), "save_pretrained", full)
    with pytest.raises(UserError, match="cannot be written: .*No space left"):
        save_checkpoint(tmp_path / "sft", pair[0], pair[1], MANIFEST)
    assert not (tmp_path / "sft" / "manifest.json").exists()
