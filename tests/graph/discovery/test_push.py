"""Symmetries of small modules, each applied to real float64 weights: the function stays, and half of it changes it."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from regauge.graph.discovery.structure import root_of
from regauge.graph.discovery.symmetries import find_symmetries, module_of
from regauge.graph.discovery.trace import main_output, trace_forward
from torch import nn

EXPERTS = 4


class Toy(nn.Module):
    """Parts by name, and a forward that is given as a function of the module and its input."""

    def __init__(self, parts, run):
        super().__init__()
        for name, make in parts.items():
            part = make()
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


class Norm(nn.Module):
    """RMS norm that multiplies by `offset + weight`."""

    def __init__(self, *shape, offset=0.0):
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.empty(*shape)), offset

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * (self.weight if self.offset == 0 else self.offset + self.weight)


def L(inputs, outputs, bias=False):
    return lambda: nn.Linear(inputs, outputs, bias=bias)


def P(*shape):
    return lambda: nn.Parameter(torch.empty(shape))


def N(*shape, offset=0.0):
    return lambda: Norm(*shape, offset=offset)


def E(rows, width):
    return lambda: nn.Embedding(rows, width)


def LN(width):
    return lambda: nn.LayerNorm(width)


def heads(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def attend(q, k, v):
    """(batch, heads, tokens, dim) -> (batch, tokens, heads * dim)"""
    return (torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v).transpose(1, 2).flatten(2)


def fold(params, axes, s, inverse):
    """Params with the channels of the axes times s, or divided by it."""
    out = dict(params)
    for axis in axes:
        classes = range(len(s)) if axis.classes is None else axis.classes
        scale = torch.tensor([1.0 if c < 0 else float(s[c]) for c in classes], dtype=torch.float64)
        p = out[axis.param].clone()
        part = p.narrow(axis.dim, axis.start, axis.size)
        if axis.stack is None:
            assert len(scale) == axis.size
            order = scale.reshape([axis.size if d == axis.dim else 1 for d in range(p.ndim)])
        else:
            slices = p.shape[axis.stack]
            assert len(scale) == slices * axis.size
            order = torch.ones(
                [axis.size if d == axis.dim else slices if d == axis.stack else 1 for d in range(p.ndim)]
            )
            order = order.double()
            for i in range(slices):
                for j in range(axis.size):
                    where = [slice(None)] * p.ndim
                    where[axis.stack], where[axis.dim] = i, j
                    order[tuple(where)] = scale[i * axis.size + j]
        shifted = part + axis.offset
        part.copy_((shifted / order if inverse else shifted * order) - axis.offset)
        out[axis.param] = p
    return out


def find(parts, run, x):
    with torch.device("meta"):
        model = Toy(parts, run)
    trace = trace_forward(model, {"x": x})
    return trace, *find_symmetries(trace)


def real(parts, run, seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = Toy(parts, run).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(generator=generator)
        for b in model.buffers():
            if b.is_floating_point():
                b.normal_(generator=generator)
    return model


def evaluate(model, params, x):
    """The output, and what each module gets as its first argument the first time."""
    given, hooks = {}, []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(partial(_keep, given, name)))
    try:
        with torch.no_grad():
            out = main_output(torch.func.functional_call(model, params, kwargs={"x": x}))
    finally:
        for hook in hooks:
            hook.remove()
    return out, given


def _keep(given, name, _module, args):
    if args and isinstance(args[0], torch.Tensor):
        given.setdefault(name, args[0].clone())


def distance(a, b):
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def hold(trace, groups, model, x, control=True):
    """Every group keeps the function, turns the activations that it names into x / s, and half of it does neither."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    before, given_before = evaluate(model, params, x)
    generator = torch.Generator().manual_seed(1)
    for group in groups:
        s = torch.rand(group.width, generator=generator, dtype=torch.float64) * 1.5 + 0.5
        after, given_after = evaluate(model, fold(fold(params, group.producers, s, True), group.consumers, s, False), x)
        assert distance(after, before) < 1e-9, f"{group} changes the function by {distance(after, before):.1e}"
        roots = {root_of(trace, number): classes for number, classes in group.reads}
        for module, number in trace.given.items():
            classes = roots.get(root_of(trace, number))
            if classes is not None and module:
                scale = torch.tensor([1.0 if c < 0 else float(s[c]) for c in classes], dtype=torch.float64)
                moved = distance(given_after[module] * scale, given_before[module])
                assert moved < 1e-9, f"{group}: the input of {module} is not divided by s"
        if control:
            for side, inverse in ((group.producers, True), (group.consumers, False)):
                half, _ = evaluate(model, fold(params, side, s, inverse), x)
                assert distance(half, before) > 1e-6, f"{group}: half of it changes nothing"


def text(group):
    sides = (sorted({module_of(a.param) for a in side}) for side in (group.producers, group.consumers))
    return group.kind + " " + " > ".join(" ".join(side) for side in sides)


CASES = {}


def case(*expected, shape=(2, 3, 8), x=None, **parts):
    """A toy: its parts, its input, and its groups as 'kind producers > consumers'."""

    def register(run):
        for group in expected:
            assert all(side.split() == sorted(side.split()) for side in group.split(" ", 1)[1].split(" > ")), group
        generator = torch.Generator().manual_seed(7)
        given_x = torch.randn(shape, generator=generator, dtype=torch.float64) if x is None else x
        CASES[run.__name__] = (set(expected), parts, run, given_x)
        return run

    return register


IDS = torch.tensor([[1, 4, 2], [3, 0, 5]])

# norms and their readers


@case("norm n > a b", n=N(8), a=L(8, 5), b=L(8, 5, bias=True))
def norm_to_linears(m, x):
    x = m.n(x)
    return m.a(x) + m.b(x)


@case("norm n n.bias > a b", n=LN(8), a=L(8, 5), b=L(8, 5, bias=True))
def layer_norm_to_linears(m, x):
    x = m.n(x)
    return m.a(x) + m.b(x)


@case("norm n > a", n=N(8, offset=1.0), a=L(8, 5))
def one_plus_weight(m, x):
    return m.a(m.n(x))


@case("norm w > a", w=P(8), a=L(8, 5))
def weight_plus_one_in_two_steps(m, x):
    return m.a(F.normalize(x, dim=-1) * ((m.w + 0.5) + 0.5))


@case(w=P(8), a=L(8, 5))
def one_added_twice_as_much(m, x):
    return m.a(x * torch.add(m.w, 1, alpha=2))


@case("norm b w > a", w=P(8), b=P(8), a=L(8, 5))
def affine_by_hand(m, x):
    return m.a(x * m.w + m.b)


@case("norm b w > a", w=P(8), b=P(8), a=L(8, 5))
def affine_with_one_plus_bias(m, x):
    return m.a(x * m.w + (1 + m.b))


@case("norm w > a", w=P(8), a=L(8, 5))
def weight_both_multiplied_and_added(m, x):
    return m.a(x * m.w + m.w)


@case(w=P(8), a=L(8, 5))
def weight_added_and_one_plus_weight_multiplied(m, x):
    return m.a(x * (1 + m.w) + m.w)


@case(w=P(8), c=P(8), a=L(8, 5))
def layer_norm_with_a_bias_that_is_computed(m, x):
    return m.a(F.layer_norm(x, (8,), m.w, m.c * 2))


@case(w=P(8), c=lambda: torch.zeros(8), a=L(8, 5))
def layer_norm_with_a_bias_that_is_a_buffer(m, x):
    return m.a(F.layer_norm(x, (8,), m.w, m.c))


@case(w=P(8), c=P(16), a=L(8, 5))
def layer_norm_with_a_strided_bias(m, x):
    return m.a(F.layer_norm(x, (8,), m.w, m.c[::2]))


@case("norm w > a", w=P(8), a=L(8, 5))
def layer_norm_without_bias(m, x):
    return m.a(F.layer_norm(x, (8,), m.w))


@case("norm b > a", b=P(8), a=L(8, 5))
def layer_norm_with_one_plus_weight(m, x):
    return m.a(F.layer_norm(x, (8,), 1 + m.b))


