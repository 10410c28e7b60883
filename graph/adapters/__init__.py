"""Where tensors live. The only code that knows a file layout, or FSDP."""

from ._base import Sink as Sink
from ._base import Source as Source
from .execute import execute as execute
from .execute import require_finite as require_finite
from .fsdp import Fsdp as Fsdp
from .memory import Memory as Memory
from .sharded import apply_sharded as apply_sharded
from .sharded import execute_sharded as execute_sharded
from .sharded import observe_sharded as observe_sharded
from .shards import Shards as Shards
from .shards import ShardWriter as ShardWriter
