"""From a composed Hydra config to plain values. The only place where configs become objects."""

from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..graph import PlanError
from ..jobs.data import Data
from ..jobs.recipes import build_recipe
from ..transforms import Transform


def plain(config: DictConfig) -> dict[str, Any]:
    """The config as dicts and lists, with interpolations resolved. Raises `PlanError` naming a missing value."""
    try:
        container = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise PlanError(str(error).splitlines()[0]) from error
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def build(config: DictConfig) -> Transform:
    """The transform of `config.recipe`; only targets of `regauge.transforms` are instantiated."""
    return build_recipe(plain(config)["recipe"])


def data(section: dict[str, Any], where: str) -> Data:
    """A `Data` from a config section. Raises `PlanError` naming the section."""
    try:
        return Data(**section)
    except (TypeError, ValueError) as error:
        raise PlanError(f"{where}: {error}") from error
