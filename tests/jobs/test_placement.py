"""What the environment of a launcher asks for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import regauge as rg
import yaml
from ranks import contents
from regauge import PlanError
from regauge.jobs import placement
from regauge.jobs.placement import Placement, make_placement, resolve
from transformers import LlamaConfig

EXAMPLES = Path(rg.__file__).parent / "examples"
ACCELERATE = {"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "2"}
TRANSFORMER = {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, {"kind": "whole"}),
        ({"ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "2"}, {"kind": "whole"}),
        (ACCELERATE, {"kind": "fsdp1", "wrap": ()}),
        ({**ACCELERATE, "FSDP_VERSION": "2"}, {"kind": "fsdp2", "wrap": (), "reshard_after_forward": True}),
        ({**ACCELERATE, **TRANSFORMER}, {"kind": "fsdp1", "wrap": None}),
        (
            {**ACCELERATE, **TRANSFORMER, "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer, Embedding"},
            {"wrap": ("LlamaDecoderLayer", "Embedding")},
        ),
        (
            {**ACCELERATE, "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "1000"},
            {"min_num_params": 1000, "wrap": None},
        ),
        ({**ACCELERATE, "FSDP_USE_ORIG_PARAMS": "true"}, {"use_orig_params": True}),
        ({**ACCELERATE, "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, {"reshard_after_forward": False}),
        ({**ACCELERATE, "FSDP_SHARDING_STRATEGY": "2"}, {"reshard_after_forward": False}),
        ({**ACCELERATE, "FSDP_SHARDING_STRATEGY": "NO_SHARD"}, {"kind": "whole"}),
        ({**ACCELERATE, "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}, {"reshard_after_forward": False}),
    ],
)
def test_accelerates_environment(env, expected):
    found = resolve(Placement(), env)
    assert {name: getattr(found, name) for name in expected} == expected


def test_hybrid_sharding_is_by_machine(monkeypatch):
    monkeypatch.setattr(placement, "world", lambda: 8)
    env = {**ACCELERATE, "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD_ZERO2", "LOCAL_WORLD_SIZE": "4"}
    found = resolve(Placement(), env)
    assert (found.replicate, found.reshard_after_forward) == (2, False)


def test_a_launcher_of_several_processes_streams(monkeypatch):
    monkeypatch.setattr(placement, "world", lambda: 2)
    assert resolve(Placement(), {}).kind == "stream"


def test_a_placement_that_is_named_does_not_depend_on_the_environment():
    assert resolve(Placement(kind="stream"), ACCELERATE) == Placement(kind="stream")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"FSDP_VERSION": "3"}, "FSDP_VERSION is '3', expected 1 or 2"),
        ({"FSDP_SHARDING_STRATEGY": "SOME"}, "FSDP_SHARDING_STRATEGY is 'SOME'"),
        ({"FSDP_AUTO_WRAP_POLICY": "SOME"}, "FSDP_AUTO_WRAP_POLICY is 'SOME'"),
    ],
)
def test_settings_that_are_unknown_are_refused(env, message):
    with pytest.raises(PlanError, match=message):
        resolve(Placement(), {**ACCELERATE, **env})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fsdp3", "expected one of auto, whole"),
        ({"kind": "fsdp2", "warp": "X"}, "warp"),
        ({"timeout": 0}, "timeout is in seconds"),
        ({"threads": 0}, "threads must be"),
    ],
)
def test_bad_placements_are_refused(value, message):
    with pytest.raises(PlanError, match=message):
        make_placement(value)


def test_settings_of_training_are_told_to_have_no_effect(caplog):
    with caplog.at_level("INFO"):
        resolve(Placement(), {**ACCELERATE, "FSDP_OFFLOAD_PARAMS": "true", "ACCELERATE_MIXED_PRECISION": "bf16"})
    assert "FSDP_OFFLOAD_PARAMS=true is for training" in caplog.text
    assert "ACCELERATE_MIXED_PRECISION=bf16 is for training" in caplog.text


@pytest.mark.parametrize("name", ["fsdp1.yaml", "fsdp2.yaml"])
def test_the_example_configs_are_what_accelerate_reads(name):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(EXAMPLES / name))
    assert config.num_processes == 2
    assert config.fsdp_config["fsdp_version"] == int(name[4])
    assert name in (EXAMPLES / name).read_text().splitlines()[0]
    assert yaml.safe_load((EXAMPLES / name).read_text())["distributed_type"] == "FSDP"


CONFIG = LlamaConfig(
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    vocab_size=320,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=0,
)


def call(*arguments, cwd, **settings):
    env = {**os.environ, "OMP_NUM_THREADS": "1", **settings}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
LAUNCH = ("-m", "accelerate.commands.launch", "--config_file")
LAUNCHERS = {
    "one": (),
    "fsdp1": (*LAUNCH, str(EXAMPLES / "fsdp1.yaml")),
    "fsdp2": (*LAUNCH, str(EXAMPLES / "fsdp2.yaml")),
    "stream": TORCHRUN,
}


@pytest.mark.slow
def test_the_founding_script_writes_the_same_folder_however_it_is_launched(make_folder_of, tmp_path):
    folder = make_folder_of(CONFIG, tmp_path / "model")
    for name, launcher in LAUNCHERS.items():
        out = call(
            *launcher, str(EXAMPLES / "quantize.py"), str(folder), str(tmp_path / name),
            cwd=tmp_path, REGAUGE_CACHE=str(tmp_path / f"cache-{name}"),
        )  # fmt: skip
        assert out.count("linears quantized") == 1
        assert name == "one" or f"in each of 2 processes, {name}" in out
    expected = contents(tmp_path / "one")
    assert len(expected) > 6
    for name in ("fsdp1", "fsdp2", "stream"):
        assert contents(tmp_path / name) == expected, name


@pytest.mark.slow
def test_the_command_on_two_processes(make_folder_of, tmp_path):
    folder = make_folder_of(CONFIG, tmp_path / "model")
    run = ("-m", "regauge", f"model.path={folder}", "data.num_samples=5", "data.max_seq_length=32", "evaluation=none")
    for kind in ("whole", "stream", "fsdp1", "fsdp2"):
        out = call(
            *TORCHRUN, *run, f"placement={kind}", f"output_dir={kind}",
            cwd=tmp_path, REGAUGE_CACHE=str(tmp_path / f"cache-{kind}"),
        )  # fmt: skip
        assert out.count("linears quantized") == 1
    call(*run, "output_dir=alone", cwd=tmp_path, REGAUGE_CACHE=str(tmp_path / "cache-alone"))
    for kind in ("whole", "stream", "fsdp1", "fsdp2"):
        assert contents(tmp_path / kind) == contents(tmp_path / "alone")


@pytest.mark.slow
def test_errors_of_a_command_on_two_processes_are_told_once(tmp_path):
    arguments = (*TORCHRUN, "-m", "regauge", "model.path=absent")
    done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.count("error: model.path: absent: no such folder") == 1