@case("norm w > a", shape=(2, 3, 4, 8), w=P(4, 8), a=L(32, 5))
def layer_norm_over_two_dims_by_hand(m, x):
    return m.a((F.layer_norm(x, (4, 8)) * m.w).flatten(2))


@case(shape=(2, 3, 4, 8), w=P(4, 8), b=P(4, 8), a=L(8, 5))
def layer_norm_over_two_dims(m, x):
    return m.a(F.layer_norm(x, (4, 8), m.w, m.b))


@case(n=N(8), a=L(8, 8))
def norm_read_by_a_residual(m, x):
    x = m.n(x)
    return m.a(x) + x


@case(n=N(8), a=L(8, 8))
def norm_read_by_an_elementwise_operator(m, x):
    x = m.n(x)
    return m.a(x) * torch.sigmoid(x)


@case("norm n > a r", n=N(8), r=L(8, 2), a=L(8, 5))
def norm_read_by_a_router(m, x):
    x = m.n(x)
    return m.a(x) * torch.softmax(m.r(x), -1)[..., :1]


@case("norm n > a r", n=N(8), r=P(2, 8), a=L(8, 5))
def norm_read_by_a_router_in_float32(m, x):
    x = m.n(x)
    logits = F.linear(x.to(m.r.dtype), m.r.to(torch.float64).to(x.dtype))
    return m.a(x) * torch.softmax(logits, -1)[..., :1]


@case(n=N(8))
def norm_that_is_the_output(m, x):
    return m.n(x)


@case("norm n > a", n=N(8), a=L(8, 5))
def outputs_as_a_tuple(m, x):
    return m.a(m.n(x)), (x, x)


@case(n=N(8), a=L(8, 5))
def a_parameter_that_is_returned(m, x):
    m.a(m.n(x))
    return m.n.weight, x


@case(n=N(8), a=L(8, 8))
def a_weight_that_is_part_of_the_output(m, x):
    return m.a(m.n(x)) + m.n.weight.sum()


@case(n=N(8), a=L(8, 5))
def the_same_norm_used_twice(m, x):
    return m.a(m.n(m.n(x)))


@case("norm n > a", "norm n2 > b", n=N(8), n2=N(8), a=L(8, 8), b=L(8, 5))
def a_residual_around_a_block(m, x):
    x = x + m.a(m.n(x))
    return m.b(m.n2(x))


@case("norm n > a", n=N(8), s=P(1), a=L(8, 5))
def a_scalar_parameter_multiplied(m, x):
    return m.a(m.n(x) * m.s)


@case(n=N(8), s=P(1), a=L(8, 5))
def a_scalar_parameter_added(m, x):
    return m.a(m.n(x) + m.s)


@case(n=N(8), s=P(), a=L(8, 5))
def a_parameter_without_dims_added(m, x):
    return m.a(m.n(x) + m.s)


@case(n=N(8), s=P(3, 1), a=L(8, 5))
def a_parameter_for_each_token_added(m, x):
    return m.a(m.n(x) + m.s)


@case("norm n s > a", n=N(8), s=P(3, 8), a=L(8, 5))
def a_parameter_for_each_token_and_channel_added(m, x):
    return m.a(m.n(x) + m.s)


@case("norm n > a", n=N(8), s=P(3, 1), a=L(8, 5))
def a_parameter_for_each_token_multiplied(m, x):
    return m.a(m.n(x) * m.s)


@case("norm n > a", "norm g > a", n=N(8), g=P(8), a=L(8, 5))
def two_vectors_multiplied_in(m, x):
    return m.a(m.n(x) * m.g)


@case(p=P(8), q=P(8), a=L(8, 5))
def parameters_multiplied_with_parameters(m, x):
    return m.a(x * (m.p * m.q))


@case("norm n > a", n=N(8), c=lambda: torch.ones(8), a=L(8, 5))
def a_buffer_multiplied_in(m, x):
    return m.a(m.n(x) * m.c)


@case("norm w > a", w=P(8), c=lambda: torch.ones(8), a=L(8, 5))
def a_buffer_multiplied_into_the_weight(m, x):
    return m.a(x * (m.w * m.c))


@case(n=N(8), c=lambda: torch.ones(8), a=L(8, 5))
def a_buffer_added(m, x):
    return m.a(m.n(x) + m.c)


@case(n=N(8), a=L(8, 5))
def division_by_its_own_norm(m, x):
    x = m.n(x)
    return m.a(x / x.norm(dim=-1, keepdim=True))


@case("norm n > a", n=N(8), a=L(8, 5))
def division_by_the_norm_of_the_input(m, x):
    return m.a(m.n(x) / x.norm(dim=-1, keepdim=True))


@case(n=N(8), a=L(8, 5))
def division_of_something_by_it(m, x):
    return m.a(x / m.n(x))


@case("norm w > a", w=P(8), a=L(8, 5))
def a_cast_of_a_weight(m, x):
    return m.a(x * m.w.to(torch.float64).to(x.dtype))


@case(w=P(8), a=L(8, 5))
def a_weight_cast_to_integers(m, x):
    return m.a(x * (m.w * 1.0).to(x.dtype) + x * m.w.long())


@case(w=P(8), a=L(8, 5))
def only_the_integer_part_of_a_weight(m, x):
    return m.a(x * m.w.to(torch.int32))


@case(n=N(8), a=L(8, 5))
def an_activation_cast_to_integers(m, x):
    return m.a((m.n(x) * 4).long().to(x.dtype))


@case(n=N(8), a=L(8, 5))
def an_activation_cast_to_bool(m, x):
    return m.a(m.n(x).relu().bool().to(x.dtype))


@case(n=N(8), a=L(8, 5))
def division_that_rounds(m, x):
    return m.a(torch.div(m.n(x), 0.25, rounding_mode="floor"))


@case(n=N(8), a=L(8, 5))
def an_integer_buffer_that_takes_it(m, x):
    held = torch.zeros(x.shape, dtype=torch.long, device=x.device)
    held.copy_(4 * m.n(x))
    return m.a(held.to(x.dtype))


@case(w=P(8), a=L(8, 5))
def a_copy_of_a_weight_that_is_shifted_in_place(m, x):
    w = m.w.clone()
    w.add_(1)
    return m.a(x * w)


@case(w=P(8), a=L(8, 5))
def a_copy_of_a_weight_with_one_channel_written(m, x):
    w = m.w.clone()
    w[0] = 1.0
    return m.a(x * w)


@case(w=P(5, 8), n=N(8))
def a_copy_of_a_matrix_that_is_squared_in_place(m, x):
    w = m.w.clone()
    w.pow_(2).add_(1)
    return F.linear(m.n(x), w) * w.sum()


@case("norm n > a", n=lambda: nn.RMSNorm(8), a=L(8, 5))
def the_rms_norm_of_torch(m, x):
    return m.a(m.n(x))


@case("norm g > b", g=P(6, 1), v=P(6, 8), b=L(6, 5))
def weight_normalization(m, x):
    return m.b(F.linear(x, m.g * (m.v / m.v.norm(dim=1, keepdim=True))))


# linears after linears


@case("up_down a a.bias > b", a=L(8, 6, bias=True), b=L(6, 5))
def linear_relu_linear(m, x):
    return m.b(F.relu(m.a(x)))


@case("up_down a > b", a=L(8, 6), b=L(6, 5))
def linear_leaky_relu_linear(m, x):
    return m.b(F.leaky_relu(m.a(x), 0.3))


@case("up_down a > b", a=L(8, 6), b=L(6, 5))
def linear_abs_linear(m, x):
    h = m.a(x)
    return m.b(h.abs() - (-h).relu() * 0.5)


@case(a=L(8, 6), b=L(6, 5))
def linear_squared_relu_linear(m, x):
    return m.b(F.relu(m.a(x)).square())


@case(a=L(8, 6), b=L(6, 5))
def linear_times_itself(m, x):
    h = m.a(x)
    return m.b(h * h)


@case(a=L(8, 6), b=L(6, 5))
def linear_gelu_linear(m, x):
    return m.b(F.gelu(m.a(x)))


@case("up_down u > d", g=L(8, 6), u=L(8, 6), d=L(6, 5))
def gated(m, x):
    return m.d(F.silu(m.g(x)) * m.u(x))


