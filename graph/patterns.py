"""Patterns on names: exact, `re:` (anchored at the start, as compressed-tensors matches) or a class name."""

import difflib
import re
from collections.abc import Iterable, Mapping


def matches(pattern: str, name: str, cls: str = "") -> bool:
    """True when `pattern` is the module's name, its class, or `re:` and a regex that matches from its start on."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern in (name, cls)


def check_patterns(patterns: Iterable[str], where: str) -> list[str]:
    """Problems with the regexes themselves."""
    problems = []
    for pattern in patterns:
        if not isinstance(pattern, str):
            problems.append(f"{where}: expected a pattern as a string, got {pattern!r}")
        elif pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                problems.append(f"{where}: {pattern!r} is not a regular expression: {error}")
    return problems


def unmatched(patterns: Iterable[str], modules: Mapping[str, str], where: str) -> list[str]:
    """One problem for each pattern that matches no module, with the nearest names."""
    problems = []
    for pattern in patterns:
        if not any(matches(pattern, name, cls) for name, cls in modules.items()):
            candidates = [*modules, *sorted(set(modules.values()))]
            near = difflib.get_close_matches(pattern.removeprefix("re:"), candidates, n=3, cutoff=0.3)
            hint = f"; nearest names: {', '.join(near)}" if near else ""
            problems.append(f"{where}: pattern {pattern!r} matches none of the {len(modules)} modules{hint}")
    return problems
