"""How well profiles describe workflows that they were not made of.

- Coverage: whole workflows that the expression describes; a workflow that was cut has no end and is left out.
- Call coverage: calls, the first step and END included, on edges that were not pruned.
- The next step: accuracy of the likeliest, recall of the two likeliest, and the set of the likeliest that together have
a
  probability of SET_MASS. Recall is the share of steps with the next one in the set, precision that share divided by
  the mean size of the set.

- Prompts, where they are recorded: how many begin as the template says, and how much of them that is.

Intervals are by bootstrap over workflows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.datasets.schema import workflow_codes
from presage.errors import TraceError
from presage.features.input_profiles import PROFILES
from presage.features.moment import PREFILL
from presage.features.prefixes import Prefixes, prefixes_of
from presage.features.sequences import WorkflowSteps, sequences_of
from presage.features.vocabulary import Vocabulary
from presage.predictors.common.bootstrap import ratio_ci, share_ci
from presage.predictors.next_agent.ngram import BackoffNgram
from presage.predictors.profile.automaton import END, ProfilePlace, wilson
from presage.predictors.profile.predictor import ProfilePredictor
from presage.predictors.profile.profile import TypeProfile
from presage.predictors.profile.prompts import recorded_prompts
from presage.predictors.profile.templates import TemplateFigures
from presage.training.baselines import Behind, behind, worst
from presage.training.metrics import RESAMPLES, json_values

SET_MASS: Final = 0.9
NGRAM: Final = "markov-3"
VARIANTS: Final = "variants"
PROFILE_BASELINES: Final = (NGRAM, VARIANTS)
"""The n-gram forecasts the next step; the variants cover a workflow if the training set has one with the same agents in
the same order."""

_RATIOS: Final = {
    "coverage": ("covered", "whole"),
    "call_coverage": ("kept", "calls"),
    "accuracy": ("correct", "positions"),
    "top2": ("two", "positions"),
    "set_recall": ("found", "positions"),
    "set_precision": ("found", "sizes"),
    "set_size": ("sizes", "positions"),
}
_LABELS: Final = {
    "coverage": "in coverage of whole workflows",
    "accuracy": "in accuracy of the next step",
    "top2": "in recall of the two likeliest next steps",
}
_NAMES: Final = ("covered", "whole", "kept", "calls", "correct", "two", "found", "sizes", "positions")


@dataclass(frozen=True, eq=False)
class ProfileCounts:
    """Counts of each of W workflows, int64 [W]; of a baseline without coverage, or without forecasts, zeros.

    Attributes:
        covered, whole: 1 if the workflow is covered, and if its end is known.
        kept, calls: its calls on kept edges, and all.
        correct, two, found, sizes, positions: steps with a known outcome that was the likeliest, one of the two
            likeliest, in the set; the sum of the sizes of the sets; and all.
    """

    covered: NDArray[np.int64]
    whole: NDArray[np.int64]
    kept: NDArray[np.int64]
    calls: NDArray[np.int64]
    correct: NDArray[np.int64]
    two: NDArray[np.int64]
    found: NDArray[np.int64]
    sizes: NDArray[np.int64]
    positions: NDArray[np.int64]

    @classmethod
    def zeros(cls, workflows: int) -> ProfileCounts:
        """Nothing counted."""
        return cls(*(np.zeros(workflows, np.int64) for _ in _NAMES))

    def take(self, workflows: NDArray[np.bool_]) -> ProfileCounts:
        """The given workflows."""
        return ProfileCounts(*(getattr(self, name)[workflows] for name in _NAMES))

    def figures(self, seed: int, resamples: int = RESAMPLES) -> dict[str, Any]:
        """The ratios of what was counted, with their intervals."""
        figures: dict[str, Any] = {}
        for name, (above, below) in _RATIOS.items():
            part, all_ = getattr(self, above), getattr(self, below)
            if all_.sum():
                figures[name] = float(part.sum() / all_.sum())
                interval = ratio_ci if name == "set_size" else share_ci
                figures[f"{name}_ci95"] = interval(part, all_, np.random.default_rng(seed), resamples)
        return figures


@dataclass(frozen=True)
class ProfileEvaluation:
    """Figures of profiles on W workflows.

    Attributes:
        type_of: the workflow type of each.
        steps: of all workflows.
        described: of each workflow type, what the report shows.
        templates: figures of the workflow types whose prompts are recorded, here and in training.
    """

    counts: ProfileCounts
    type_of: tuple[str, ...]
    steps: int
    baselines: Mapping[str, ProfileCounts]
    described: Mapping[str, Mapping[str, Any]]
    templates: Mapping[str, TemplateFigures]
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """The object that `train-predictor` prints, as JSON values; the caller sets "model" and "version"."""
        figures = self.counts.figures(self.seed)
        types = np.asarray(self.type_of)
        lost = [comparison for name, baseline in self.baselines.items() for comparison in self._lost(name, baseline)]
        by_type = {}
        for name, described in self.described.items():
            counted = self.counts.take(types == name)
            by_type[name] = {**described, **counted.figures(self.seed), "workflows": int(counted.whole.sum())}
            by_type[name].setdefault("coverage", None)
            by_type[name]["templates"] = {**described["templates"], **_template_figures(self.templates.get(name))}
        shown = {**{name: figures.get(name) for name in ("coverage", "accuracy")}, "behind": worst(lost)}
        return json_values(
            {
                "kind": "profile",
                "model": None,
                "version": None,
                "workflows": len(types),
                "steps": self.steps,
                "coverage": None,
                **figures,
                "by_workflow_type": by_type,
                "baselines": {name: counts.figures(self.seed) for name, counts in self.baselines.items()},
                "profiles": dict.fromkeys(PROFILES, shown),  # it reads no input but the agents and their order
                "behind": worst(lost),
            }
        )

    def _lost(self, name: str, baseline: ProfileCounts) -> list[Behind]:
        lost = []
        for figure, label in _LABELS.items():
            above, below = _RATIOS[figure]
            mine, its = (getattr(side, above) for side in (self.counts, baseline))
            all_ = getattr(baseline, below)
            if not all_.sum():
                continue
            own = its.sum() / all_.sum()
            gap = own - mine.sum() / all_.sum()
            ends = ratio_ci(its - mine, all_, np.random.default_rng(self.seed))
            lost += behind(name, label, float(gap), ends, float(own))
        return lost


def evaluate(
    predictor: ProfilePredictor, table: pa.Table, seed: int, baselines: Mapping[str, ProfileCounts] | None = None
) -> ProfileEvaluation:
    """Evaluate profiles on a valid trace in canonical order; raises TraceError if they know none of its types."""
    counts = ProfileCounts.zeros(int(workflow_codes(table).max()) + 1)
    type_of = [""] * len(counts.whole)
    sequences = sequences_of(table)
    if not sequences.keys() & predictor.profiles.keys():
        raise TraceError(
            f"the traces are of {', '.join(map(repr, list(sequences)[:5]))}, the profiles of "
            f"{', '.join(map(repr, list(predictor.profiles)[:5]))}; give traces of the same application, or train on "
            "these"
        )
    place = np.cumsum(np.r_[0, np.diff(workflow_codes(table)) != 0])
    for name, of_type in sequences.items():
        for steps in of_type.workflows:
            index = int(place[steps.rows.start])
            type_of[index] = name
            _count(counts, index, predictor.profiles.get(name), steps)
    described = {name: describe_profile(predictor, name) for name in predictor.profiles}
    prompts = recorded_prompts(
        table, {name: of_type for name, of_type in sequences.items() if name in predictor.templates}
    )
    templates = {name: predictor.templates[name].evaluate(recorded) for name, recorded in prompts.items()}
    return ProfileEvaluation(counts, tuple(type_of), len(table), baselines or {}, described, templates, seed)


def _template_figures(template: TemplateFigures | None) -> dict[str, Any]:
    if template is None:
        return {"prompts": 0}
    return {
        "prompts": template.prompts,
        "predicted": template.predicted,
        "precision": template.precision,
        "recall": template.recall,
        "recall_beyond_cache": template.recall_new,
    }


def _count(counts: ProfileCounts, workflow: int, profile: TypeProfile | None, steps: WorkflowSteps) -> None:
    known_steps = len(steps.agents) - (not steps.complete)
    counts.whole[workflow], counts.positions[workflow] = steps.complete, known_steps
    counts.calls[workflow], counts.sizes[workflow] = known_steps + 1, 0
    if profile is None:
        return
    kept = list(profile.automaton.calls(profile.alphabet.items(steps), steps.complete))
    counts.kept[workflow], counts.calls[workflow] = sum(kept), len(kept)
    counts.covered[workflow] = steps.complete and profile.covers(steps)
    place = ProfilePlace()
    for index, agent in enumerate(steps.agents[:known_steps]):
        place = profile.automaton.step(place, agent, index, steps.parents[index], profile.alphabet)
        outcomes = profile.automaton.outcomes(place)
        actual = steps.agents[index + 1] if index + 1 < len(steps.agents) else None
        chosen = sorted(outcomes, key=lambda outcome: (-outcomes[outcome], outcome or ""))
        size = int(np.searchsorted(np.cumsum([outcomes[outcome] for outcome in chosen]), SET_MASS - 1e-9)) + 1
        counts.correct[workflow] += bool(chosen) and chosen[0] == actual
        counts.two[workflow] += actual in chosen[:2]
        counts.found[workflow] += actual in chosen[:size]
        counts.sizes[workflow] += min(size, len(chosen))


def fit_profile_baseline(name: str, train: pa.Table, test: pa.Table) -> ProfileCounts:
    """Counts of one of PROFILE_BASELINES, fitted on one trace, on another."""
    workflow = np.cumsum(np.r_[0, np.diff(workflow_codes(test)) != 0])
    counts = ProfileCounts.zeros(int(workflow[-1]) + 1)
    if name == VARIANTS:
        trained = {
            (kind, tuple(steps.agents)) for kind, many in sequences_of(train).items() for steps in many.workflows
        }
        for kind, many in sequences_of(test).items():
            for steps in many.workflows:
                index = workflow[steps.rows.start]
                counts.whole[index] = steps.complete
                counts.covered[index] = steps.complete and (kind, tuple(steps.agents)) in trained
        return counts
    types, agents = (tuple(sorted(set(train[column].to_pylist()))) for column in ("workflow_type", "agent"))
    vocabulary = Vocabulary(types, agents)
    learning, held = (prefixes_of(table, vocabulary, 1) for table in (train, test))
    forecast = BackoffNgram(3).fit(learning, learning).predict(held, PREFILL)[:, 0]
    return count_sets(forecast, held)


def count_sets(forecast: NDArray[np.float32], held: Prefixes) -> ProfileCounts:
    """Counts of the next steps of probabilities [n, V+1] of n steps, without coverage."""
    counts = ProfileCounts.zeros(held.workflows)
    actual = held.outcomes[:, 0]
    order = np.argsort(-forecast, axis=1, kind="stable")
    mass = np.cumsum(np.take_along_axis(forecast, order, axis=1), axis=1)
    size = (mass < SET_MASS - 1e-9).sum(axis=1) + 1
    rank = (order == actual[:, None]).argmax(axis=1)
    known_ = actual >= 0
    right = known_ & (actual < forecast.shape[1])
    for name_, value in {
        "positions": known_,
        "correct": right & (rank == 0),
        "two": right & (rank < 2),
        "found": right & (rank < size),
        "sizes": np.where(known_, size, 0),
    }.items():
        np.add.at(getattr(counts, name_), held.workflow, value.astype(np.int64))
    return counts


def describe_profile(predictor: ProfilePredictor, name: str) -> dict[str, Any]:
    """What the report shows of a workflow type, as JSON values."""
    profile = predictor.profiles[name]
    automaton = profile.automaton
    states = [
        {
            "agent": " ‖ ".join(state.symbol) if isinstance(state.symbol, tuple) else state.symbol,
            "visits": state.visits,
            "distance": state.distance,
            "left": None if state.left is None else {"mean": state.left.mean, "quantiles": list(state.left.quantiles)},
            "next": [
                [to if to != END else None, times, times / state.known, *wilson(times, state.known), to in state.kept]
                for to, times in sorted(state.counts.items(), key=lambda edge: -edge[1])
            ],
        }
        for state in automaton.states
    ]
    return {
        "expression": profile.text,
        "level": profile.level,
        "trained_on": profile.workflows,
        "covered_in_training": profile.covered,
        "dominant_path": [list(profile.path[0]), profile.path[1]],
        "pruned": automaton.pruned,
        "unseen": profile.unseen,
        "confident": profile.confident,
        "doubts": list(profile.doubts),
        "warnings": list(profile.warnings),
        "agents": {
            agent: {"steps_a_workflow": share.mean, "share_of_workflows": share.workflows / profile.usage.workflows}
            | {name: vars(percentiles) for name, percentiles in profile.numbers.get(agent, {}).items()}
            for agent, share in profile.usage.agents.items()
        },
        "states": states,
        "templates": _described_templates(predictor, name),
    }


def _described_templates(predictor: ProfilePredictor, name: str) -> dict[str, Any]:
    learnt = predictor.templates.get(name)
    if learnt is None:
        why = "no prompt (input_text) in the training traces" if predictor.config.templates else "templates = false"
        return {"statement": f"no templates: {why}", "of_agents": []}
    templates = sorted(learnt.templates.values(), key=lambda template: (template.context.agent, -template.prompts))
    return {
        "statement": learnt.statement,
        "of_agents": [
            {
                **asdict(template.context),
                "template": str(template),
                "exact_segments": template.usable,
                "trained_on": template.prompts,
                "segments": [
                    {
                        "segment": str(segment),
                        "support": segment.support,
                        "precision": segment.precision,
                        "held_out_tasks": segment.held_out_tasks,
                        **({} if segment.text is None else {"text": segment.text}),
                    }
                    for segment in template.segments
                ],
            }
            for template in templates
        ],
    }
