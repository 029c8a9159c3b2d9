"""`presage models`, `promote` and `rollback`: what is registered, and who serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import options
from presage.cli.boundary import REFUSED
from presage.cli.output import Output

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.predictors.next_agent import NextAgentPredictor
    from presage.registry.connect import Registry
    from presage.registry.gates import Budget, Evidence
    from presage.training.evaluate import ByMoment

_SEED = 0
"""Of the bootstrap behind a verdict: the same traces give the same verdict."""

_AGENTS_OF_BUDGET = 30
_BYTES_AN_AGENT = 25_000

_Name = Annotated[str, typer.Argument(help="Registered model, such as next-agent.", show_default=False)]


def models(tracking_uri: options.TrackingUri = None, as_json: options.Json = False) -> None:
    """List registered versions with aliases, verdicts and headline figures."""
    from presage.registry.listing import list_models

    out = Output(as_json)
    with out.working() as report:
        report("asking the registry", None)
        registry = options.open_registry(tracking_uri)
        listed = list_models(registry)
    out.result({"registry": registry.uri, "models": listed}, *(_listing(listed, registry.uri) if not as_json else ()))


def promote(
    name: _Name,
    version: Annotated[int, typer.Option(help="The version to judge.", min=1, show_default=False)],
    traces: Annotated[
        list[Path], typer.Option("--traces", help="Held-out traces; repeat for more.", show_default=False)
    ],
    alias: Annotated[str, typer.Option("--to", help="The alias to give it.")] = "champion",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Judge, and change nothing.")] = False,
    skip_bad: options.SkipBad = False,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Judge a version against the present holder of an alias on held-out traces; it takes the alias if it passes.

    Exit code 3 when a gate refuses. Verdict and figures become tags of the version either way.
    """
    import numpy as np

    from presage.datasets.digest import digest
    from presage.registry.gates import judge
    from presage.registry.promote import promote as carry_out
    from presage.training.next_agent import held_out

    out = Output(as_json)
    with out.working() as report:
        report("asking the registry", None)
        registry = options.open_registry(tracking_uri)
        registry.version(name, version)
        table = options.read(traces, skip_bad, out, report)
        holder = registry.aliases(name).get(alias)
        judged = {version: _loaded(registry, name, version)}
        if holder is not None and holder != version:  # against itself a version would pass
            judged[holder] = _loaded(registry, name, holder)
        table, left_out = held_out(table, *(predictor for _, predictor in judged.values()))
        if left_out:
            out.note(f"{left_out} workflows left out: their tasks are among those a judged version was trained on")
        traces_digest = f"sha256:{digest(table)}"
        report(f"judging version {version}", None)
        candidate = _evidence(*judged[version], table, name, version)
        champion = None
        if holder is not None and holder != version:
            report(f"judging the {alias}, version {holder}", None)
            champion = _evidence(*judged[holder], table, name, holder)
        verdict = judge(
            candidate,
            champion,
            _budget(judged[version][1]),
            name=name,
            version=version,
            rng=np.random.default_rng(_SEED),
        )
        done = carry_out(registry, name, version, verdict, alias=alias, dry_run=dry_run, data_digest=traces_digest)
    data = {**verdict.to_dict(), "alias": alias, "previous": done.previous, "moved": done.moved, "dry_run": dry_run}
    data["left_out"] = left_out
    out.result(data, *(_verdict(data) if not as_json else ()))
    if not verdict.promoted:
        raise typer.Exit(REFUSED)


