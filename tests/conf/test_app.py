"""The command, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def command(*arguments, cwd, check=True):
    done = subprocess.run([sys.executable, "-m", "regauge", *arguments], cwd=cwd, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path / "cache"))


def test_help_names_groups_without_loading_torch(tmp_path):
    out = command("--help", cwd=tmp_path).stdout
    assert "smooth_w8a8" in out
    assert "alpha: 0.8" in out


@pytest.mark.usefixtures("own_cache")
def test_errors_are_one_line_and_exit_with_two(tmp_path):
    done = command("model.path=absent", cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: model.path: absent: no such folder; give a checkpoint folder or 'smollm2'"


def test_inspect_needs_a_config_only(tmp_path):
    from transformers import LlamaConfig

    settings = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(**settings, vocab_size=64, bos_token_id=0, eos_token_id=0).save_pretrained(tmp_path / "model")
    out = command("job=inspect", "model.path=model", "hydra.run.dir=run", cwd=tmp_path).stdout
    assert "model.layers.0-1 (2 alike)" in out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("written")] == [
        str(tmp_path / "run" / name) for name in ("inspect.json", "graph.svg")
    ]
    assert len(json.loads((tmp_path / "run" / "inspect.json").read_text())["symmetries"]) == 11
    (tmp_path / "model" / "config.json").write_text('{"model_type": "nope"}')
    done = command("job=inspect", "model.path=model", cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: model/config.json: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("own_cache")
def test_a_sweep_writes_a_folder_for_each_job_and_calibrates_once(tmp_path):
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    settings = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**settings, vocab_size=64, bos_token_id=0, eos_token_id=0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?").save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a b c a b " * 100)
    arguments = ["-m", "model.path=model", "data=text", "data.name=text.txt", "data.num_samples=2"]
    arguments += ["data.max_seq_length=16", "evaluation=text", "evaluation.name=text.txt", "evaluation.num_samples=2"]
    arguments += ["evaluation.max_seq_length=16", "output_dir=swept", "recipe.stages.smooth.alpha=0.3,0.7"]
    command(*arguments, cwd=tmp_path)
    reports = [json.loads((tmp_path / "swept" / str(n) / "report.json").read_text()) for n in (0, 1)]
    assert [r["recipe"]["stages"]["smooth"]["alpha"] for r in reports] == [0.3, 0.7]
    assert [r["statistics_reused"] for r in reports] == [False, True]
    assert len(list((tmp_path / "cache" / "statistics").iterdir())) == 1
    assert Path(tmp_path / "swept" / "0" / "model.safetensors").exists()
