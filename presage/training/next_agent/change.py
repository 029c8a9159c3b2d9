"""What is left of a forecast when the application changes? One training, judged on changed copies of the test set.

Each change is what a release does: agents get other names, or other words in their system prompts too, one agent
becomes two, a workflow type gets another name, two get one. All other texts, sizes and the order stay. An outcome
counts as right by its role: a forecast of `coder` is right if the agent that used to be `coder` came, whatever it is
called now; so a change measures what the predictor still knows of what it reads, and not whether it can spell new
names.

A further training leaves out all workflows with one agent, which the test set has: an agent never seen. It is judged on
the test workflows with that agent, beside the whole training on the same ones; the new agent itself cannot be forecast.

Remaining lengths and return times are judged on the same changed copies; their labels have no names.

Of a reworded system prompt a fifth of the sentences is left out, but never all; a fifth of the different words is
replaced, wherever it stands, by other words of the prompts at hand; lines come in another order. Synonyms would be
kinder: they are words that no other agent's prompt has. What is left out or replaced follows from the salt and the text
itself, so that two prompts of one template, with other users and tasks in them, stay two prompts of one template.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pkgutil import resolve_name
from typing import Any, Final
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.describe import describe
from presage.datasets.schema import digest, workflow_codes
from presage.errors import TraceError
from presage.features.agent_names import recognised
from presage.features.moment import MOMENTS, Moment
from presage.features.prefixes import Prefixes, prefixes_of
from presage.predictor_kinds import KINDS
from presage.training.baselines import find
from presage.training.metrics import differences, json_values
from presage.training.next_agent.evaluate import ByMoment, Evaluation, Predict, evaluate
from presage.training.next_agent.study import OURS, Recipe
from presage.training.next_agent.train import FittedPredictor, fit_predictor
from presage.training.quantile_trainings import Family
from presage.training.quantiles import FLOOR, difference
from presage.training.sets import check_known_agents, set_apart
from presage.training.training import Progress, fit_baselines
from presage.wording import counted

_SHARE: Final = 0.2
_RANGE: Final = 2**32


def rewording(prompts: Iterable[str], salt: int) -> Callable[[str], str]:
    """A function that rewords a prompt, by the words of all the prompts at hand."""
    words = sorted({word for prompt in prompts for word in prompt.split() if word.isalpha()})

    def drawn(text: str) -> float:
        return crc32(text.encode("utf-8", "surrogatepass"), salt) / _RANGE

    def replaced(word: str) -> str:
        return words[int(drawn(word + " ") * len(words))] if word.isalpha() and drawn(word) < _SHARE else word

    def reword(prompt: str) -> str:
        lines = []
        for line in prompt.split("\n"):
            sentences = line.split(". ")
            kept = [sentence for sentence in sentences if drawn(sentence) >= _SHARE] or [max(sentences, key=drawn)]
            lines.append(". ".join(" ".join(map(replaced, sentence.split(" "))) for sentence in kept))
        return "\n".join(sorted(lines, key=drawn))

    return reword


BASELINES: Final = ("markov-3", "boosted-trees")
RENAMED: Final = 0.3
"""Share of the agents that get another name."""
UNCHANGED: Final = "unchanged"
NEVER_SEEN: Final = "never seen"
KNOWN: Final = "known"
_RECOGNISED: Final = ", recognised by their system prompts"
_MARK: Final = " (new)"
_LISTED: Final = 10
_ADDED: Final = (0.05, 0.7)
"""Share of the workflows that an agent must be in to be left out of a training."""

Change = Callable[[pa.Table, np.random.Generator], tuple[pa.Table, str] | None]
"""A changed trace and the names that changed; None for a trace that cannot change so."""


def _renamed(table: pa.Table, rng: np.random.Generator) -> tuple[pa.Table, str]:
    """A share of the agents, drawn at random, at least one."""
    agents = sorted(pc.unique(table["agent"]).to_pylist())
    chosen = sorted(rng.choice(agents, max(1, round(RENAMED * len(agents))), replace=False).tolist())
    names = {name: name + _MARK for name in chosen}
    return _with(table, "agent", [names.get(name, name) for name in table["agent"].to_pylist()]), _listed(chosen)


def _reworded(table: pa.Table, rng: np.random.Generator) -> tuple[pa.Table, str] | None:
    """As `_renamed`; the same agents' system prompts are reworded too."""
    if "system_prompt" not in table.column_names or table["system_prompt"].null_count == len(table):
        return None
    changed, what = _renamed(table, rng)
    prompts = table["system_prompt"].to_pylist()
    reword = cache(rewording(filter(None, prompts), int(rng.integers(2**32))))
    renamed = pc.not_equal(changed["agent"], table["agent"]).to_pylist()
    texts = [reword(text) if is_renamed and text else text for text, is_renamed in zip(prompts, renamed, strict=True)]
    return _with(changed, "system_prompt", texts), what


