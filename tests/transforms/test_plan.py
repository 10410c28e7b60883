"""What planning refuses, and how it says so."""

from dataclasses import dataclass
from functools import partial

import pytest
import regauge as rg
import torch
from regauge import LayoutError, PlanError
from regauge.transforms import KINDS, Dequantize, Encode, Quantize, Rescale, SmoothQuant, Step, chain, partition, select

HEAD = ("lm_head",)


def problems(tiny, transform, kind="llama"):
    model = tiny(kind)
    with pytest.raises(PlanError) as caught:
        rg.plan(transform, model.params, model.graph)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (Quantize(ignore=("lm_haed",)), "ignore: pattern 'lm_haed' matches none of"),
        (Quantize(ignore=("lm_haed",)), "nearest names: lm_head"),
        (Quantize(targets=("re:(",)), "not a regular expression"),
        (Quantize(targets=("Conv2d",)), "targets: pattern 'Conv2d'"),
        (Quantize(targets=("lm_head",), ignore=HEAD), "no module is left"),
        (Quantize(scheme="W4A16", ignore=HEAD), "group_size 128 does not divide the 32 or 48 input channels of 14 linears"),
        (Quantize(scheme="W4A16", ignore=HEAD), "sizes that fit all: 16, 8, 4, 2"),
        (chain(Quantize(ignore=HEAD), Quantize(ignore=HEAD)), "expected a 2-D float weight, found torch.int8"),
        (chain(Quantize(ignore=HEAD), SmoothQuant()), "holds integer codes; equalize before quantizing"),
        (Rescale(scales={"model.norm": torch.ones(32)}), "no symmetry 'model.norm'"),
        (Rescale(scales={"model.layers.0.input_layernorm": torch.ones(3)}), r"shape (32,), got (3,)"),
        (select(Quantize(), include="re:nothing"), "select(Quantize): pattern 're:nothing' matches none"),
        (select(SmoothQuant(), exclude=["re:.*q_proj"]), "q_proj is not selected but shares the scale"),
        (SmoothQuant(mappings=[["q_proj", "norm"]]), "a mapping is [[linear patterns], producer pattern]"),
        (SmoothQuant(mappings=[[["re:.*q_proj"], "re:.*input_layernorm"]]), "k_proj, model.layers.0.self_attn.v_proj reads"),
        (SmoothQuant(mappings=[[["re:.*mlp.gate_proj", "re:.*mlp.up_proj"], "re:.*input_layernorm"]]), "reads the output of"),
        (SmoothQuant(mappings=[[["re:.*q_proj"], "re:.*layernorm"]]), "2 producers match"),
        (SmoothQuant(mappings=[[["re:.*k_proj"], "re:.*q_proj"]]), "reads the same activation"),
        (partition({"a": Quantize()}, {"re:.*mlp": "a"}), "each label needs a transform"),
        (partition({"a": Quantize(), "b": Quantize()}, {"re:": "a"}), "each transform a linear"),
        (Encode(schemes={"model.nothing": None}), "no linear model.nothing"),
    ],
)  # fmt: skip
def test_faults_are_named(tiny, transform, message):
    assert message in problems(tiny, transform)


def test_faults_of_all_stages_are_reported_together(tiny):
    bad = chain(Rescale(scales={"x": torch.ones(1)}), Quantize(ignore=("y",)), Quantize(ignore=HEAD), SmoothQuant())
    found = problems(tiny, bad).splitlines()
    assert [line.split(":")[0].split("[")[0] for line in found] == ["rescale", "quantize", "smooth"]


def test_long_lists_are_cut_in_the_message_and_kept_in_the_error():
    error = PlanError([f"problem {n}" for n in range(100)])
    assert str(error).splitlines()[-1] == "... and 88 more"
    assert len(error.problems) == 100


def test_a_family_without_symmetries_asks_for_mappings(tiny):
    model = tiny("llama")
    bare = rg.Graph(linears=model.graph.linears, sites=model.graph.sites, modules=model.graph.modules)
    with pytest.raises(PlanError, match="no symmetry of kind 'norm' is known for this model; give mappings"):
        rg.plan(SmoothQuant(), model.params, bare)


