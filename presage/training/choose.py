"""Baselines by name, alone and in sets: what an option such as `--baselines default,knn` stands for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from presage.errors import ConfigurationError

Sets = Mapping[str, tuple[str, ...]]
"""Names for several at once."""


def every(known: Collection[str]) -> Sets:
    """The sets where all baselines take seconds: "default" and "all" are every one, "none" is none."""
    return {"default": tuple(known), "all": tuple(known), "none": ()}


def choose_names(text: str, known: Collection[str], sets: Sets) -> tuple[str, ...]:
    """What a comma-separated list of names and sets stands for, each once.

    Raises:
        ConfigurationError: there is no such baseline and no such set.
    """
    chosen = [name for item in text.split(",") for name in sets.get(item, (item,))]
    check_names(chosen, known, sets)
    return tuple(dict.fromkeys(chosen))


def check_names(names: Iterable[str], known: Collection[str], sets: Sets) -> None:
    """Raises ConfigurationError unless each is the name of a baseline."""
    if unknown := [name for name in names if name not in known]:
        raise ConfigurationError(
            f"no baseline {unknown[0]!r}; there are: {', '.join(known)}; and the sets {', '.join(sets)}"
        )
