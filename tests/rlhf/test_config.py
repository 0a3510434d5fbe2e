"""Composing, writing, reading and refusing `params.yaml`; the command line of rlhf.config."""

from __future__ import annotations

import errno
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf import config
from rlhf.errors import UsageError, UserError

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "params.yaml"


def run(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    command = [sys.executable, "-m", "rlhf.config", *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


def refused(overrides: list[str], path: Path = COMMITTED) -> str:
    with pytest.raises(UsageError) as caught:
        config.load(overrides, path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- what is written


def test_the_committed_params_are_the_composed_default(tmp_path):
    config.write(config.compose(), tmp_path / "params.yaml")
    assert (tmp_path / "params.yaml").read_bytes() == COMMITTED.read_bytes()


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["scale=smoke"],
        ["scale=smollm2-135m"],
        ["scale=qwen2.5-0.5b", "ppo.lr=1e-5"],
        ["data=gsm8k"],
        ["data=files", "data.reads=/there/gsm8k"],
        ["reward=reward_model"],
        ["reward=mixture", "ppo.reward.reward_model_weight=0.5"],
        ["critic=separate"],
        ["kl=adaptive", "ppo.kl.target=3"],
        ["sft.source=tiny:", "data.max_train=null", "prompt.system='Say: \"yes\", # or é'"],
    ],
    ids=" ".join,
)
def test_compose_writes_the_bytes_that_dvc_writes(tmp_path, overrides):
    """The function that `dvc exp run -S` calls for params.yaml (Experiments._update_params)."""
    from dvc.utils.hydra import compose_and_dump

    compose_and_dump(tmp_path / "dvc.yaml", str(config.CONF_DIR), None, "config", str(ROOT), overrides)
    config.write(config.compose(overrides), tmp_path / "ours.yaml")
    assert (tmp_path / "ours.yaml").read_bytes() == (tmp_path / "dvc.yaml").read_bytes()


def test_dvc_composes_the_same_files():
    """The settings of `.dvc/config` that decide what `dvc exp run -S` composes."""
    from configobj import ConfigObj

    assert ConfigObj(str(ROOT / ".dvc" / "config"))["hydra"] == {"enabled": "True"}


def test_written_params_read_back_as_they_were_composed(tmp_path):
    raw = config.compose(["scale=qwen2.5-0.5b", "prompt.system='a: b # c'"])
    config.write(raw, tmp_path / "params.yaml")
    assert config.load((), tmp_path / "params.yaml") == config.validate(raw)


def test_writing_leaves_an_equal_file_alone_and_no_temporary_behind(tmp_path):
    path = tmp_path / "params.yaml"
    config.write(config.compose(), path)
    before = path.stat()
    config.write(config.compose(), path)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    config.write(config.compose(["seed=1"]), path)
    assert path.stat().st_ino != before.st_ino
    assert [file.name for file in tmp_path.iterdir()] == ["params.yaml"]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "params.yaml"
    config.write(config.compose(), path)
    old = path.read_bytes()

    def full(self, *_arguments, **_options):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match=r"params\.yaml cannot be written: No space left on device"):
        config.write(config.compose(["seed=1"]), path)
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["params.yaml"]


def test_a_read_only_disk_is_told_in_one_line_and_no_matter_where_nothing_changes(tmp_path, monkeypatch):
    path = tmp_path / "params.yaml"
    config.write(config.compose(), path)

    def read_only(*_arguments, **_options):
        raise OSError(errno.EROFS, "Read-only file system")

    for change in ("write_bytes", "write_text", "replace", "unlink"):
        monkeypatch.setattr(Path, change, read_only)
    config.write(config.compose(), path)
    with pytest.raises(UserError, match=r"params\.yaml cannot be written: Read-only file system: make room or access"):
        config.write(config.compose(["seed=1"]), path)


def test_a_file_that_somebody_changed_is_noticed(tmp_path):
    path, raw = tmp_path / "params.yaml", config.compose()
    config.write(raw, path)
    config.require_unchanged(raw, path)
    for changed in (config.compose(["seed=1"]), None):
        path.unlink() if changed is None else config.write(changed, path)
        with pytest.raises(UserError, match=r"^params\.yaml was changed while the pipeline ran: run it again"):
            config.require_unchanged(raw, path)