@case("up_down g > d", "up_down u > d", g=L(8, 6), u=L(8, 6), d=L(6, 5))
def gated_by_relu_is_linear_in_each_factor(m, x):
    return m.d(F.relu(m.g(x)) * m.u(x))


@case("up_down f f.bias > d", f=L(8, 12, bias=True), d=L(6, 5))
def fused_gate_first(m, x):
    gate, up = m.f(x).chunk(2, -1)
    return m.d(F.silu(gate) * up)


@case("up_down f f.bias > d", f=L(8, 12, bias=True), d=L(6, 5))
def fused_up_first(m, x):
    up, gate = m.f(x).split(6, -1)
    return m.d(F.silu(gate) * up)


@case("up_down f f.bias > d", f=L(8, 12, bias=True), d=L(6, 5))
def fused_interleaved(m, x):
    h = m.f(x)
    return m.d(F.silu(h[..., ::2]) * h[..., 1::2])


@case("up_down f > d", f=L(8, 13), d=L(6, 5))
def fused_with_a_row_of_its_own(m, x):
    up, gate, own = m.f(x).split((6, 6, 1), -1)
    return m.d(F.silu(gate) * up * torch.sigmoid(own))


@case("up_down f > d", f=L(8, 12), d=L(6, 5))
def fused_rolled_and_flipped(m, x):
    gate, up = m.f(x).roll(5, -1).flip(-1).chunk(2, -1)
    return m.d(F.silu(gate) * up[..., [3, 1, 0, 2, 5, 4]])


@case("up_down a > b", a=L(8, 6), b=L(6, 5))
def a_permutation_by_a_constant(m, x):
    return m.b(F.relu(m.a(x)).index_select(-1, torch.tensor([5, 0, 2, 1, 4, 3])))


@case("up_down a > b", a=L(8, 6), b=L(4, 5))
def channels_picked_by_a_constant(m, x):
    return m.b(m.a(x)[..., [5, 0, 0, 3]])


@case(a=L(8, 6), b=L(6, 5))
def a_permutation_by_data(m, x):
    return m.b(m.a(x)[..., x[0, 0, :6].argsort()])


@case("up_down a > b", a=L(8, 6), b=L(6, 5))
def tokens_picked_by_data(m, x):
    return m.b(m.a(x)[:, x[0, :, 0].argsort()])


@case("up_down a > b", a=L(8, 6), b=L(6, 5))
def tokens_gathered_by_data(m, x):
    h = m.a(x)
    return m.b(h.gather(1, x[..., :1].argsort(1).expand(h.shape)))


@case(a=L(8, 6), b=L(6, 5))
def channels_gathered_by_data(m, x):
    return m.b(m.a(x).gather(-1, x[..., :6].argsort(-1)))


@case(a=L(8, 6), b=L(3, 5))
def channels_as_tokens(m, x):
    return m.b(m.a(x).unflatten(-1, (2, 3)).flatten(1, 2))


@case(a=L(8, 6), b=L(6, 5))
def labels_that_become_rows(m, x):
    h = m.a(x)
    return m.b(torch.cat((h, h.flip(-1)), 1).transpose(1, 2).reshape(2, 6, 6))


@case("up_down a > b c", a=L(8, 6), b=L(6, 5), c=L(6, 5))
def one_producer_in_two_branches(m, x):
    h = m.a(x)
    return m.b(F.relu(h)) + m.c(h.abs())


@case("up_down a > c", a=L(8, 6), c=L(6, 5))
def two_branches_of_one_producer_added(m, x):
    h = m.a(x)
    return m.c(F.relu(h) + h.roll(2, -1))


@case(a=L(8, 6), b=L(8, 6), c=L(6, 5))
def two_producers_added(m, x):
    return m.c(m.a(x) + m.b(x))


@case("up_down a > c", a=L(8, 6), b=L(8, 4), c=L(10, 5))
def labelled_beside_unlabelled(m, x):
    return m.c(torch.cat((m.a(x), x[..., :4].tanh()), -1)) + F.gelu(m.b(x)).sum()


@case("up_down a > c", "up_down b > c", a=L(8, 6), b=L(8, 4), c=L(10, 5))
def two_producers_side_by_side(m, x):
    return m.c(torch.cat((m.a(x), m.b(x)), -1))


@case(a=L(8, 6), c=L(6, 5))
def tokens_of_others_beside_it(m, x):
    return m.c(torch.cat((m.a(x), x[:, :1, :6]), 1))


@case("up_down a > c", a=L(8, 6), c=L(6, 5))
def sums_over_tokens(m, x):
    h = m.a(x)
    return m.c(h.mean(1)) + m.c(h.sum(1, keepdim=True)).squeeze(1)


@case(a=L(8, 6), c=L(6, 5))
def means_over_channels(m, x):
    h = m.a(x)
    return m.c(h - h.mean(-1, keepdim=True))


@case("up_down a > c", a=L(8, 6), c=L(10, 5))
def padding_with_zeros(m, x):
    return m.c(F.pad(m.a(x), (1, 3)))


@case(a=L(8, 6), c=L(10, 5))
def padding_with_ones(m, x):
    return m.c(F.pad(m.a(x), (1, 3), value=1.0))


@case("up_down a > c", a=L(8, 6), c=L(6, 5))
def masked_with_zero(m, x):
    return m.c(m.a(x).masked_fill(x[..., :1] > 0, 0.0))


@case("up_down a > c", a=L(8, 6), c=L(6, 5))
def masked_with_zero_by_a_larger_mask(m, x):
    return m.c(torch.masked_fill(m.a(x[0]), x[..., :1] > 0, 0.0))


@case(a=L(8, 6), c=L(6, 5))
def masked_with_one(m, x):
    return m.c(m.a(x).masked_fill(x[..., :1] > 0, 1.0))


@case(a=L(8, 6), c=L(6, 5))
def masked_by_itself(m, x):
    h = m.a(x)
    return m.c(h.masked_fill(h > 1, 0.0))


@case(a=L(8, 6), c=L(6, 5))
def chosen_by_where(m, x):
    return m.c(torch.where(x[..., :6] > 0, m.a(x), x[..., :6]))


@case(a=L(8, 6), c=L(6, 5))
def cumulative_sum_over_channels(m, x):
    return m.c(m.a(x).cumsum(-1))


@case(a=L(8, 6), k=lambda: nn.Conv1d(6, 6, 3, groups=6, padding=1), c=L(6, 5))
def a_convolution(m, x):
    return m.c(m.k(m.a(x).transpose(1, 2)).transpose(1, 2))


@case(a=L(8, 6), c=L(6, 5))
def clamped(m, x):
    return m.c(m.a(x).clamp(-1, 1))


@case(a=L(8, 6), c=L(6, 5))
def sorted_channels(m, x):
    return m.c(m.a(x).sort(-1).values)


@case(a=L(8, 6), c=L(6, 5))
def added_to_a_multiple_of_itself_and_of_another(m, x):
    return m.c(torch.add(x[..., :6], m.a(x), alpha=2.0))


@case("up_down a > c", "norm g > c", a=L(8, 6), g=P(6), c=L(6, 5))
def a_layer_scale_vector(m, x):
    return m.c(m.a(x) * m.g)


@case("up_down a b > c", a=L(8, 6), b=P(6), c=L(6, 5))
def a_bias_that_is_added_later(m, x):
    return m.c(m.a(x) + m.b)


@case(a=L(8, 6), b=P(6), c=L(6, 5))
def a_bias_that_is_added_and_multiplied(m, x):
    return m.c(m.a(x) + m.b) * m.b.sum()


@case(a=L(8, 6), b=P(6), c=L(6, 5))
def a_bias_that_is_subtracted_is_no_producer(m, x):
    return m.c(m.a(x) - m.b)


@case("up_down b w > c", w=P(6, 8), b=P(12), c=L(6, 5))
def the_second_half_of_a_longer_bias(m, x):
    return m.c(F.linear(x, m.w, m.b[6:])) * 2


