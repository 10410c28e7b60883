"""Models without weights, and configs from folders."""

import json

import pytest
import torch
from regauge import LayoutError
from regauge.graph.skeleton import load_config, skeleton, tied_names, trace_reads
from torch import nn
from transformers import BertConfig, CLIPConfig, LlamaConfig

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


def test_a_model_that_is_no_language_model_is_named():
    with pytest.raises(LayoutError, match="model type 'clip' is no causal language model"):
        skeleton(CLIPConfig())


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


class Toy(nn.Module):
    """Linears that read one tensor, its view, its edited copy, and each other."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.a, self.b, self.c, self.d, self.e, self.unused = (nn.Linear(4, 4) for _ in range(6))

    def forward(self, input_ids, use_cache=None):
        x = self.norm(input_ids[..., None].float().expand(-1, -1, 4))
        y = self.a(x) + self.b(x)
        shifted = x.clone()
        made = self.c(shifted)
        shifted += 1
        return self.d(shifted) + self.e(made) + y


def test_linears_are_grouped_by_the_tensor_that_they_read():
    with torch.device("meta"):
        model = Toy()
    reads = trace_reads(model, ["a", "b", "c", "d", "e", "unused"])
    # d reads the storage of c after it was edited
    assert reads.groups == [["a", "b"], ["c"], ["d"], ["e"], ["unused"]]
    assert reads.producers == {"a": "norm", "e": "c"}


def test_a_decoder_of_another_kind_of_model_can_be_traced():
    model = skeleton(BertConfig(**SHAPE, is_decoder=True))
    groups = trace_reads(model, [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]).groups
    attention = "bert.encoder.layer.0.attention.self"
    assert [f"{attention}.{name}" for name in ("query", "key", "value")] in groups
