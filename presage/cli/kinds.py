"""How the commands describe a kind of predictor, and loading a predictor by reference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from presage.cli import options
from presage.cli.output import Output, Progress, report_lines
from presage.errors import ArtefactError
from presage.predictor_kinds import KINDS
from presage.wording import counted

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.registry.connect import Registry
    from presage.registry.gates import ArtefactEvidence, Gate, Interface
    from presage.registry.resolve import ResolvedModel


@dataclass(frozen=True)
class Loaded:
    """A predictor, and where it came from: the user's reference (`source`), and the registered version if it is one."""

    folder: Path
    kind: Kind
    predictor: Any
    name: str | None
    version: int | None
    source: str

    @property
    def called(self) -> str:
        """Its name in messages."""
        return f"{self.name} version {self.version}" if self.name else self.source

    @property
    def model(self) -> str:
        """Its name in metrics."""
        return self.name or self.source

    def artefact_evidence(self, latency: float, interface: Interface) -> ArtefactEvidence:
        """What the gates of every kind judge."""
        from presage.predictors.common.artefact import artefact_size_bytes, find_pickles
        from presage.registry.gates import ArtefactEvidence

        pickles = tuple(str(path.relative_to(self.folder)) for path in find_pickles(self.folder))
        return ArtefactEvidence(latency, artefact_size_bytes(self.folder), interface, pickles)


@dataclass(frozen=True)
class Data:
    """The data a kind is trained and evaluated on.

    Attributes:
        unit: "workflow" or "prompt".
        read: reads and validates files; optionally skips bad rows and reports them.
        held_out: (data, *predictors) -> the part that none of them was trained on, and the number of units left out.
        digest: SHA-256 of the content, independent of the files.
        example: the MLflow input example: a few rows, without any text of a user; states are zeros.
    """

    unit: str
    read: Callable[[list[Path], bool, Output, Progress], Any]
    held_out: Callable[..., tuple[Any, int]]
    digest: Callable[[Any], str]
    example: Callable[[Any], list[dict[str, Any]]]

    def unseen(
        self, paths: list[Path], predictors: list[Any], skip_bad: bool, out: Output, report: Progress
    ) -> tuple[Any, int]:
        """Read the files and leave out what a predictor was trained on; also returns the number of units left out."""
        data, left_out = self.held_out(self.read(paths, skip_bad, out, report), *predictors)
        if left_out:
            out.note(f"{counted(left_out, self.unit)} left out: a model was trained on them")
        return data, left_out


def _ask(predictor: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = predictor.forecast(rows).to_dict()
    return found


def _no_types(_: Any) -> Collection[str]:
    return ()


@dataclass(frozen=True)
class Kind:
    """One kind of predictor.

    Attributes:
        name: in artefacts, and as a subcommand of `train-predictor`.
        legend: explains the figures of `headline`.
        advice: what to try when a baseline wins.
        data: traces or outcomes.
        train: the subcommand of `train-predictor`.
        examples: for the help of the subcommand.
        evaluate: (predictor, data it was not trained on, seed) -> an object with `evaluation` and `latency_us`.
        gates: (candidate, champion or None, data, seed, input profile) -> gates.
        forecast: (JSON of a forecast, name of the predictor, steps) -> what people read.
        headline: the most important figures of a registered version, by title.
        tags: tags of a version's run, from the metrics of its training.
        ask: (predictor, steps of one workflow) -> JSON of the forecast.
        types: the workflow types that a predictor knows; none of a router.
    """

    name: str
    legend: str
    advice: str
    data: Data
    train: Callable[..., None]
    examples: str
    evaluate: Callable[[Any, Any, int], Any]
    gates: Callable[[Loaded, Loaded | None, Any, int, str], list[Gate]]
    forecast: Callable[[dict[str, Any], str, list[dict[str, Any]]], list[Any]]
    headline: Callable[[Mapping[str, float]], dict[str, str]]
    tags: Callable[[Mapping[str, Any]], dict[str, str]]
    ask: Callable[[Any, list[dict[str, Any]]], dict[str, Any]] = _ask
    types: Callable[[Any], Collection[str]] = _no_types

    def tables(self, metrics: dict[str, Any]) -> list[Any]:
        """The report of these metrics, as a terminal shows it."""
        document = resolve_name(KINDS[self.name].report)(metrics)
        return [*report_lines(document), f"\none forecast takes {metrics['latency_us']:,.1f} µs"]


def kind_of(name: str) -> Kind:
    """The kind of that name; raises ArtefactError if there is none."""
    if name not in KINDS:
        raise ArtefactError(f"a predictor of kind {name!r}; wanted one of {', '.join(KINDS)}")
    kind: Kind = resolve_name(KINDS[name].commands)
    return kind


def load(reference: str, registry: Callable[[], Registry]) -> Loaded:
    """Load `models:/NAME@ALIAS`, `models:/NAME/VERSION` or an artefact folder."""
    from presage.registry.resolve import resolve

    return _load(resolve(reference, registry))


def load_at(reference: str, tracking_uri: str | None) -> Loaded:
    """`load` from the existing registry at a URI, without importing MLflow if that is a database on this machine."""
    from presage.registry.database import resolve_at

    return _load(resolve_at(reference, tracking_uri))


def _load(found: ResolvedModel) -> Loaded:
    from presage.cli.compiling import say_when_compiling
    from presage.predictors.common.artefact import read_artefact
    from presage.registry.table import load_predictor

    say_when_compiling()
    kind = kind_of(read_artefact(found.folder).kind)
    return Loaded(found.folder, kind, load_predictor(found.folder), found.name, found.version, found.source)


def lazily(name: str) -> Callable[..., Any]:
    """The function `module:name`, imported by its first call: the parser of the commands imports all kinds."""
    return lambda *args: resolve_name(name)(*args)


def _example(table: pa.Table) -> list[dict[str, Any]]:
    """The first steps of one workflow: names, numbers, zero states; no text."""
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


TRACES = Data(
    "workflow",
    options.read,
    lazily("presage.training.sets:held_out"),
    lazily("presage.datasets.schema:digest"),
    _example,
)
"""The data of kinds that forecast workflows."""