@case("up_down b w > c", w=P(6, 8), b=P(12), c=L(6, 5))
def a_cast_of_the_second_half_of_a_longer_bias(m, x):
    return m.c(F.linear(x, m.w, m.b[6:].to(torch.float64).to(x.dtype)))


@case(w=P(6, 8), b=P(12), c=L(6, 5))
def every_other_number_of_a_longer_bias(m, x):
    return m.c(F.linear(x, m.w, m.b[::2]))


@case(w=P(6, 8), b=P(1), c=L(6, 5))
def one_bias_for_all_channels(m, x):
    return m.c(F.linear(x, m.w, m.b.expand(6)))


@case(w=P(6, 8), b=P(1), c=L(6, 5))
def one_bias_that_broadcasts(m, x):
    return m.c(torch.addmm(m.b, x.flatten(0, 1), m.w.t()))


@case("up_down w > c", w=P(6, 8), c=L(3, 5))
def the_second_half_of_the_rows(m, x):
    return m.c(F.linear(x, m.w[3:]))


@case("up_down w > c", w=P(6, 8), c=L(3, 5))
def a_cast_of_the_second_half_of_the_rows(m, x):
    return m.c(F.linear(x, m.w[3:].to(torch.float64).to(x.dtype)))


@case("up_down a > w", a=L(8, 3), w=P(5, 7))
def the_last_columns(m, x):
    return F.linear(m.a(x), m.w[:, 4:])


@case(n=N(8), w=P(6, 8))
def a_copy_of_the_first_rows_as_consumer(m, x):
    return F.linear(m.n(x), m.w[:3].clone()) * F.linear(m.n(x), m.w[3:].clone())


@case(w=P(6, 8), c=L(4, 5))
def one_plus_the_last_columns(m, x):
    return m.c(x[..., :4].unsqueeze(-2).expand(2, 3, 6, 4) * (m.w[:, 4:] + 1)).sum(-2)


@case(w=P(12), c=L(6, 5))
def rows_of_a_vector_picked_by_data(m, x):
    return m.c(m.c.weight.sum(0) * x[..., :6] + m.w.view(2, 6)[(x[..., 0] > 0).long()])


@case(a=L(8, 6), w=P(12), c=L(6, 5))
def a_bias_picked_by_data_from_a_reshaped_vector(m, x):
    return m.c(m.a(x) + m.w.view(2, 6)[(x[..., 0] > 0).long()])


@case("up_down a w > c", a=L(8, 6), w=P(4, 6), c=L(6, 5))
def a_bias_picked_by_data(m, x):
    return m.c(m.a(x) + m.w[(x[..., 0] > 0).long()])


@case("up_down a w > c", a=L(8, 6), w=P(4, 6), c=L(6, 5))
def a_bias_picked_from_a_part_of_a_table(m, x):
    return m.c(m.a(x) + m.w[(x[..., 0] > 0).long() + 2])


@case(a=L(8, 8))
def one_linear_as_producer_and_consumer(m, x):
    return m.a(F.relu(m.a(x)))


@case(n=N(8), a=L(8, 6), b=L(6, 8))
def a_block_applied_twice(m, x):
    for _ in range(2):
        x = x + m.b(F.relu(m.a(m.n(x))))
    return x


@case(w=P(6, 8))
def a_tied_matrix_there_and_back(m, x):
    return F.relu(x @ m.w.t()) @ m.w


@case(w=P(6, 8), c=L(6, 8))
def a_tied_matrix_there_and_back_beside_another(m, x):
    h = F.relu(x @ m.w.t())
    return h @ m.w + m.c(h)


@case(e=E(6, 8), a=L(8, 6), x=IDS)
def a_tied_embedding_beside_another(m, x):
    h = m.e(x)
    return F.linear(h, m.e.weight) + m.a(h)


@case(e=E(6, 8), x=IDS)
def a_tied_embedding(m, x):
    return F.linear(m.e(x), m.e.weight)


@case("embed e > a", e=E(6, 8), a=L(8, 5), x=IDS)
def embedding_to_linear(m, x):
    return m.a(m.e(x) * math.sqrt(8))


@case("embed e p > a", e=E(6, 8), p=P(3, 8), a=L(8, 5), x=IDS)
def embedding_with_positions_as_a_parameter(m, x):
    return m.a(m.e(x) + m.p)


@case(e=E(6, 8), p=E(9, 8), a=L(8, 5), x=IDS)
def embedding_with_looked_up_positions(m, x):
    return m.a(m.e(x) + m.p(torch.arange(3)))


@case(e=E(6, 8), p=E(9, 8), a=L(8, 5), x=IDS)
def embedding_with_the_first_positions(m, x):
    return m.a(m.e(x) + m.p.weight[:3])


# attention


@case("v_o v > o", "q_k q > k", q=L(8, 8), k=L(8, 8), v=L(8, 8), o=L(8, 5))
def attention(m, x):
    return m.o(attend(heads(m.q(x), 2), heads(m.k(x), 2), heads(m.v(x), 2)))


@case(
    "v_o v v.bias > o",
    "q_k q q.bias > k k.bias",
    q=L(8, 8, bias=True),
    k=L(8, 8, bias=True),
    v=L(8, 8, bias=True),
    o=L(8, 5, bias=True),
)
def attention_with_biases(m, x):
    return m.o(attend(heads(m.q(x), 2), heads(m.k(x), 2), heads(m.v(x), 2)))


@case("v_o f f.bias > o", "q_k f f.bias > f f.bias", f=L(8, 24, bias=True), o=L(8, 5))
def fused_attention(m, x):
    q, k, v = m.f(x).chunk(3, -1)
    return m.o(attend(heads(q, 2), heads(k, 2), heads(v, 2)))


@case("v_o f f.bias > o", "q_k f f.bias > f f.bias", f=L(8, 24, bias=True), o=L(8, 5))
def fused_attention_interleaved_by_head(m, x):
    q, k, v = m.f(x).view(2, 3, 2, 3, 4).unbind(-2)
    return m.o(attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)))


@case("v_o f > o", "q_k f > f", f=L(8, 24), o=L(8, 5))
def fused_attention_interleaved_by_channel(m, x):
    q, k, v = m.f(x).view(2, 3, 8, 3).unbind(-1)
    return m.o(attend(heads(q, 2), heads(k, 2), heads(v, 2)))


@case("v_o v > o", "q_k q > k", q=L(8, 16), k=L(8, 8), v=L(8, 8), o=L(16, 5))
def grouped_queries_by_repeat_interleave(m, x):
    k, v = (heads(y, 2).repeat_interleave(2, dim=1) for y in (m.k(x), m.v(x)))
    return m.o(attend(heads(m.q(x), 4), k, v))


@case("v_o v > o", "q_k q > k", q=L(8, 16), k=L(8, 8), v=L(8, 8), o=L(16, 5))
def grouped_queries_by_expand(m, x):
    k, v = (heads(y, 2)[:, :, None].expand(2, 2, 2, 3, 4).reshape(2, 4, 3, 4) for y in (m.k(x), m.v(x)))
    return m.o(attend(heads(m.q(x), 4), k, v))


@case("v_o v > o", "q_k q > k", q=L(8, 16), k=L(8, 8), v=L(8, 8), o=L(16, 5))
def grouped_queries_by_repeat(m, x):
    k, v = (heads(y, 2).repeat(1, 2, 1, 1) for y in (m.k(x), m.v(x)))
    return m.o(attend(heads(m.q(x), 4), k, v))


@case("v_o v > o", "q_k q > k", q=L(8, 16), k=L(8, 4), v=L(8, 4), o=L(16, 5))
def one_key_value_head(m, x):
    return m.o(attend(heads(m.q(x), 4), heads(m.k(x), 1), heads(m.v(x), 1)))


@case("v_o f > o", "q_k f > f", f=L(8, 24), o=L(16, 5))
def one_key_value_head_fused(m, x):
    q, k, v = m.f(x).split((16, 4, 4), -1)
    return m.o(attend(heads(q, 4), heads(k, 1), heads(v, 1)))


