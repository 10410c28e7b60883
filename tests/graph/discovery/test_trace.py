"""What one forward is written down as: operators, parameters behind values, and what modules get and return."""

import pytest
import torch
import torch.nn.functional as F
from regauge.graph import LayoutError
from regauge.graph.discovery.trace import WRITTEN, Ref, main_output, trace_forward
from torch import nn

X = torch.ones(2, 3, 8)


class Model(nn.Module):
    """A module whose forward is given."""

    def __init__(self, run, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def traced(run, x=X, **parts):
    with torch.device("meta"):
        model = Model(run, **{name: make() for name, make in parts.items()})
    return trace_forward(model, {"x": x})


def weight(*shape):
    return lambda: nn.Parameter(torch.empty(shape))


def factor(trace):
    """The value that the last multiplication takes beside the input."""
    node = [n for n in trace.nodes if n.name == "mul"][-1]
    return trace.values[node.args[1].id]


@pytest.mark.parametrize(
    ("view", "shape", "stride", "offset"),
    [
        (lambda w: w, (6, 8), (8, 1), 0),
        (lambda w: w.t().t(), (6, 8), (8, 1), 0),
        (lambda w: w[2:4, 1:], (2, 7), (8, 1), 17),
        (lambda w: w.view(2, 3, 8)[1], (3, 8), (8, 1), 24),
        (lambda w: w.chunk(2)[1], (3, 8), (8, 1), 24),
        (lambda w: w[:, ::2], (6, 4), (8, 2), 0),
        (lambda w: w.unsqueeze(1).expand(6, 5, 8), (6, 5, 8), (8, 0, 1), 0),
    ],
    ids=["whole", "transposed_twice", "block", "view_and_select", "chunk", "strided", "expand"],
)
def test_views_of_a_parameter_are_that_parameter(view, shape, stride, offset):
    value = factor(traced(lambda m, x: x.sum() * view(m.w), w=weight(6, 8)))
    assert (value.param, value.shape, value.stride, value.offset) == ("w", shape, stride, offset)
    assert value.added == 0
    assert value.picked is None


@pytest.mark.parametrize(
    ("copy", "added", "offset"),
    [
        (lambda w: w.float(), 0.0, 0),
        (lambda w: w.clone(), 0.0, 0),
        (lambda w: w.detach(), 0.0, 0),
        (lambda w: w.float().to(torch.float64).bfloat16(), 0.0, 0),
        (lambda w: 1 + w, 1.0, 0),
        (lambda w: w.float() + 1.0, 1.0, 0),
        (lambda w: (w + 0.5).float() + 1, 1.5, 0),
        (lambda w: w[8:].float(), 0.0, 8),
        (lambda w: w[8:].float()[2:].clone(), 0.0, 10),
        (lambda w: w.split(8)[1] + 1, 1.0, 8),
    ],
    ids=[
        "cast",
        "copy",
        "detach",
        "casts",
        "one_plus",
        "cast_plus_one",
        "added_twice",
        "cast_of_a_part",
        "copy_of_a_part_of_a_cast",
        "one_plus_a_part",
    ],
)
def test_casts_copies_and_shifts_of_a_parameter_are_that_parameter(copy, added, offset):
    value = factor(traced(lambda m, x: x.sum() * copy(m.w), w=weight(16)))
    assert (value.param, value.added, value.offset) == ("w", added, offset)


@pytest.mark.parametrize(
    "other",
    [
        lambda w: w * 2,
        lambda w: 1 - w,
        lambda w: w.exp(),
        lambda w: w.long(),
        lambda w: w.bool(),
        lambda w: w.sum(),
        lambda w: w + w,
        lambda w: w.clone().add_(1),
        lambda w: w.float().fill_(1.0),
    ],
    ids=["times", "from_one", "exp", "integers", "bool", "sum", "twice", "copy_shifted_in_place", "cast_filled"],
)
def test_what_is_computed_from_a_parameter_is_not_that_parameter(other):
    trace = traced(lambda m, x: x.sum() * other(m.w), w=weight(8))
    assert factor(trace).param is None


def test_writing_a_part_of_a_copy_ends_that_the_copy_is_the_parameter():
    def run(m, x):
        w = m.w.clone()
        w[:2] = 1.0
        return x.sum() * w

    trace = traced(run, w=weight(8))
    assert factor(trace).param is None
    assert trace.params == {"w": (8,)}


def test_slices_of_a_stack_that_data_picks_keep_the_index():
    trace = traced(lambda m, x: x.sum() * m.w[x[:, 0, 0].long()], w=weight(4, 8))
    value = factor(trace)
    assert value.param == "w"
    made = trace.nodes[trace.makers[value.picked]]
    assert made.name == "_to_copy"


@pytest.mark.parametrize(
    "pick",
    [lambda w, i: w.view(8, 4)[i], lambda w, i: w[2:][i], lambda w, i: w[:, i]],
    ids=["reshaped", "part", "columns"],
)
def test_what_is_picked_from_a_part_or_another_shape_is_not_the_parameter(pick):
    trace = traced(lambda m, x: x.sum() * pick(m.w, x[:, 0, 0].long()), w=weight(4, 8))
    value = factor(trace)
    assert value.param is None or value.picked is None or value.offset > 0


def test_ties_are_one_parameter():
    def tie(m):
        m.b.weight = m.a.weight
        return m

    with torch.device("meta"):
        model = Model(
            lambda m, x: m.b(torch.tanh(m.a(x))), a=nn.Linear(8, 8, bias=False), b=nn.Linear(8, 8, bias=False)
        )
        tie(model)
    trace = trace_forward(model, {"x": X})
    assert trace.params == {"a.weight": (8, 8)}
    read = [trace.values[n.args[1].id].param for n in trace.nodes if n.name == "mm"]
    assert read == ["a.weight", "a.weight"]


def names(trace):
    return [node.name for node in trace.nodes]


def test_operators_in_place_have_the_names_of_their_functional_forms_and_make_new_values():
    trace = traced(lambda m, x: torch.tanh(x).mul_(2).relu_())
    assert names(trace) == ["tanh", "mul", "relu"]
    assert [node.outputs[0] for node in trace.nodes[:2]] == [node.args[0].id for node in trace.nodes[1:]]
    assert trace.returned == set(trace.nodes[-1].outputs)


def test_views_of_memory_that_is_written_are_values_anew():
    def run(m, x):
        y = torch.tanh(x)
        part = y[..., :2]
        y.mul_(3)
        return part

    trace = traced(run)
    assert names(trace) == ["tanh", "slice", "mul", WRITTEN]
    written = trace.nodes[-1]
    assert written.args == ((Ref(trace.nodes[2].outputs[0]),), (Ref(trace.nodes[1].outputs[0]),))
    assert trace.returned == set(written.outputs)
    assert trace.values[written.outputs[0]].shape == (2, 3, 2)


def test_an_operator_that_writes_another_argument_says_so():
    trace = traced(lambda m, x: torch.add(x, 1.0, out=torch.empty_like(x)))
    assert "add (writes its arguments)" in names(trace)


def test_nothing_written_leaves_no_trace_of_writing():
    trace = traced(lambda m, x: m.a(F.relu(x)), a=lambda: nn.Linear(8, 5))
    assert WRITTEN not in names(trace)
    assert not any("writes" in name for name in names(trace))


def test_modules_are_known_by_what_they_get_and_return():
    trace = traced(lambda m, x: m.b(m.a(x).relu()), a=lambda: nn.Linear(8, 6, bias=False), b=lambda: nn.Linear(6, 5))
    relu = next(n for n in trace.nodes if n.name == "relu")
    assert trace.made[relu.args[0].id] == "a"
    assert trace.given["b"] == relu.outputs[0]
    assert trace.made[next(iter(trace.returned))] in ("b", "")
    assert {n.module for n in trace.nodes if n.name == "mm"} == {"a"}
    assert relu.module == ""


def test_a_module_that_runs_twice_is_known_by_its_first_run():
    trace = traced(lambda m, x: m.a(m.a(x).relu()), a=lambda: nn.Linear(8, 8, bias=False))
    assert trace.given["a"] not in trace.makers  # the input of the model


def test_constants_of_the_code_are_kept_and_computed_values_are_not():
    def run(m, x):
        fixed, data = torch.tensor([2, 0, 1]), x[0, :, 0].argsort()
        return x[:, fixed] + x[:, [1, 0, 2]] + x[:, data]

    trace = traced(run)
    picked = [node.args[1][-1].id for node in trace.nodes if node.name == "index"]
    assert [trace.constants[n].tolist() if n in trace.constants else None for n in picked] == [
        [2, 0, 1],
        [1, 0, 2],
        None,
    ]


def test_a_constant_that_is_written_is_none_any_more():
    def run(m, x):
        fixed = torch.tensor([2, 0, 1])
        fixed[:1] = x[0, 0, 0].long()
        return x[:, fixed]

    trace = traced(run)
    assert next(n for n in trace.nodes if n.name == "index").args[1][-1].id not in trace.constants


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        x = self.proj(x)
        return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("run", "parts", "words"),
    [
        (lambda m, x: m.inner(x), {"inner": Routed}, ("'inner'", "(Routed)", "_local_scalar_dense", "DataDependent")),
        (lambda m, x: x if x.max() > 0 else -x, {}, ("the model's own forward", "(Model)", "_local_scalar_dense")),
        (lambda m, x: x[x > 0], {}, ("the model's own forward", "index|nonzero")),
        (lambda m, x: x.sum().item() + m.w, {"w": weight(8)}, ("_local_scalar_dense",)),
        (lambda m, x: m.a(x), {"a": lambda: nn.Linear(7, 5)}, ("'a'", "(Linear)", "RuntimeError")),
        (lambda m, x: {}["nothing"], {}, ("operator none", "KeyError")),
    ],
    ids=["inside_a_module", "in_the_model", "mask", "item", "shapes", "before_any_operator"],
)
def test_a_forward_that_cannot_be_traced_names_module_and_operator(run, parts, words):
    with pytest.raises(LayoutError) as caught:
        traced(run, **parts)
    assert caught.value.__cause__ is not None
    for word in words:
        assert any(w in str(caught.value) for w in word.split("|")), (word, str(caught.value))


