"""What the commands do with next-agent predictors: judge, compare, tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any, Final

from presage.cli.kinds import Loaded
from presage.cli.of_traces import OfTraces
from presage.cli.tables import accuracies, number, profile_accuracies, table

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.predictors.next_agent import NextAgentPredictor
    from presage.registry.gates import Budget, Evidence
    from presage.registry.verdict import Verdict
    from presage.training.evaluate import ByMoment

_AGENTS_OF_BUDGET: Final = 30
_BYTES_AN_AGENT: Final = 25_000
_LIKELIEST: Final = 3


class NextAgent(OfTraces):
    """See `presage.cli.kinds.Kind`."""

    name = "next-agent"
    legend = "accuracy 1, 2, … steps ahead"
    advice = (
        "more workflows (presage study learning-curve shows whether they help), agent names that tell roles apart, "
        "recorded texts or hidden states (presage study states), or --set network.epochs and boosting.rounds"
    )

    def metrics(self, loaded: Loaded, table: pa.Table, seed: int) -> dict[str, Any]:
        """Judged beside the n-gram it carries."""
        from presage.training.next_agent import evaluate_model

        judged = evaluate_model(
            loaded.predictor, table, seed, model=loaded.name or loaded.source, version=loaded.version
        )
        return {**judged.evaluation.to_dict(), "latency_us": judged.latency_us}

    def verdict(
        self,
        candidate: Loaded,
        champion: Loaded | None,
        table: pa.Table,
        seed: int,
        *,
        name: str,
        version: int,
        profile: str,
    ) -> Verdict:
        """Accuracy against champion and n-gram, calibration, likelihood, latency, size."""
        import numpy as np

        from presage.registry.gates import judge

        return judge(
            _evidence(candidate, table, seed, profile),
            None if champion is None else _evidence(champion, table, seed, profile),
            _budget(candidate.predictor),
            name=name,
            version=version,
            rng=np.random.default_rng(seed),
        )

    def tables(self, metrics: dict[str, Any], called: str) -> list[Any]:
        """Accuracy at both moments, and under each input profile."""
        return [
            *accuracies(metrics, called),
            profile_accuracies(metrics),
            f"\none forecast takes {metrics['latency_us']:.1f} µs",
        ]

    def forecast(self, data: dict[str, Any], called: str, rows: list[dict[str, Any]]) -> list[Any]:
        """The likeliest agents at each step ahead, and END."""
        lines = []
        for k, horizon in enumerate(data["horizons"], start=1):
            likeliest = sorted(horizon["agents"].items(), key=lambda item: -item[1])[:_LIKELIEST]
            lines.append([str(k), *(f"{agent} {p:.3f}" for agent, p in likeliest), f"{horizon['end']:.3f}"])
        shown = min(_LIKELIEST, len(data["horizons"][0]["agents"]))
        head = ["steps ahead", *(f"likeliest {n + 1}" for n in range(shown)), "END"]
        last = rows[-1]
        after = f"After step {len(rows) - 1} ({last['agent']}, {data['moment']}) of {last['workflow_id']}"
        source = f"source {data['source']}, {data['evidence']} training steps of this agent in this workflow type"
        return [table(after, head, lines), f"\n{called}; {source}"]

    def headline(self, figures: Mapping[str, float]) -> dict[str, str]:
        """Accuracy 1 to K steps ahead at both moments."""
        told = {}
        for moment in ("prefill", "completion"):
            ahead = takewhile(figures.__contains__, (f"{moment}_accuracy_{k}" for k in count(1)))
            told[moment] = " ".join(number(figures[name]) for name in ahead) or "–"
        return told


def _budget(predictor: NextAgentPredictor) -> Budget:
    """The budget for thirty agents, and room for each one more: its column in every leaf, table and count."""
    from presage.registry.gates import Budget

    usual = Budget()
    more = max(0, len(predictor.vocabulary.agents) - _AGENTS_OF_BUDGET)
    return replace(usual, size_bytes=usual.size_bytes + more * _BYTES_AN_AGENT)


def _evidence(loaded: Loaded, table: pa.Table, seed: int, profile: str) -> Evidence:
    """What the gates want to know of a version, measured on these traces under an input profile."""
    from presage.predictors.artefact import FORMAT_VERSION, artefact_size_bytes, find_pickles
    from presage.registry.gates import Evidence, Schema
    from presage.training.next_agent import NGRAM, evaluate_model

    predictor: NextAgentPredictor = loaded.predictor
    judged = evaluate_model(predictor, table, seed, profile=profile, model=loaded.name, version=loaded.version)
    return Evidence(
        workflows=judged.workflows,
        moments=_moments(judged.evaluation.moments),
        latency_us=judged.latency_us,
        size_bytes=artefact_size_bytes(loaded.folder),
        schema=Schema(predictor.horizon, FORMAT_VERSION, frozenset(predictor.vocabulary.workflow_types)),
        pickles=tuple(str(path.relative_to(loaded.folder)) for path in find_pickles(loaded.folder)),
        floor=_moments(judged.evaluation.baselines[NGRAM]),
    )


def _moments(figures: ByMoment) -> dict[str, Any]:
    from presage.registry.gates import MomentEvidence

    return {moment: MomentEvidence(of.correct, of.positions, of.nll, of.ece) for moment, of in figures.items()}