@case("v_o v > o", "q_k q > k", q=L(8, 16), k=L(8, 8), v=L(8, 8), o=L(16, 5))
def heads_in_another_order(m, x):
    k = heads(m.k(x), 2).repeat_interleave(2, 1).flip(1)
    v = heads(m.v(x), 2).repeat_interleave(2, 1).roll(1, 1)[:, [2, 0, 3, 1]]
    return m.o(attend(heads(m.q(x), 4), k, v))


def rope_halves(x, dim):
    position = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)[:, None]
    angle = position / 10 ** (torch.arange(dim // 2, dtype=x.dtype, device=x.device) / dim)
    cos, sin = (torch.cat((f, f), -1) for f in (angle.cos(), angle.sin()))
    turned, rest = x[..., :dim], x[..., dim:]
    a, b = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-b, a), -1) * sin, rest), -1)


def rope_pairs(x):
    position = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)[:, None]
    angle = position / 10 ** torch.arange(x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1).flatten(-2)


@case("v_o v > o", "q_k q > k", q=L(8, 16), k=L(8, 8), v=L(8, 8), o=L(16, 5))
def rotary_halves(m, x):
    q, k = rope_halves(heads(m.q(x), 4), 4), rope_halves(heads(m.k(x), 2), 4)
    return m.o(attend(q, k.repeat_interleave(2, 1), heads(m.v(x), 2).repeat_interleave(2, 1)))


@case("v_o v > o", "q_k q > k", q=L(8, 16), k=L(8, 16), v=L(8, 8), o=L(8, 5))
def rotary_pairs(m, x):
    return m.o(attend(rope_pairs(heads(m.q(x), 2)), rope_pairs(heads(m.k(x), 2)), heads(m.v(x), 2)))


@case("v_o v > o", "q_k q > k", q=L(8, 16), k=L(8, 16), v=L(8, 8), o=L(8, 5))
def rotary_in_part(m, x):
    return m.o(attend(rope_halves(heads(m.q(x), 2), 4), rope_halves(heads(m.k(x), 2), 4), heads(m.v(x), 2)))


@case("q_k q > k", q=L(8, 16), k=L(8, 16), v=L(8, 8), o=L(8, 5))
def rotary_on_queries_alone_in_part_and_values(m, x):
    q, k = rope_halves(heads(m.q(x), 2), 4), heads(m.k(x), 2)
    return m.o(attend(q, k, F.gelu(heads(m.v(x), 2))))


@case("v_o v > o", "q_k qn > kn", q=L(8, 8), k=L(8, 8), v=L(8, 8), o=L(8, 5), qn=N(4), kn=N(4))
def norms_of_queries_and_keys(m, x):
    return m.o(attend(m.qn(heads(m.q(x), 2)), m.kn(heads(m.k(x), 2)), heads(m.v(x), 2)))


@case("v_o v > o", "q_k qn > kn", q=L(8, 8), k=L(8, 8), v=L(8, 8), o=L(8, 5), qn=N(2, 1, 4), kn=N(2, 1, 4))
def norms_of_queries_and_keys_by_head(m, x):
    return m.o(attend(m.qn(heads(m.q(x), 2)), m.kn(heads(m.k(x), 2)), heads(m.v(x), 2)))


@case("v_o v > o", "q_k qn > kn", q=L(8, 16), k=L(8, 8), v=L(8, 8), o=L(16, 5), qn=N(4, 4), kn=N(2, 4))
def norms_by_head_of_grouped_queries(m, x):
    q, k = m.qn(m.q(x).view(2, 3, 4, 4)).transpose(1, 2), m.kn(m.k(x).view(2, 3, 2, 4)).transpose(1, 2)
    return m.o(attend(q, k.repeat_interleave(2, 1), heads(m.v(x), 2).repeat_interleave(2, 1)))


@case("v_o v > o", "q_k qn > kn", q=L(8, 8), k=L(8, 8), v=L(8, 8), o=L(8, 5), qn=N(8, offset=1.0), kn=N(8))
def norms_over_all_heads(m, x):
    return m.o(attend(heads(m.qn(m.q(x)), 2), heads(m.kn(m.k(x)), 2), heads(m.v(x), 2)))


@case("v_o v > o", q=L(8, 8), k=L(8, 8), v=L(8, 8), o=L(8, 5), n=N(4))
def one_norm_for_queries_and_keys(m, x):
    return m.o(attend(m.n(heads(m.q(x), 2)), m.n(heads(m.k(x), 2)), heads(m.v(x), 2)))


@case("v_o v > o", v=L(8, 8), o=L(8, 5), q=L(8, 8))
def queries_that_are_their_own_keys(m, x):
    q = heads(m.q(x), 2)
    return m.o(attend(q, q, heads(m.v(x), 2)))


@case("q_k o q > k", q=L(8, 8), k=L(8, 8), o=L(8, 5))
def keys_that_are_values_too(m, x):
    k = heads(m.k(x), 2)
    return m.o(attend(heads(m.q(x), 2), k, k))


@case("v_o v > o", "q_k q > k", q=L(8, 8), k=L(8, 8), v=L(8, 8), o=L(8, 5))
def soft_capped(m, x):
    scores = heads(m.q(x), 2) @ heads(m.k(x), 2).transpose(-1, -2)
    p = torch.softmax(torch.tanh(scores / 5) * 5, -1)
    return m.o((p @ heads(m.v(x), 2)).transpose(1, 2).flatten(2))


@case("v_o v > o", "q_k q > k", q=L(8, 8), k=L(8, 8), v=L(8, 8), o=L(8, 5))
def linear_biases_by_baddbmm(m, x):
    q, k, v = (heads(y, 2).flatten(0, 1) for y in (m.q(x), m.k(x), m.v(x)))
    alibi = torch.arange(3, dtype=x.dtype, device=x.device).expand(4, 1, 3)
    p = torch.softmax(torch.baddbmm(alibi, q, k.transpose(1, 2), beta=0.5, alpha=0.3), -1)
    return m.o((p @ v).unflatten(0, (2, 2)).transpose(1, 2).flatten(2))


@case("v_o v > o", "q_k q > k", q=L(8, 8), k=L(8, 8), v=L(8, 8), o=L(8, 5), s=P(2))
def attention_sinks(m, x):
    scores = heads(m.q(x), 2) @ heads(m.k(x), 2).transpose(-1, -2)
    sinks = m.s.reshape(1, 2, 1, 1).expand(2, 2, 3, 1)
    p = torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1]
    return m.o((p @ heads(m.v(x), 2)).transpose(1, 2).flatten(2))


@case("v_o v > o", "q_k q > k", q=L(8, 8), k=L(8, 8), v=L(8, 8), o=L(8, 5))
def attention_by_einsum(m, x):
    q, k, v = (y.view(2, 3, 2, 4) for y in (m.q(x), m.k(x), m.v(x)))
    p = torch.softmax(torch.einsum("bthd,bshd->bhts", q, k), -1)
    return m.o(torch.einsum("bhts,bshd->bthd", p, v).flatten(2))


@case(q=P(2, 4, 8), k=P(2, 4, 8), v=P(2, 4, 8), o=P(2, 4, 5))
def attention_with_three_dimensional_weights(m, x):
    q, k, v = (torch.einsum("btc,hdc->bhtd", x, w) for w in (m.q, m.k, m.v))
    p = torch.softmax(q @ k.transpose(-1, -2), -1)
    return torch.einsum("bhtd,hdo->bto", p @ v, m.o)


@case("v_o v > o", q=L(8, 8), k=L(8, 8), v=L(8, 8), o=L(8, 5))
def scores_that_are_used_for_more(m, x):
    q = heads(m.q(x), 2)
    return m.o(attend(q, heads(m.k(x), 2), heads(m.v(x), 2))) + torch.sigmoid(q).sum()


@case("v_o v > o", q=L(8, 8), k=L(8, 8), k2=L(8, 8), v=L(8, 8), o=L(8, 5))
def one_query_for_two_keys(m, x):
    q, v = heads(m.q(x), 2), heads(m.v(x), 2)
    return m.o(attend(q, heads(m.k(x), 2), v) + attend(q, heads(m.k2(x), 2), v))


@case("v_o a > o", a=L(8, 8), q=L(8, 8), o=L(8, 5))
def weights_of_an_activation_over_tokens(m, x):
    return m.o(torch.softmax(m.q(x)[..., :3], -1) @ m.a(x))


