"""Running a plan between stores: what is checked, in which order, and what is told."""

from contextlib import contextmanager

import pytest
import regauge as rg
import torch
from regauge import LayoutError
from regauge.graph.adapters import require_finite
from regauge.transforms import Quantize, Rescale, SmoothQuant, chain

HEAD = ("lm_head",)


class Counting(rg.Memory):
    """A store that keeps a record of its reads and writes."""

    def __init__(self, params=None, log=None, fail_on=None):
        super().__init__(params)
        self.log = [] if log is None else log
        self.fail_on = fail_on

    @contextmanager
    def read(self, names):
        names = tuple(names)
        self.log.append(("read", names))
        if self.fail_on in names:
            raise OSError("the disk is gone")
        with super().read(names) as params:
            yield params

    def write(self, params):
        if self.fail_on in params:
            raise OSError("the disk is full")
        super().write(params)
        self.log.append(("write", tuple(params)))


@pytest.fixture
def planned(tiny):
    model = tiny()
    return model, rg.plan(chain(SmoothQuant(), Quantize(ignore=HEAD)), model.params, model.graph)


def test_every_tensor_is_read_once_and_written_once(planned):
    model, plan = planned
    source, sink = Counting(model.params), Counting()
    rg.execute(plan, source, sink, model.stats)
    assert sorted(n for _, names in source.log for n in names) == sorted(plan.source)
    assert sorted(n for _, names in sink.log for n in names) == sorted(plan.target)
    assert [names for _, names in source.log] == [cell.reads for cell in plan.cells]
    assert [names for _, names in sink.log] == [cell.writes for cell in plan.cells]


def test_no_more_than_three_cells_are_held(planned):
    model, plan = planned
    log = []
    rg.execute(plan, Counting(model.params, log), Counting(log=log), model.stats)
    held = peak = 0
    for what, _ in log:
        held += 1 if what == "read" else -1
        peak = max(peak, held)
    assert len(plan.cells) > 6
    assert peak <= 3


def test_progress_adds_up_to_the_bytes_of_the_source(planned):
    model, plan = planned
    sizes = []
    rg.execute(plan, rg.Memory(model.params), rg.Memory(), model.stats, progress=sizes.append)
    assert len(sizes) == len(plan.cells)
    assert sum(sizes) == sum(p.nbytes for p in model.params.values())


def test_every_step_is_told_with_what_it_read_and_changed(planned):
    model, plan = planned
    told = []
    rg.execute(plan, rg.Memory(model.params), rg.Memory(), model.stats, on_step=lambda *args: told.append(args))
    assert sorted(step.name for step, *_ in told) == sorted(step.name for step in plan.steps)
    folded = rg.apply(rg.plan(SmoothQuant(), model.params, model.graph), model.params, model.stats)
    for step, before, changed, known in told:
        assert set(step.needs) <= known.keys()
        assert before.keys() == set(step.reads)
        assert changed.keys() == set(step.writes)
        source = folded if step.name.startswith("quantize") else model.params
        assert all(torch.equal(before[name], source[name]) for name in before)


def test_statistics_come_back_as_they_are_after_the_edits(planned):
    model, plan = planned
    given = dict(model.stats)
    final = rg.execute(plan, rg.Memory(model.params), rg.Memory(), given)
    assert all(given[key] is model.stats[key] for key in given)
    edited = set(plan.needs)
    assert all((final[key] is model.stats[key]) == (key not in edited) for key in final)


