"""What symmetries each architecture has, written down from reading its code in transformers.

`blocks` maps the prefix of a list of layers to the groups of each of its layers, (kind, producer) -> consumers, by
names inside the layer; one mapping stands for all layers. `outside` are groups outside all layers, by full names.
`missed` are rescalings that exist and are not found, with the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers as t
from shapes import SHAPE

Groups = Mapping[tuple[str, str], tuple[str, ...]]

GQA = {**SHAPE, "max_position_embeddings": 64}
_COMMON = {name: value for name, value in GQA.items() if name != "num_key_value_heads"}
_SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 96,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    config: Any
    blocks: Mapping[str, Groups | tuple[Groups, ...]]
    outside: Groups = field(default_factory=dict)
    missed: tuple[str, ...] = ()


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATED = ("mlp.gate_proj", "mlp.up_proj")
QK = {("q_k", "self_attn.q_proj:k_proj"): ("self_attn.k_proj",)}
QK_NORM = {("q_k", "self_attn.q_norm:k_norm"): ()}
V_O = {("v_o", "self_attn.v_proj"): ("self_attn.o_proj",)}
UP_DOWN = {("up_down", "mlp.up_proj"): ("mlp.down_proj",)}
ATTENTION = {("norm", "input_layernorm"): QKV, **QK, **V_O}
LLAMA = {**ATTENTION, ("norm", "post_attention_layernorm"): GATED, **UP_DOWN}
SANDWICH = {("norm", "input_layernorm"): QKV, **V_O, ("norm", "pre_feedforward_layernorm"): GATED, **UP_DOWN}
HEAD = {("head", "model.norm"): ("lm_head",)}
ROUTED = {
    ("norm", "post_attention_layernorm"): ("mlp.gate", "mlp.experts.gate_up_proj"),
    ("up_down", "mlp.experts.gate_up_proj"): ("mlp.experts.down_proj",),  # for each expert by itself
}


def _heads_first(attention: str, prefix: str = "") -> Groups:
    """A fused projection with q, k and v rows, and its output projection."""
    fused = f"{prefix}{attention}"
    return {("v_o", fused): (f"{prefix}dense",), ("q_k", f"{fused}:{attention}"): (fused,)}


def _whole_attention(name: str, out: str) -> Groups:
    return {
        ("q_k", f"{name}.q_proj:k_proj"): (f"{name}.k_proj",),
        ("v_o", f"{name}.v_proj"): (f"{name}.{out}",),
    }


_DEEPSEEK_ATTENTION = {
    ("norm", "input_layernorm"): ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    ("norm", "self_attn.q_a_layernorm"): ("self_attn.q_b_proj",),
    ("norm", "self_attn.kv_a_layernorm"): ("self_attn.kv_b_proj",),
    ("q_k", "self_attn.q_b_proj:kv_b_proj"): ("self_attn.kv_b_proj",),  # the part without positions
    ("q_k", "self_attn.q_b_proj:kv_a_proj_with_mqa"): ("self_attn.kv_a_proj_with_mqa",),  # the rotated part
    ("v_o", "self_attn.kv_b_proj"): ("self_attn.o_proj",),
}
_DEEPSEEK = (
    {**_DEEPSEEK_ATTENTION, ("norm", "post_attention_layernorm"): GATED, **UP_DOWN},
    {
        **_DEEPSEEK_ATTENTION,
        ("norm", "post_attention_layernorm"): (
            "mlp.gate",
            "mlp.experts.gate_up_proj",
            "mlp.shared_experts.gate_proj",
            "mlp.shared_experts.up_proj",
        ),
        ("up_down", "mlp.experts.gate_up_proj"): ("mlp.experts.down_proj",),
        ("up_down", "mlp.shared_experts.up_proj"): ("mlp.shared_experts.down_proj",),
    },
)
_BERT = {
    ("q_k", "attention.self.query:key"): ("attention.self.key",),
    ("v_o", "attention.self.value"): ("attention.output.dense",),
}
_MODERNBERT = {
    ("q_k", "attn.Wqkv:Wqkv"): ("attn.Wqkv",),
    ("v_o", "attn.Wqkv"): ("attn.Wo",),
    ("norm", "mlp_norm"): ("mlp.Wi",),
    ("up_down", "mlp.Wi"): ("mlp.Wo",),
}
_OPT = {
    ("norm", "self_attn_layer_norm"): QKV,
    **_whole_attention("self_attn", "out_proj"),
    ("norm", "final_layer_norm"): ("fc1",),
}
_T5_SELF = {
    ("norm", "layer.0.layer_norm"): tuple(f"layer.0.SelfAttention.{x}" for x in "qkv"),
    ("q_k", "layer.0.SelfAttention.q:k"): ("layer.0.SelfAttention.k",),
    ("v_o", "layer.0.SelfAttention.v"): ("layer.0.SelfAttention.o",),
}


def _t5_relu(layer: int) -> Groups:
    name = f"layer.{layer}"
    return {
        ("norm", f"{name}.layer_norm"): (f"{name}.DenseReluDense.wi",),
        ("up_down", f"{name}.DenseReluDense.wi"): (f"{name}.DenseReluDense.wo",),
    }


_WHISPER_SELF = {
    ("norm", "self_attn_layer_norm"): QKV,
    **_whole_attention("self_attn", "out_proj"),
    ("norm", "final_layer_norm"): ("fc1",),
}
_VIT = {
    ("norm", "layernorm_before"): ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    **_whole_attention("attention", "o_proj"),
    ("norm", "layernorm_after"): ("mlp.fc1",),
}


def _cross(prefix: str, layers: int) -> tuple[str, ...]:
    return tuple(f"{prefix}.{i}.encoder_attn.{x}_proj" for i in range(layers) for x in "kv")


ARCHITECTURES = {
    "llama": Architecture(config=t.LlamaConfig(**GQA), blocks={"model.layers": LLAMA}, outside=HEAD),
    "llama, biases": Architecture(
        config=t.LlamaConfig(**GQA, attention_bias=True, mlp_bias=True), blocks={"model.layers": LLAMA}, outside=HEAD
    ),
    "llama, tied": Architecture(config=t.LlamaConfig(**GQA, tie_word_embeddings=True), blocks={"model.layers": LLAMA}),
    "llama, no head": Architecture(config=t.LlamaConfig(**GQA, architectures=["LlamaModel"]), blocks={"layers": LLAMA}),
    "mistral": Architecture(config=t.MistralConfig(**GQA), blocks={"model.layers": LLAMA}, outside=HEAD),
    "qwen2": Architecture(config=t.Qwen2Config(**GQA), blocks={"model.layers": LLAMA}, outside=HEAD),
    "qwen3": Architecture(
        config=t.Qwen3Config(**GQA, head_dim=8),
        blocks={"model.layers": {**{k: v for k, v in LLAMA.items() if k[0] != "q_k"}, **QK_NORM}},
        outside=HEAD,
    ),
    "smollm3": Architecture(
        config=t.SmolLM3Config(**GQA, no_rope_layers=[1, 0], tie_word_embeddings=False),
        blocks={"model.layers": LLAMA},
        outside=HEAD,
    ),
    "gemma": Architecture(config=t.GemmaConfig(**GQA, head_dim=8), blocks={"model.layers": LLAMA}),
    "gemma2": Architecture(config=t.Gemma2Config(**GQA, head_dim=8), blocks={"model.layers": {**SANDWICH, **QK}}),
    "gemma3": Architecture(
        config=t.Gemma3TextConfig(**GQA, head_dim=8), blocks={"model.layers": {**SANDWICH, **QK_NORM}}
    ),
    "granite": Architecture(config=t.GraniteConfig(**GQA), blocks={"model.layers": LLAMA}, outside=HEAD),
    "olmo": Architecture(  # its norms have no weight
        config=t.OlmoConfig(**GQA), blocks={"model.layers": {**QK, **V_O, **UP_DOWN}}
    ),
    "olmo2": Architecture(  # it normalises what a sublayer returns
        config=t.Olmo2Config(**GQA), blocks={"model.layers": {**QK_NORM, **V_O, **UP_DOWN}}, outside=HEAD
    ),
    "cohere": Architecture(  # one norm for attention and MLP
        config=t.CohereConfig(**GQA),
        blocks={"model.layers": {("norm", "input_layernorm"): (*QKV, *GATED), **QK, **V_O, **UP_DOWN}},
    ),
    "stablelm": Architecture(config=t.StableLmConfig(**GQA), blocks={"model.layers": LLAMA}, outside=HEAD),
    "starcoder2": Architecture(
        config=t.Starcoder2Config(**GQA, tie_word_embeddings=False),
        blocks={"model.layers": {**ATTENTION, ("norm", "post_attention_layernorm"): ("mlp.c_fc",)}},
        outside=HEAD,
    ),
    "glm4": Architecture(
        config=t.Glm4Config(**GQA, head_dim=8),
        blocks={
            "model.layers": {
                **ATTENTION,
                ("norm", "post_attention_layernorm"): ("mlp.gate_up_proj",),
                ("up_down", "mlp.gate_up_proj"): ("mlp.down_proj",),
            }
        },
        outside=HEAD,
    ),
    "nemotron": Architecture(
        config=t.NemotronConfig(**GQA),
        blocks={"model.layers": {**ATTENTION, ("norm", "post_attention_layernorm"): ("mlp.up_proj",)}},
        outside=HEAD,
        missed=(
            "up_proj -> down_proj through relu(x)^2: degree two, which would need 1/s^2 on one side and s on the other",
        ),
    ),
    "phi": Architecture(
        config=t.PhiConfig(**GQA),
        blocks={
            "model.layers": {
                ("norm", "input_layernorm"): (*QKV, "mlp.fc1"),
                **QK,
                ("v_o", "self_attn.v_proj"): ("self_attn.dense",),
            }
        },
        outside={("head", "model.final_layernorm"): ("lm_head",)},
    ),
    "phi3": Architecture(
        config=t.Phi3Config(**GQA),
        blocks={
            "model.layers": {
                ("norm", "input_layernorm"): ("self_attn.qkv_proj",),
                ("q_k", "self_attn.qkv_proj:qkv_proj"): ("self_attn.qkv_proj",),
                ("v_o", "self_attn.qkv_proj"): ("self_attn.o_proj",),
                ("norm", "post_attention_layernorm"): ("mlp.gate_up_proj",),
                ("up_down", "mlp.gate_up_proj"): ("mlp.down_proj",),
            }
        },
        outside=HEAD,
    ),
    "opt": Architecture(
        config=t.OPTConfig(
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=32,
            vocab_size=96,
        ),
        blocks={"model.decoder.layers": {**_OPT, ("up_down", "fc1"): ("fc2",)}},
    ),
    "opt, projected": Architecture(  # as OPT-350M: a narrow embedding, and norms behind the sublayers
        config=t.OPTConfig(
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=16,
            vocab_size=96,
            do_layer_norm_before=False,
            tie_word_embeddings=False,
        ),
        blocks={
            "model.decoder.layers": (
                {**_whole_attention("self_attn", "out_proj"), ("up_down", "fc1"): ("fc2",)},
                {
                    **_whole_attention("self_attn", "out_proj"),
                    ("up_down", "fc1"): ("fc2",),
                    ("head", "final_layer_norm"): ("model.decoder.project_out",),
                },
            )
        },
        outside={
            ("embed", "model.decoder.embed_tokens"): ("model.decoder.project_in",),
            ("up_down", "model.decoder.project_out"): ("lm_head",),
        },
    ),
    "gpt2": Architecture(
        config=t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, bos_token_id=0, eos_token_id=0),
        blocks={
            "transformer.h": {
                ("norm", "ln_1"): ("attn.c_attn",),
                ("q_k", "attn.c_attn:c_attn"): ("attn.c_attn",),
                ("v_o", "attn.c_attn"): ("attn.c_proj",),
                ("norm", "ln_2"): ("mlp.c_fc",),
            }
        },
    ),
    "gpt_neox": Architecture(
        config=t.GPTNeoXConfig(**_COMMON),
        blocks={
            "gpt_neox.layers": {
                ("norm", "input_layernorm"): ("attention.query_key_value",),
                **_heads_first("query_key_value", "attention."),
                ("norm", "post_attention_layernorm"): ("mlp.dense_h_to_4h",),
            }
        },
        outside={("head", "gpt_neox.final_layer_norm"): ("lm_head",)},
    ),
    "gptj": Architecture(
        config=t.GPTJConfig(
            n_embd=32, n_layer=2, n_head=4, rotary_dim=4, vocab_size=96, bos_token_id=0, eos_token_id=0
        ),
        blocks={
            "transformer.h": {
                ("norm", "ln_1"): ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.fc_in"),
                **_whole_attention("attn", "out_proj"),
            }
        },
        outside={("head", "transformer.ln_f"): ("lm_head",)},
    ),
    "falcon": Architecture(  # multi-query, parallel
        config=t.FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=96),
        blocks={
            "transformer.h": {
                ("norm", "input_layernorm"): ("self_attention.query_key_value", "mlp.dense_h_to_4h"),
                **_heads_first("query_key_value", "self_attention."),
            }
        },
    ),
    "bloom": Architecture(  # ALiBi
        config=t.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=96),
        blocks={
            "transformer.h": {
                ("norm", "input_layernorm"): ("self_attention.query_key_value",),
                **_heads_first("query_key_value", "self_attention."),
                ("norm", "post_attention_layernorm"): ("mlp.dense_h_to_4h",),
            }
        },
    ),
    "mpt": Architecture(
        config=t.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=96),
        blocks={
            "transformer.blocks": {
                ("norm", "norm_1"): ("attn.Wqkv",),
                ("q_k", "attn.Wqkv:Wqkv"): ("attn.Wqkv",),
                ("v_o", "attn.Wqkv"): ("attn.out_proj",),
                ("norm", "norm_2"): ("ffn.up_proj",),
            }
        },
    ),
    "mixtral": Architecture(
        config=t.MixtralConfig(**GQA, num_local_experts=4),
        blocks={"model.layers": {**ATTENTION, **ROUTED}},
        outside=HEAD,
    ),
    "qwen3_moe": Architecture(
        config=t.Qwen3MoeConfig(**GQA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8),
        blocks={"model.layers": {("norm", "input_layernorm"): QKV, **QK_NORM, **V_O, **ROUTED}},
        outside=HEAD,
    ),
    "olmoe": Architecture(
        config=t.OlmoeConfig(**GQA, num_experts=4, num_experts_per_tok=2),
        blocks={"model.layers": {("norm", "input_layernorm"): QKV, **QK_NORM, **V_O, **ROUTED}},
        outside=HEAD,
    ),
    "deepseek_v3": Architecture(
        config=t.DeepseekV3Config(
            **{**GQA, "num_key_value_heads": 4},
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
            n_shared_experts=1,
        ),
        blocks={"model.layers": _DEEPSEEK},
        outside=HEAD,
    ),
    "gpt_oss": Architecture(
        config=t.GptOssConfig(**GQA, num_local_experts=4, head_dim=8),
        blocks={
            "model.layers": {
                **ATTENTION,
                ("norm", "post_attention_layernorm"): ("mlp.router", "mlp.experts.gate_up_proj"),
            }
        },
        outside=HEAD,  # (up + 1) * gate: no scale passes the constant
    ),
    "llama4": Architecture(
        config=t.Llama4TextConfig(**GQA, num_local_experts=4, head_dim=8, intermediate_size_mlp=48),
        blocks={
            "model.layers": {
                ("norm", "input_layernorm"): QKV,
                **V_O,
                ("norm", "post_attention_layernorm"): (
                    "feed_forward.router",
                    "feed_forward.experts.gate_up_proj",
                    "feed_forward.shared_expert.gate_proj",
                    "feed_forward.shared_expert.up_proj",
                ),
                ("up_down", "feed_forward.experts.gate_up_proj"): ("feed_forward.experts.down_proj",),
                ("up_down", "feed_forward.shared_expert.up_proj"): ("feed_forward.shared_expert.down_proj",),
            }
        },
        outside=HEAD,
        missed=(
            "q_proj with k_proj in layers that do not normalise them: rotated as complex numbers, which are not traced",
        ),
    ),
    "bert": Architecture(  # norms behind the sublayers feed the residual; the last one feeds the head alone
        config=t.BertConfig(**_COMMON, architectures=["BertForMaskedLM"]),
        blocks={
            "bert.encoder.layer": (_BERT, {**_BERT, ("head", "output.LayerNorm"): ("cls.predictions.transform.dense",)})
        },
    ),
    "roberta": Architecture(
        config=t.RobertaConfig(**_COMMON, architectures=["RobertaForMaskedLM"]),
        blocks={"roberta.encoder.layer": (_BERT, {**_BERT, ("head", "output.LayerNorm"): ("lm_head.dense",)})},
    ),
    "modernbert": Architecture(
        config=t.ModernBertConfig(**_COMMON, architectures=["ModernBertForMaskedLM"]),
        blocks={"model.layers": (_MODERNBERT, {**_MODERNBERT, ("norm", "attn_norm"): ("attn.Wqkv",)})},
        outside={("head", "model.final_norm"): ("head.dense",)},
    ),
    "albert": Architecture(  # one layer, used again and again
        config=t.AlbertConfig(**_COMMON, embedding_size=16, architectures=["AlbertForMaskedLM"]),
        blocks={"albert.encoder.albert_layer_groups": {}},
        outside={("head", "albert.embeddings.LayerNorm"): ("albert.encoder.embedding_hidden_mapping_in",)},
        missed=(
            "value -> dense and query with key: the layer is used at every depth, and one group would have to hold for all",
        ),
    ),
    "t5": Architecture(
        config=t.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=96),
        blocks={
            "encoder.block": {**_T5_SELF, **_t5_relu(1)},
            "decoder.block": {
                **_T5_SELF,
                ("norm", "layer.1.layer_norm"): ("layer.1.EncDecAttention.q",),
                ("q_k", "layer.1.EncDecAttention.q:k"): ("layer.1.EncDecAttention.k",),
                ("v_o", "layer.1.EncDecAttention.v"): ("layer.1.EncDecAttention.o",),
                **_t5_relu(2),
            },
        },
        outside={
            ("norm", "encoder.final_layer_norm"): tuple(
                f"decoder.block.{i}.layer.1.EncDecAttention.{x}" for i in range(2) for x in "kv"
            )
        },
    ),
    "bart": Architecture(
        config=t.BartConfig(**_SEQ2SEQ, architectures=["BartForConditionalGeneration"]),
        blocks={
            "model.encoder.layers": (
                _whole_attention("self_attn", "out_proj"),
                {
                    **_whole_attention("self_attn", "out_proj"),
                    ("norm", "final_layer_norm"): _cross("model.decoder.layers", 2),
                },
            ),
            "model.decoder.layers": {
                **_whole_attention("self_attn", "out_proj"),
                **_whole_attention("encoder_attn", "out_proj"),
            },
        },
    ),
    "whisper": Architecture(
        config=t.WhisperConfig(**_SEQ2SEQ, num_mel_bins=8, max_source_positions=16, max_target_positions=16),
        blocks={
            "model.encoder.layers": _WHISPER_SELF,
            "model.decoder.layers": {
                **_WHISPER_SELF,
                ("norm", "encoder_attn_layer_norm"): ("encoder_attn.q_proj",),
                **_whole_attention("encoder_attn", "out_proj"),
            },
        },
        outside={("norm", "model.encoder.layer_norm"): _cross("model.decoder.layers", 2)},
    ),
    "vit": Architecture(
        config=t.ViTConfig(
            **{k: v for k, v in _COMMON.items() if "token" not in k and k != "vocab_size"}, image_size=16, patch_size=8
        ),
        blocks={"vit.layers": _VIT},
        outside={("head", "vit.layernorm"): ("classifier",)},
    ),
}