# shapes


@case("up_down a > b", shape=(4, 8), a=L(8, 6), b=L(6, 5))
def two_dims(m, x):
    return m.b(F.relu(m.a(x)))


@case("up_down a a.bias > b", shape=(2, 3, 2, 8), a=L(8, 6, bias=True), b=L(6, 5))
def four_dims(m, x):
    return m.b(F.relu(m.a(x)))


@case("norm n > a", shape=(2, 3, 2, 8), n=N(8), a=L(8, 5, bias=True))
def four_dims_after_a_norm(m, x):
    return m.a(m.n(x))


@case("up_down a a.bias > b", shape=(8,), a=L(8, 6, bias=True), b=L(6, 5))
def one_dim(m, x):
    return m.b(F.relu(m.a(x)))


@case("norm n > a", n=N(8), a=L(8, 1))
def a_linear_with_one_row(m, x):
    return m.a(m.n(x))


@case(shape=(2, 3, 1), n=N(1), a=L(1, 1, bias=True), b=L(1, 3))
def width_one(m, x):
    return m.b(F.relu(m.a(m.n(x))))


@case(a=L(8, 1, bias=True), b=L(1, 5))
def a_bottleneck_of_one(m, x):
    return m.b(F.relu(m.a(x)))


@case(shape=(2, 3, 1), q=L(1, 1, bias=True), k=L(1, 1, bias=True))
def queries_and_keys_of_width_one(m, x):
    return torch.softmax(m.q(x) @ m.k(x).transpose(-1, -2), -1) @ x


@case("up_down a > b", a=L(8, 6), b=L(6, 5))
def by_einsum(m, x):
    h = torch.einsum("bti,oi->bto", x, m.a.weight)
    return torch.einsum("bti,oi->bto", F.relu(h), m.b.weight)


@case(a=L(8, 6), b=L(6, 5))
def by_product_and_sum(m, x):
    return (m.a(x).unsqueeze(-2) * m.b.weight).sum(-1)


@case("up_down a > b", a=P(8, 6), b=P(6, 5))
def transposed_weights(m, x):
    return F.relu(x @ m.a) @ m.b


@case("up_down a > b", a=P(8, 8), b=P(8, 8))
def square_weights(m, x):
    return F.relu(x @ m.a) @ m.b.t()


@case("up_down a > b", a=L(8, 8), b=L(8, 8))
def weights_from_the_left(m, x):
    return m.b.weight @ F.relu(m.a(x)).transpose(1, 2)


# memory written in place


@case("up_down a > b", a=L(8, 6), b=L(6, 5))
def operators_in_place(m, x):
    h = m.a(x)
    h.mul_(2.0).relu_()
    h.mul_(torch.sigmoid(x[..., :6]))
    return m.b(h)


@case("norm b w > a", w=P(8), b=P(8), a=L(8, 5))
def an_affine_in_place(m, x):
    h = x.tanh()
    h.mul_(m.w)
    h.add_(m.b)
    return m.a(h)


@case(a=L(8, 6), b=L(6, 5))
def an_addition_in_place(m, x):
    h = m.a(x)
    h += x[..., :6]
    return m.b(h)


@case("up_down a > b", a=L(8, 6), b=L(6, 5))
def an_addition_of_itself_in_place(m, x):
    h = m.a(x)
    h += F.relu(h).flip(-1)
    return m.b(h)


@case("up_down a > b", a=L(8, 6), b=L(6, 5))
def a_view_written_in_place(m, x):
    h = m.a(x)
    h[..., :2].sigmoid_()
    return m.b(h)


@case("up_down a > b", a=L(8, 6), b=L(6, 5))
def the_memory_of_a_view_written_in_place(m, x):
    h = m.a(x)
    part = h[..., 2:]
    h.mul_(3.0)
    return m.b(torch.cat((part, h[..., :2]), -1))


@case("up_down a > b", a=L(8, 6), b=L(6, 5))
def channels_set_to_zero_in_place(m, x):
    h = m.a(x)
    h[..., 1] = 0
    return m.b(h)


@case("up_down a > b", a=L(8, 6), b=L(6, 5))
def channels_set_to_one_in_place(m, x):
    h = m.a(x)
    h[..., 1] = 1
    return m.b(h)


@case("up_down a > c", "up_down b > c", a=L(8, 6), b=L(8, 4), c=L(10, 5))
def slices_of_new_memory(m, x):
    h = x.new_empty(2, 3, 10)
    h[..., 4:] = m.a(x)
    h[..., :4] = m.b(x)
    return m.c(h)


@case(a=L(8, 6), c=L(12, 5))
def strided_slices_of_zeros(m, x):
    h = x.new_zeros(2, 3, 12)
    h[..., ::2] = m.a(x)
    h[..., 1::2] = F.relu(m.a(x))
    return m.c(h)


@case("up_down a > c", a=L(8, 6), c=L(12, 5))
def one_activation_in_two_slices(m, x):
    y, h = m.a(x), x.new_zeros(2, 3, 12)
    h[..., ::2], h[..., 1::2] = y, F.relu(y)
    return m.c(h)


@case(a=L(8, 6), c=L(6, 5))
def memory_that_is_overwritten_in_part(m, x):
    y, h = m.a(x), x.new_zeros(2, 3, 6)
    h.copy_(y)
    h[:, 1] = x[:, 1, :6]
    return m.c(h)


@case("up_down a > c", a=L(8, 6), c=L(6, 5))
def memory_that_takes_a_smaller_activation(m, x):
    h = x.new_zeros(2, 3, 6)
    h.copy_(m.a(x[:1, :1]))
    return m.c(h)


@case(a=L(8, 6), c=L(6, 5))
def an_output_that_is_written_by_out(m, x):
    y, h = m.a(x), x.new_empty(2, 3, 6)
    torch.add(y, 1.0, out=h)
    return m.c(h)


@case(a=L(8, 6), c=L(6, 5))
def an_indexed_write(m, x):
    h = x.new_zeros(2, 3, 6)
    h[:, x[0, :, 0].argsort()] = m.a(x) + 0
    return m.c(h)


# stacks of experts


@case("up_down u > d", u=P(EXPERTS, 8, 6), d=P(EXPERTS, 6, 5))
def experts_by_bmm(m, x):
    h = x.flatten(0, 1).expand(EXPERTS, 6, 8)
    return F.relu(h @ m.u) @ m.d


@case("up_down b u > d", u=P(EXPERTS, 8, 6), b=P(EXPERTS, 1, 6), d=P(EXPERTS, 6, 5))
def experts_by_baddbmm(m, x):
    return F.relu(torch.baddbmm(m.b, x.flatten(0, 1).expand(EXPERTS, 6, 8), m.u)) @ m.d


@case(u=P(EXPERTS, 8, 6), b=P(6), d=P(EXPERTS, 6, 5))
def experts_with_one_bias_by_baddbmm(m, x):
    return F.relu(torch.baddbmm(m.b, x.flatten(0, 1).expand(EXPERTS, 6, 8), m.u)) @ m.d


@case(u=P(EXPERTS, 8, 6), b=P(1, 1, 6), d=P(EXPERTS, 6, 5))
def experts_with_one_bias(m, x):
    return F.relu(x.flatten(0, 1).expand(EXPERTS, 6, 8) @ m.u + m.b) @ m.d


@case("up_down b u > d", u=P(EXPERTS, 8, 6), b=P(EXPERTS, 6), d=P(EXPERTS, 6, 5))
def experts_with_biases(m, x):
    return F.relu(x.flatten(0, 1).expand(EXPERTS, 6, 8) @ m.u + m.b[:, None]) @ m.d


@case(u=P(EXPERTS, 8, 6), b=P(EXPERTS, 6), d=P(EXPERTS, 6, 5))
def experts_with_biases_in_an_order_of_the_data(m, x):
    order = x.flatten()[:EXPERTS].argsort()
    return F.relu(x.flatten(0, 1).expand(EXPERTS, 6, 8) @ m.u + m.b[order][:, None]) @ m.d