def _split(table: pa.Table, rng: np.random.Generator) -> tuple[pa.Table, str]:
    """The agent with most steps; one or the other name in each step, at random."""
    agents = table["agent"].to_pylist()
    name = min(Counter(agents).items(), key=lambda agent_steps: (-agent_steps[1], agent_steps[0]))[0]
    side = rng.random(len(agents)) < 0.5
    names = [
        f"{agent} {'a' if left else 'b'}" if agent == name else agent for agent, left in zip(agents, side, strict=True)
    ]
    return _with(table, "agent", names), name


def _retyped(table: pa.Table, rng: np.random.Generator) -> tuple[pa.Table, str]:
    """All workflow types."""
    types = table["workflow_type"].to_pylist()
    return _with(table, "workflow_type", [name + _MARK for name in types]), _listed(sorted(set(types)))


def _merged(table: pa.Table, rng: np.random.Generator) -> tuple[pa.Table, str] | None:
    """The two workflow types with most steps get one common name, and their workflows ids that differ."""
    types = table["workflow_type"].to_pylist()
    both = [
        name for name, _ in sorted(Counter(types).items(), key=lambda type_steps: (-type_steps[1], type_steps[0]))[:2]
    ]
    if len(both) < 2:
        return None
    ids = table["workflow_id"].to_pylist()
    ids = [
        f"{name}/{workflow_id}" if name in both else workflow_id for name, workflow_id in zip(types, ids, strict=True)
    ]
    named = _with(table, "workflow_type", [" and ".join(both) if name in both else name for name in types])
    return _with(named, "workflow_id", ids), _listed(both)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _with(table: pa.Table, column: str, values: Sequence[str | None]) -> pa.Table:
    position = table.schema.get_field_index(column)
    return table.set_column(position, table.schema.field(position), pa.array(values, table.schema.field(position).type))


CHANGES: Final[Mapping[str, Change]] = {
    "agents renamed": _renamed,
    "an agent split in two": _split,
    "workflow types renamed": _retyped,
    "agents renamed, their system prompts reworded": _reworded,
    "two workflow types merged": _merged,
}


