"""`presage models`, `presage register`, `presage promote` and `presage rollback`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from presage.cli import options, replay_gate
from presage.cli.kinds import unseen
from presage.cli.output import REFUSED, Output, table
from presage.cli.server import ApiKey
from presage.errors import without_passwords
from presage.predictor_kinds import KINDS, Kind
from presage.registry.connect import NoRegistryError, default_uri, is_named, open_existing, open_registry
from presage.wording import counted

_Name = Annotated[str, typer.Argument(help="Registered model, such as next-agent.")]


def models(
    tracking_uri: options.TrackingUri = None,
    url: Annotated[
        str | None,
        typer.Option(help="A running engine, such as http://localhost:8000: shows its live figures too."),
    ] = None,
    api_key: ApiKey = None,
    as_json: options.Json = False,
) -> None:
    """List registered versions with aliases, verdicts and headline figures; of a running engine, promised and live."""
    from presage.registry.promote import list_models, vacant_aliases

    out = Output(as_json)
    listed: list[dict[str, Any]] = []
    vacant: list[dict[str, Any]] = []
    with out.working() as report:
        report("opening the registry", None)
        try:
            registry = open_existing(tracking_uri)
            listed, vacant = list_models(registry), vacant_aliases(registry)
        except NoRegistryError:
            if is_named(tracking_uri):  # a place that somebody named and that is not there is a mistake
                raise
    uri = without_passwords(tracking_uri or default_uri())
    data = {"registry": uri, "models": listed, "vacant_aliases": vacant}
    live: list[Any] = []
    if url is not None:
        from presage.cli.status import promised_and_live

        data["live"], live = promised_and_live(url, api_key)
    shown = [*_listing(listed, uri), *map(_vacancy, vacant), *live] if not as_json else ()
    out.result(data, *shown)


def register(
    folder: Annotated[Path, typer.Argument(help="What a training command wrote with --out.")],
    name: Annotated[str | None, typer.Option(help="Registered model. Default: that of the training.")] = None,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Register the folder of a training as a new version, as the training does unless it is told --no-register.

    For a registry that could not be reached then, for another one, or for a training on a machine without one.
    """
    from presage.kinds.registration import register_folder

    out = Output(as_json)
    with out.working() as report:
        report("registering", None)
        made = register_folder(folder, name, lambda: open_registry(tracking_uri))
    data = {"name": made.name, "version": made.version, "registered": made.uri, "folder": str(folder)}
    out.result(data, f"registered as {made.uri}")


