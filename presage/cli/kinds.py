"""What the commands do differently for each kind of predictor: one description a kind, all of them listed in `load`.

A command loads an artefact, whatever its kind, and asks the `Kind` that goes with it to judge, to compare and to show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from presage.cli import options
from presage.cli.output import Output, Report

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.registry.gates import Gate


@dataclass(frozen=True)
class Loaded:
    """A predictor and where it came from.

    Attributes:
        folder: its artefact.
        kind: what the commands do with it.
        predictor: fitted, of that kind.
        name: registered model; None for a plain folder.
        version: its version; None for a plain folder.
        source: the reference as it was given.
    """

    folder: Path
    kind: Kind
    predictor: Any
    name: str | None
    version: int | None
    source: str

    @property
    def called(self) -> str:
        """What people know it by."""
        return f"{self.name} version {self.version}" if self.name else self.source

    def metrics(self, data: Any, seed: int) -> dict[str, Any]:
        """The object of the command contract: the predictor on data it was not trained on."""
        evaluated = self.kind.evaluate(self, data, seed)
        return {**evaluated.evaluation.to_dict(), "latency_us": evaluated.latency_us}

    @property
    def artefact_evidence(self) -> dict[str, Any]:
        """What the gates of every kind ask of the artefact."""
        from presage.predictors.common.artefact import artefact_size_bytes, find_pickles

        return {
            "size_bytes": artefact_size_bytes(self.folder),
            "pickles": tuple(str(path.relative_to(self.folder)) for path in find_pickles(self.folder)),
        }


@dataclass(frozen=True)
class Data:
    """What a kind learns from and is judged on.

    Attributes:
        unit: what it consists of: "workflows" or "prompts".
        read: the data in files, valid, less bad rows if told so; says what was skipped.
        held_out: the part that none of the predictors was trained on, and how many units were left out.
        digest: one name for its content, "sha256:…".
        example: a few rows as an example of what MLflow serves: no text of a user, states of zeros.
    """

    unit: str
    read: Callable[[list[Path], bool, Output, Report], Any]
    held_out: Callable[[Any, list[Any]], tuple[Any, int]]
    digest: Callable[[Any], str]
    example: Callable[[Any], list[dict[str, Any]]]


class Evaluates(Protocol):
    """Evaluates a loaded predictor."""

    def __call__(self, loaded: Loaded, data: Any, seed: int, /, *, profile: str | None = None) -> Any:
        """`.evaluation` and `.latency_us`, on data it was not trained on, under an input profile; None: all inputs."""
        ...


def _no_precision(loaded: Loaded, precision: str) -> Loaded:
    from presage.errors import ConfigurationError

    raise ConfigurationError(
        f"--precision {precision}: {loaded.called} is no router with a transformer; leave the option out"
    )


def _ask(predictor: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = predictor.forecast(rows).to_dict()
    return found


@dataclass(frozen=True)
class Kind:
    """One kind of predictor, to the commands.

    Attributes:
        name: as artefacts have it, and the subcommand of `train-predictor`.
        legend: what the figures of `headline` are.
        advice: what to try where a baseline won.
        data: traces, or outcomes.
        train: the subcommand.
        examples: of the subcommand, for its help.
        evaluate: the predictor on data it was not trained on.
        gates: of a candidate and the champion, if any, evaluated on the same data with a seed under an input profile.
        tables: metrics for people, the predictor called as it is.
        forecast: a forecast for people, from its JSON values, what the predictor is called, and the steps it is after.
        headline: the figures of a registered version that matter most, by what they are called.
        warnings: what makes the figures of a training too good, if anything, for people.
        ask: the forecast of a predictor after the steps of one workflow, JSON values.
        at_precision: the same at another precision; raises ConfigurationError where there is none to choose.
    """

    name: str
    legend: str
    advice: str
    data: Data
    train: Callable[..., None]
    examples: str
    evaluate: Evaluates
    gates: Callable[[Loaded, Loaded | None, Any, int, str], list[Gate]]
    tables: Callable[[dict[str, Any], str], list[Any]]
    forecast: Callable[[dict[str, Any], str, list[dict[str, Any]]], list[Any]]
    headline: Callable[[Mapping[str, float]], dict[str, str]]
    warnings: Callable[[dict[str, Any]], list[str]]
    ask: Callable[[Any, list[dict[str, Any]]], dict[str, Any]] = _ask
    at_precision: Callable[[Loaded, str], Loaded] = _no_precision


def _held_out(table: pa.Table, predictors: list[Any]) -> tuple[pa.Table, int]:
    """The workflows of tasks that none of the predictors learnt from."""
    from presage.training.sets import held_out

    return held_out(table, *predictors)


def _digest(table: pa.Table) -> str:
    """Of the rows, whatever files they came in."""
    from presage.datasets.schema import digest

    return f"sha256:{digest(table)}"


def _example(table: pa.Table) -> list[dict[str, Any]]:
    """The first steps of one workflow: names and numbers, no text, and states of zeros."""
    import pyarrow.compute as pc

    first = table.filter(pc.equal(table["workflow_id"], table["workflow_id"][0])).slice(0, 3)
    kept = ("workflow_type", "step", "agent", "kind", "input_tokens", "output_tokens")
    example = []
    for row in first.select(kept).to_pylist():
        row["workflow_id"] = "example"
        for state in ("prefill_state", "completion_state"):
            if state in table.column_names:
                row[state] = [0.0] * table.schema.field(state).type.list_size
        example.append(row)
    return example


TRACES = Data("workflows", options.read, _held_out, _digest, _example)
"""Of the kinds that forecast workflows."""


def shared_tasks(metrics: dict[str, Any]) -> list[str]:
    """A warning if test workflows run a task that something was trained on."""
    from presage.training.sets import SHARED_TASKS

    shared = metrics["data"][SHARED_TASKS]
    said = f"{shared} test workflows run a task that is in the training traces: the figures may be too good"
    return [said] if shared else []