@case(u=P(EXPERTS, 8, 6), d=P(EXPERTS, 6, 5))
def experts_in_an_order_of_the_data(m, x):
    order = x.flatten()[:EXPERTS].argsort()
    return F.relu(x.flatten(0, 1).expand(EXPERTS, 6, 8) @ m.u)[order] @ m.d


@case("up_down u > d", u=P(EXPERTS, 8, 6), d=P(EXPERTS, 6, 5))
def experts_in_reverse(m, x):
    return F.relu(x.flatten(0, 1).expand(EXPERTS, 6, 8) @ m.u).flip(0) @ m.d


@case(u=P(EXPERTS, 8, 6), d=P(6, 5))
def experts_with_one_matrix_after(m, x):
    return F.relu(x.flatten(0, 1).expand(EXPERTS, 6, 8) @ m.u).flatten(0, 1) @ m.d


@case("up_down u > d", u=P(8, 6), d=P(EXPERTS, 6, 5))
def one_matrix_with_experts_after(m, x):
    return F.relu(x.flatten(0, 1) @ m.u).expand(EXPERTS, 6, 6) @ m.d


COUNTS = (2, 0, 3, 1)


class Routed:
    """Rows sorted by expert, each times the matrix of its expert: a grouped matmul, in float64 a loop.

    It holds one tensor of offsets for all matmuls of a forward, as models have it.
    """

    def __init__(self, x, counts=COUNTS):
        self.counts = counts
        self.offsets = torch.tensor(counts, dtype=torch.int32, device=x.device).cumsum(0, dtype=torch.int32)
        self.ids = torch.tensor([i for i, n in enumerate(counts) for _ in range(n)], device=x.device)

    def __call__(self, x, w):
        if x.dtype == torch.bfloat16:
            return torch._grouped_mm(x, w, self.offsets)
        return torch.cat([part @ w[i] for i, part in enumerate(x.split(self.counts))])


GROUPED = {"shape": (6, 8), "u": P(EXPERTS, 8, 16), "d": P(EXPERTS, 16, 8)}


@case("up_down u > d", **GROUPED)
def grouped_experts(m, x):
    run = Routed(x)
    return run(F.relu(run(x, m.u)), m.d)


@case("up_down u > d", shape=(6, 8), u=P(EXPERTS, 16, 8), d=P(EXPERTS, 8, 16))
def grouped_experts_with_transposed_weights(m, x):
    run = Routed(x)
    return run(F.relu(run(x, m.u.transpose(1, 2))), m.d.transpose(1, 2))


@case("up_down f > d", shape=(6, 8), f=P(EXPERTS, 8, 32), d=P(EXPERTS, 16, 8))
def grouped_experts_with_fused_gates(m, x):
    run = Routed(x)
    gate, up = run(x, m.f).chunk(2, -1)
    return run(F.silu(gate) * up, m.d)


@case("up_down f > d", shape=(6, 8), f=P(EXPERTS, 8, 32), d=P(EXPERTS, 16, 8))
def grouped_experts_with_interleaved_gates(m, x):
    run = Routed(x)
    h = run(x, m.f)
    return run(F.silu(h[..., ::2]) * h[..., 1::2], m.d)


@case("up_down b u > d", b=P(EXPERTS, 16), **GROUPED)
def grouped_experts_with_biases(m, x):
    run = Routed(x)
    return run(F.relu(run(x, m.u) + m.b[run.ids]), m.d)


@case("up_down b u > d", b=P(16), **GROUPED)
def grouped_experts_with_one_bias(m, x):
    run = Routed(x)
    return run(F.relu(run(x, m.u) + m.b), m.d)


@case("up_down u > d", **GROUPED)
def grouped_experts_of_other_groups(m, x):
    return Routed(x, (1, 2, 1, 2))(F.relu(Routed(x)(x, m.u)), m.d)


@case("up_down u > d", **GROUPED)
def grouped_experts_on_reversed_rows(m, x):
    run = Routed(x)
    return run(F.relu(run(x, m.u)).flip(0), m.d)


@case("up_down u > d", **GROUPED)
def grouped_experts_on_rolled_rows(m, x):
    run = Routed(x)
    return run(F.relu(run(x, m.u)).roll(1, 0), m.d)


@case("up_down u > d", **GROUPED)
def grouped_experts_on_rows_by_a_constant(m, x):
    run = Routed(x)
    return run(F.relu(run(x, m.u))[[5, 4, 0, 1, 2, 3]], m.d)


@case("up_down u > d", **GROUPED)
def grouped_experts_on_rows_cut_and_joined(m, x):
    run = Routed(x)
    h = F.relu(run(x, m.u))
    return run(torch.cat((h[3:], h[:3])), m.d)


@case("up_down u > d", **GROUPED)
def grouped_experts_on_rows_by_data(m, x):
    run = Routed(x)
    return run(F.relu(run(x, m.u))[x[:, 0].argsort()], m.d)


@case("up_down u > d", shape=(6, 8), u=P(EXPERTS, 8, 16), d=L(16, 5))
def grouped_experts_with_one_linear_after(m, x):
    return m.d(F.relu(Routed(x)(x, m.u)))


@case("up_down u > d", shape=(6, 8), u=P(EXPERTS, 8, 16), d=L(16, EXPERTS))
def grouped_experts_with_one_linear_after_with_as_many_rows(m, x):
    return m.d(F.relu(Routed(x)(x, m.u)))


@case("up_down u > d s", shape=(6, 8), u=P(EXPERTS, 8, 16), d=P(EXPERTS, 16, 8), s=L(16, 8))
def grouped_experts_beside_one_linear(m, x):
    run = Routed(x)
    h = F.relu(run(x, m.u))
    return run(h, m.d) + m.s(h)


@case("up_down a > u", shape=(6, 8), a=L(8, 16), u=P(EXPERTS, 16, 8))
def one_linear_with_grouped_experts_after(m, x):
    return Routed(x)(F.relu(m.a(x)), m.u)


@case("norm n > r u", shape=(6, 8), n=N(8), r=L(8, EXPERTS), u=P(EXPERTS, 8, 16))
def a_norm_read_by_router_and_grouped_experts(m, x):
    h = m.n(x)
    chosen = torch.softmax(m.r(h), -1)[:, :1]
    return Routed(x)(h[x[:, 0].argsort()], m.u) * chosen


@case(shape=(6, 8), u=P(EXPERTS, 8, 16), b=P(EXPERTS, 16), d=P(EXPERTS, 16, 8))
def experts_picked_for_each_row(m, x):
    ids = (x[:, 0] > 0).long() * 2 + 1
    h = torch.bmm(x[:, None], m.u[ids]).squeeze(1) + m.b[ids]
    return torch.bmm(F.relu(h)[:, None], m.d[ids]).squeeze(1)


@case("up_down u > d", shape=(3, 6, 8), u=P(3, 8, 16), d=P(3, 16, 8))
def grouped_matmul_of_two_stacks(m, x):
    if x.dtype == torch.bfloat16:
        return torch._grouped_mm(F.relu(torch._grouped_mm(x, m.u)), m.d)
    return F.relu(x @ m.u) @ m.d


@pytest.mark.parametrize("name", CASES)
def test_groups_are_those_expected_and_hold(name):
    expected, parts, run, x = CASES[name]
    trace, found, rejected = find(parts, run, x)
    hold(trace, found, real(parts, run), x)
    assert {text(group) for group in found} == expected
    assert all(r.reasons for r in rejected)


@pytest.mark.parametrize("name", [name for name in CASES if "grouped" in name])
def test_no_scales_of_single_experts_where_rows_change_places(name):
    _, parts, run, x = CASES[name]
    _, found, _ = find(parts, run, x)
    own = {group.width for group in found} - {8, 16}
    in_order = {
        "grouped_experts",
        "grouped_experts_with_transposed_weights",
        "grouped_experts_with_fused_gates",
        "grouped_experts_with_interleaved_gates",
        "grouped_experts_with_biases",
    }
    if name in in_order:
        assert own == {16 * EXPERTS} or own == {8 * EXPERTS}
    elif name not in ("grouped_matmul_of_two_stacks", "grouped_queries_by_repeat", "grouped_queries_by_expand"):
        assert not own


