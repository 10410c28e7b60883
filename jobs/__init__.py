"""What a user runs, as plain functions. Nothing here knows Hydra."""

from .data import Data as Data
from .evaluate import Evaluation as Evaluation
from .evaluate import evaluate as evaluate
from .inspect import Inspection as Inspection
from .inspect import inspect as inspect
from .oneshot import oneshot as oneshot
from .placement import Placement as Placement
from .recipes import build_recipe as build_recipe
from .recipes import load_recipe as load_recipe
from .recipes import packaged_recipes as packaged_recipes
from .report import LinearRow as LinearRow
from .report import Report as Report
