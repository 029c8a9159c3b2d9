"""`presage promote --replay`: hit rate and completion time with the candidate's forecasts.

The candidate, the champion and stock vLLM serve the same held-out workflows in virtual time, in the same order. The
policy is eviction by score alone, which uses next-agent forecasts: without admission and priority, any difference
comes from the forecasts. With a fleet, versions of a remaining-length predictor route its workflows, beside session
affinity.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from presage.cli.kinds import Kind, Loaded
from presage.cli.output import Output, Progress
from presage.cli.replay import load_of
from presage.errors import ConfigurationError

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.registry.connect import Registry
    from presage.registry.gates import Gate
    from presage.serving_hooks.replay.runs import Done
    from presage.serving_hooks.replay.workload import Workload

_POLICY: Final = "next-use"
_ROUTED: Final = "session-affinity"
_OURS: Final = "presage"
"""Without and with forecasts, on a fleet."""

_CONCURRENCY: Final = 16
_SEEDS: Final = 8
_FOLDER: Final = "replay"
"""Among the artifacts of the version's run."""

_option = partial(typer.Option, rich_help_panel="The replay")

Asked = Annotated[
    bool, typer.Option("--replay", help="Replay the traces and gate on hit rate and completion time; needs vLLM.")
]
Engine = Annotated[str | None, _option(help="TOML file of an engine, or a built-in name.")]
Fleet = Annotated[
    Path | None,
    _option(help="TOML file of several engines: gates a remaining-length version by what routing gains."),
]
CacheTokens = Annotated[int | None, _option(help="Cache size in tokens; overrides the file.")]
Concurrency = Annotated[int | None, _option(help=f"Number of concurrent workflows. Default: {_CONCURRENCY}.")]
Rate = Annotated[float | None, _option(help="Mean arrivals of workflows per second.")]
Prompts = Annotated[str | None, _option(help="As of `presage replay`.")]
OpeningTokens = Annotated[int | None, _option(help="As of `presage replay`.")]
ClosingTokens = Annotated[int | None, _option(help="As of `presage replay`.")]
PauseS = Annotated[float | None, _option(help="Mean of random pauses between steps, instead of recorded pauses.")]
Seeds = Annotated[
    int | None,
    _option(min=3, help=f"Runs of each version, each on a random half of the workflows. Default: {_SEEDS}."),
]
Processes = Annotated[int | None, _option(min=1, help="Parallel runs. Default: one per core.")]


def asked_for(replay: bool, options: Mapping[str, Any]) -> ReplayGate | None:
    """The gate, if --replay is given; `options` are all of the command by name, None if not given.

    Raises ConfigurationError for a bad option or one without --replay, and EngineError if vLLM is not installed.
    """
    own = inspect.signature(ReplayGate).parameters
    given = {name: value for name, value in options.items() if name in own and value is not None}
    if replay:
        return ReplayGate(**given)
    if given:
        option = next(iter(given)).replace("_", "-")
        raise ConfigurationError(f"--{option} configures the replay: add --replay")
    return None


