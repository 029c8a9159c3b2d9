"""What the commands of the kinds that forecast quantiles share: options, training, and how a forecast looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli.output import table
from presage.cli.training import TrainingJob, carry_out
from presage.errors import ConfigurationError

if TYPE_CHECKING:
    from presage.predictors.quantiles.choice import QuantileConfig
    from presage.training.training import Training

Estimator = Annotated[
    str | None,
    typer.Option(help="forest, boosted, ridge, or auto: lowest loss on the selection part."),
]


def train_quantiles(
    job: TrainingJob,
    kind: type[QuantileConfig],
    known: Mapping[str, object],
    train: Callable[..., Training[Any, Any]],
    *,
    estimator: str | None,
    quantiles: str | None,
    **more: Any,
) -> None:
    """Carry out a training; arguments as the commands take them.

    Args:
        kind: of the settings.
        known: the baselines by name.
        train: (traces, test traces or None, settings) with `baselines`, `name`, `progress` and `more` -> the training.
    """
    from presage.training.baselines import choose_names
    from presage.training.configuration import read_configuration
    from presage.training.quantiles import LIMITS

    own: dict[str, Any] = {"estimator": estimator} if estimator is not None else {}
    own |= {"quantiles": _quantiles(quantiles)} if quantiles is not None else {}
    configuration = replace(read_configuration(kind, job.config, job.settings or (), LIMITS), **own)
    configuration.check()
    more |= {"baselines": choose_names(job.baselines, known), "name": job.name, "seed": job.seed}
    carry_out(job, lambda data, test, report: train(data, test, configuration, progress=report, **more))


def _quantiles(text: str) -> tuple[float, ...]:
    """Numbers separated by commas; the configuration checks that they are quantiles."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError as error:
        raise ConfigurationError(
            f"--quantiles {text}: wanted ascending numbers between 0 and 1, such as 0.5,0.9,0.99"
        ) from error


def forecast_table(
    title: str,
    data: dict[str, Any],
    called: str,
    *,
    unit: str,
    within: str,
    shown: Callable[[float], str],
    beyond: Callable[[float], str],
) -> tuple[Any, str]:
    """The quantiles of a forecast as a table, and a line on where they come from.

    Args:
        within: the words before a number.
        shown: a number as people read it.
        beyond: of a number above all that calibrated it, says so; else empty. Not asked of a forecast that has none.
    """
    lines = [
        [
            f"{100 * float(q):g} % of such steps: {within}",
            shown(value),
            beyond(value) if data["beyond_calibration"] else "",
        ]
        for q, value in data["quantiles"].items()
    ]
    source = f"source {data['source']}, {data['evidence']} training steps behind it"
    if not data["calibrated"]:
        source += "; NOT CALIBRATED: the upper quantiles have no coverage guarantee here"
    return table(title, ["", unit, ""], lines, left=(0, 2)), f"{called}; {source}"
