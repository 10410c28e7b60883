"""Quantization schemes in the words of compressed-tensors: `QuantArgs` of one tensor, `Scheme` of one linear."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

STRATEGIES = ("tensor", "channel", "group", "token")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantArgs:
    """How one tensor is quantized to integers.

    Args:
      num_bits: 2 to 8.
      symmetric: zero point 0, otherwise an int8 zero point is stored.
      strategy: one scale per "tensor", per output "channel", per "group" of `group_size` input channels, or per
        "token" (activations).
      group_size: input channels that share a scale; given exactly when the strategy is "group".
      dynamic: the scale is computed from the tensor at run time (activations only).
    """

    num_bits: int = 8
    symmetric: bool = True
    strategy: str = "tensor"
    group_size: int | None = None
    dynamic: bool = False

    def __post_init__(self):
        if self.num_bits not in range(2, 9):
            raise ValueError(f"num_bits: expected 2 to 8, got {self.num_bits!r}")
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {self.strategy!r}")
        if (self.strategy == "group") != (self.group_size is not None):
            raise ValueError(f"group_size: strategy {self.strategy!r} does not go with group_size={self.group_size!r}")
        if self.group_size is not None and (not isinstance(self.group_size, int) or self.group_size < 1):
            raise ValueError(f"group_size: expected a positive integer, got {self.group_size!r}")

    @property
    def qmin(self) -> int:
        return -(2 ** (self.num_bits - 1))

    @property
    def qmax(self) -> int:
        return 2 ** (self.num_bits - 1) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a linear is quantized: its weight, and the activation that it reads (None: left as it is)."""

    weights: QuantArgs
    input_activations: QuantArgs | None = None

    def __post_init__(self):
        if self.weights.strategy == "token" or self.weights.dynamic:
            raise ValueError("weights: expected strategy tensor, channel or group with dynamic false")
        a = self.input_activations
        if a is not None and not (a.dynamic and a.strategy == "token"):
            raise ValueError("input_activations: only dynamic per-token quantization is supported")

    @property
    def label(self) -> str:
        """A short name: "W8A8", "W4A16 g64 asym"."""
        w, a = self.weights, self.input_activations
        group = f" g{w.group_size}" if w.group_size else "" if w.strategy == "channel" else f" {w.strategy}"
        return f"W{w.num_bits}A{a.num_bits if a else 16}{group}{'' if w.symmetric else ' asym'}"


_CHANNEL = QuantArgs(num_bits=8, strategy="channel")
_TOKEN = QuantArgs(num_bits=8, strategy="token", dynamic=True)

PRESETS: Mapping[str, Scheme] = {
    "W8A8": Scheme(weights=_CHANNEL, input_activations=_TOKEN),
    "W8A16": Scheme(weights=_CHANNEL),
    "W4A16": Scheme(weights=QuantArgs(num_bits=4, strategy="group", group_size=128)),
    "W4A16_ASYM": Scheme(weights=QuantArgs(num_bits=4, strategy="group", group_size=128, symmetric=False)),
}


def make_scheme(scheme: str | Scheme | Mapping[str, Any], group_size: int | None = None) -> Scheme:
    """A scheme from a preset name, a mapping with the keys of `Scheme`, or a scheme; `group_size` overrides its own.

    Raises `ValueError` naming the key, what was expected and what was found.
    """
    if isinstance(scheme, str):
        if scheme not in PRESETS:
            raise ValueError(f"scheme: expected one of {', '.join(PRESETS)} or a mapping, got {scheme!r}")
        scheme = PRESETS[scheme]
    elif isinstance(scheme, Mapping):
        _check_keys("scheme", scheme, Scheme)
        scheme = Scheme(**{key: _args(key, value) for key, value in scheme.items() if value is not None})
    if group_size is not None:
        scheme = replace(scheme, weights=replace(scheme.weights, strategy="group", group_size=group_size))
    return scheme


def _args(where: str, value: Any) -> QuantArgs:
    if isinstance(value, QuantArgs):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"scheme.{where}: expected a mapping such as {{num_bits: 8}}, got {value!r}")
    _check_keys(f"scheme.{where}", value, QuantArgs)
    return QuantArgs(**value)


def _check_keys(where: str, value: Mapping[str, Any], cls: type) -> None:
    known = [f.name for f in fields(cls)]
    wrong = sorted(set(value) - set(known))
    if wrong:
        raise ValueError(f"{where}: unknown key {wrong[0]!r}; expected some of {', '.join(known)}")
