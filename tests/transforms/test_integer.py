"""Number formats: against hand-made arithmetic, and to the byte against compressed-tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from regauge.transforms import (
    QuantArgs,
    _rows,
    dequantize,
    fake_quantize,
    fake_quantize_activation,
    pack_rows,
    quantization_parameters,
    quantize,
    unpack_rows,
)
from regauge.transforms._rows import _BYTES, absmax, in_rows

STRATEGIES = st.sampled_from(["tensor", "channel", "group"])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def settings_and_weights(draw):
    strategy = draw(STRATEGIES)
    rows, groups, size = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 7))
    values = st.floats(-1000, 1000, width=32, allow_subnormal=False)
    w = torch.from_numpy(draw(arrays("float32", (rows, groups * size), elements=values)))
    bits, symmetric = draw(st.integers(2, 8)), draw(st.booleans())
    args = QuantArgs(
        num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=size if strategy == "group" else None
    )
    return args, w.to(draw(DTYPES))


@given(settings_and_weights())
def test_codes_are_in_range_and_errors_within_half_a_step(case):
    args, w = case
    scale, zeros = quantization_parameters(w, args, torch.float32)
    q = quantize(w, scale, zeros, args)
    back = dequantize(q, scale, zeros, args, torch.float32)
    assert q.dtype == torch.int8
    assert args.qmin <= int(q.min())
    assert int(q.max()) <= args.qmax
    step = scale.repeat_interleave(args.group_size, 1) if args.strategy == "group" else scale
    # the largest positive value of a symmetric grid lies half a step beyond its last code, and a zero point is rounded
    bound = step * (0.5 if args.symmetric else 1.0) * (1 + 1e-3) + 1e-4 * w.abs().float()
    assert bool(((back - w.float()).abs() <= bound).all())


@given(settings_and_weights())
def test_fake_is_quantize_then_dequantize_bit_for_bit(case):
    args, w = case
    scale, zeros = quantization_parameters(w, args, w.dtype)
    expected = dequantize(quantize(w, scale, zeros, args), scale, zeros, args, w.dtype)
    assert torch.equal(fake_quantize(w, args), expected)


def naive_codes(w, args):
    """Scale, zero point and codes of one run of weights, number by number in Python."""
    values = [float(x) for x in w]
    low, high = min(0.0, *values), max(0.0, *values)
    single = torch.tensor([-low, high, high - low])  # rounds to float32
    steps = args.qmax - args.qmin
    span = single[2] / steps if not args.symmetric else torch.maximum(single[0], single[1]) / (steps / 2)
    scale = span if span > 0 else torch.tensor(torch.finfo(torch.float32).eps)
    zero = 0.0 if args.symmetric else min(max(float(args.qmin + single[0] / scale), args.qmin), args.qmax)
    zero = round(zero)
    codes = [round(min(max(float(x / scale + zero), args.qmin), args.qmax)) for x in w]
    return scale, zero, codes


@given(settings_and_weights())
def test_codes_are_those_of_a_naive_loop(case):
    args, w = case
    w = w.float()
    scale, zeros = quantization_parameters(w, args, torch.float32)
    codes = quantize(w, scale, zeros, args)
    size = args.group_size or w.shape[1]
    runs = [row[i : i + size] for row in w for i in range(0, w.shape[1], size)]
    runs = [w.reshape(-1)] if args.strategy == "tensor" else runs
    naive = [naive_codes(run, args) for run in runs]
    assert codes.reshape(-1).tolist() == [q for _, _, run in naive for q in run]
    assert scale.reshape(-1).tolist() == [s.item() for s, _, _ in naive]
    assert args.symmetric or zeros.reshape(-1).tolist() == [z for _, z, _ in naive]


@given(settings_and_weights())
def test_codes_come_back_from_the_numbers_that_they_mean(case):
    """Rounding again to the same grid changes nothing."""
    args, w = case
    scale, zeros = quantization_parameters(w, args, torch.float32)
    codes = quantize(w, scale, zeros, args)
    assert torch.equal(quantize(dequantize(codes, scale, zeros, args, torch.float32), scale, zeros, args), codes)


@given(settings_and_weights())
def test_zero_is_on_every_grid(case):
    args, w = case
    w = torch.where(w.abs() < 500, 0.0, w)
    assert bool((fake_quantize(w, args)[w == 0] == 0).all())


@pytest.mark.parametrize("num_bits", range(2, 9))
def test_an_asymmetric_grid_reaches_both_ends(num_bits):
    args = QuantArgs(num_bits=num_bits, symmetric=False, strategy="channel")
    steps = args.qmax - args.qmin
    w = torch.arange(0.0, steps + 1)[None] - steps // 3  # steps of one from a whole zero point: all exact
    scale, zeros = quantization_parameters(w, args, torch.float32)
    assert scale.item() == 1.0
    assert quantize(w, scale, zeros, args).tolist() == [list(range(args.qmin, args.qmax + 1))]
    assert torch.equal(fake_quantize(w, args), w)


@given(settings_and_weights(), st.integers(-6, 6))
def test_a_power_of_two_passes_through(case, exponent):
    args, w = case
    w = w.float()
    w = torch.where(w.abs() < 1e-3, 0.0, w)
    if bool((_extent(w, args) == 0).any()):
        return  # a row of zeros has a scale of its own
    assert torch.equal(fake_quantize(w * 2.0**exponent, args), fake_quantize(w, args) * 2.0**exponent)


def _extent(w, args):
    if args.strategy == "tensor":
        return w.abs().amax()
    return (w.unflatten(1, (-1, args.group_size)) if args.strategy == "group" else w).abs().amax(-1)


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_stay_zero(symmetric):
    args = QuantArgs(num_bits=4, symmetric=symmetric, strategy="channel")
    assert torch.equal(fake_quantize(torch.zeros(2, 3), args), torch.zeros(2, 3))


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_large_matrices_are_rounded_in_pieces_to_the_same_codes(strategy, symmetric):
    args = QuantArgs(symmetric=symmetric, strategy=strategy, group_size=8 if strategy == "group" else None)
    w = torch.randn(3 * _BYTES // (4 * 64) + 5, 64, generator=torch.Generator().manual_seed(0))
    scale, zeros = quantization_parameters(w, args, torch.float32)
    whole = quantize(w, scale, zeros, args)
    for row in (0, 1, w.shape[0] // 2, w.shape[0] - 1):
        pick = slice(row, row + 1)
        one = scale if strategy == "tensor" else scale[pick]
        zero = zeros if strategy == "tensor" or zeros is None else zeros[pick]
        assert torch.equal(whole[pick], quantize(w[pick], one, zero, args))


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_cut_into_pieces_gives_the_same_codes(monkeypatch, rows, strategy, symmetric):
    args = QuantArgs(symmetric=symmetric, strategy=strategy, group_size=3 if strategy == "group" else None)
    w = torch.randn(7, 9, generator=torch.Generator().manual_seed(rows))
    scale, zeros = quantization_parameters(w, args, torch.float32)
    whole = quantize(w, scale, zeros, args)
    monkeypatch.setattr(_rows, "_BYTES", rows * 4 * 9)
    assert torch.equal(quantize(w, scale, zeros, args), whole)


@pytest.mark.parametrize("size", [1.0, 1e-3], ids=["normal", "subnormal_in_float16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_stored_scales_are_the_largest_that_do_not_exceed_the_exact_ones(dtype, size):
    """Else the largest weight of a group, half a step beyond the last code, would be rounded inward."""
    args = QuantArgs(num_bits=4, strategy="channel")
    w = -torch.rand(500, 1, generator=torch.Generator().manual_seed(0)).add(0.1).mul(size / 4)
    scale, _ = quantization_parameters(w, args, dtype)
    exact = w.abs() / 7.5
    above = torch.nextafter(scale, torch.tensor(float("inf"), dtype=dtype))
    assert bool((scale.float() <= exact).all())
    assert bool((above.float() > exact).all())
    assert quantize(w, scale, None, args).unique().tolist() == [-8]


@pytest.mark.parametrize("symmetric", [True, False])
def test_each_token_of_an_activation_has_a_grid_of_its_own(symmetric):
    args = QuantArgs(symmetric=symmetric, strategy="token", dynamic=True)
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1.0, 1e3])[:, None]
    out = fake_quantize_activation(x, args)
    channel = QuantArgs(symmetric=symmetric, strategy="channel")
    for b in range(2):
        for t in range(3):
            assert torch.equal(out[b, t], fake_quantize(x[b, t][None], channel)[0])
    assert fake_quantize_activation(x.bfloat16(), args).dtype == torch.bfloat16


def test_rounding_is_half_to_even():
    args = QuantArgs(strategy="tensor")
    w = torch.tensor([[127.5, 0.5, 1.5, 2.5, -0.5, -1.5]])
    scale, _ = quantization_parameters(w, args, torch.float32)
    assert scale.item() == 1.0
    assert quantize(w, scale, None, args).tolist() == [[127, 0, 2, 2, 0, -2]]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_passes_through_the_rounding(strategy, symmetric, dtype):
    args = QuantArgs(num_bits=4, symmetric=symmetric, strategy=strategy, group_size=4 if strategy == "group" else None)
    w = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    slope = torch.arange(8.0, dtype=dtype)

    def total(x):
        return (fake_quantize(x, args) * slope).sum()

    single = torch.func.grad(total)(w)
    grouped = {"tensor": w.reshape(1, -1), "channel": w, "group": w.unflatten(1, (-1, 4))}[strategy]
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    # the extremes move the scale, and the clamp stops what lies beyond the last code
    inside = ((grouped > 0.9 * low) & (grouped < 0.9 * high)).reshape(w.shape)
    assert int(inside.sum()) >= 12
    assert torch.allclose(single[inside], slope.expand(4, 8)[inside], atol=1e-5)
    batch = torch.stack((w, w.flip(0), 2 * w))
    many = torch.func.vmap(torch.func.grad(total))(batch)
    assert torch.allclose(many, torch.stack([torch.func.grad(total)(x) for x in batch]), atol=1e-4)
    assert torch.equal(torch.func.vmap(lambda x: fake_quantize(x, args))(batch)[1], fake_quantize(w.flip(0), args))


def test_the_peak_moves_the_scale():
    """The gradient of a weight beyond the last code is that of the scale, not zero and not one."""
    args = QuantArgs(num_bits=4, strategy="channel")
    w = torch.tensor([[7.5, 2.0, 1.0]])
    gradient = torch.func.grad(lambda x: fake_quantize(x, args).sum())(w)
    # codes 7, 2, 1 of a scale of w0 / 7.5: the rest of each rounded weight is its code minus w / scale
    assert torch.allclose(gradient, torch.tensor([[7 / 7.5, 1.0, 1.0]]))


@pytest.mark.parametrize("num_bits", range(2, 9))
@pytest.mark.parametrize("columns", [1, 5, 31, 32, 33, 96, 100])
def test_packing_is_that_of_the_library(num_bits, columns):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    low, high = -(2 ** (num_bits - 1)), 2 ** (num_bits - 1)
    codes = torch.randint(low, high, (3, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(columns))
    words = pack_rows(codes, num_bits)
    assert torch.equal(words, helpers.pack_to_int32(codes, num_bits))
    assert torch.equal(unpack_rows(words, num_bits, columns), codes)
    assert torch.equal(helpers.unpack_from_int32(words, num_bits, codes.shape), codes)


def library_args(args):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    return quantization.QuantizationArgs(
        num_bits=args.num_bits, symmetric=args.symmetric, strategy=args.strategy, group_size=args.group_size
    )


@given(settings_and_weights())
def test_scales_zero_points_and_codes_are_those_of_the_library(case):
    from compressed_tensors.quantization.lifecycle.forward import dequantize as their_dequantize
    from compressed_tensors.quantization.lifecycle.forward import quantize as their_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args, w = case
    w = w.float()
    if not args.symmetric and bool((_extent(w, args) == 0).any()):
        return  # it divides zero by zero, and casts NaN to an integer
    # the library divides in the dtype of the weight, we always in float32
    theirs = library_args(args)
    grouped = w.unflatten(1, (-1, args.group_size)) if args.strategy == "group" else w
    if args.strategy == "tensor":
        low, high = w.amin().reshape(1), w.amax().reshape(1)
    else:
        low, high = (f(grouped, -1, keepdim=args.strategy == "channel") for f in (torch.amin, torch.amax))
    scale, zeros = quantization_parameters(w, args, torch.float32)
    their_scale, their_zeros = calculate_qparams(low, high, theirs)
    assert torch.equal(scale, their_scale)
    assert zeros is None or torch.equal(zeros, their_zeros)
    codes = quantize(w, scale, zeros, args)
    assert torch.equal(codes, their_quantize(w, their_scale, their_zeros, theirs, dtype=torch.int8))
    for dtype in (torch.float32, torch.bfloat16):
        stored = scale.to(dtype)
        got = dequantize(codes, stored, zeros, args, dtype)
        assert torch.equal(got, their_dequantize(codes, stored, zeros if zeros is not None else None, theirs))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("num_bits", range(2, 9))
@pytest.mark.parametrize("shape", [(24, 48), (7, 33), (1, 1)], ids=str)
def test_the_librarys_compressor_writes_the_same_bytes(num_bits, strategy, symmetric, shape):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from regauge.transforms._compressed_tensors import _decode, _encode

    size = {48: 16, 33: 11, 1: 1}[shape[1]]
    args = QuantArgs(
        num_bits=num_bits, symmetric=symmetric, strategy=strategy, group_size=size if strategy == "group" else None
    )
    w = torch.randn(shape, generator=torch.Generator().manual_seed(num_bits))
    scale, zeros = quantization_parameters(w, args, torch.float32)
    ours = {"weight": quantize(w, scale, zeros, args), "weight_scale": scale}
    theirs = {"weight": w, "weight_scale": scale, "weight_zero_point": torch.zeros_like(scale, dtype=torch.int8)}
    if zeros is not None:
        ours["weight_zero_point"] = theirs["weight_zero_point"] = zeros
    scheme = QuantizationScheme(targets=["Linear"], weights=library_args(args))
    for kind in ("pack-quantized", "int-quantized"):
        compressor = BaseCompressor.get_value_from_registry(kind)
        expected = compressor.compress(dict(theirs), scheme)
        got, _ = _encode(ours, {}, name="weight", args=args, formats={"weight": kind})
        assert got.keys() == expected.keys(), kind
        for name in got:
            assert torch.equal(got[name], expected[name]), (kind, name)
            assert got[name].dtype == expected[name].dtype, (kind, name)
        back, _ = _decode(got, {}, name="weight", args=args, shape=shape)
        assert all(torch.equal(back[name], ours[name]) for name in ours)
        assert torch.equal(
            compressor.decompress(dict(got), scheme)["weight"],
            dequantize(ours["weight"], scale, zeros, args, torch.float32),
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (700, 900), (1, 4), (4, 1)])
@pytest.mark.parametrize("dim", [0, 1])
def test_peaks_compared_as_integers_are_those_compared_as_floats(dtype, shape, dim):
    p = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    p[0, 0], p[-1, -1] = -0.0, -torch.inf
    assert torch.equal(absmax(p, dim), torch.maximum(p.amax(1 - dim), -p.amin(1 - dim)).abs())
    assert torch.equal(absmax(p.T, dim), absmax(p, 1 - dim))
    p[-1, 0] = torch.nan
    assert torch.isnan(absmax(p, dim)[-1 if dim == 0 else 0])


def test_rows_give_the_bits_of_one_call():
    p, s = torch.randn(3000, 700), torch.rand(3000, 1) + 0.5
    one = torch.rand(1, 700)
    assert torch.equal(in_rows(lambda p, s, o: p / s * o, p, s, one), p / s * one)
    assert torch.equal(torch.func.vmap(lambda o: in_rows(torch.mul, p, o))(one), (p * one)[None])
    q = p.clone().requires_grad_()
    in_rows(torch.mul, q, s).sum().backward()
    assert torch.equal(q.grad, s.expand_as(q))
