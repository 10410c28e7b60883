"""A narrow instance of a config: the same modules with few channels and few layers, to run proofs on."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

# setting -> the largest value that it keeps
_WIDTHS = {
    "intermediate_size": 48,
    "ffn_dim": 48,
    "d_ff": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "n_inner": 48,
    "intermediate_size_mlp": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "d_kv": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "image_size": 16,
    "patch_size": 8,
    "num_mel_bins": 8,
    "max_source_positions": 16,
}
_LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers")
_HEADS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "num_heads")
_HIDDEN = ("hidden_size", "d_model", "word_embed_proj_dim")
_VOCAB = 96
_LENGTH = 64


def narrowed(config: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is made smaller, and a function that makes such a config: those that may serve, the smallest first.

    A model may refuse a width that its code does not foresee, so full width with few layers follows at the end.
    """
    depth = max(_depths(config), default=1)
    depths = [n for n in (2, 3, 4, 6, 8, 12) if n < depth]
    for layers in (*depths, depth):
        yield f"{layers} layers, narrow", partial(_smaller, config, layers, narrow=True)
    for layers in (*depths[:1], depth):
        yield f"{layers} layers, full width", partial(_smaller, config, layers, narrow=False)


def _smaller(config: Any, layers: int, narrow: bool) -> Any:
    small = copy.deepcopy(config)
    for part in _parts(small):
        _cut_layers(part, layers)
        _cut_vocabulary(part)
        if narrow:
            _cut_widths(part)
    return small


def _depths(config: Any) -> set[int]:
    return {n for name in _LAYERS if (n := _get(config, name)) is not None}


def _get(config: Any, name: str) -> int | None:
    """An integer setting, None where the config has none or does not say it for all layers at once."""
    try:
        value = getattr(config, name, None)
    except Exception:
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _limit(config: Any, name: str, limit: int) -> None:
    value = _get(config, name)
    if value is not None and value > limit:
        with contextlib.suppress(AttributeError):  # a property that follows from others
            setattr(config, name, limit)


def _parts(config: Any) -> Iterator[Any]:
    """The config and the configs of its parts (text, vision)."""
    yield config
    for name in getattr(config, "sub_configs", {}) or {}:
        part = getattr(config, name, None)
        if part is not None:
            yield part


def _cut_layers(config: Any, layers: int) -> None:
    depths = _depths(config)
    for name in _LAYERS:
        _limit(config, name, layers)
    for name, value in list(vars(config).items()):  # one entry for each layer
        if isinstance(value, list) and len(value) in depths and len(value) > layers:
            setattr(config, name, value[:layers])


def _cut_vocabulary(config: Any) -> None:
    _limit(config, "vocab_size", _VOCAB)
    _limit(config, "max_position_embeddings", _LENGTH)
    for name, value in list(vars(config).items()):
        if name.endswith("token_id"):
            values = value if isinstance(value, list) else [value]
            if any(isinstance(v, int) and v >= _VOCAB for v in values):
                setattr(config, name, 0)


def _cut_widths(config: Any) -> None:
    heads, groups = _get(config, "num_attention_heads"), _get(config, "num_key_value_heads")
    few = 4
    for name in _HEADS:
        _limit(config, name, 4)
        few = min(few, _get(config, name) or 4)
    if heads is not None and groups is not None:
        kept = few if groups == heads else 1 if groups == 1 else 2
        _limit(config, "num_key_value_heads", kept if few % kept == 0 else few)
    for name in _HIDDEN:
        if _get(config, name) is not None:
            setattr(config, name, 8 * few)
    for name, limit in _WIDTHS.items():
        _limit(config, name, limit)
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict):  # factors for each frequency
        part = rope.get("partial_rotary_factor", 1.0) or 1.0
        size = int(8 * part) // 2
        for name, value in rope.items():
            if isinstance(value, list) and len(value) > size:
                rope[name] = value[:size]
