"""A fit of all parts on one set of prefixes: projections, then trees, network and n-gram."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from presage.features.history import history_size
from presage.features.inputs import SIZE_COUNT, known
from presage.features.moment import COMPLETION, MOMENTS, PREFILL, Moment
from presage.features.prefixes import Prefixes, transition_matrix
from presage.features.projection import Projection, fit_projection
from presage.predictors.common.probabilities import outcome_shift
from presage.predictors.next_agent.boosting import TreeEnsemble, fit_trees, tree_limits
from presage.predictors.next_agent.ngram import BackoffNgram
from presage.predictors.next_agent.parts import (
    COMPONENTS,
    PATTERNS,
    STAGES,
    TREES,
    NextAgentConfig,
    NextAgentParts,
    project_all,
    unrolled,
    widths_of,
)

if TYPE_CHECKING:
    from presage.predictors.next_agent.continued import Start
    from presage.predictors.next_agent.network import Examples

NGRAM_ORDER: Final = 3
_RENAMED_SHARE: Final = 0.5
"""Share of the training workflows that the network learns from a second time, with unknown names."""
_EVEN_SHARE: Final = np.float32(1 / 3)
_IDS_SHARE: Final = 0.4
_SHARE: Final = 0.15
"""Shares of all trees that read ids alone, and tools or token counts as well; the others read states."""


@dataclass(frozen=True)
class Stopping:
    """Result of early stopping: epochs of the network, trees of each ensemble; and the losses of each epoch of the
    network, nats a label, by name.
    """

    epochs: int
    rounds: Mapping[str, int]
    curves: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Projected:
    """Training examples with projected states.

    Attributes:
        train: training prefixes; their states may be out of fold.
        projections: of states, by moment.
        examples: input vectors of `train`, projected out of fold.
        held_out: input vectors of the validation prefixes; `examples` without any.
        renamed: input vectors of some workflows of `train` with names that are unknown. The network learns from them
            too; trees, which would pay for them with accuracy on known names, do not.
    """

    train: Prefixes
    projections: Mapping[Moment, Projection]
    examples: Examples
    held_out: Examples
    renamed: Examples

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of the projected states at both moments."""
        return widths_of(self.projections)


def project(
    train: Prefixes, validation: Prefixes | None, config: NextAgentConfig, seed: int, start: Start | None = None
) -> Projected:
    """Fit the projections on training prefixes, or take those of `start`, and make the input vectors."""
    if start is not None:
        projections = start.parts.projections

        def examples_of(prefixes: Prefixes) -> Examples:
            twins = start.extension.twins(prefixes)
            both = (_examples(source, project_all(source, projections)) for source in (prefixes, twins))
            return next(both).and_then(next(both))

        examples = examples_of(train)
        held_out = examples if validation is None else examples_of(validation)
        renamed = _renamed(train, project_all(train, projections), seed)
        return Projected(train, projections, examples, held_out, renamed)
    kept = {
        PREFILL: (config.components, config.discriminants),
        COMPLETION: (config.completion_components, config.completion_discriminants),
    }

    def fit(moment: Moment) -> tuple[Projection, NDArray[np.float32]]:
        components, discriminants = kept[moment]
        return fit_projection(train, moment, components=components, discriminants=discriminants, seed=seed)

    # Matrix products release the GIL, so both moments run in parallel, each in one thread.
    with threadpool_limits(limits=1), ThreadPoolExecutor(max_workers=len(MOMENTS)) as pool:
        fitted = dict(zip(train.states, pool.map(fit, train.states), strict=True))
    projections = {moment: projection for moment, (projection, _) in fitted.items()}
    out_of_fold = {moment: projected for moment, (_, projected) in fitted.items()}
    examples = _examples(train, out_of_fold)
    held_out = examples if validation is None else _examples(validation, project_all(validation, projections))
    return Projected(train, projections, examples, held_out, _renamed(train, out_of_fold, seed))