def study_change(
    table: pa.Table, test: pa.Table | None, recipe: Recipe, *, baselines: Sequence[str] = BASELINES, share: Progress
) -> dict[str, Any]:
    """Accuracy under every change, as `metrics.json`; without `test`, a part of the traces is set apart.

    Returns:
        JSON values. `changes` {name: {"what": which names, "known_steps": share of the steps whose agent the vocabulary
        has, "workflows", "models": {name: {moment: {"accuracy", "ci95", "ece"}}}, "differences": {name: {moment:
        {"difference", "ci95"}}}, the model minus the same model unchanged, paired}}, each figure K values; the first
        change is UNCHANGED. Changed agents that the model recognises by their system prompts, as wherever it is served,
        are judged once more, recognised. `never_seen`: the same for NEVER_SEEN and KNOWN, whose `differences` are to
        KNOWN; None where no agent can be left out. `quantiles` {kind of model: {change: {"models": {name: figures},
        "difference": to the same model unchanged}}}, as `train-predictor` prints figures; None for a kind that the
        traces cannot train. Renamed agents with known system prompts are recognised there.

    Raises:
        TraceError: the training set is too small, or the test set has none of its agents.
    """
    parts = set_apart(table, test, recipe.seed)
    fitted = _fit(parts.train, recipe, share)
    check_known_agents(parts.test, fitted.predictor.vocabulary)
    predicts = _baselines(fitted, baselines, recipe, share)
    share("judging", 0.6)
    held = _held(fitted, parts.test)
    judged: dict[str, tuple[Evaluation, str, Prefixes]] = {
        UNCHANGED: (_judge(fitted, held, predicts, recipe), "", held)
    }
    tables = {UNCHANGED: parts.test}
    for place, (name, change) in enumerate(CHANGES.items()):
        made = change(parts.test, np.random.default_rng([recipe.seed, place]))
        if made is None:
            continue
        changed, what = made
        tables[name] = changed
        read = recognised(changed, fitted.predictor.agent_names, fitted.predictor.vocabulary)
        again = [] if read is changed else [(name + _RECOGNISED, read, "")]
        for called, traces, names in [(name, changed, what), *again]:
            seen = replace(_held(fitted, traces), outcomes=held.named_outcomes)  # by role
            judged[called] = _judge(fitted, seen, predicts, recipe, held), names, seen
    return {
        "kind": "study",
        "study": "change",
        "model": OURS,
        "version": None,
        "workflows": held.workflows,
        "steps": held.steps,
        "data": {
            "training": f"{counted(fitted.learning.workflows, 'workflow')}, {counted(fitted.learning.steps, 'step')}",
            "split": parts.rule,
            "states": recipe.states,
            "seed": recipe.seed,
            "digest of the training traces": f"sha256:{digest(parts.train)}",
            "digest of the test traces": f"sha256:{digest(parts.test)}",
        },
        "traces": describe(parts.train),
        "config": asdict(recipe.config),
        "changes": _figures(judged, UNCHANGED, recipe.seed),
        "quantiles": {
            kind.name: _quantiles(resolve_name(kind.family), parts.train, tables, recipe.seed, share)
            for kind in KINDS.values()
            if kind.family is not None
        },
        "never_seen": _never_seen(parts.train, parts.test, fitted, predicts, baselines, recipe, share),
    }


def _quantiles(
    family: Family[Any, Any], train: pa.Table, tables: Mapping[str, pa.Table], seed: int, share: Progress
) -> dict[str, Any] | None:
    try:
        fitted = family.fit(train, None, seed=seed, progress=lambda stage, _: share(stage, None))
        predictor, evaluations = fitted.predictor, {}
        constant = {FLOOR: family.baseline(predictor, FLOOR, fitted.learning)}
        for name, table in tables.items():
            filled = fitted.counts.fill(recognised(table, predictor.agent_names, predictor.vocabulary))
            rows = predictor.rows(filled.table)
            evaluations[name] = family.judge(predictor, rows, filled, baselines=constant, seed=seed, profiles=None)
    except TraceError:  # no lengths, or no times
        return None
    before = evaluations[UNCHANGED].figures
    return {
        name: {
            "models": {
                model: figures.to_dict()
                for model, figures in {OURS: evaluation.figures, **evaluation.baselines}.items()
            },
            "difference": difference(evaluation.figures, before, seed).to_dict(predictor.quantiles),
        }
        for name, evaluation in evaluations.items()
    }


def _fit(table: pa.Table, recipe: Recipe, share: Progress) -> FittedPredictor:
    return fit_predictor(
        table,
        recipe.config,
        horizon=recipe.horizon,
        seed=recipe.seed,
        states=recipe.states,
        text_encoder=recipe.text_encoder,
        progress=lambda stage, _: share(stage, None),
    )


def _baselines(fitted: FittedPredictor, names: Sequence[str], recipe: Recipe, share: Progress) -> Mapping[str, Predict]:
    def predict(name: str) -> Predict:
        return find(name).fit(recipe.seed, fitted.learning, fitted.inner, fitted.validation).predict

    return fit_baselines(names, predict, share)


def _held(fitted: FittedPredictor, table: pa.Table) -> Prefixes:
    predictor = fitted.predictor
    held = prefixes_of(table, predictor.vocabulary, predictor.horizon)
    return held.with_states(predictor.source.states(table))


def _judge(
    fitted: FittedPredictor,
    seen: Prefixes,
    predicts: Mapping[str, Predict],
    recipe: Recipe,
    unchanged: Prefixes | None = None,
) -> Evaluation:
    rng, predict = np.random.default_rng(recipe.seed), fitted.predictor.predict
    if unchanged is None:
        return evaluate(predict, seen, rng, baselines=predicts)
    rivals = {name: by_role(baseline, unchanged, seen) for name, baseline in predicts.items()}
    return evaluate(by_role(predict, unchanged, seen), seen, rng, baselines=rivals)


