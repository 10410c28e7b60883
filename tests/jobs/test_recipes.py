"""Recipes: what builds, what is refused, and what the message says."""

import pytest
import regauge as rg
from regauge import PlanError
from regauge.jobs import build_recipe, load_recipe, packaged_recipes
from regauge.transforms import Quantize, Select, SmoothQuant

SMOOTH = {"_target_": "regauge.transforms.SmoothQuant", "alpha": 0.8}
QUANTIZE = {"_target_": "regauge.transforms.Quantize", "ignore": ["lm_head"]}


@pytest.mark.parametrize("name", packaged_recipes())
def test_every_packaged_recipe_builds(name):
    transform, mapping = load_recipe(name)
    assert [type(t).__name__ for t in transform.transforms][-1] == "Quantize"
    assert list(mapping["stages"]) == mapping["order"]


def test_recipe_keeps_the_given_order():
    built = build_recipe({"order": ["b", "a"], "stages": {"a": QUANTIZE, "b": SMOOTH}})
    assert built.transforms == (SmoothQuant(alpha=0.8), Quantize(ignore=("lm_head",)))


def test_nested_targets_build_inside_out():
    inner = {"_target_": "regauge.transforms.select", "transform": QUANTIZE, "exclude": ["re:.*down_proj"]}
    built = build_recipe({"stages": {"only": inner}})
    assert built.transforms == (Select(transform=Quantize(ignore=("lm_head",)), exclude=("re:.*down_proj",)),)


def test_yaml_file_mapping_and_transform_are_the_same_recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("stages: {s: {_target_: regauge.transforms.SmoothQuant, alpha: 0.8}}\n")
    from_file, _ = load_recipe(path)
    from_mapping, _ = load_recipe({"stages": {"s": SMOOTH}})
    own = rg.chain(SmoothQuant(alpha=0.8))
    assert from_file == from_mapping == load_recipe(own)[0] == own


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("nothing", "neither a .yaml file nor one of"),
        ("absent.yaml", "no such file"),
        ({"stage": {}}, "unknown key 'stage'"),
        ({"stages": {}}, "expected a mapping of names"),
        ({"stages": {"a": SMOOTH}, "order": ["a", "b"]}, "there is no stage 'b'"),
        ({"stages": {"a": SMOOTH, "b": QUANTIZE}, "order": ["a"]}, "stage 'b' is missing"),
        ({"stages": {"a": {"alpha": 1}}}, "no key '_target_'"),
        ({"stages": {"a": 3}}, "expected a mapping with '_target_'"),
        ({"stages": {"a": {**SMOOTH, "alhpa": 1}}}, "did you mean 'alpha'"),
        ({"stages": {"a": {**SMOOTH, "alpha": 2}}}, r"recipe.stages.a: alpha: expected a number in \[0, 1\], got 2"),
        ({"stages": {"a": {**SMOOTH, "alpha": True}}}, "alpha"),
        ({"stages": {"a": {**SMOOTH, "kinds": "norm"}}}, "expected a list"),
        ({"stages": {"a": {**QUANTIZE, "scheme": {"weights": {"bits": 4}}}}}, "unknown key 'bits'"),
        ({"stages": {"a": {**QUANTIZE, "scheme": "W5A5"}}}, "expected one of W8A8"),
    ],
)
def test_faults_are_named_with_their_stage(recipe, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match=message):
        load_recipe(recipe)


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "regauge.jobs.oneshot",
        "regauge.transforms.__builtins__",
        "regauge.transforms._types.spec",
        "torch.load",
    ],
)
def test_a_recipe_cannot_name_code_outside_the_transforms(target):
    with pytest.raises(PlanError, match="is not allowed"):
        build_recipe({"stages": {"a": {"_target_": target}}})


def test_yaml_tags_do_not_run_code(tmp_path):
    path = tmp_path / "evil.yaml"
    path.write_text(f"stages: !!python/object/apply:os.system ['touch {tmp_path}/ran']\n")
    with pytest.raises(PlanError, match="not YAML"):
        load_recipe(path)
    assert not (tmp_path / "ran").exists()


def test_all_faulty_stages_are_reported_together():
    stages = {"a": {**SMOOTH, "alpha": -1}, "b": {**QUANTIZE, "form": "float"}}
    with pytest.raises(PlanError) as caught:
        build_recipe({"stages": stages})
    assert [p.split(":")[0] for p in caught.value.problems] == ["recipe.stages.a", "recipe.stages.b"]
