"""What a run tells of the machine that it ran on."""

from __future__ import annotations

import platform
import sys
from hashlib import sha256

import torch

from rlhf import anchors, machine

CPUINFO = "processor\t: 0\nvendor_id\t: Maker\nmodel name\t: Fast Processor 9\nprocessor\t: 1\nmodel name\t: Other\n"


def test_the_tags_say_what_decides_bits():
    tags = machine.tags()
    assert all(key.startswith("machine.") for key in tags)
    told = machine.of_tags(tags | {"stage": "train_ppo"})
    assert told["python"] == platform.python_version()
    assert told["torch"] == torch.__version__.partition("+")[0]
    assert told["lock"] == sha256((anchors.CHECKOUT / "requirements.lock").read_bytes()).hexdigest()
    assert told["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert set(machine.DECISIVE) - {"gpu"} <= told.keys()
    assert "stage" not in told


def test_a_process_without_torch_does_not_load_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    assert not {"machine.instructions", "machine.gpu"} & machine.tags().keys()
    assert "torch" not in sys.modules


def test_the_processor_is_named_as_linux_names_it(tmp_path):
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    assert machine.processor(tmp_path / "cpuinfo") == "Fast Processor 9"
    assert machine.processor(tmp_path / "none") == (platform.processor() or platform.machine())


def test_memory_is_what_a_container_may_take(tmp_path):
    limit = tmp_path / "memory.max"
    whole = machine.memory(limit)
    assert whole > 1 << 28
    for text, expected in (("max\n", whole), ("1048576\n", 1 << 20), (f"{whole * 2}\n", whole)):
        limit.write_text(text)
        assert machine.memory(limit) == expected
