"""Every config composes and builds; faults are told in one line before any work."""

from pathlib import Path

import pytest
import regauge.conf
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from regauge import PlanError
from regauge.conf.build import build, data, plain
from regauge.jobs import build_recipe

CONF = Path(regauge.conf.__file__).parent
OPTIONS = sorted(f"{p.parent.name}={p.stem}" for p in CONF.glob("*/*.yaml"))


@pytest.fixture(autouse=True)
def hydra():
    with initialize_config_module("regauge.conf", version_base="1.3"):
        yield


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_and_builds(option):
    filled = {
        "data=text": "data.name=x.txt",
        "data=hub": "data.name=open_platypus",
        "evaluation=text": "evaluation.name=x.txt",
        "evaluation=hub": "evaluation.name=open_platypus",
        "model=folder": "model.path=x",
    }
    config = compose("config", [option, *filter(None, [filled.get(option)])])
    values = plain(config)
    assert build(config) == build_recipe(values["recipe"])
    assert data(values["data"], "data").num_samples == 64
    assert values["evaluation"] is None or data(values["evaluation"], "evaluation").num_samples == 20


def test_recipes_are_plain_packages_of_the_recipe_group():
    for path in (CONF / "recipe").glob("*.yaml"):
        composed = plain(compose("config", [f"recipe={path.stem}"]))["recipe"]
        assert composed == OmegaConf.to_container(OmegaConf.load(path))
        assert path.read_text().startswith("# ")


def test_overrides_reach_the_transform():
    config = compose("config", ["recipe=smooth_w4a16", "recipe.stages.smooth.alpha=0.3"])
    assert build(config).transforms[0].alpha == 0.3


def test_sweeps_name_parameters_that_exist():
    config = compose("config", ["experiment=alpha_sweep"], return_hydra_config=True)
    for key in config.hydra.sweeper.params:
        assert OmegaConf.select(config, key) is not None


@pytest.mark.parametrize("override", ["recipe.stages.smooth.alhpa=1", "recipe=nope", "job.settings.plot=1"])
def test_unknown_keys_and_options_are_refused_at_compose(override):
    with pytest.raises(Exception, match=r"alhpa|nope|plot"):
        compose("config", [override])


def test_missing_value_is_named():
    with pytest.raises(PlanError, match="name"):
        plain(compose("config", ["data=text"]))


def test_unknown_data_setting_names_its_section():
    with pytest.raises(PlanError, match=r"evaluation: .*num_sample\b"):
        data({"num_sample": 3}, "evaluation")
