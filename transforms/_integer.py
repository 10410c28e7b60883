"""Integer rounding: scales and zero points, codes, and back. Elementwise and row-wise maths, no names.

Legend: O = output rows, I = input channels, G = groups, K = channels of a group. Conventions are those of
compressed-tensors, so that its decoder reproduces ours to the bit:

  symmetric   scale = max|w| / ((qmax - qmin) / 2), cut to the stored precision; zero point 0
  asymmetric  scale = (max - min) / (qmax - qmin), zero point = round(clamp(qmin - min / scale))
  codes       q = round(clamp(w / scale + zero_point, qmin, qmax)), half to even
  decode      (q - zero_point) * scale

All of it is computed in float32 from the scale as it is stored. A row or group of zeros gets the smallest normal step
of the scale's dtype (eps) as its scale.
"""

import torch
from torch import Tensor

from ._rows import absmax, in_rows, is_plain
from ._scheme import QuantArgs


def quantization_parameters(w: Tensor, args: QuantArgs, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of a weight, from its minimum and maximum per tensor, channel or group.

    Args:
      w: (O, I), any float dtype.
      args: strategy tensor, channel or group.
      scale_dtype: dtype in which the scale is stored, and from which the zero point follows.

    Returns:
      scale of shape (1,), (O, 1) or (O, G), and a zero point alike in int8, or None when symmetric.
    """
    if args.symmetric and args.strategy == "channel" and w.ndim == 2:
        high = absmax(w, 0)[:, None].float()
        return _from_extremes(-high, high, args, scale_dtype)
    low, high = _extremes(_grouped(w, args), args)
    return _from_extremes(low, high, args, scale_dtype)


def quantize(w: Tensor, scale: Tensor, zero_point: Tensor | None, args: QuantArgs) -> Tensor:
    """Codes of `w` on the grid of `scale` and `zero_point`: int8 of the shape of `w`."""

    def codes(w: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
        return _codes(w, scale, zero_point, args).to(torch.int8)

    return in_rows(codes, w, scale) if zero_point is None else in_rows(codes, w, scale, zero_point)


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor | None, args: QuantArgs, dtype: torch.dtype) -> Tensor:
    """(q - zero_point) * scale in float32, rounded once to `dtype`."""

    def decode(codes: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
        q = _grouped(codes, args).float()
        if zero_point is not None:
            q = q - _spread(zero_point, args).float()
        return (q * _spread(scale, args).float()).reshape(codes.shape).to(dtype)

    return in_rows(decode, codes, scale) if zero_point is None else in_rows(decode, codes, scale, zero_point)


def fake_quantize(w: Tensor, args: QuantArgs, scale_dtype: torch.dtype | None = None) -> Tensor:
    """`w` rounded to its own grid, in its own dtype; equal to quantize then dequantize, bit for bit.

    The gradient passes through the rounding as if it were not there (straight-through), also under `torch.func`.
    """
    scale, zero_point = quantization_parameters(w, args, scale_dtype or w.dtype)
    q = _grouped(_codes(w, scale, zero_point, args), args)
    if zero_point is not None:
        q = q - _spread(zero_point, args).float()
    return (q * _spread(scale, args).float()).reshape(w.shape).to(w.dtype)


def fake_quantize_activation(x: Tensor, args: QuantArgs) -> Tensor:
    """Dynamic per-token rounding of an activation (..., I), in its own dtype."""
    return fake_quantize(x.reshape(-1, x.shape[-1]), _as_channel(args), x.dtype).reshape(x.shape)


def _as_channel(args: QuantArgs) -> QuantArgs:
    return QuantArgs(num_bits=args.num_bits, symmetric=args.symmetric, strategy="channel")


def _grouped(w: Tensor, args: QuantArgs) -> Tensor:
    return w.unflatten(-1, (-1, args.group_size)) if args.strategy == "group" else w


def _spread(scale: Tensor, args: QuantArgs) -> Tensor:
    return scale[..., None] if args.strategy == "group" else scale


def _extremes(grouped: Tensor, args: QuantArgs) -> tuple[Tensor, Tensor]:
    """Minimum and maximum, both forced to include 0; exact in any dtype."""
    if args.strategy == "tensor":
        low, high = grouped.amin().reshape(1), grouped.amax().reshape(1)
    else:
        keep = args.strategy == "channel"
        low, high = grouped.amin(-1, keepdim=keep), grouped.amax(-1, keepdim=keep)
    return low.clamp(max=0).float(), high.clamp(min=0).float()


def _from_extremes(low: Tensor, high: Tensor, args: QuantArgs, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    steps = args.qmax - args.qmin
    if args.symmetric:
        scale = _toward_zero(torch.maximum(-low, high) / (steps / 2), dtype).to(dtype)
    else:
        scale = ((high - low) / steps).to(dtype)
    scale = torch.where(scale == 0, torch.finfo(dtype).eps, scale)
    if args.symmetric:
        return scale, None
    zero_point = (args.qmin - low / scale.float()).clamp(args.qmin, args.qmax)
    return scale, _round(zero_point).to(torch.int8)


# low bits of a float32 mantissa that the dtype does not have
_LOST_BITS = {torch.bfloat16: 16, torch.float16: 13}


def _toward_zero(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The float32 scale cut to the precision of `dtype`; its derivative is one.

    The largest weight of a symmetric grid lies at -7.5 or 7.5 steps (4 bits), a tie. A scale that is rounded up moves
    it inside, and it shrinks whatever its sign; cut, it goes outward where there is a code. On SmolLM2 in groups of 64
    this is worth 0.3 to 1.4 of perplexity.
    """
    bits = _LOST_BITS.get(dtype, 0)
    if not bits:
        return scale
    cut = (scale.detach().contiguous().view(torch.int32) & -(1 << bits)).view(torch.float32)
    if dtype == torch.float16:  # below the smallest normal number the step is fixed
        tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        cut = torch.where(cut < torch.finfo(dtype).smallest_normal, (cut / tiny).floor() * tiny, cut)
    return scale + (cut - scale).detach()  # exact: the two are within a factor of two


def _codes(w: Tensor, scale: Tensor, zero_point: Tensor | None, args: QuantArgs) -> Tensor:
    """The codes as float32 whole numbers."""
    x = _grouped(w, args).float() / _spread(scale, args).float()
    if zero_point is not None:
        x = x + _spread(zero_point, args).float()
    if is_plain(x):  # x is ours: no further copies
        return x.clamp_(args.qmin, args.qmax).round_().reshape(w.shape)
    return _round(x.clamp(args.qmin, args.qmax)).reshape(w.shape)


def _round(x: Tensor) -> Tensor:
    """Half to even; x + (round(x) - x) is exact here, and its derivative is one."""
    if is_plain(x):
        return torch.round(x)
    return x + (torch.round(x) - x).detach()
