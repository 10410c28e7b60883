"""Models without weights, and configs from folders."""

import json

import pytest
import torch
from regauge import LayoutError
from regauge.graph.skeleton import block_prefixes, example_inputs, load_config, model_class, skeleton, tied_names
from torch import nn
from transformers import BertConfig, LlamaConfig, PreTrainedConfig, T5Config, ViTConfig, WhisperConfig

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}


def write(folder, content):
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_a_config_is_read_from_a_folder(tmp_path):
    LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    assert load_config(tmp_path).intermediate_size == 48


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(LayoutError, match=r"no config.json; model.path must be a Hugging Face checkpoint folder"):
        load_config(tmp_path / "absent")


@pytest.mark.parametrize("content", ["{", "{}", '{"model_type": "no_such_model"}'])
def test_a_damaged_config_is_named(tmp_path, content):
    with pytest.raises(LayoutError, match=r"config\.json"):
        load_config(write(tmp_path, content))


def test_a_quantized_model_is_refused(tmp_path):
    config = {**LlamaConfig(**SHAPE).to_dict(), "quantization_config": {"quant_method": "gptq", "bits": 4}}
    with pytest.raises(LayoutError, match=r"quantized already \(gptq\); start from the original checkpoint"):
        load_config(write(tmp_path, config))


class Remote(PreTrainedConfig):
    model_type = "remote"


def test_a_model_that_transformers_does_not_know_is_named():
    with pytest.raises(LayoutError, match="model type 'remote' is no model of transformers"):
        skeleton(Remote())


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LlamaConfig(), "LlamaForCausalLM"),
        (LlamaConfig(architectures=["LlamaModel"]), "LlamaModel"),
        (BertConfig(architectures=["BertForMaskedLM"]), "BertForMaskedLM"),
        (LlamaConfig(architectures=["NotThere", "os", "pipeline"]), "LlamaForCausalLM"),
        (T5Config(), "T5ForConditionalGeneration"),
        (WhisperConfig(), "WhisperForConditionalGeneration"),
        (ViTConfig(), "ViTForImageClassification"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_the_class_is_the_one_that_the_config_names_if_transformers_has_it(config, name):
    assert model_class(config).__name__ == name


def test_a_config_that_no_model_can_be_built_from_is_named():
    with pytest.raises(LayoutError, match="'llama' cannot be built from its config"):
        skeleton(LlamaConfig(**SHAPE, num_key_value_heads=4, hidden_act="no such function"))


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (LlamaConfig(**SHAPE), {"input_ids"}),
        (T5Config(d_model=32, num_layers=1, num_heads=4), {"input_ids", "decoder_input_ids"}),
        (
            ViTConfig(image_size=16, patch_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=4),
            {"pixel_values"},
        ),
    ],
    ids=["llama", "t5", "vit"],
)
def test_inputs_are_those_that_the_forward_takes(config, names):
    model = skeleton(config)
    assert set(example_inputs(model)) == names


def test_blocks_are_the_outermost_lists_of_layers():
    t5 = skeleton(T5Config(d_model=32, num_layers=2, num_decoder_layers=1, num_heads=4))
    assert block_prefixes(t5) == ("encoder.block.0", "encoder.block.1", "decoder.block.0")
    assert block_prefixes(skeleton(LlamaConfig(**SHAPE))) == ("model.layers.0",)


def test_a_skeleton_holds_no_numbers():
    model = skeleton(LlamaConfig(**SHAPE))
    assert all(p.is_meta for p in model.parameters())
    assert not model.training


def test_ties_are_found_by_identity():
    a, b, c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    with torch.no_grad():
        b.weight.copy_(a.weight)
    c.weight = a.weight
    assert tied_names(nn.ModuleList([a, b, c])) == {"2.weight": "0.weight"}
