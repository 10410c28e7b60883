"""Where tensors live. The only code that knows a file layout, or FSDP."""

from ._base import Sink as Sink
from ._base import Source as Source
from .dealt import execute_sharded as execute_sharded
from .execute import execute as execute
from .execute import require_finite as require_finite
from .fsdp import Fsdp as Fsdp
from .loading import load_whole as load_whole
from .memory import Memory as Memory
from .partial import Partial as Partial
from .partial import digest_of as digest_of
from .ranks import everyones as everyones
from .ranks import process_group as process_group
from .ranks import rank as rank
from .ranks import together as together
from .ranks import world as world
from .sharded import apply_sharded as apply_sharded
from .sharded import observe_sharded as observe_sharded
from .shards import Shards as Shards
from .shards import ShardWriter as ShardWriter
from .streaming import observe_streamed as observe_streamed
from .wrapping import Sharding as Sharding
from .wrapping import load_sharded as load_sharded
