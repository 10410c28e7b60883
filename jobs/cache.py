"""The user's cache folder: `REGAUGE_CACHE`, else `$XDG_CACHE_HOME/regauge`, else `~/.cache/regauge`."""

import os
from pathlib import Path


def cache_dir(*parts: str) -> Path:
    """A folder in the cache, made if it is missing."""
    base = os.environ.get("REGAUGE_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "regauge"
    )
    path = Path(base).joinpath(*parts)
    path.mkdir(parents=True, exist_ok=True)
    return path
