"""What the commands do with predictors of remaining output tokens: judge, compare, tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from presage.cli.kinds import Loaded
from presage.cli.of_traces import OfTraces
from presage.cli.tables import number, table

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.features.lengths import Target
    from presage.registry.length_gates import LengthEvidence
    from presage.registry.verdict import Verdict


class RemainingLength(OfTraces):
    """See `presage.cli.kinds.Kind`."""

    name = "remaining-length"
    advice = (
        "more workflows, output_tokens on every LLM step, --estimator forest or boosted, recorded prompts, or --states "
        "none where texts only tell workflows apart"
    )
    legend = "tau distance over all steps and at arrival (0 best, .5 none), pinball loss in tokens by quantile"

    def metrics(self, loaded: Loaded, table: pa.Table, seed: int) -> dict[str, Any]:
        """Judged beside the best constant for these traces."""
        from presage.training.lengths.train import evaluate_lengths

        judged = evaluate_lengths(
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
        """Order and numbers against champion and constant, coverage, latency, size."""
        from presage.registry.length_gates import LengthBudget, judge_lengths

        return judge_lengths(
            _evidence(candidate, table, seed, profile),
            None if champion is None else _evidence(champion, table, seed, profile),
            LengthBudget(),
            name=name,
            version=version,
            seed=seed,
        )

    def tables(self, metrics: dict[str, Any], called: str) -> list[Any]:
        """Order, numbers, honesty, and what the order is worth in a queue."""
        judged = {called: metrics, **metrics["baselines"]}
        quantiles = list(metrics["pinball"])
        head = [
            f"{metrics['workflows']} workflows, {metrics['steps']} steps",
            "tau distance, all",
            "at arrival",
            *(f"pinball {q}" for q in quantiles),
            *(f"within {q}" for q in quantiles),
        ]
        rows = [
            [
                name,
                *(_interval(of, "tau_distance", scope, 3) for scope in ("all", "arrival")),
                *(number(of["pinball"][q], 1) for q in quantiles),
                *(number(of["coverage"][q]) for q in quantiles),
            ]
            for name, of in judged.items()
        ]
        told: list[Any] = [table("\nOutput tokens: order (0 best, .5 none), loss in tokens, coverage", head, rows)]
        if len(metrics["by_workflow_type"]) > 1:
            of_types = [
                [
                    kind,
                    str(of["workflows"]),
                    number(of["tau_distance"]["all"]),
                    *(number(of["pinball"][q], 1) for q in quantiles),
                    *(number(of["coverage"][q]) for q in quantiles),
                ]
                for kind, of in metrics["by_workflow_type"].items()
            ]
            told.append(table("\nBy workflow type", ["", "workflows", "tau distance", *head[3:]], of_types))
        told.append(_profiles(metrics["profiles"], quantiles))
        if metrics["queue"] is not None:
            queue = metrics["queue"]
            waits = [
                [name, f"{tokens:,.0f}", f"{queue['saved'][name]:.1%}"]
                for name, tokens in queue["completion_tokens"].items()
            ]
            title = f"\nMean completion in a queue with one server, busy {queue['load']:.0%} of the time"
            told.append(table(title, ["policy", "tokens of service", "saved"], waits))
        left_out = ", ".join(f"{count} steps ({why})" for why, count in metrics["left_out_steps"].items() if count)
        told.append(f"\n{f'not judged: {left_out}; ' if left_out else ''}one step takes {metrics['latency_us']:.1f} µs")
        return told

    def forecast(self, data: dict[str, Any], called: str, rows: list[dict[str, Any]]) -> list[Any]:
        """The quantiles after the last step."""
        last = rows[-1]
        lines = [
            [f"{100 * float(q):g} % of such steps: at most", f"{tokens:,.0f}"]
            for q, tokens in data["quantiles"].items()
        ]
        title = f"Output tokens at step {len(rows) - 1} ({last['agent']}) of {last['workflow_id']}"
        source = f"source {data['source']}, {data['evidence']} training steps behind it"
        if not data["calibrated"]:
            source += "; NOT CALIBRATED: the upper quantiles promise nothing here"
        return [table(title, ["", "tokens"], lines), f"\n{called}; {source}"]

    def headline(self, figures: Mapping[str, float]) -> dict[str, str]:
        """Tau distance, and the pinball loss of each quantile."""
        losses = sorted((float(name.removeprefix("pinball_")), name) for name in figures if name.startswith("pinball_"))
        return {
            "tau distance": " ".join(number(figures.get(f"tau_distance_{scope}")) for scope in ("all", "arrival")),
            "pinball": ", ".join(f"{q:g}: {number(figures[name], 1)}" for q, name in losses) or "–",
        }


def target_of(name: str) -> Target:
    """What is to be predicted.

    Raises:
        ConfigurationError: it is neither "remaining" nor "step".
    """
    from presage.errors import ConfigurationError

    if name == "remaining":
        return "remaining"
    if name == "step":
        return "step"
    raise ConfigurationError(f"--target {name}: wanted remaining (this step and all later ones) or step (this one)")


def quantiles_of(text: str) -> tuple[float, ...]:
    """The numbers of a comma-separated list; whether they are quantiles is the configuration's to say.

    Raises:
        ConfigurationError: one of them is no number.
    """
    from presage.errors import ConfigurationError

    try:
        return tuple(map(float, text.split(",")))
    except ValueError as error:
        raise ConfigurationError(
            f"--quantiles {text}: wanted rising numbers between 0 and 1, such as 0.5,0.9,0.99"
        ) from error


def _profiles(profiles: dict[str, Any], quantiles: list[str]) -> Any:
    """Order, loss and coverage by what serving can see."""
    head = ["inputs", "tau distance, all", *(f"pinball {q}" for q in quantiles), *(f"within {q}" for q in quantiles)]
    rows = [
        [
            name,
            _interval(of, "tau_distance", "all", 3),
            *(number(of["pinball"][q], 1) for q in quantiles),
            *(_interval(of, "coverage", q, 3) for q in quantiles),
        ]
        for name, of in profiles.items()
    ]
    return table("\nBy what is at hand when serving (engine: what vLLM's scheduler supplies)", head, rows)


def _interval(of: dict[str, Any], figure: str, key: str, digits: int) -> str:
    low, high = of[f"{figure}_ci95"][key]
    return f"{number(of[figure][key], digits)} [{number(low, digits)}, {number(high, digits)}]"


def _evidence(loaded: Loaded, table: pa.Table, seed: int, profile: str) -> LengthEvidence:
    """What the gates want to know of a version, measured on these traces under an input profile."""
    from presage.predictors.artefact import FORMAT_VERSION, artefact_size_bytes, find_pickles
    from presage.registry.length_gates import LengthEvidence, LengthSchema
    from presage.training.lengths.train import FLOOR, evaluate_lengths

    predictor = loaded.predictor
    judged = evaluate_lengths(predictor, table, seed, profile=profile, model=loaded.name, version=loaded.version)
    return LengthEvidence(
        workflows=judged.workflows,
        type_of=judged.evaluation.type_of,
        counts=judged.evaluation.figures,
        floor=judged.evaluation.baselines[FLOOR],
        latency_us=judged.latency_us,
        size_bytes=artefact_size_bytes(loaded.folder),
        schema=LengthSchema(
            judged.evaluation.target,
            tuple(predictor.quantiles),
            FORMAT_VERSION,
            frozenset(predictor.encoder.vocabulary.workflow_types),
        ),
        pickles=tuple(str(path.relative_to(loaded.folder)) for path in find_pickles(loaded.folder)),
    )
