"""What a model is. Only plain types are exported here; providers and observation are imported by module name."""

from ._errors import LayoutError as LayoutError
from ._errors import PlanError as PlanError
from .types import Axis as Axis
from .types import Graph as Graph
from .types import Linear as Linear
from .types import Proof as Proof
from .types import Rejection as Rejection
from .types import Site as Site
from .types import Symmetry as Symmetry