def grow(
    of: Projected,
    config: NextAgentConfig,
    seed: int,
    *,
    rounds: Mapping[str, int] | None = None,
    grown: Mapping[str, TreeEnsemble] | None = None,
    start: Start | None = None,
) -> dict[str, TreeEnsemble]:
    """Grow the ensembles of trees, by the names of `TREES`.

    `rounds` are the trees of each ensemble, None for early stopping on held-out examples; `grown` are ensembles grown
    on the same prefixes, from which to take those that read no state. Those of `start` stay, and half as many may be
    added as usual.
    """
    history, tools = history_size(len(of.train.vocabulary.agents)), len(of.train.vocabulary.tools) + 1
    sizes = history + tools + 1
    ids = np.append(np.arange(history), sizes - 1)
    columns = {
        "answers": np.arange(history, history + tools),
        "tokens": np.arange(sizes, sizes + SIZE_COUNT),
        "states": np.arange(sizes + SIZE_COUNT, of.examples.inputs[0].shape[1]),
    }
    outcomes = of.train.vocabulary.outcomes
    most = tree_limits(of.train.horizon * outcomes, config.boosting)[1]
    old: Mapping[str, TreeEnsemble] = {}
    if start is not None:
        old, most = _with_room(start.parts.trees, most), most // 2

    def fit(
        name: str,
        moment: int,
        rows: tuple[NDArray[np.bool_], NDArray[np.bool_]],
        start: tuple[NDArray[np.float32], NDArray[np.float32]] | None,
        always: NDArray[np.int64],
        drawn: NDArray[np.int64],
        limit: int,
    ) -> TreeEnsemble:
        train, held = (data.inputs[moment][r] for data, r in zip((of.examples, of.held_out), rows, strict=True))
        labels, before = of.examples.outcomes[rows[0]], old.get(name)
        begun = None if start is None else (start[0][rows[0]], start[1][rows[1]])
        if before is not None:
            if begun is None:
                shift = outcome_shift(before.logits(train).reshape(*labels.shape, outcomes), labels)
                before = replace(before, base=before.base + shift.ravel())
            of_old = before.logits(train), before.logits(held)
            begun = of_old if begun is None else (begun[0] + of_old[0], begun[1] + of_old[1])
        more = fit_trees(
            train,
            labels,
            held,
            of.held_out.outcomes[rows[1]],
            outcomes,
            config.boosting,
            seed,
            always=always.tolist(),
            drawn=drawn.tolist(),
            most=limit,
            start=begun,
            rounds=None if rounds is None else rounds[name],
            depth=None if before is None else before.depth,
        )
        return more if before is None else before.and_then(more)

    both = of.examples, of.held_out
    if grown is not None:
        of_ids = grown[TREES[0]]
    else:
        every = tuple(np.ones(len(data.outcomes), bool) for data in both)
        of_ids = fit(TREES[0], 0, (every[0], every[1]), None, ids, ids[:0], round(_IDS_SHARE * most))

    def of_moment(moment: int) -> dict[str, TreeEnsemble]:
        ensembles: dict[str, TreeEnsemble] = {}
        begun = [of_ids.logits(data.inputs[moment]) for data in both]
        patterns = [known(data.inputs[moment], moment, *of.widths) for data in both]
        for stage, bit in STAGES:
            name = f"{stage}.{MOMENTS[moment]}"
            rows = [has[bit // 2] for has in patterns]
            if grown is not None and name in grown:
                ensembles[name] = grown[name]
            elif stage == "states":
                added = {TREES[0]: of_ids, **ensembles}
                limit = most - sum(len(trees) - len(old.get(trees_name, ())) for trees_name, trees in added.items())
                ensembles[name] = fit(
                    name, moment, (rows[0], rows[1]), (begun[0], begun[1]), ids, columns[stage], limit
                )
            else:
                every, limit = np.concatenate([ids, columns[stage]]), round(_SHARE * most)
                ensembles[name] = fit(name, moment, (rows[0], rows[1]), (begun[0], begun[1]), every, ids[:0], limit)
            for logits, data, read in zip(begun, both, rows, strict=True):
                logits[read] += ensembles[name].logits(data.inputs[moment][read])
        return ensembles

    with ThreadPoolExecutor(max_workers=len(MOMENTS)) as pool:  # growing releases the GIL
        by_moment = list(pool.map(of_moment, range(len(MOMENTS))))
    return {TREES[0]: of_ids, **by_moment[0], **by_moment[1]}


def tree_logits(
    data: Examples, trees: Mapping[str, TreeEnsemble], widths: tuple[int, int], moment: int
) -> NDArray[np.float32]:
    """`kernels.tree_logits` of all positions at a moment, float32 [n, K (V+1)]."""
    inputs = data.inputs[moment]
    out = trees[TREES[0]].logits(inputs)
    patterns = known(inputs, moment, *widths)
    for stage, bit in STAGES:
        rows = patterns[bit // 2]
        out[rows] += trees[f"{stage}.{MOMENTS[moment]}"].logits(inputs[rows])
    return out


def learn(
    of: Projected,
    config: NextAgentConfig,
    seed: int,
    *,
    trees: Mapping[str, TreeEnsemble] | None = None,
    stopping: Stopping | None = None,
    start: Start | None = None,
    progress: Callable[[float], None],
) -> tuple[NextAgentParts, Stopping]:
    """Fit all parts on training examples; the mixture has equal weights.

    `trees` are ensembles of `grow`, if known; `stopping` is that of an earlier fit, None for early stopping on held-out
    examples; `start` is what to train further; `progress` receives the share of epochs done.
    """
    from presage.predictors.next_agent.network import fit_network  # torch: versions are judged without it

    train = of.train
    epochs, rounds = (stopping.epochs, stopping.rounds) if stopping is not None else (None, None)
    most = epochs if epochs is not None else config.network.epochs
    losses: list[tuple[float, float]] = []

    def after_epoch(done: int, training: float, validation: float) -> None:
        losses.append((training, validation))
        progress(done / most)

    with threadpool_limits(limits=1), ThreadPoolExecutor(max_workers=1) as pool:
        growing = pool.submit(grow, of, config, seed, rounds=rounds, start=start) if trees is None else None
        network, epoch = fit_network(
            of.examples.and_then(of.renamed),
            of.held_out,
            transition_matrix(train),
            len(train.vocabulary.workflow_types),
            sum(of.widths),
            config.network,
            seed,
            start=None if start is None else start.parts.network,
            epochs=epochs,
            progress=after_epoch,
        )
        grown = growing.result() if growing is not None else trees
    assert grown is not None
    ngram, evidence = BackoffNgram(NGRAM_ORDER).fit(train, train), _counts(train)
    shares = np.full((PATTERNS, len(MOMENTS), len(COMPONENTS), train.horizon), _EVEN_SHARE)
    rounds_of = {name: len(ensemble) for name, ensemble in grown.items()}
    if start is not None:
        old = start.parts
        ngram, evidence, shares = old.ngram.and_then(ngram), evidence + old.evidence, old.shares
        kept = _with_room(old.trees, tree_limits(train.horizon * train.vocabulary.outcomes, config.boosting)[1])
        rounds_of = {name: count - len(kept[name]) for name, count in rounds_of.items()}
    parts = NextAgentParts(of.projections, network, grown, ngram, _evidence(evidence), shares)
    curves = dict(zip(("training_loss", "validation_loss"), zip(*losses, strict=True), strict=True))
    return parts, Stopping(epoch, rounds_of, curves)


def _with_room(trees: Mapping[str, TreeEnsemble], most: int) -> Mapping[str, TreeEnsemble]:
    """The first trees of each ensemble, at most so many at a moment."""
    counts = [
        sum(len(ensemble) for name, ensemble in trees.items() if name == TREES[0] or name.endswith(m)) for m in MOMENTS
    ]
    if max(counts) <= most:
        return trees
    return {name: ensemble.first(len(ensemble) * most // max(counts)) for name, ensemble in trees.items()}


def _examples(prefixes: Prefixes, projected: Mapping[Moment, NDArray[np.float32]]) -> Examples:
    from presage.predictors.next_agent.network import Examples

    return Examples(prefixes.offsets, unrolled(prefixes, projected), prefixes.outcomes)


def _renamed(prefixes: Prefixes, projected: Mapping[Moment, NDArray[np.float32]], seed: int) -> Examples:
    """Examples of some workflows whose names are unknown in part: what a forecast reads after a release that
    renames."""
    rng = np.random.default_rng(seed)
    some = rng.permutation(prefixes.workflows)[: max(1, round(_RENAMED_SHARE * prefixes.workflows))]
    rows = prefixes.rows_of(some)
    return _examples(
        prefixes.take(some).with_unknown_names(rng), {moment: states[rows] for moment, states in projected.items()}
    )


def _counts(prefixes: Prefixes) -> NDArray[np.int32]:
    """Training steps of each agent in each workflow type, int32 [T+1, V+1]."""
    vocabulary = prefixes.vocabulary
    counts = np.zeros((len(vocabulary.workflow_types) + 1, len(vocabulary.agents) + 1), np.int32)
    np.add.at(counts, (prefixes.workflow_type[prefixes.workflow], prefixes.agent), 1)
    return counts


def _evidence(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    """The evidence behind forecasts, int32 [T+1, V+1], from training steps.

    An unknown workflow type has the least of any that calls the agent, since what is unknown has no more evidence than
    what is known.
    """
    counts[-1], counts[:, -1] = 0, 0
    most = np.iinfo(np.int32).max
    least = np.where(counts > 0, counts, most).min(axis=0)
    counts[-1] = np.where(least < most, least, 0)
    return counts
