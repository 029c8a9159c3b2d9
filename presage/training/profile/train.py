"""Make the profiles of an application, and evaluate them beside baselines on tasks that were set apart."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa

from presage.datasets.describe import describe
from presage.datasets.schema import workflow_count
from presage.datasets.schema.names import NameMapping
from presage.datasets.split import Split
from presage.datasets.tasks import task_keys
from presage.features.sequences import TypeSequences, sequences_of
from presage.features.served_steps import served_steps
from presage.predictors.profile.automaton import ProfilePlace
from presage.predictors.profile.predictor import ProfilePredictor
from presage.predictors.profile.profile import ProfileConfig
from presage.predictors.profile.prompts import recorded_prompts
from presage.training.baselines import check_names
from presage.training.profile.evaluate import PROFILE_BASELINES, ProfileEvaluation, evaluate, fit_profile_baseline
from presage.training.sets import SHARED_TASKS, described, set_apart, shared_tasks, workflow_names
from presage.training.training import Judged, Progress, Training, fit_baselines, median_us, named_digests, versions
from presage.wording import counted

ProfileTraining = Training[ProfilePredictor, ProfileEvaluation]

_ROUNDS = 200


@dataclass(frozen=True)
class FittedProfiles:
    """Fitted profiles, and the seconds that the fit took."""

    predictor: ProfilePredictor
    seconds: float


def train_profiles(
    table: pa.Table,
    test: pa.Table | None = None,
    config: ProfileConfig | None = None,
    *,
    seed: int = 0,
    baselines: Sequence[str] = PROFILE_BASELINES,
    name: str | None = None,
    progress: Progress | None = None,
) -> ProfileTraining:
    """Make profiles and evaluate them on held-out workflows.

    Args:
        table: a valid trace.
        test: a valid test trace; None splits off a fifth of the tasks of `table`, the latest if times are recorded.
        seed: of the split and the bootstrap.
        baselines: of `PROFILE_BASELINES`.

    Raises:
        ConfigurationError: an unknown baseline.
        TraceError: too few traces to split.
    """
    check_names(baselines, PROFILE_BASELINES)
    parts = set_apart(table, test, seed)
    fitted = fit_profiles(parts.train, config, seed=seed, progress=progress)
    return assess_profiles(fitted, parts, baselines=baselines, name=name, progress=progress)


def fit_profiles(
    table: pa.Table, config: ProfileConfig | None = None, *, seed: int = 0, progress: Progress | None = None
) -> FittedProfiles:
    """Make profiles of all of a valid trace."""
    begun, table = time.perf_counter(), served_steps(table)
    sequences = sequences_of(table)
    predictor = ProfilePredictor(config, seed)
    prompts = recorded_prompts(table, sequences)
    names = NameMapping.of(table)
    predictor.fit(sequences, prompts=prompts, names=names, trained_on=task_keys(table), progress=progress)
    return FittedProfiles(predictor, time.perf_counter() - begun)


def assess_profiles(
    fitted: FittedProfiles,
    parts: Split,
    *,
    baselines: Sequence[str] = PROFILE_BASELINES,
    name: str | None = None,
    progress: Progress | None = None,
) -> ProfileTraining:
    """Evaluate profiles that were made of the training part on the test set, beside baselines of the same part."""
    check_names(baselines, PROFILE_BASELINES)
    predictor, seed, report = fitted.predictor, fitted.predictor.seed, progress or (lambda _, __: None)
    rivals = fit_baselines(baselines, lambda baseline: fit_profile_baseline(baseline, parts.train, parts.test), report)
    report("judging on the test set", None)
    evaluation = evaluate(predictor, parts.test, seed, rivals)
    workflows = workflow_count(parts.train)
    digests, training_data = described(parts, workflows, len(parts.train))
    metrics = {
        **evaluation.to_dict(),
        "model": name,
        "data": {
            "training": f"{counted(workflows, 'workflow')}, {counted(len(parts.train), 'step')}",
            "split": parts.rule,
            SHARED_TASKS: shared_tasks(parts),
            "seed": seed,
            **named_digests(digests),
        },
        "traces": describe(parts.train),
        "config": asdict(predictor.config),
        "versions": versions(),
        "fit_seconds": round(fitted.seconds, 2),
        "latency_us": _latency_us(predictor, sequences_of(parts.test)),
        "size_bytes": None,
    }
    return ProfileTraining(predictor, metrics, training_data, evaluation, digests)


def evaluate_profiles(predictor: ProfilePredictor, table: pa.Table, seed: int) -> Judged[ProfileEvaluation]:
    """Evaluate profiles on a valid trace that they were not made of; raises TraceError for unknown types alone."""
    table = served_steps(table)
    evaluation = evaluate(predictor, table, seed)
    return Judged(evaluation, _latency_us(predictor, sequences_of(table)), workflow_names(table))


def _latency_us(predictor: ProfilePredictor, sequences: Mapping[str, TypeSequences]) -> float:
    """Median of one further step of a running workflow and its forecast, microseconds."""
    name = next(name for name in sequences if name in predictor.profiles)
    profile, workflows = predictor.profiles[name], sequences[name].workflows
    rng = np.random.default_rng(predictor.seed)
    places = []
    for number in rng.integers(len(workflows), size=_ROUNDS):
        steps, place = workflows[number], ProfilePlace()
        last = int(rng.integers(len(steps.agents)))
        for index in range(last):
            place = profile.automaton.step(place, steps.agents[index], index, steps.parents[index], profile.alphabet)
        places.append((place, steps.agents[last], last, steps.parents[last]))

    def forecast(number: int) -> object:
        return predictor.forecast_at(name, profile.automaton.step(*places[number], profile.alphabet))

    return median_us(forecast, _ROUNDS)
