"""Which benchmark family a prompt belongs to, by the name of its task.

Tasks of one benchmark are written `benchmark/subject`, and its parts `benchmark_train` and `benchmark_test`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from presage.errors import ConfigurationError

_PART: Final = re.compile(r"[-_/](train|test|dev|val|validation)$")


def families(tasks: Sequence[str | None], pattern: str | None = None) -> list[str | None]:
    """The family of each task; None where there is no task, or where the pattern does not match it.

    Args:
        tasks: n names.
        pattern: a regular expression searched in each task; its first group, or all of it, names the family. None
            takes the name up to the first "/", or all of it where that leaves one family; no `_train` or `_test`.

    Raises:
        ConfigurationError: the pattern is no regular expression.
    """
    if pattern is not None:
        try:
            rule = re.compile(pattern)
        except re.error as error:
            raise ConfigurationError(
                f"the family pattern {pattern!r} is no regular expression ({error}); such as '^[^/]+'"
            ) from error
        matches = [rule.search(task) if task is not None else None for task in tasks]
        return [(found[1] if rule.groups else found[0]) or None if found else None for found in matches]
    whole = [_PART.sub("", task) if task is not None else None for task in tasks]
    first = [name.split("/", 1)[0] if name is not None else None for name in whole]
    return first if len(set(first) - {None}) > 1 else whole
