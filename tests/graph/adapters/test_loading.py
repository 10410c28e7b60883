"""Loading part by part gives what transformers loads."""

import copy

import pytest
import regauge as rg
import torch
from architectures import ARCHITECTURES
from regauge import LayoutError
from regauge.graph.adapters import load_whole
from regauge.graph.adapters.loading import drop, fill, hollow, inside, places_of
from regauge.graph.skeleton import is_causal_lm, load_config, new_model
from regauge.jobs.evaluate import load_model

# checkpoints of these hold tensors by other names than the model's parameters
RENAMED = {"gpt_neox", "mixtral", "qwen3_moe", "olmoe", "deepseek_v3"}
NAMES = [n for n, case in ARCHITECTURES.items() if n not in RENAMED and is_causal_lm(case.config)]


def saved(name, dtype, folder):
    torch.manual_seed(0)
    model = new_model(copy.deepcopy(ARCHITECTURES[name].config), dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder)
    return load_config(folder), rg.Shards(folder)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_is_the_model_that_transformers_loads(name, dtype, tmp_path):
    config, source = saved(name, dtype, tmp_path)
    ours, theirs = load_whole(config, source), load_model(tmp_path)
    for tensors in ("named_parameters", "named_buffers"):
        mine = dict(getattr(ours, tensors)(remove_duplicate=False))
        other = dict(getattr(theirs, tensors)(remove_duplicate=False))
        assert mine.keys() == other.keys()
        assert [n for n in mine if mine[n].dtype != other[n].dtype or not torch.equal(mine[n], other[n])] == []
    assert len(list(ours.parameters())) == len(list(theirs.parameters()))  # ties
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        assert torch.equal(ours(input_ids=tokens).logits, theirs(input_ids=tokens).logits)
    assert not any(p.requires_grad for p in ours.parameters())
    assert not any(m.training for m in ours.modules())


def test_parts_are_filled_and_let_go(tmp_path):
    config, source = saved("llama, tied", torch.bfloat16, tmp_path)
    model = hollow(config, source.specs())
    places = places_of(model)
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    assert "lm_head.weight" not in places
    layer = model.model.layers[0]
    names = inside(places, [layer])
    assert names == [n for n in source.specs() if n.startswith("model.layers.0.")] or set(names) == {
        n for n in source.specs() if n.startswith("model.layers.0.")
    }
    fill(model, places, source, names)
    assert {n for n, p in model.named_parameters() if not p.is_meta} == set(names)
    drop(places, names)
    assert all(p.is_meta for p in model.parameters())
    fill(model, places, source, places)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tensor_of_another_shape_is_named(tmp_path):
    config, source = saved("llama", torch.bfloat16, tmp_path)
    config.intermediate_size += 2
    with pytest.raises(LayoutError, match=r"mlp.*_proj.weight: the model has shape"):
        load_whole(config, source)