# --- what compose refuses


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["scale=huge"], ["scale=huge: ", "Could not find 'scale/huge'", "take one of qwen2.5-0.5b, smoke, smollm2"]),
        (["sclae=tiny"], ["Could not override 'sclae': conf/ has the groups"]),
        (["ppo.nope=3"], ["Could not override 'ppo.nope'", "help lists the keys"]),
        (["+ppo.nope=3"], ["ppo.nope: unknown key"]),
        (["~ppo.kl"], ["ppo.kl: missing"]),
        (["ppo.lr=-1", "seed=-3"], ["seed: ", "ppo.lr: "]),
        (["ppo.lr=1,2"], ["ppo.lr=1,2"]),
        (["=1"], ["=1: Config group override must be a string"]),
        (["ppo.lr=${nope}"], ["'nope' not found"]),
        (["tiny"], ["tiny"]),
        (["--help"], ["--help"]),
        (["ppo.lr=[1"], ["ppo.lr=[1"]),
        (["sft.source=models/mine"], ["sft: reads must be models/mine"]),
        (["seed=1", "hydra.verbose=true"], ["hydra.verbose=true: Hydra only composes here"]),
        (["+hydra.run.dir=/tmp/x"], ["hydra.run.dir=/tmp/x: Hydra only composes here"]),
        (["hydra/job_logging=none"], ["hydra/job_logging=none: Hydra only composes here"]),
    ],
    ids=str,
)
def test_compose_refuses_in_one_line(overrides, parts):
    with pytest.raises(UsageError) as caught:
        config.compose(overrides)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


# --- what load reads


def test_load_reads_the_committed_params():
    assert config.load((), COMMITTED) == config.validate(config.compose())


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "seed: missing"),
        (b"# nothing\n", "seed: missing"),
        (b"- seed\n- ppo\n", "holds a list instead of keys"),
        (b"42\n", "not valid YAML"),
        (b"seed\n", "seed: Input should be a valid integer"),
        (b"seed: [1\nppo: 2\n", "not valid YAML"),
        (b"seed: 1\nseed: 2\n", "not valid YAML"),
        (bytes(range(256)), "not valid YAML"),
        (b"seed: \x00", "not valid YAML"),
        (b"prompt: {system: '\xe9'}", "not valid YAML"),
        (b"seed: ${nope}\n", "'nope' not found"),
        (b"seed: !!python/object/apply:os.getpid []\n", "not valid YAML"),
    ],
)
@pytest.mark.parametrize("overrides", [[], ["ppo.reward.source=verifier"], ["sft.source=models/mine"]], ids=str)
def test_an_unreadable_file_is_refused_in_one_line(tmp_path, content, part, overrides):
    path = tmp_path / "params.yaml"
    path.write_bytes(content)
    text = refused(overrides, path)
    assert part in text
    assert text.startswith(str(path))


def test_a_missing_file_says_how_to_write_it(tmp_path):
    assert "is missing: write it with python -m rlhf.config compose" in refused([], tmp_path / "params.yaml")
    assert "is missing" in refused([], tmp_path)


@pytest.mark.parametrize("text", ["1e-5", "'1e-5'", "1.0e-05"])
def test_a_small_number_in_the_file_is_a_number_however_it_is_written(tmp_path, text):
    path = tmp_path / "params.yaml"
    path.write_text(re.sub(r"(?m)^(ppo:(?:\n .*)*?\n  lr:).*", rf"\g<1> {text}", COMMITTED.read_text()))
    assert config.load((), path).ppo.lr == 1e-5


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("ppo.lr=1e-5", "ppo", "lr", 1e-5),
        ("ppo.lr='1e-5'", "ppo", "lr", 1e-5),
        ("data.max_train=null", "data", "max_train", None),
        ("data.max_train=7", "data", "max_train", 7),
        ("sft.source=tiny:", "sft", "source", "tiny:"),
        ("sft.source=hf://org/name@main", "sft", "source", "hf://org/name@main"),
        ('sft.source="wheel://a==1.0/b.gguf"', "sft", "source", "wheel://a==1.0/b.gguf"),
        ("prompt.system=", "prompt", "system", ""),
        ("prompt.system=Think step by step.", "prompt", "system", "Think step by step."),
        ("prompt.template='Q: {question}'", "prompt", "template", "Q: {question}"),
        ("runtime.deterministic=false", "runtime", "deterministic", False),
        ("data.reads=${sft.reads}", "data", "reads", "conf/nothing"),
    ],
)
def test_overrides_are_read_in_hydras_grammar(override, section, name, value):
    assert getattr(getattr(config.load([override], COMMITTED), section), name) == value


