"""Run a model as its quantized version would run: activations rounded in front of the linears that ask for it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from ..transforms import Scheme, fake_quantize_activation


@contextmanager
def quantized_activations(model: nn.Module, schemes: Mapping[str, Scheme]) -> Iterator[nn.Module]:
    """Within the context, every linear in `schemes` with `input_activations` reads rounded inputs.

    Weights are not touched: give the model fake-quantized ones, by `torch.func.functional_call` or by loading them.
    """
    handles = []
    for name, scheme in schemes.items():
        args = scheme.input_activations
        if args is not None:
            module = model.get_submodule(name)
            handles.append(
                module.register_forward_pre_hook(
                    lambda _m, inputs, args=args: (fake_quantize_activation(inputs[0], args), *inputs[1:])
                )
            )
    try:
        yield model
    finally:
        for handle in handles:
            handle.remove()
