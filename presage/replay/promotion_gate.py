"""The last gate of a promotion: hit rate and completion time with the candidate's forecasts.

The candidate, the champion and stock vLLM serve the same held-out workflows in virtual time, in the same order. The
policy is eviction by score alone, which uses next-agent forecasts: without admission and priority, any difference
comes from the forecasts. With a fleet, versions of a remaining-length predictor route its workflows, beside session
affinity.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from presage.errors import ConfigurationError

if TYPE_CHECKING:
    from presage.kinds.loaded import Loaded
    from presage.kinds.promotion import Contest
    from presage.predictor_kinds import Kind
    from presage.registry.connect import Registry
    from presage.registry.gates import Gate
    from presage.replay.runs import Done, Setting
    from presage.replay.workload import Workload

_POLICY: Final = "next-use"
_ROUTED: Final = "session-affinity"
_OURS: Final = "presage"
"""Without and with forecasts, on a fleet."""

CONCURRENCY: Final = 16
SEEDS: Final = 8
_FOLDER: Final = "replay"
"""Among the artifacts of the version's run."""


class ReplayGate:
    """Replays versions and judges the figures; arguments as the options of `presage promote --replay`.

    Raises ConfigurationError for a bad argument, and EngineError if vLLM is not installed.
    """

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
        seeds: int = SEEDS,
        processes: int | None = None,
    ) -> None:
        from presage.replay.fleet_file import FleetPlan, read_fleet
        from presage.replay.runs import check_vllm
        from presage.replay.workload import Arrivals, PromptConvention
        from presage.serving_hooks.engine_file import read_engine

        if concurrency is None and rate is None:
            concurrency = CONCURRENCY
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

    def judge(self, judged: Contest) -> tuple[tuple[Gate, ...], dict[str, Any]]:
        """The gates, and their figures in the format of `presage replay`.

        Notes tell of workflows left out, and of replays in which the cache was never full. Raises TraceError if the
        traces cannot be replayed.
        """
        from presage.registry.evidence import judge_replay
        from presage.replay.forecasts import COUNTS
        from presage.replay.policies import POLICIES, ROUTING, STOCK
        from presage.replay.runs import Setting, contest, result
        from presage.replay.workload import check_fits, workload

        candidate, champion, note = judged.candidate, judged.champion, judged.note
        held = workload(judged.table, self._convention, self._pause_s)
        for engine in {self._engine, *(member.engine for member in self._fleet)}:
            check_fits(held.jobs, engine)
        if held.left_out:
            note(f"{held.left_out} workflows not replayed: their request sizes were not recorded")
        if held.estimated_sizes:
            note(f"request sizes of {held.estimated_sizes} workflows were not all recorded, and are estimated")
        for contender in (candidate, champion):
            _check_agents(contender, held)
        setting = Setting(
            held.jobs, self._convention, self._arrivals, self._engine, "", fleet=self._fleet, models=self._models
        )
        names = {
            contender: f"version {contender.version}" for contender in (candidate, champion) if contender is not None
        }
        alone, policy = (_ROUTED, ROUTING[_OURS]) if self._fleet else (STOCK, POLICIES[_POLICY])
        contenders = {alone: (setting, ROUTING[alone] if self._fleet else POLICIES[alone])}
        for contender, name in names.items():
            folder = str(contender.folder)
            agents, lengths = (COUNTS, folder) if self._fleet else (folder, None)
            contenders[name] = replace(setting, forecasts=agents, lengths=lengths), policy
        done = contest(contenders, range(self._seeds), self._processes, judged.report)
        runs = {name: [run for run in done if run.policy == name] for name in contenders}
        figures = [[run.figures for run in same_policy] for same_policy in runs.values()]
        if all(by_seed == figures[0] for by_seed in figures):
            note(
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

    def keep(self, registry: Registry, name: str, version: int, found: Mapping[str, Any]) -> None:
        """Attach the report of a replay to the run of the version; raises RegistryError."""
        from presage.registry.connect import attach
        from presage.report.files import write_metrics, write_report

        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            attach(registry, name, version, [write_metrics(folder, found), *write_report(folder, found)], _FOLDER)


def load_of(setting: Setting) -> dict[str, Any]:
    """The load of a replay: its requests, how prompts are assembled, and how workflows arrive."""
    steps = [step for job in setting.jobs for step in job.steps]
    return {
        "requests": len(steps),
        "prompt_tokens": sum(step.prompt_tokens for step in steps),
        "output_tokens": sum(step.output_tokens for step in steps),
        **asdict(setting.convention),
        "concurrency": setting.arrivals.concurrency,
        "rate": setting.arrivals.rate,
    }


def _check_agents(contender: Loaded | None, held: Workload) -> None:
    agents = {step.agent for job in held.jobs for step in job.steps}
    if contender is None:
        return
    predictor = contender.predictor
    vocabulary = predictor.encoder.vocabulary if contender.kind.name == "remaining-length" else predictor.vocabulary
    if not agents & set(vocabulary.agents):
        raise ConfigurationError(
            f"{contender.called} knows none of the {len(agents)} agents of these traces, so it cannot forecast in a "
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