def rollback(
    name: _Name,
    alias: Annotated[str, typer.Option(help="The alias to give back.")] = "champion",
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Give an alias back to the version that held it before. Passes no gate: it is the way out."""
    from presage.registry.promote import rollback as go_back

    out = Output(as_json)
    with out.working() as report:
        report("asking the registry", None)
        before, now = go_back(options.open_registry(tracking_uri), name, alias=alias)
    data = {"name": name, "alias": alias, "from": before, "to": now}
    out.result(data, f"{name}: {alias} was version {before}, is version {now}")


def _loaded(registry: Registry, name: str, version: int) -> tuple[Path, NextAgentPredictor]:
    from presage.predictors.next_agent import NextAgentPredictor
    from presage.registry.resolve import resolve

    folder = resolve(f"models:/{name}/{version}", lambda: registry).folder
    return folder, NextAgentPredictor.load(folder)


def _budget(predictor: NextAgentPredictor) -> Budget:
    """The budget for thirty agents, and room for each one more: its column in every leaf, table and count."""
    from presage.registry.gates import Budget

    usual = Budget()
    more = max(0, len(predictor.vocabulary.agents) - _AGENTS_OF_BUDGET)
    return replace(usual, size_bytes=usual.size_bytes + more * _BYTES_AN_AGENT)


def _evidence(folder: Path, predictor: NextAgentPredictor, table: pa.Table, name: str, version: int) -> Evidence:
    """What the gates want to know of a version, measured on these traces."""
    from presage.predictors.artefact import FORMAT_VERSION, artefact_size_bytes, find_pickles
    from presage.registry.gates import Evidence, Schema
    from presage.training.next_agent import NGRAM, evaluate_model

    judged = evaluate_model(predictor, table, _SEED, model=name, version=version)
    return Evidence(
        workflows=judged.workflows,
        moments=_moments(judged.evaluation.moments),
        latency_us=judged.latency_us,
        size_bytes=artefact_size_bytes(folder),
        schema=Schema(predictor.horizon, FORMAT_VERSION, frozenset(predictor.vocabulary.workflow_types)),
        pickles=tuple(str(path.relative_to(folder)) for path in find_pickles(folder)),
        floor=_moments(judged.evaluation.baselines[NGRAM]),
    )


def _moments(figures: ByMoment) -> dict[str, Any]:
    from presage.registry.gates import MomentEvidence

    return {moment: MomentEvidence(of.correct, of.positions, of.nll, of.ece) for moment, of in figures.items()}


def _listing(listed: list[dict[str, Any]], uri: str) -> list[Any]:
    from presage.cli.tables import number, table

    if not listed:
        return [f"no models in {uri}; register one with `train-predictor next-agent TRACES...`"]
    rows = [
        [
            entry["name"],
            str(entry["version"]),
            ", ".join(entry["aliases"]) or "–",
            _standing(entry),
            *(
                " ".join(number(entry["figures"].get(f"{moment}_accuracy_{k}")) for k in (1, 2, 3))
                for moment in ("prefill", "completion")
            ),
            f"{entry['size_bytes'] / 1e6:.2f} MB",
            entry["registered_at"][:10],
        ]
        for entry in listed
    ]
    head = ["name", "version", "aliases", "verdict", "prefill", "completion", "size", "registered"]
    figures = "Accuracy 1, 2 and 3 steps ahead, on the test set of each training; `--json` tells all."
    return [f"Models in {uri}", table("", head, rows), f"\n{figures}"]


def _standing(entry: dict[str, Any]) -> str:
    if entry["rolled_back"]:
        return "rolled back"
    if entry["verdict"] == "refused":
        gates = len(entry["refused_by"])
        return f"refused, {gates} gate{'s' * (gates > 1)}"
    return entry["verdict"] or "not judged"


def _verdict(data: dict[str, Any]) -> list[Any]:
    from presage.cli.tables import table

    rows = [["passed" if gate["passed"] else "REFUSED", gate["name"], gate["reason"]] for gate in data["gates"]]
    head = f"{data['name']} version {data['version']}"
    holder = f" (held by version {data['previous']})" if data["previous"] else ""
    if not data["promoted"]:
        end = f"{head} was refused; {data['alias']} stays as it was{holder}."
    elif data["dry_run"]:
        end = f"{head} would be promoted to {data['alias']}{holder}; nothing was changed."
    elif data["moved"]:
        end = f"{head} is {data['alias']} now{holder.replace('held', 'before: held') if holder else ''}."
    else:
        end = f"{head} passed, and was {data['alias']} already."
    gates = table(f"Gates of {head}", ["", "gate", "why"], rows)
    for column in gates.columns:
        column.justify = "left"
    return [gates, f"\n{end}"]