def test_the_model_is_left_as_it_is():
    with torch.device("meta"):
        model = Model(lambda m, x: m.b(m.a(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 5))
        model.b.bias = nn.Parameter(torch.empty(5, dtype=torch.float64))
    before = {name: (id(p), p.dtype, p.device) for name, p in model.named_parameters()}
    trace_forward(model, {"x": X})
    assert {name: (id(p), p.dtype, p.device) for name, p in model.named_parameters()} == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_failed_trace_leaves_the_model_as_it_is_too():
    with torch.device("meta"):
        model = Routed()
    with pytest.raises(LayoutError):
        trace_forward(model, {"x": X})
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        (X, X),
        ((X, X + 1), X),
        ([X], X),
        (((X + 1, X), X), X + 1),
        ({"hidden": X, "more": X + 1}, X),
        (type("Out", (), {"logits": X, "last_hidden_state": X + 1})(), X),
        (type("Out", (), {"logits": None, "last_hidden_state": X + 1})(), X + 1),
    ],
    ids=["tensor", "tuple", "list", "nested", "mapping", "logits", "hidden_state"],
)
def test_the_output_of_a_model_is_its_logits_its_last_state_or_its_first_output(out, expected):
    assert torch.equal(main_output(out), expected)


def test_an_output_that_holds_no_tensor_first_is_refused_by_name():
    with pytest.raises(LayoutError):
        traced(lambda m, x: (None, x))