@pytest.mark.parametrize("damage", ["missing", "shape", "dtype", "stats"])
def test_nothing_is_read_when_the_source_is_not_what_was_planned(planned, damage):
    model, plan = planned
    params, stats, name = dict(model.params), model.stats, "model.norm.weight"
    if damage == "missing":
        del params[name]
    elif damage == "shape":
        params[name] = torch.ones(31)
    elif damage == "dtype":
        params[name] = params[name].half()
    else:
        stats = {}
    source = Counting(params)
    with pytest.raises(LayoutError, match="statistic" if damage == "stats" else name):
        rg.execute(plan, source, Counting(), stats)
    assert source.log == []


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"])
@pytest.mark.parametrize("side", ["source", "sink"])
def test_a_store_that_fails_stops_the_run(planned, name, side):
    """Also on the last cell, which is written when nothing is left to do."""
    model, plan = planned
    source = Counting(model.params, fail_on=name if side == "source" else None)
    sink = Counting(fail_on=name if side == "sink" else None)
    with pytest.raises(OSError, match="the disk is gone" if side == "source" else "the disk is full"):
        rg.execute(plan, source, sink, model.stats)
    assert name not in sink.params


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "transform",
    [
        Quantize(ignore=HEAD),
        Quantize(scheme="W4A16_ASYM", group_size=16, ignore=HEAD),
        Quantize(scheme="W4A16", group_size=16, ignore=HEAD),
        Quantize(ignore=HEAD, form="fake"),
        SmoothQuant(kinds=("up_down",)),
        chain(SmoothQuant(kinds=("up_down",)), Quantize(ignore=HEAD)),
    ],
    ids=["w8a8", "w4a16_asym", "w4a16", "fake", "smooth", "chain"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_are_not_finite_stop_the_run(tiny, value, transform, dtype):
    model = tiny("llama", dtype)
    plan = rg.plan(transform, model.params, model.graph)
    name = "model.layers.1.mlp.down_proj.weight"
    bad = model.params[name].clone()
    bad[3, 5] = value
    with pytest.raises(LayoutError, match=f"{name}: 1 of 1536 weights are NaN or infinite"):
        rg.execute(plan, rg.Memory({**model.params, name: bad}), rg.Memory(), model.stats)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_results_that_are_not_finite_stop_the_run(tiny, value):
    """A scale of zero makes the norm infinite; such a checkpoint must not be written."""
    model, name = tiny(), "model.layers.0.input_layernorm"
    s = torch.ones(32)
    s[7] = value
    plan = rg.plan(Rescale(scales={name: s}), model.params, model.graph)
    with pytest.raises(ValueError, match=name):
        rg.execute(plan, rg.Memory(model.params), rg.Memory())


@pytest.mark.parametrize(
    ("dtype", "value", "settings"),
    [
        # the lowest code lies half a step below the largest weight, and beyond what float16 holds
        (torch.float16, -65000.0, {"scheme": "W4A16", "group_size": 16, "form": "fake"}),
        (torch.bfloat16, 1e8, {"scheme": "W8A16", "scale_dtype": "float16"}),
    ],
    ids=["weight", "scale"],
)
def test_numbers_that_overflow_their_dtype_stop_the_run(tiny, dtype, value, settings):
    model, name = tiny("llama", dtype), "model.layers.0.mlp.up_proj.weight"
    large = model.params[name].clone()
    large[0, 0] = value
    plan = rg.plan(Quantize(ignore=HEAD, **settings), model.params, model.graph)
    with pytest.raises(LayoutError, match=name):
        rg.execute(plan, rg.Memory({**model.params, name: large}), rg.Memory())


def test_tensors_that_no_step_touches_are_passed_on_as_they_are(planned):
    model, plan = planned
    sink = rg.Memory()
    rg.execute(plan, rg.Memory(model.params), sink, model.stats)
    for name in ("model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"):
        assert sink.params[name] is model.params[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_finite_tensors_pass_and_others_are_counted(dtype):
    p = torch.linspace(-3, 3, 12, dtype=torch.float32).reshape(3, 4).to(dtype)
    require_finite("p", p)
    require_finite("empty", p[:0])
    require_finite("codes", torch.ones(3, dtype=torch.int8))
    p[1, 1], p[2, 0] = float("nan"), float("inf")
    with pytest.raises(LayoutError, match="p: 2 of 12 weights"):
        require_finite("p", p)


def test_gradients_are_not_recorded(tiny):
    model = tiny()
    sink = rg.Memory()
    plan = rg.plan(SmoothQuant(), model.params, model.graph)
    learned = {name: p.clone().requires_grad_() for name, p in model.params.items()}
    rg.execute(plan, rg.Memory(learned), sink, model.stats)
    assert not sink.params["model.layers.0.input_layernorm.weight"].requires_grad
