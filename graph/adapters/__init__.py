"""Where tensors live. The only code that knows a file layout (and, to come, FSDP)."""

from ._base import Sink as Sink
from ._base import Source as Source
from .execute import execute as execute
from .execute import require_finite as require_finite
from .memory import Memory as Memory
from .shards import Shards as Shards
from .shards import ShardWriter as ShardWriter
