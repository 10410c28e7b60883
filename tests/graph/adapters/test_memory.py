"""A dict of tensors as a store."""

import pytest
import regauge as rg
import torch
from regauge.graph.adapters import Sink, Source


def test_it_is_a_source_and_a_sink():
    assert isinstance(rg.Memory(), Source)
    assert isinstance(rg.Memory(), Sink)


def test_reading_gives_the_very_tensors():
    params = {"a": torch.ones(2), "b": torch.ones(3, dtype=torch.int8)}
    store = rg.Memory(params)
    with store.read(["b", "a"]) as got:
        assert got["a"] is params["a"]
        assert list(got) == ["b", "a"]
    specs = store.specs()
    assert {n: (p.shape, p.dtype, p.is_meta) for n, p in specs.items()} == {
        n: (p.shape, p.dtype, True) for n, p in params.items()
    }


def test_a_missing_tensor_is_named():
    with pytest.raises(rg.LayoutError, match="memory: no tensor x"), rg.Memory().read(["x"]):
        pass


def test_writing_leaves_the_dict_that_was_given(tiny):
    params = {"a": torch.ones(2)}
    store = rg.Memory(params)
    store.write({"b": torch.ones(1)})
    assert set(store.params) == {"a", "b"}
    assert set(params) == {"a"}


def test_a_model_shares_its_parameters_and_stores_ties_once(tiny):
    model = tiny("tied_llama").model
    store = rg.Memory.of(model)
    assert "lm_head.weight" not in store.params
    assert store.params.keys() == tiny("tied_llama").graph.shapes.keys()
    assert all(not p.requires_grad for p in store.params.values())
    assert store.params["model.norm.weight"].data_ptr() == model.model.norm.weight.data_ptr()
