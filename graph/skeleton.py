"""The model without its weights: which class a config stands for, an instance on the meta device, and inputs for it."""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ._errors import LayoutError, first_line

_TOKENS = 4


def load_config(folder: str | Path) -> Any:
    """The transformers config of a checkpoint folder. Raises `LayoutError` if there is none, or if it is quantized."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise LayoutError(f"{folder}: no config.json; model.path must be a Hugging Face checkpoint folder")
    config = read_config(folder)
    if getattr(config, "quantization_config", None):
        method = dict(config.quantization_config).get("quant_method", "unknown")
        raise LayoutError(f"{path}: the model is quantized already ({method}); start from the original checkpoint")
    return config


def read_config(folder: str | Path) -> Any:
    """The transformers config of a checkpoint folder, quantized or not."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise LayoutError(f"{folder}/config.json: {first_line(error) or type(error).__name__}") from error


def model_class(config: Any) -> type[nn.Module]:
    """The transformers class that a config stands for: the one it names, else a model with a head, else the bare one.

    Classes are taken from transformers alone; code that comes with a checkpoint is never run.
    """
    import transformers

    for name in getattr(config, "architectures", None) or ():
        cls = getattr(transformers, str(name), None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls
    causal, seq2seq = transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM
    order = [causal, transformers.AutoModelForMaskedLM, transformers.AutoModelForImageClassification]
    if getattr(config, "is_encoder_decoder", False):
        order = [seq2seq, transformers.AutoModelForSpeechSeq2Seq, *order]
    for auto in (*order, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            found = auto._model_mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise LayoutError(
        f"model type {config.model_type!r} is no model of transformers {transformers.__version__}; models with code of "
        "their own are not supported, since that code would have to be run"
    )


def is_causal_lm(config: Any) -> bool:
    """True for models whose logits at a token predict the next one."""
    import transformers

    found = transformers.AutoModelForCausalLM._model_mapping.get(type(config), ())
    return model_class(config) in (found if isinstance(found, tuple) else (found,))


def reads_tokens_alone(config: Any) -> bool:
    """True for models whose forward needs nothing but token ids: no image, no sound, no second sequence."""
    main = getattr(model_class(config), "main_input_name", "input_ids")
    return main == "input_ids" and not getattr(config, "is_encoder_decoder", False)


def skeleton(config: Any) -> nn.Module:
    """The model of `config` on the meta device: every module and shape, no memory."""
    with torch.device("meta"):
        try:
            return new_model(config)
        except LayoutError:
            raise
        except Exception as error:  # whatever the model's own code raises
            raise LayoutError(f"model type {config.model_type!r} cannot be built from its config: {error}") from error


def new_model(config: Any, dtype: torch.dtype | None = None) -> nn.Module:
    """An instance on the current device, with ties; in the config's dtype unless one is given."""
    cls: Any = model_class(config)
    settings = {} if dtype is None else {"dtype": dtype}
    # what AutoModel.from_config calls for the class that it chose
    model: nn.Module = cls._from_config(config, **settings)
    return model.eval()


def example_inputs(model: nn.Module) -> dict[str, Tensor]:
    """The smallest inputs of a model: a few tokens, an image, or the features of a piece of speech; zeros."""
    config: Any = model.config
    known = inspect.signature(model.forward).parameters
    tokens = torch.zeros(1, _TOKENS, dtype=torch.long)
    inputs: dict[str, Tensor] = {}
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values" or ("pixel_values" in known and "input_ids" not in known):
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        inputs["pixel_values"] = torch.zeros(1, getattr(vision, "num_channels", 3), height, width)
    elif main == "input_features":
        inputs["input_features"] = torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions)
    else:
        inputs["input_ids"] = tokens
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in known:
        inputs["decoder_input_ids"] = tokens
    return inputs


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


def block_prefixes(model: nn.Module) -> tuple[str, ...]:
    """The repeated layers: items of every outermost `ModuleList` whose items hold parameters and share one class."""
    blocks: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len({type(child) for child in module}) != 1:
            continue
        nested = any(name.startswith(f"{prefix}.") for prefix in blocks)
        if not nested and next(module.parameters(), None) is not None and list(module[0].children()):
            blocks += [f"{name}.{index}" for index in range(len(module))]
    return tuple(blocks)
