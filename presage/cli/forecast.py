"""`presage evaluate`, `presage forecast` and `presage route`: use a registered model or an artefact folder."""

from __future__ import annotations

import math
import sys
import tomllib
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import options
from presage.cli.kinds import command_of, tables, unseen
from presage.cli.output import Output, table
from presage.errors import ArtefactError, ConfigurationError, InputError
from presage.kinds.loaded import load_at
from presage.report.blocks import number

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.predictors.router.choice import ModelChoice


Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="models:/NAME@ALIAS, models:/NAME/VERSION, or an artefact folder."),
]


def evaluate(
    model: Model,
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="TRACES", help="Traces to evaluate on; outcomes for a router."),
    ],
    seed: options.Seed = 0,
    precision: Annotated[
        str | None,
        typer.Option(help="Precision of a router's transformer (fp32, bf16 or int8), to compare speed and accuracy."),
    ] = None,
    skip_bad: options.SkipBad = False,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Evaluate a model, and a baseline, on traces (for a router: outcomes) that the model was not trained on."""

    out = Output(as_json)
    with out.working() as report:
        report("loading the model", None)
        loaded = load_at(model, tracking_uri)
        kind, predictor = loaded.kind, loaded.predictor
        if precision is not None:
            if kind.name != "router":
                raise ConfigurationError(
                    f"--precision {precision}: {loaded.called} is not a router with a transformer; omit the option"
                )
            predictor = predictor.at_precision(precision)
        judged_on, left_out = unseen(kind, traces, [predictor], skip_bad, out, report)
        report("forecasting", None)
        judged = kind.evaluate(predictor, judged_on, seed)
    data = {**judged.evaluation.to_dict(), "model": loaded.model, "version": loaded.version}
    data |= {"latency_us": judged.latency_us, "left_out": left_out}
    out.result(data, *(tables(kind, data) if not as_json else ()))


def forecast(
    model: Model,
    steps: Annotated[
        Path,
        typer.Argument(
            metavar="STEPS|-",
            help="The steps of one workflow so far: JSONL, .csv or .parquet; - reads JSONL from standard input.",
            allow_dash=True,
        ),
    ],
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Forecast one running workflow from its steps so far: next agents and END, remaining tokens, or solving model."""

    out = Output(as_json)
    with out.working() as report:
        report("loading the model", None)
        loaded = load_at(model, tracking_uri)
        rows = _one_workflow(steps, out)
        command = command_of(loaded.kind)
        answer = command.ask(loaded.predictor, rows)
    data = {"model": loaded.model, "version": loaded.version, **answer}
    out.result(data, *(command.forecast(data, loaded.called, rows) if not as_json else ()))


def _one_workflow(steps: Path, out: Output) -> list[dict[str, Any]]:
    """The validated steps of one workflow, without empty columns."""
    from presage.datasets.adapters import SUFFIXES

    _spare_pandas()
    # The system's path of standard input, so that error messages name it like any other file.
    path = Path("/dev/stdin") if str(steps) == "-" else steps
    source_format = "auto" if path.name.endswith(tuple(SUFFIXES)) else "jsonl"
    table: pa.Table = options.read([path], False, out, lambda _, __: None, source_format)
    rows = table.to_pylist()
    workflows = {(row["workflow_type"], row["workflow_id"]) for row in rows}
    if len(workflows) > 1:
        raise InputError(
            f"{path}: steps of {len(workflows)} workflows; wanted one workflow: keep the rows of one workflow_id"
        )
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


class _WithoutPandas(MetaPathFinder):
    """An import system in which pandas is not installed."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        """Refuse pandas; leave the rest to the others."""
        if name == "pandas":
            raise ModuleNotFoundError(name=name)


def _spare_pandas() -> None:
    """Keep pyarrow from importing pandas, a fifth of a second: it does so to see whether the first list that it turns
    into an array is an object of pandas. Whoever asks pyarrow for a data frame later still gets one.
    """
    import pyarrow as pa

    if "pandas" not in sys.modules:
        sys.meta_path.insert(0, hidden := _WithoutPandas())
        try:
            pa.array([])
        finally:
            sys.meta_path.remove(hidden)


def route(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT|-", help="The prompt; - reads it from standard input.")],
    costs: Annotated[
        Path | None,
        typer.Option(help='A TOML file with one line per model: "name" = cost of a request.'),
    ] = None,
    max_cost: Annotated[
        float | None,
        typer.Option(help="Pick the likeliest model with at most this cost.", min=0.0),
    ] = None,
    min_quality: Annotated[
        float | None,
        typer.Option(
            help="Pick the cheapest model with at least this probability of solving the prompt.", min=0.0, max=1.0
        ),
    ] = None,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Pick the model most likely to solve a prompt, optionally within a limit on cost or quality."""
    from presage.predictors.router.choice import choose

    out = Output(as_json)
    with out.working() as report:
        prices = _costs(costs) if costs is not None else {}
        report("loading the model", None)
        loaded = load_at(model, tracking_uri)
        if loaded.kind.name != "router":
            raise ArtefactError(f"{model}: a {loaded.kind.name} predictor; wanted a router (train-predictor router)")
        try:
            text = sys.stdin.read() if prompt == "-" else prompt
        except UnicodeDecodeError:
            raise InputError("standard input: not UTF-8; wanted one prompt in UTF-8") from None
        routed = loaded.predictor.forecast(text).to_dict()
        choice = choose(routed["probabilities"], prices, routed["pick"], max_cost=max_cost, min_quality=min_quality)
    data = {
        "model": loaded.model,
        "version": loaded.version,
        **routed,
        "choice": choice.model,
        "reason": choice.reason,
        "limit_kept": choice.kept,
    }
    out.result(data, *(_render(data, prices, choice, loaded.called) if not as_json else ()))


def _costs(path: Path) -> dict[str, float]:
    from presage.datasets.adapters.files.text import BOM, not_utf8

    try:
        costs = tomllib.loads(path.read_bytes().removeprefix(BOM).decode())
    except (OSError, ValueError) as error:
        what = str(error)
        if isinstance(error, UnicodeDecodeError):
            line = error.object.count(b"\n", 0, error.start) + 1
            what = f"line {line}: {not_utf8(error)}"
        message = f'{path}: cannot be read as TOML ({what}); wanted lines such as "small-model" = 0.2'
        raise ConfigurationError(message) from error
    for name, cost in costs.items():
        if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < math.inf:
            raise ConfigurationError(
                f"{path}: the cost of {name!r} is {cost!r}; wanted a number, 0 or more (a name with dots in quotes)"
            )
    return {name: float(cost) for name, cost in costs.items()}


def _render(data: dict[str, Any], prices: dict[str, float], choice: ModelChoice, called: str) -> list[Any]:
    likely = sorted(data["probabilities"].items(), key=lambda item: -item[1])
    rows = [
        [
            name,
            number(p),
            f"{prices[name]:g}" if name in prices else "–",
            str(data["evidence"][name]),
            "← " + choice.reason if name == choice.model else "",
        ]
        for name, p in likely
    ]
    shown = table("", ["model", "solves it", "cost", "training labels", ""], rows, left=(0, 4))
    source = f"\n{called}; source {data['source']}"
    if data["source"] == "back-off":
        source += ": too far from the training prompts: trust these probabilities less"
    return [shown, source]