def promote(
    context: typer.Context,
    name: _Name,
    version: Annotated[int, typer.Option(help="The version to evaluate.", min=1)],
    traces: Annotated[list[Path], typer.Option(help="Held-out traces, or outcomes for a router; repeat for more.")],
    alias: Annotated[str, typer.Option("--to", help="The alias to give it.")] = "champion",
    target: Annotated[
        Literal["engine", "gateway", "full"] | None,
        typer.Option(
            "--profile",
            help="Inputs available when serving: engine (ids, token counts, hidden states: what vLLM's scheduler "
            "supplies), gateway (ids, token counts, texts) or full (everything recorded). Default: engine. A router "
            "reads prompts and has none.",
        ),
    ] = None,
    types: Annotated[
        str | None,
        typer.Option(
            help="Workflow types to judge on and to go on with, separated by commas. Others of the champion may then "
            "be missing, with a warning. Default: all.",
            metavar="NAMES",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Evaluate only; change nothing.")] = False,
    replay: replay_gate.Asked = False,
    engine: replay_gate.Engine = None,
    cache_tokens: replay_gate.CacheTokens = None,
    fleet: replay_gate.Fleet = None,
    concurrency: replay_gate.Concurrency = None,
    rate: replay_gate.Rate = None,
    prompts: replay_gate.Prompts = None,
    opening_tokens: replay_gate.OpeningTokens = None,
    closing_tokens: replay_gate.ClosingTokens = None,
    pause_s: replay_gate.PauseS = None,
    seeds: replay_gate.Seeds = None,
    processes: replay_gate.Processes = None,
    skip_bad: options.SkipBad = False,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Compare a version with the current holder of an alias on held-out traces; move the alias if all gates pass.

    Exit code 3 if a gate fails; the version keeps the verdict either way. Exit code 3 too, without
    a verdict, if the alias moves meanwhile. If the version passes, its run also stores the reference figures for an
    engine's drift alarm.
    """
    from presage.kinds.promotion import judge_version

    out = Output(as_json)
    last = replay_gate.asked_for(replay, context.params)
    with out.working() as report:
        report("opening the registry", None)
        registry = open_existing(tracking_uri)

        def held(kind: Kind, judged: list[Any]) -> tuple[Any, int]:
            return unseen(kind, traces, judged, skip_bad, out, report)

        verdict, data = judge_version(
            registry,
            name,
            version,
            held,
            alias=alias,
            target=target,
            types=None if types is None else [name.strip() for name in types.split(",") if name.strip()],
            dry_run=dry_run,
            last=last,
            note=out.note,
            report=report,
        )
    out.result(data, *(_verdict(data) if not as_json else ()))
    if not verdict.promoted:
        raise typer.Exit(REFUSED)


def rollback(
    name: _Name,
    alias: Annotated[str, typer.Option(help="The alias to move back.")] = "champion",
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Move an alias back to its previous version, without evaluating any gate."""
    from presage.registry.promote import rollback as go_back

    out = Output(as_json)
    with out.working() as report:
        report("opening the registry", None)
        before, now = go_back(open_existing(tracking_uri), name, alias=alias)
    data = {"name": name, "alias": alias, "from": before, "to": now}
    was = "no version" if before is None else f"version {before}"
    out.result(data, f"{name}: {alias} was {was}, is version {now}")


def _listing(listed: list[dict[str, Any]], uri: str) -> list[Any]:
    if not listed:
        return [f"no models in {uri}; register one with `train-predictor`"]
    kinds = {entry["kind"]: [other for other in listed if other["kind"] == entry["kind"]] for entry in listed}
    shown: list[Any] = [
        f"Models in {uri}, with their figures on the test set of each training; `--json` shows all fields."
    ]
    return shown + [_of_kind(kind, entries) for kind, entries in kinds.items()]


def _of_kind(name: str, entries: list[dict[str, Any]]) -> Any:
    if kind := KINDS.get(name):
        figures, title = [kind.headline(entry["figures"]) for entry in entries], f"\n{name}: {kind.legend}"
    else:  # registered by a later version of Presage
        figures, title = [{} for _ in entries], f"\n{name}: a kind that this version of Presage does not support"
    head = ["name", "version", "aliases", "verdict", *figures[0], "size", "registered"]
    rows = [
        [
            entry["name"],
            str(entry["version"]),
            ", ".join(entry["aliases"]) or "–",
            _standing(entry),
            *headline.values(),
            "–" if entry["size_bytes"] is None else f"{entry['size_bytes'] / 1e6:.2f} MB",
            entry["registered_at"][:10],
        ]
        for entry, headline in zip(entries, figures, strict=True)
    ]
    return table(title, head, rows)


def _vacancy(vacancy: dict[str, Any]) -> str:
    name, alias = vacancy["name"], vacancy["alias"]
    target = "no version" if vacancy["version"] is None else f"version {vacancy['version']}, which was deleted"
    back = f"presage rollback {name} --alias {alias}"
    remedy = "promote a version" if vacancy["former"] is None else f"`{back}` gives it to version {vacancy['former']}"
    return f"\n{name}: {alias} points to {target}; {remedy}"


def _standing(entry: dict[str, Any]) -> str:
    if entry["rolled_back"]:
        return "rolled back"
    if entry["verdict"] == "refused":
        return f"refused, {counted(len(entry['refused_by']), 'gate')}"
    lost = max(entry["lost"].values(), default=0)
    return entry["verdict"] or ("not judged" if not lost else f"not judged, LOST {lost} to baselines")


def _outcome(gate: dict[str, Any]) -> str:
    if not gate["passed"]:
        return "REFUSED"
    return "WARNING" if gate["warning"] else "passed"


def _verdict(data: dict[str, Any]) -> list[Any]:
    rows = [[_outcome(gate), gate["name"], gate["reason"]] for gate in data["gates"]]
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
    title = f"Gates of {head}" + (f", judged under the profile {data['profile']}" if data["profile"] else "")
    return [table(title, ["", "gate", "why"], rows, left=range(3)), f"\n{end}"]