def test_one_linear_in_two_roles_is_never_a_trivial_symmetry():
    """Rows of a matrix that are read again as columns: 1/s and s on the same numbers change nothing at all."""
    _, found, _ = find({"w": P(6, 8)}, lambda m, x: F.relu(x @ m.w.t()) @ m.w, torch.ones(2, 3, 8))
    assert not found


@pytest.mark.parametrize(
    ("name", "producer", "reason"),
    [
        ("linear_squared_relu_linear", "a", "pow in the model"),
        ("linear_gelu_linear", "a", "gelu in the model"),
        ("norm_that_is_the_output", "n", "it is the output of the model"),
        ("norm_read_by_a_residual", "n", "a value that is not scaled: add in the model"),
        ("linear_times_itself", "a", "two scaled values meet in mul in the model"),
        ("the_same_norm_used_twice", "n", "pow in n"),
        ("clamped", "a", "clamp in the model"),
        ("a_tied_embedding", "e", "e.weight is used in two ways"),
        ("chosen_by_where", "a", "where in the model"),
    ],
)
def test_rejections_name_the_operator_and_the_module(name, producer, reason):
    _, parts, run, x = CASES[name]
    _, _, rejected = find(parts, run, x)
    reasons = next(r.reasons for r in rejected if r.name == producer)
    assert any(reason in r for r in reasons), reasons


def test_what_nothing_reads_is_rejected_with_that_reason():
    def run(m, x):
        m.a(x)
        return m.b(x)

    _, found, rejected = find({"a": L(8, 6), "b": L(8, 5)}, run, torch.ones(2, 3, 8))
    assert not found
    assert {r.name: r.reasons for r in rejected}["a"] == ("nothing reads it",)


def classes_of(name, kind):
    _, parts, run, x = CASES[name]
    _, found, _ = find(parts, run, x)
    return next(group for group in found if group.kind == kind)


@pytest.mark.parametrize(
    ("name", "kind", "width", "side", "classes"),
    [
        ("attention", "v_o", 8, "consumers", None),
        ("grouped_queries_by_expand", "v_o", 8, "consumers", (*range(4), *range(4), *range(4, 8), *range(4, 8))),
        ("grouped_queries_by_repeat", "v_o", 8, "consumers", (*range(8), *range(8))),
        ("one_key_value_head", "v_o", 4, "consumers", tuple(range(4)) * 4),
        ("rotary_halves", "q_k", 4, "consumers", (0, 1, 0, 1, 2, 3, 2, 3)),
        ("rotary_pairs", "q_k", 8, "consumers", tuple(i // 2 for i in range(16))),
        ("rotary_in_part", "q_k", 12, "consumers", (0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9, 10, 11)),
        ("fused_interleaved", "up_down", 6, "producers", (0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5)),
        ("padding_with_zeros", "up_down", 6, "consumers", None),
    ],
)
def test_classes_are_those_of_the_code(name, kind, width, side, classes):
    group = classes_of(name, kind)
    assert group.width == width
    found = getattr(group, side)[0].classes
    if name == "fused_interleaved":  # the second of each pair is scaled, from channel 1 on
        assert getattr(group, side)[0].start == 1
    assert found == classes


# random graphs

WIDTH = 6
OPERATORS = {
    "norm": 1, "layer_norm": 1, "one_plus": 1, "linear": 1, "biased": 1, "relu": 1, "abs": 1, "gelu": 1, "neg": 1,
    "add": 2, "sub": 2, "mul": 2, "vector": 1, "bias": 1, "swap": 1, "gate": 1, "cat": 2, "attend": 3, "tokens": 1,
    "flip": 1, "pick": 1, "in_place": 2, "slices": 2, "again": 1, "back": 1, "masked": 1, "half_cast": 1, "stack": 1,
    "square": 1, "contract": 2, "fused": 1, "strided": 1,
}  # fmt: skip


def compose(program):
    """The parts and the forward of a program: operators, each with the numbers of the values that it reads."""
    parts = {}
    for i, (op, _) in enumerate(program):
        made = {
            "norm": N(WIDTH),
            "one_plus": N(WIDTH, offset=1.0),
            "layer_norm": LN(WIDTH),
            "linear": L(WIDTH, WIDTH),
            "biased": L(WIDTH, WIDTH, bias=True),
            "vector": P(WIDTH),
            "bias": P(WIDTH),
            "gate": L(WIDTH, 2 * WIDTH, bias=True),
            "fused": L(WIDTH, 3 * WIDTH),
            "strided": L(WIDTH, 2 * WIDTH),
            "cat": L(2 * WIDTH, WIDTH),
            "half_cast": P(2 * WIDTH, WIDTH),
            "stack": P(2, WIDTH, WIDTH),
        }.get(op)
        if made is not None:
            parts[f"p{i}"] = made
    parts["head"] = L(WIDTH, 5)
    linears = [i for i, (op, _) in enumerate(program) if op in ("linear", "biased")]

    def run(m, x):
        values = [x]
        for i, (op, reads) in enumerate(program):
            a, *rest = (values[r % len(values)] for r in reads)
            values.append(step(m, op, getattr(m, f"p{i}", None), a, rest, [n for n in linears if n < i]))
        return m.head(values[-1]) + m.head(values[len(values) // 2]).tanh()

    return parts, run


def step(m, op, part, a, rest, linears):
    if (
        part is not None
        and isinstance(part, nn.Module)
        and op in ("norm", "one_plus", "layer_norm", "linear", "biased")
    ):
        return part(a)
    if op in ("relu", "abs", "neg"):
        return getattr(torch, op)(a)
    if op in ("add", "sub", "mul"):
        return getattr(torch, op)(a, rest[0])
    if op in ("again", "back"):  # a linear that was used before, as it is and transposed
        weight = getattr(m, f"p{linears[-1]}").weight if linears else torch.eye(WIDTH, dtype=a.dtype)
        return a @ (weight.t() if op == "again" else weight)
    if op in ("swap", "gate", "strided"):
        h = a if op == "swap" else part(a)
        left, right = (h[..., ::2], h[..., 1::2]) if op == "strided" else h.chunk(2, -1)
        return torch.cat((right, left), -1) if op == "swap" else F.silu(left) * right
    if op == "fused":
        q, k, v = part(a).chunk(3, -1)
        return attend(heads(q, 2), heads(k, 2), heads(v, 2))
    if op == "attend":
        return attend(heads(a, 2), heads(rest[0], 2), heads(rest[1], 2))
    if op == "contract":
        return torch.softmax(a @ rest[0].transpose(-1, -2), -1) @ a
    if op == "in_place":
        return a.clone().mul_(2.0).add_(rest[0])
    if op == "slices":
        out = a.new_empty(a.shape)
        out[..., :3], out[..., 3:] = a[..., 3:], rest[0][..., :3]
        return out
    if op == "stack":
        return (torch.relu(a.flatten(0, 1).expand(2, -1, -1) @ part)).sum(0).view(a.shape)
    return {
        "gelu": lambda: F.gelu(a),
        "vector": lambda: a * part,
        "bias": lambda: a + part,
        "cat": lambda: part(torch.cat((a, rest[0]), -1)),
        "tokens": lambda: a.mean(1, keepdim=True).expand(a.shape),
        "flip": lambda: a.flip(-1),
        "pick": lambda: a[..., [0, 0, 3, 1, 5, 4]],
        "masked": lambda: a.masked_fill(torch.ones(3, 1).tril().bool() ^ True, 0.0),
        "half_cast": lambda: F.linear(a, part[WIDTH:].to(torch.float64).to(a.dtype)),
        "square": lambda: a.relu().square(),
    }[op]()


PROGRAMS = st.lists(
    st.sampled_from(sorted(OPERATORS)).flatmap(
        lambda op: st.tuples(st.just(op), st.lists(st.integers(-3, -1), min_size=OPERATORS[op], max_size=OPERATORS[op]))
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150)
@given(PROGRAMS, st.integers(0, 3))
def test_whatever_is_found_in_a_random_graph_keeps_its_function(program, seed):
    parts, run = compose(program)
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    trace, found, _ = find(parts, run, x)
    hold(trace, found, real(parts, run, seed), x, control=False)