def by_role(predict: Predict, unchanged: Prefixes, seen: Prefixes) -> Predict:
    """Forecasts of changed prefixes: what is forecast of an agent that a workflow has called under a new name counts as
    forecast of the agent that it was."""
    if not len(seen.vocabulary.new_agents):
        return predict
    vocabulary, workflow = seen.vocabulary, seen.workflow
    new, agents = vocabulary.new_agents, np.arange(vocabulary.outcomes)
    was = np.tile(agents, (seen.workflows, 1))
    rows = np.isin(seen.agent, new) & (unchanged.agent < vocabulary.unknown)
    was[workflow[rows], seen.agent[rows]] = unchanged.agent[rows]
    column, called = np.tile(agents, (seen.steps, 1)), seen.new_agents
    for number, agent in enumerate(new):
        column[:, agent] = np.where(called > number, was[workflow, agent], agent)

    def judged(prefixes: Prefixes, moment: Moment) -> NDArray[np.float32]:
        forecast = predict(prefixes, moment)
        summed = np.zeros_like(forecast)
        np.add.at(summed.swapaxes(1, 2), (np.arange(len(column))[:, None], column), forecast.swapaxes(1, 2))
        return summed

    return judged


def _figures(evaluations: Mapping[str, tuple[Evaluation, str, Prefixes]], base: str, seed: int) -> dict[str, Any]:
    def models(judged: Evaluation) -> dict[str, ByMoment]:
        return {OURS: judged.moments, **judged.baselines}

    told = {}
    for name, (evaluation, what, seen) in evaluations.items():
        against = models(evaluations[base][0])
        told[name] = {
            "what": what,
            "known_steps": float(
                1 - np.isin(seen.agent, [*seen.vocabulary.new_agents, seen.vocabulary.unknown]).mean()
            ),
            "workflows": seen.workflows,
            "models": {
                model: {
                    moment: {key: getattr(figures[moment], key) for key in ("accuracy", "ci95", "ece")}
                    for moment in MOMENTS
                }
                for model, figures in models(evaluation).items()
            },
            "differences": {
                model: differences({str(moment): (figures[moment], against[model][moment]) for moment in MOMENTS}, seed)
                for model, figures in models(evaluation).items()
            },
        }
    return json_values(told)


def _never_seen(
    train: pa.Table,
    test: pa.Table,
    whole: FittedPredictor,
    whole_predicts: Mapping[str, Predict],
    baselines: Sequence[str],
    recipe: Recipe,
    share: Progress,
) -> dict[str, Any] | None:
    """The agent whose steps are the most among those that enough workflows do without."""
    workflows = int(workflow_codes(train).max()) + 1
    seen = Counter(
        name for _, name in set(zip(workflow_codes(train).tolist(), train["agent"].to_pylist(), strict=True))
    )
    held = set(test["agent"].to_pylist())
    steps = Counter(train["agent"].to_pylist())
    low, high = (part * workflows for part in _ADDED)
    able = [name for name, count in seen.items() if low <= count <= high and name in held]
    for agent in sorted(able, key=lambda name: (-steps[name], name)):
        share(f"training without {agent}", 0.7)
        without, with_it = _workflows_with(train, agent, wanted=False), _workflows_with(test, agent, wanted=True)
        try:
            fitted = _fit(without, recipe, share)
            check_known_agents(with_it, fitted.predictor.vocabulary)
        except TraceError:  # too little is left
            continue
        judged: dict[str, tuple[Evaluation, str, Prefixes]] = {}
        pairs = ((KNOWN, whole, whole_predicts), (NEVER_SEEN, fitted, _baselines(fitted, baselines, recipe, share)))
        for name, fitted_on, predicts in pairs:
            seen_ = _held(fitted_on, with_it)
            judged[name] = _judge(fitted_on, seen_, predicts, recipe), agent, seen_
        return _figures(judged, KNOWN, recipe.seed)
    return None


def _workflows_with(table: pa.Table, agent: str, *, wanted: bool) -> pa.Table:
    codes = workflow_codes(table)
    has = np.zeros(int(codes.max()) + 1, bool)
    has[codes[np.array(table["agent"].to_pylist()) == agent]] = True
    return table.filter(pa.array(has[codes] == wanted))