@pytest.mark.parametrize("kind", ["llama", "tied_llama", "qwen3", "opt"])
def test_mappings_of_the_user_find_what_is_built_in(tiny, kind):
    model = tiny(kind)
    norms = (
        ("self_attn_layer_norm", "final_layer_norm")
        if kind == "opt"
        else ("input_layernorm", "post_attention_layernorm")
    )
    up = ["re:.*fc1"] if kind == "opt" else ["re:.*gate_proj", "re:.*up_proj"]
    pattern = "re:.*layers.*" if kind == "opt" else "re:.*"
    mappings = [
        [["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], f"{pattern}{norms[0]}"],
        [up, f"{pattern}{norms[1]}"],
    ]
    own = rg.plan(SmoothQuant(mappings=mappings), model.params, model.graph)
    built_in = rg.plan(SmoothQuant(), model.params, model.graph)
    assert sorted(s.name for s in own.steps) == sorted(s.name for s in built_in.steps)
    ours, theirs = (rg.apply(plan, model.params, model.stats) for plan in (own, built_in))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_tied_pairs_are_quantized_together_or_not_at_all(tiny):
    assert "add 'Embedding' to targets, or 'lm_head' to ignore" in problems(tiny, Quantize(), "tied_llama")
    both = Quantize(targets=("Linear", "Embedding"), ignore=HEAD)
    assert "ignore both or neither" in problems(tiny, both, "tied_llama")
    model = tiny("tied_llama")
    plan = rg.plan(Quantize(targets=("Embedding",)), model.params, model.graph)
    assert set(plan.schemes) == {"lm_head", "model.embed_tokens"}
    assert len(plan.steps) == 1


@pytest.mark.parametrize("transform", [Dequantize, partial(Encode)])
def test_layouts_need_codes(tiny, transform):
    schemes = rg.plan(Quantize(ignore=HEAD), tiny().params, tiny().graph).schemes
    assert "quantize with form='integer' first" in problems(tiny, transform(schemes=schemes))


def test_conv1d_has_no_layout(tiny):
    schemes = rg.plan(Quantize(ignore=HEAD), tiny("gpt2").params, tiny("gpt2").graph).schemes
    found = problems(tiny, chain(Quantize(ignore=HEAD), Encode(schemes=schemes)), "gpt2")
    assert "no layout for Conv1D; use form='fake'" in found


def test_apply_wants_what_was_planned(tiny):
    model = tiny()
    plan = rg.plan(SmoothQuant(), model.params, model.graph)
    with pytest.raises(LayoutError, match="statistic 'absmax:model.layers.0.self_attn.q_proj' and 3 more is missing"):
        rg.apply(plan, model.params)
    with pytest.raises(LayoutError, match="planned for float32 .* got bfloat16"):
        rg.apply(plan, {n: p.bfloat16() for n, p in model.params.items()}, model.stats)
    with pytest.raises(LayoutError, match=r"tensor model\.norm\.weight is missing"):
        rg.apply(plan, {n: p for n, p in model.params.items() if n != "model.norm.weight"}, model.stats)
    with pytest.raises(LayoutError, match="is missing"):
        rg.execute(plan, rg.Memory(model.params), rg.Memory())


@dataclass(frozen=True)
class Fixed:
    """A transform of one given step."""

    step: Step

    def plan(self, specs, graph):
        return (self.step,)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fn": lambda p, s: ({}, {})}, "declares ['model.norm.weight'], returns []"),
        ({"fn": lambda p, s: ({NORM: p[NORM][:3]}, {})}, "declares float32 (32,), returns float32 (3,)"),
        ({"fn": lambda p, s: ({NORM: p[NORM].half()}, {})}, "returns float16 (32,)"),
        ({"fn": lambda p, s: ({NORM: p[NORM] @ torch.ones(5)}, {})}, "fails on these shapes"),
        ({"reads": ("absent",)}, "tensor absent does not exist at this point"),
        ({"needs": ("absmax:absent",)}, "no site 'absent'"),
        ({"needs": ("median:lm_head",)}, "expected '<kind>:<site>'"),
    ],
)
def test_steps_that_break_their_word_are_refused(tiny, change, message):
    spec = torch.empty(32, device="meta")
    step = {"name": "bad", "reads": (NORM,), "writes": {NORM: spec}, "fn": lambda p, s: (p, {}), **change}
    assert message in problems(tiny, Fixed(Step(**step)))


def test_statistics_without_a_closed_form_name_both_steps(tiny, monkeypatch):
    class Median(type(KINDS["absmax"])):
        def rescale(self, state, s):
            raise NotImplementedError("the median of x / s")

    monkeypatch.setitem(KINDS, "median", Median("median"))
    site = "model.layers.0.self_attn.q_proj"
    step = Step(name="clip", reads=(NORM,), writes={NORM: torch.empty(32, device="meta")}, needs=(f"median:{site}",), fn=lambda p, s: (p, {}))  # fmt: skip
    found = problems(tiny, chain(SmoothQuant(), Fixed(step)))
    assert "smooth[model.layers.0.input_layernorm] changes an activation whose statistics clip needs" in found
    rg.plan(chain(Fixed(step), Rescale(scales={})), tiny().params, tiny().graph)  # before an edit it is fine


def test_repeated_blocks_are_run_once_on_meta_tensors_unless_they_differ(tiny):
    model = tiny()
    runs = []

    def fn(params, stats, *, name):
        runs.append(name)
        return {name: params[name] * 2}, {}

    @dataclass(frozen=True)
    class Double:
        def plan(self, specs, graph):
            names = [n for n in specs if n.endswith("q_proj.weight")]
            return tuple(Step(name=n, reads=(n,), writes={n: specs[n]}, fn=partial(fn, name=n)) for n in names)

    rg.plan(Double(), model.params, model.graph)
    assert runs == ["model.layers.0.self_attn.q_proj.weight"]
    runs.clear()
    other = {**model.params, "model.layers.1.self_attn.q_proj.weight": torch.ones(8, 4)}
    rg.plan(Double(), other, model.graph)
    assert len(runs) == 2