class ReplayGate:
    """Replays versions and judges the figures; arguments and errors as in `asked_for`."""

    def __init__(
        self,
        engine: str | None = None,
        cache_tokens: int | None = None,
        fleet: Path | None = None,
        concurrency: int | None = None,
        rate: float | None = None,
        prompts: str = "recorded",
        opening_tokens: int = 0,
        closing_tokens: int = 0,
        pause_s: float | None = None,
        seeds: int = _SEEDS,
        processes: int | None = None,
    ) -> None:
        from presage.serving_hooks.replay.engine_file import read_engine
        from presage.serving_hooks.replay.fleet_file import FleetPlan, read_fleet
        from presage.serving_hooks.replay.runs import check_vllm
        from presage.serving_hooks.replay.workload import Arrivals, PromptConvention

        if concurrency is None and rate is None:
            concurrency = _CONCURRENCY
        self._arrivals = Arrivals(concurrency, rate)
        self._convention = PromptConvention(prompts, opening_tokens, closing_tokens)  # type: ignore[arg-type]  # it checks
        plan = FleetPlan() if fleet is None else read_fleet(fleet)
        self._fleet, self._models = plan.engines, plan.agents
        if self._fleet and (engine is not None or cache_tokens is not None):
            raise ConfigurationError("--engine and --cache-tokens apply to one engine: say them in the file of --fleet")
        self._engine = self._fleet[0].engine if self._fleet else read_engine(engine or "invented", cache_tokens)
        self._pause_s, self._seeds = pause_s, seeds
        self._processes = processes or len(os.sched_getaffinity(0))
        check_vllm()

    def check(self, kind: Kind, name: str) -> None:
        """Raise ConfigurationError unless the policy uses this kind of predictor."""
        if self._fleet:
            if kind.name != "remaining-length":
                raise ConfigurationError(
                    f"--fleet replays routing by remaining work, and {name!r} is a {kind.name} predictor: promote it "
                    "without --fleet"
                )
        elif kind.name != "next-agent":
            raise ConfigurationError(
                f"--replay applies to next-agent predictors, and {name!r} is a {kind.name} predictor: "
                "promote it without --replay"
            )

    def judge(
        self, candidate: Loaded, champion: Loaded | None, table: pa.Table, out: Output, report: Progress
    ) -> tuple[tuple[Gate, ...], dict[str, Any]]:
        """The gates, and their figures in the format of `presage replay`.

        Args:
            candidate: the version to promote.
            champion: the current holder of the alias, or None.
            table: traces that neither was trained on; raises TraceError if they cannot be replayed.
            out: receives notes on workflows left out, and on replays in which the cache was never full.
        """
        from presage.registry.evidence import judge_replay
        from presage.serving_hooks.replay.forecasts import COUNTS
        from presage.serving_hooks.replay.policies import POLICIES, ROUTING, STOCK
        from presage.serving_hooks.replay.runs import Setting, contest, result
        from presage.serving_hooks.replay.workload import check_fits, workload

        held = workload(table, self._convention, self._pause_s)
        for engine in {self._engine, *(member.engine for member in self._fleet)}:
            check_fits(held.jobs, engine)
        if held.left_out:
            out.note(f"{held.left_out} workflows not replayed: their request sizes were not recorded")
        if held.estimated_sizes:
            out.note(f"request sizes of {held.estimated_sizes} workflows were not all recorded, and are estimated")
        for one in (candidate, champion):
            _check_agents(one, held)
        setting = Setting(
            held.jobs, self._convention, self._arrivals, self._engine, "", fleet=self._fleet, models=self._models
        )
        names = {one: f"version {one.version}" for one in (candidate, champion) if one is not None}
        alone, policy = (_ROUTED, ROUTING[_OURS]) if self._fleet else (STOCK, POLICIES[_POLICY])
        contenders = {alone: (setting, ROUTING[alone] if self._fleet else POLICIES[alone])}
        for one, name in names.items():
            folder = str(one.folder)
            agents, lengths = (COUNTS, folder) if self._fleet else (folder, None)
            contenders[name] = replace(setting, forecasts=agents, lengths=lengths), policy
        done = contest(contenders, range(self._seeds), self._processes, report)
        runs = {name: [run for run in done if run.policy == name] for name in contenders}
        figures = [[run.figures for run in of] for of in runs.values()]
        if all(of == figures[0] for of in figures):
            out.note(
                "all runs have equal figures, with and without forecasts: the cache was never full. Raise "
                "--concurrency or lower --cache-tokens"
            )
        gates = judge_replay(
            _figures(runs[names[candidate]]),
            None if champion is None else _figures(runs[names[champion]]),
            _figures(runs[alone]),
        )
        return gates, {
            "kind": "replay",
            "workload": {
                "workflows": len(held.jobs),
                "workflows_of_a_run": (len(held.jobs) + 1) // 2,
                "left_out": held.left_out,
                **load_of(setting),
            },
            "engine": self._engine.model_dump(),
            "forecasts": f"of {' and '.join(names.values())}, each with the policy {policy.name}",
            **({"engines": len(self._fleet)} if self._fleet else {}),
            "seeds": self._seeds,
            "interrupted": False,
            "policies": result(done),
        }


def keep(registry: Registry, name: str, version: int, found: Mapping[str, Any]) -> None:
    """Attach the report of a replay to the run of the version; raises RegistryError."""
    from presage.registry.connect import attach
    from presage.report.files import write_metrics, write_report

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        attach(registry, name, version, [write_metrics(folder, found), *write_report(folder, found)], _FOLDER)


def _check_agents(one: Loaded | None, held: Workload) -> None:
    agents = {step.agent for job in held.jobs for step in job.steps}
    if one is None:
        return
    predictor = one.predictor
    known = predictor.encoder.vocabulary if one.kind.name == "remaining-length" else predictor.vocabulary
    if not agents & set(known.agents):
        raise ConfigurationError(
            f"{one.called} knows none of the {len(agents)} agents of these traces, so it cannot forecast in a "
            "replay: give traces of the applications it was trained on"
        )


def _figures(runs: Sequence[Done]) -> Any:
    from presage.registry.evidence import Replayed

    return Replayed(
        tuple(run.figures["hit_rate"] for run in runs),
        tuple(run.figures["completion_mean_s"] for run in runs),
        tuple(run.figures["completion_p99_s"] for run in runs),
        tuple(run.figures["start_delay_p99_s"] for run in runs),
        tuple(run.figures.get("later_ttft_p99_s", 0.0) for run in runs),
        tuple(sorted({name for run in runs for name in run.off})),
    )
