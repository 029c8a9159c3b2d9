"""What the commands do with routers: judge, compare, tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from presage.cli import outcomes
from presage.cli.kinds import Loaded
from presage.cli.output import Output, Report
from presage.cli.tables import number, table

if TYPE_CHECKING:
    from presage.datasets.outcomes.schema import Outcomes
    from presage.registry.router_gates import RouterBudget, RouterComparison
    from presage.registry.verdict import Verdict
    from presage.training.router.evaluate import RouterFigures, Told

_TRANSFORMER_MS: Final = 2_000.0
_TRANSFORMER_BYTES: Final = 2_000_000_000


class Router:
    """See `presage.cli.kinds.Kind`."""

    name = "router"
    unit = "prompts"
    advice = "more labelled prompts of your own traffic, --encoder with a sentence encoder, or --head transformer"
    legend = "mean average precision over models, calibration error, accuracy of the picks and of the best single model"

    def read(self, paths: list[Path], skip_bad: bool, out: Output, report: Report) -> Outcomes:
        """The outcomes as one matrix."""
        return outcomes.read(paths, skip_bad, out, report).outcomes

    def held_out(self, data: Outcomes, predictors: list[Any]) -> tuple[Outcomes, int]:
        """The prompts that none of the routers learnt from."""
        from presage.training.router.evaluate import held_out

        return held_out(data, *predictors)

    def digest(self, data: Outcomes) -> str:
        """Of prompts, models and labels, whatever files they came in."""
        from presage.datasets.outcomes.schema import outcomes_digest

        return f"sha256:{outcomes_digest(data)}"

    def example(self, data: Outcomes) -> list[dict[str, Any]]:
        """A prompt of ours: those of the outcomes are a user's."""
        return [{"prompt": "Which of these numbers is prime: 21, 23, 25?"}]

    def warnings(self, metrics: dict[str, Any]) -> list[str]:
        """None: prompts of the training set are left out of the test set."""
        return []

    def at_precision(self, loaded: Loaded, precision: str) -> Loaded:
        """Of the transformer."""
        return replace(loaded, predictor=loaded.predictor.at_precision(precision))

    def metrics(self, loaded: Loaded, data: Outcomes, seed: int) -> dict[str, Any]:
        """Judged beside its own base rates."""
        from presage.training.router.train import evaluate_router

        judged = evaluate_router(
            loaded.predictor, data, seed, model=loaded.name or loaded.source, version=loaded.version
        )
        return {**judged.evaluation.to_dict(), "latency_us": judged.latency_us}

    def verdict(
        self,
        candidate: Loaded,
        champion: Loaded | None,
        data: Outcomes,
        seed: int,
        *,
        name: str,
        version: int,
        profile: str,
    ) -> Verdict:
        """Order, picks and probabilities against champion and base rates, calibration, latency, size.

        A router reads prompts and nothing else, so it is judged with them whatever the profile.
        """
        from presage.predictors.artefact import FORMAT_VERSION, artefact_size_bytes, find_pickles
        from presage.registry.router_gates import RouterEvidence, RouterSchema, judge_router
        from presage.training.router.baselines import BaseRate
        from presage.training.router.evaluate import compare_routers
        from presage.training.router.train import evaluate_router

        judged = evaluate_router(candidate.predictor, data, seed)
        found, floor = judged.evaluation, BaseRate.name
        against = None
        if champion is not None:
            both = compare_routers(candidate.predictor, champion.predictor, data, seed)
            its = RouterSchema(FORMAT_VERSION, frozenset(champion.predictor.models))
            against = (its, _compared("the champion", both.mine, both.its, both.differences))
        return judge_router(
            RouterEvidence(
                labels=found.figures.ranking.labels,
                prompts=found.figures.ranking.prompts,
                ece=found.figures.ranking.ece,
                latency_ms=judged.latency_us / 1000,
                size_bytes=artefact_size_bytes(candidate.folder),
                schema=RouterSchema(FORMAT_VERSION, frozenset(candidate.predictor.models)),
                floor=_compared("the base rates", found.figures, found.baselines[floor], found.differences[floor]),
                pickles=tuple(str(path.relative_to(candidate.folder)) for path in find_pickles(candidate.folder)),
            ),
            against,
            _budget(candidate.predictor.config.head),
            name=name,
            version=version,
        )

    def tables(self, metrics: dict[str, Any], called: str) -> list[Any]:
        """Order, picks and honesty; models; cost against quality."""
        judged = {called: metrics, **metrics["baselines"]}
        rows = [
            [
                name,
                _interval(of, "macro_map"),
                number(of["macro_auroc"]),
                _interval(of, "brier"),
                number(of["ece"]),
                _interval(of, "picked_accuracy"),
            ]
            for name, of in judged.items()
        ]
        head = [f"{metrics['prompts']} prompts, {metrics['labels']} labels"]
        head += ["macro mAP", "AUROC", "Brier", "ECE", "picked accuracy"]
        told: list[Any] = [table("\nWhich model solves it, with 95 % intervals", head, rows)]
        best = metrics["best_single_model"]
        if best is not None:
            low, high = metrics["gain_over_best_single_ci95"]
            told.append(
                f"\nbest single model {best} {number(metrics['best_single'])} (ours less it: 95 % {number(low)} to "
                f"{number(high)}), at random {number(metrics['random'])}, oracle {number(metrics['oracle'])}, on "
                f"{metrics['prompts_with_every_label']} prompts with every label"
            )
        of_models = [
            [
                name,
                str(of["labels"]),
                *(number(of[f]) for f in ("base_rate", "average_precision", "auroc", "brier", "ece")),
                number(metrics["picked_shares"].get(name)),
            ]
            for name, of in sorted(metrics["by_model"].items(), key=lambda item: -(item[1]["base_rate"] or 0.0))
        ]
        head = ["model", "labels", "solves", "average precision", "AUROC", "Brier", "ECE", "picked for"]
        told.append(table("\nBy model", head, of_models))
        if metrics["cost_quality"] is not None:
            told += _costs(metrics["cost_quality"])
        return [*told, f"\none prompt takes {metrics['latency_us'] / 1000:.2f} ms"]

    def ask(self, predictor: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Of the last step's input."""
        from presage.errors import InputError

        prompt = rows[-1].get("input_text")
        if prompt is None:
            raise InputError(
                "the last step has no input_text, which is what a router reads; add it, or ask with "
                '`presage route MODEL "prompt"`'
            )
        found: dict[str, Any] = predictor.forecast(prompt).to_dict()
        return found

    def forecast(self, data: dict[str, Any], called: str, rows: list[dict[str, Any]]) -> list[Any]:
        """The models, the likeliest first."""
        likely = sorted(data["probabilities"].items(), key=lambda item: -item[1])
        lines = [[name, number(p), "← pick" if name == data["pick"] else ""] for name, p in likely]
        title = f"Step {len(rows) - 1} ({rows[-1]['agent']}) of {rows[-1]['workflow_id']}"
        return [table(title, ["model", "solves it", ""], lines), f"\n{called}; source {data['source']}"]

    def headline(self, figures: Mapping[str, float]) -> dict[str, str]:
        """Macro mAP, calibration, and picks beside the best single model."""
        names = {"macro mAP": "macro_map", "ECE": "ece", "picked": "picked_accuracy", "best single": "best_single"}
        return {called: number(figures.get(name)) for called, name in names.items()}


def _interval(of: dict[str, Any], figure: str) -> str:
    low, high = of[f"{figure}_ci95"]
    return f"{number(of[figure])} [{number(low)}, {number(high)}]"


def _costs(curve: dict[str, Any]) -> list[Any]:
    rows = [
        [
            f"at most {float(slack):.0%} below the best single model",
            f"{point['cost']:.4g}" if point else "–",
            number(point["accuracy"]) if point else "–",
        ]
        for slack, point in curve["at_slack"].items()
    ]
    rows += [[f"always {name}", f"{of['cost']:.4g}", number(of["accuracy"])] for name, of in curve["singles"].items()]
    said = (
        f"\narea under cost and quality: {number(curve['area'])}, of single models mixed at random "
        f"{number(curve['area_of_singles'])}"
    )
    return [table(f"\nWhat quality costs ({curve['unit']} a request)", ["", "cost", "accuracy"], rows), said]


def _budget(head: str) -> RouterBudget:
    """A transformer takes its time and its room; what a linear router may take is the default."""
    from presage.registry.router_gates import RouterBudget

    if head == "transformer":
        return RouterBudget(latency_ms=_TRANSFORMER_MS, size_bytes=_TRANSFORMER_BYTES)
    return RouterBudget()


def _compared(rival: str, mine: RouterFigures, its: RouterFigures, differences: Any) -> RouterComparison:
    from presage.registry.router_gates import Compared, RouterComparison

    def of(figure: str, one: float, other: float) -> Compared:
        told: Told = differences[figure]
        return Compared(one, other, told[1])

    return RouterComparison(
        rival,
        macro_map=of("macro_map", mine.ranking.macro_map, its.ranking.macro_map),
        picked_accuracy=of("picked_accuracy", mine.picking.picked_accuracy, its.picking.picked_accuracy),
        brier=of("brier", mine.ranking.brier, its.ranking.brier),
    )
