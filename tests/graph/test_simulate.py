"""Rounded activations: where they are asked for, while they are asked for, and nowhere else."""

import pytest
import regauge as rg
import torch
from regauge.transforms import QuantArgs, Scheme, fake_quantize_activation, make_scheme

TOKENS = torch.arange(2, 14)[None]
NAME = "model.layers.1.mlp.down_proj"


def inputs(model, schemes, names):
    """What each named linear is given."""
    seen = {}

    def keep(name):
        return lambda _module, args: seen.update({name: args[0]})

    with torch.no_grad(), rg.quantized_activations(model, schemes):
        handles = [model.get_submodule(n).register_forward_pre_hook(keep(n)) for n in names]
        model(input_ids=TOKENS)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(("bits", "symmetric"), [(8, True), (4, True), (8, False)])
def test_only_the_linears_that_ask_read_rounded_activations(tiny, bits, symmetric):
    model = tiny().model
    args = QuantArgs(num_bits=bits, symmetric=symmetric, strategy="token", dynamic=True)
    schemes = {
        NAME: Scheme(weights=QuantArgs(), input_activations=args),
        "model.layers.1.mlp.up_proj": make_scheme("W8A16"),
    }
    plain, rounded = (
        inputs(model, {}, [NAME, "model.layers.1.mlp.up_proj"]),
        inputs(model, schemes, [NAME, "model.layers.1.mlp.up_proj"]),
    )
    assert torch.equal(rounded[NAME], fake_quantize_activation(plain[NAME], args))
    assert not torch.equal(rounded[NAME], plain[NAME])
    assert torch.equal(rounded["model.layers.1.mlp.up_proj"], plain["model.layers.1.mlp.up_proj"])


def test_the_model_is_as_before_afterwards_even_on_an_error(tiny):
    model = tiny().model
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    before = tiny().logits()
    schemes = {NAME: make_scheme("W8A8")}
    with rg.quantized_activations(model, schemes) as same:
        assert same is model
        assert not torch.equal(tiny().logits(), before)
    with pytest.raises(IndexError), rg.quantized_activations(model, schemes):
        model(input_ids=torch.tensor([[10**6]]))
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert torch.equal(tiny().logits(), before)


def test_weights_given_from_outside_are_used(tiny):
    """The pair that simulates a quantized model: fake weights by functional_call, activations by hooks."""
    model = tiny()
    quantize = rg.transforms.Quantize(ignore=("lm_head",), form="fake")
    plan = rg.plan(quantize, model.params, model.graph)
    out = rg.apply(plan, model.params)
    with rg.quantized_activations(model.model, plan.schemes):
        both, only_activations = model.logits(out), model.logits()
    only_weights = model.logits(out)
    assert not torch.equal(both, only_activations)
    assert not torch.equal(both, only_weights)
    assert ((both - model.logits()).norm() / model.logits().norm()).item() < 0.1
