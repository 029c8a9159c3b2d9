"""Tables for people, from the same objects that `--json` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

Json = Mapping[str, Any]


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table, its first column on the left and the others on the right. No name is taken for markup."""
    made = Table(title=Text(title), title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for index, name in enumerate(head):
        made.add_column(Text(name), justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def accuracies(metrics: Json, name: str) -> Iterator[Table]:
    """Accuracy of a predictor and its baselines, a table a moment."""
    for moment, figures in metrics["moments"].items():
        horizons = range(len(figures["accuracy"]))
        rows = [[name, *(_interval(figures, k) for k in horizons), number(figures["ece"][0])]]
        rows += [
            [baseline, *(_interval(of[moment], k) for k in horizons), number(of[moment]["ece"][0])]
            for baseline, of in metrics["baselines"].items()
        ]
        states = "" if figures["states"] else ", without states"
        head = [
            f"{metrics['workflows']} workflows",
            *(f"{k + 1} step{'s' * (k > 0)} ahead" for k in horizons),
            "ECE, 1 step",
        ]
        yield table(f"\nAccuracy at {moment}{states}, with 95 % intervals", head, rows)


def profile_accuracies(metrics: Json) -> Table:
    """Accuracy and calibration by what serving can see."""
    rows = []
    for profile, of in metrics["profiles"].items():
        for moment, figures in of["moments"].items():
            ece = " / ".join(number(value) for value in figures["ece"])
            name = f"{profile}, {moment}{'' if figures['states'] else ', no states'}"
            rows.append([name, *(_interval(figures, k) for k in range(len(figures["accuracy"]))), ece])
    horizons = range(len(next(iter(metrics["moments"].values()))["accuracy"]))
    head = ["inputs, moment", *(f"{k + 1} step{'s' * (k > 0)} ahead" for k in horizons), "ECE"]
    return table("\nAccuracy by what is at hand when serving (engine: what vLLM's scheduler supplies)", head, rows)


def number(value: float | None, digits: int = 3) -> str:
    """A figure, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def _interval(figures: Json, k: int) -> str:
    low, high = figures["ci95"][k]
    return f"{number(figures['accuracy'][k])} [{number(low)}, {number(high)}]"
