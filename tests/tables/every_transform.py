"""Every transform, by name, with settings that fit a tiny model."""

from dataclasses import dataclass
from functools import partial

import regauge as rg
import torch
from regauge.transforms import (
    CrossLayerEqualize,
    Decode,
    Dequantize,
    Encode,
    LogEqualize,
    Quantize,
    Rescale,
    SmoothQuant,
    chain,
    identity,
    partition,
    select,
)
from torch import Tensor, nn

TOKENS = torch.arange(2, 26).reshape(2, 12)


@dataclass(frozen=True)
class Tiny:
    """A model, its graph, its parameters (ties once), and statistics of every site on a few tokens."""

    model: nn.Module
    graph: rg.Graph
    params: dict[str, Tensor]
    stats: dict[str, Tensor]

    @property
    def observed_kinds(self) -> tuple[str, ...]:
        """Kinds of symmetries whose activation is observed, but for the head."""
        return tuple({s.kind: 0 for s in self.graph.symmetries if s.site not in (None, "lm_head")})

    @property
    def linear_kinds(self) -> tuple[str, ...]:
        """Kinds of symmetries between linears."""
        return tuple({s.kind: 0 for s in self.graph.symmetries if s.kind in ("v_o", "up_down", "q_k")})

    def logits(self, params: dict[str, Tensor] | None = None) -> Tensor:
        with torch.no_grad():
            return torch.func.functional_call(self.model, params or {}, (TOKENS,)).logits


HEAD = ("lm_head",)
ALL = ("norm", "v_o", "up_down")
ASYM = {"weights": {"num_bits": 8, "symmetric": False, "strategy": "channel"}}
TENSOR = {"weights": {"num_bits": 8, "symmetric": False, "strategy": "tensor"}}
ODD = {"weights": {"num_bits": 3, "strategy": "group", "group_size": 16}}


def rescale(tiny):
    generator = torch.Generator().manual_seed(1)
    return Rescale(scales={s.name: torch.rand(s.width, generator=generator) + 0.5 for s in tiny.graph.symmetries})


def encoded(tiny, quantize, *then):
    """The quantizer, then transforms that need to know what it did."""
    schemes = rg.plan(quantize, tiny.params, tiny.graph).schemes
    return chain(quantize, *(transform(schemes=schemes) for transform in then))


TRANSFORMS = {
    "identity": lambda t: identity(),
    "smooth": lambda t: SmoothQuant(alpha=0.6),
    "smooth_range": lambda t: SmoothQuant(alpha=0.6, statistic="range"),
    "smooth_all": lambda t: SmoothQuant(kinds=t.observed_kinds),
    "log": lambda t: LogEqualize(),
    "log_all": lambda t: LogEqualize(statistic="range", kinds=t.observed_kinds),
    "rescale": rescale,
    "cross_layer": lambda t: CrossLayerEqualize(kinds=t.linear_kinds),
    "w8a8": lambda t: Quantize(scheme="W8A8", ignore=HEAD),
    "w8a16": lambda t: Quantize(scheme="W8A16", ignore=HEAD),
    "w4a16": lambda t: Quantize(scheme="W4A16", group_size=16, ignore=HEAD),
    "w4a16_asym": lambda t: Quantize(scheme="W4A16_ASYM", group_size=16, ignore=HEAD),
    "asym_channel": lambda t: Quantize(scheme=ASYM, ignore=HEAD, scale_dtype="float32"),
    "embedding": lambda t: Quantize(scheme="W8A8", targets=("Linear", "Embedding")),
    "fake": lambda t: Quantize(scheme="W4A16_ASYM", group_size=16, ignore=HEAD, form="fake"),
    "fake_w8a8": lambda t: Quantize(scheme="W8A8", ignore=HEAD, form="fake"),
    "fake_w4a16": lambda t: Quantize(scheme="W4A16", group_size=16, ignore=HEAD, form="fake"),
    "fake_channel": lambda t: Quantize(scheme=ASYM, ignore=HEAD, form="fake", scale_dtype="float16"),
    "fake_tensor": lambda t: Quantize(scheme=TENSOR, ignore=HEAD, form="fake"),
    "fake_embedding": lambda t: Quantize(targets=("Linear", "Embedding"), form="fake"),
    "dequantize": lambda t: encoded(t, Quantize(ignore=HEAD), partial(Dequantize, dtype="float32")),
    "encode_int": lambda t: encoded(t, Quantize(ignore=HEAD), Encode),
    "encode_pack": lambda t: encoded(t, Quantize(scheme="W4A16_ASYM", group_size=16, ignore=HEAD), Encode),
    "encode_odd": lambda t: encoded(t, Quantize(scheme=ODD, ignore=HEAD), Encode),
    "encode_tensor": lambda t: encoded(t, Quantize(scheme=TENSOR, ignore=HEAD), Encode),
    "encode_untied": lambda t: encoded(t, Quantize(targets=("Linear", "Embedding")), partial(Encode, untie=True)),
    "decode": lambda t: encoded(t, Quantize(scheme=ODD, ignore=HEAD), Encode, Decode),
    "decode_untied": lambda t: encoded(
        t,
        Quantize(scheme="W4A16_ASYM", group_size=16, targets=("Linear", "Embedding")),
        partial(Encode, untie=True),
        partial(Decode, untie=True),
    ),
    "select": lambda t: select(Quantize(), include=["re:.*0.*"], exclude=["lm_head"]),
    "partition": lambda t: partition(
        {"a": Quantize(scheme="W8A16"), "b": Quantize(scheme="W4A16", group_size=16), "rest": identity()},
        {"re:.*self_attn": "a", "re:.*(mlp|fc)": "b", "re:": "rest"},
    ),
    "chain": lambda t: chain(SmoothQuant(), LogEqualize(), Quantize(ignore=HEAD)),
}
