"""What `Encode` leaves of a whole model is what the library reads and writes."""

from functools import partial

import pytest
import regauge as rg
import torch
from regauge.transforms import Decode, Dequantize, Encode, Quantize, chain, formats_of, must_untie

compressors = pytest.importorskip("compressed_tensors.compressors")
HEAD = ("lm_head",)
SCHEMES = {
    "W8A8": {"scheme": "W8A8"},
    "W8A16": {"scheme": "W8A16"},
    "W4A16": {"scheme": "W4A16", "group_size": 16},
    "W4A16_ASYM": {"scheme": "W4A16_ASYM", "group_size": 16},
    "five_bits": {"scheme": {"weights": {"num_bits": 5, "strategy": "channel", "symmetric": False}}},
    "three_bits": {"scheme": {"weights": {"num_bits": 3, "strategy": "group", "group_size": 8}}},
    "tensor": {"scheme": {"weights": {"num_bits": 8, "strategy": "tensor", "symmetric": False}}},
}
BOTH = ("Linear", "Embedding")


def library_scheme(scheme):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    w = scheme.weights
    args = QuantizationArgs(num_bits=w.num_bits, symmetric=w.symmetric, strategy=w.strategy, group_size=w.group_size)
    return QuantizationScheme(targets=["Linear"], weights=args)


def layer(params, name):
    """The tensors of one module, under their local names."""
    return {key.removeprefix(f"{name}."): p for key, p in params.items() if key.startswith(f"{name}.weight")}


def run(model, *transforms):
    return rg.apply(rg.plan(chain(*transforms), model.params, model.graph), model.params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_the_library_decodes_what_we_write_to_our_numbers(tiny, name, dtype):
    model = tiny("llama", dtype)
    quantize = Quantize(**SCHEMES[name], ignore=HEAD)
    schemes = rg.plan(quantize, model.params, model.graph).schemes
    written = run(model, quantize, Encode(schemes=schemes))
    ours = run(model, quantize, Dequantize(schemes=schemes, dtype=str(dtype).removeprefix("torch.")))
    formats = formats_of(schemes, model.graph)
    assert len(schemes) == 14
    for linear, scheme in schemes.items():
        compressor = compressors.BaseCompressor.get_value_from_registry(formats[linear])
        theirs = compressor.decompress(layer(written, linear), library_scheme(scheme))["weight"]
        assert theirs.dtype == dtype
        assert torch.equal(theirs, ours[f"{linear}.weight"]), linear


@pytest.mark.parametrize("name", SCHEMES)
def test_the_library_writes_what_we_write(tiny, name):
    model = tiny("llama")
    quantize = Quantize(**SCHEMES[name], ignore=HEAD)
    schemes = rg.plan(quantize, model.params, model.graph).schemes
    codes, written = run(model, quantize), run(model, quantize, Encode(schemes=schemes))
    formats = formats_of(schemes, model.graph)
    for linear, scheme in schemes.items():
        given = {"weight_zero_point": torch.zeros_like(codes[f"{linear}.weight_scale"], dtype=torch.int8)}
        given.update(layer(codes, linear), weight=model.params[f"{linear}.weight"])
        compressor = compressors.BaseCompressor.get_value_from_registry(formats[linear])
        theirs, ours = compressor.compress(given, library_scheme(scheme)), layer(written, linear)
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[key], ours[key]) and theirs[key].dtype == ours[key].dtype for key in ours)


def test_activations_decide_the_layout(tiny):
    model = tiny("tied_llama")
    of = partial(rg.plan, specs=model.params, graph=model.graph)
    eight, four = of(Quantize(targets=BOTH)).schemes, of(Quantize(scheme="W8A16", targets=BOTH)).schemes
    assert set(formats_of(eight, model.graph).values()) == {"int-quantized"}
    assert set(formats_of(four, model.graph).values()) == {"pack-quantized"}
    assert must_untie(eight, model.graph)
    assert not must_untie(four, model.graph)
    assert eight["model.embed_tokens"].input_activations is None
    assert eight["lm_head"].input_activations is not None


def test_untied_pairs_are_written_twice(tiny):
    model = tiny("tied_llama")
    quantize = Quantize(targets=BOTH)
    schemes = rg.plan(quantize, model.params, model.graph).schemes
    tied = run(model, quantize, Encode(schemes=schemes))
    assert not layer(tied, "lm_head")
    untied = run(model, quantize, Encode(schemes=schemes, untie=True))
    assert layer(untied, "lm_head").keys() == layer(untied, "model.embed_tokens").keys() == {"weight", "weight_scale"}
    for key, p in layer(untied, "lm_head").items():
        assert torch.equal(p, untied[f"model.embed_tokens.{key}"])
    decoded = run(model, quantize, Encode(schemes=schemes, untie=True), Decode(schemes=schemes, untie=True))
    assert decoded.keys() == run(model, quantize).keys()


def test_decoding_needs_the_layout(tiny):
    model = tiny()
    quantize = Quantize(scheme="W8A16", ignore=HEAD)
    schemes = rg.plan(quantize, model.params, model.graph).schemes
    with pytest.raises(rg.PlanError, match="expected a tensor model.layers.0.self_attn.q_proj.weight_packed"):
        run(model, quantize, Decode(schemes=schemes))