def test_the_last_of_two_overrides_wins():
    assert config.load(["seed=1", "seed=2"], COMMITTED).seed == 2


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["ppo.lrr=1"], "with ppo.lrr=1: ppo.lrr: unknown key"),
        (["nope.deep.er=1"], "nope: unknown key"),
        (["ppo.lr=-1", "ppo.epochs=0"], "ppo.epochs: Input should be greater than or equal to 1; ppo.lr: "),
        (["ppo.lr=true"], "ppo.lr: "),
        (["ppo.lr=nan"], "ppo.lr: "),
        (["ppo=3"], "ppo: "),
        (["ppo=3", "ppo.reward.source=reward_model"], "ppo.lr: missing"),
        (["ppo.lr.x=3"], "ppo.lr: "),
        (["seed=???"], "seed: "),
        (["ppo.lr=${nope}"], "with ppo.lr=${nope}: Interpolation key 'nope' not found"),
        (["lr"], "override 'lr': "),
        (["=3"], "override '=3': write key=value"),
        (["--help"], "--help: no such option: write key=value"),
        (["+ppo.lr=3"], "override '+ppo.lr=3': write key=value"),
        (["~ppo.lr"], "override '~ppo.lr': write key=value"),
        (["ppo.lr=1,2"], "override 'ppo.lr=1,2': write key=value with one value"),
        (["ppo.lr=[1"], "override 'ppo.lr=[1': "),
        (["sft.source=wheel://a==1/b"], "with quotes around a value that holds = "),
        (["prompt.template={question}"], "with quotes around a value that holds = "),
        (["data.source=files"], "data: reads must name the directory"),
        (["kl=adaptive"], "kl is a group of conf/, and no key: compose params.yaml with it: python -m rlhf.config com"),
        (["data=files"], "python -m rlhf.config compose data=files, or make run data=files"),
        (["prompt.template='a\nb'"], "prompt: template must contain"),
    ],
)
def test_wrong_overrides_are_refused_by_name(overrides, part):
    with pytest.raises(UsageError) as caught:
        config.load(overrides, COMMITTED)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "reward", "sft"),
    [
        (["ppo.reward.source=reward_model"], "models/reward", "conf/nothing"),
        (["ppo.reward.source=mixture"], "models/reward", "conf/nothing"),
        (["ppo.reward.source=verifier"], "conf/nothing", "conf/nothing"),
        (["ppo.critic.kind=separate", "ppo.critic.start=reward_model"], "models/reward", "conf/nothing"),
        (["ppo.selection=reward_model"], "models/reward", "conf/nothing"),
        (["sft.source=models/mine"], "conf/nothing", "models/mine"),
        (["sft.source=hf://a/b"], "conf/nothing", "conf/nothing"),
        (["sft.source=models/mine", "sft.reads=models/mine"], "conf/nothing", "models/mine"),
    ],
    ids=str,
)
def test_reads_follows_an_overridden_source(overrides, reward, sft):
    params = config.load(overrides, COMMITTED)
    assert (params.ppo.reward.reads, params.sft.reads) == (reward, sft)


@pytest.mark.parametrize(
    ("source", "reads"),
    [("pairs.jsonl", "pairs.jsonl"), ("hf://a/b@main", "conf/nothing"), ("sampled", "conf/nothing")],
)
def test_reads_follows_an_overridden_preference_source(source, reads):
    assert config.load([f"preferences.source={source}"], COMMITTED).preferences.reads == reads


def test_an_explicit_reads_is_not_overruled():
    assert "ppo: reward.reads must be" in refused(["ppo.reward.source=reward_model", "ppo.reward.reads=conf/nothing"])


# --- the command line


def test_the_command_line_composes_checks_and_helps(tmp_path):
    composed = run("compose", "scale=smoke", "seed=3", directory=tmp_path)
    assert (composed.returncode, composed.stderr) == (0, "")
    assert composed.stdout == "params.yaml written: scale=smoke seed=3\n"
    assert config.load((), tmp_path / "params.yaml").seed == 3
    assert run("check", directory=tmp_path).stdout == "params.yaml is valid\n"
    helped = run("help", directory=tmp_path)
    assert helped.returncode == 0
    assert [line.split()[0] for line in helped.stdout.splitlines()] == [key for key, _ in config.describe()]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["compose", "scale=huge"], "take one of"),
        (["compose", "ppo.lr=-1"], "ppo.lr: "),
        (["check"], "params.yaml is missing: write it with"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_ends_with_one_line_and_2(tmp_path, arguments, part):
    done = run(*arguments, directory=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("config: ")
    assert part in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_is_no_error(tmp_path, option):
    done = run(option, directory=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "python -m rlhf.config compose" in done.stdout


def test_ctrl_c_is_one_line(tmp_path):
    """Interrupted in the middle of composing, here where Hydra is loaded."""
    (tmp_path / "hydra.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "rlhf.config", "compose"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children would ignore it
    try:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "config: interrupted\n")


def test_a_fault_with_a_line_break_is_told_in_one_line(tmp_path):
    config.write(config.compose(), tmp_path / "params.yaml")
    done = run("check", "prompt.template='a\nb'", directory=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("key", ["data", "sft", "preferences"])
def test_a_source_that_is_missing_is_named(tmp_path, key):
    raw = {name: {"reads": "."} for name in ("data", "sft", "preferences")} | {key: {"reads": "there"}}
    with pytest.raises(UserError, match=rf"^{key}\.reads=there is missing: name the (directory|file) with"):
        config.check_sources(raw, tmp_path)
    (tmp_path / "there").mkdir()
    config.check_sources(raw, tmp_path)
