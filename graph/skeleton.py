"""The model without its weights: a meta instance of its config, and which module reads and makes which activation."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ._errors import LayoutError


def load_config(folder: str | Path) -> Any:
    """The transformers config of a checkpoint folder. Raises `LayoutError` if there is none, or if it is quantized."""
    from transformers import AutoConfig

    path = Path(folder) / "config.json"
    if not path.is_file():
        raise LayoutError(f"{folder}: no config.json; model.path must be a Hugging Face checkpoint folder")
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise LayoutError(f"{path}: {error}") from error
    if getattr(config, "quantization_config", None):
        method = dict(config.quantization_config).get("quant_method", "unknown")
        raise LayoutError(f"{path}: the model is quantized already ({method}); start from the original checkpoint")
    return config


def skeleton(config: Any) -> nn.Module:
    """The causal language model of `config` on the meta device: every module and shape, no memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()
        except ValueError as error:
            raise LayoutError(f"model type {config.model_type!r} is no causal language model: {error}") from error


def tied_names(model: nn.Module) -> dict[str, str]:
    """Alias -> stored name, for parameters that are one tensor in the model: `{"lm_head.weight": "model.embed..."}`."""
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = id(parameter)
        if key in first:
            ties[name] = first[key]
        else:
            first[key] = name
    return ties


@dataclass
class Reads:
    """What a forward on meta tensors shows: the activation that each linear reads, and the module that made it."""

    groups: list[list[str]] = field(default_factory=list)
    producers: dict[str, str] = field(default_factory=dict)  # first linear of a group -> module


def _identity(x: Tensor) -> tuple:
    return (x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), tuple(x.stride()), x._version)


def trace_reads(model: nn.Module, linears: Iterable[str]) -> Reads:
    """Group linears that are given the very same tensor, in one forward of a copy that holds fake tensors.

    Where the model cannot run so (data-dependent control flow) every linear is its own group and no producer is known.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    names = list(linears)
    # bfloat16: the grouped matmul of mixture-of-experts models accepts nothing else on fake tensors
    model = copy.deepcopy(model).bfloat16()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        set_attention = getattr(model, "set_attn_implementation", None)
        if callable(set_attention):
            set_attention("eager")
        try:
            return _trace(model, names)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, DataDependentOutputException):
            return Reads(groups=[[name] for name in names])


def _trace(model: nn.Module, names: list[str]) -> Reads:
    inputs: dict[str, tuple] = {}
    outputs: dict[tuple, str] = {}
    alive: list[Tensor] = []  # a freed storage may be reused, and would look like the same activation

    def before(name: str):
        def hook(_module, args):
            if args and isinstance(args[0], Tensor):
                alive.append(args[0])
                inputs[name] = _identity(args[0])

        return hook

    def after(name: str):
        def hook(_module, _args, out):
            if isinstance(out, Tensor):
                alive.append(out)
                outputs[_identity(out)] = name

        return hook

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(before(name))
    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(after(name))
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)
    groups: dict[object, list[str]] = {}
    for name in names:
        groups.setdefault(inputs.get(name, name), []).append(name)
    made = {group[0]: outputs[key] for key, group in groups.items() if isinstance(key, tuple) and key in outputs}
    return Reads(groups=list(groups.values()), producers=made)


def norm_offset(module: nn.Module, width: int) -> float:
    """The constant c of a norm that multiplies by `c + w` (0 for most, 1 for Gemma's), read off two evaluations."""
    probe: nn.Module = copy.deepcopy(module).to_empty(device="cpu").float()
    x = torch.linspace(0.5, 1.5, width).reshape(1, width)

    def run(value: float) -> Tensor:
        for name, parameter in probe.named_parameters():
            parameter.data.fill_(0.0 if name == "bias" else value)
        out: Tensor = probe(x)
        return out

    with torch.no_grad():
        zero, one = run(0.0), run(1.0)
    slope = (one - zero).abs().amax()
    return float((zero.abs().amax() / slope).round()) if slope > 0 else 0.0
