"""One round of learning: projections, then network, trees and n-gram, on one set of prefixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from presage.features.call_graph import transition_matrix
from presage.features.history import history_size
from presage.features.inputs import SIZE_COUNT
from presage.features.moment import COMPLETION, MOMENTS, PREFILL, Moment
from presage.features.prefixes import Prefixes
from presage.features.projection import Projection, fit_projection
from presage.predictors.boosting import TreeEnsemble, fit_trees
from presage.predictors.network import Examples, fit_network
from presage.predictors.ngram import BackoffNgram
from presage.predictors.parts import NextAgentConfig, Parts
from presage.predictors.projected import project_all, unrolled

NGRAM_ORDER = 3
EVEN_SHARE = np.float32(1 / 3)


@dataclass(frozen=True)
class Stopping:
    """When learning stopped on held-out prefixes: epochs of the network, rounds of the trees at each moment."""

    epochs: int
    rounds: Sequence[int]


def learn(
    train: Prefixes,
    validation: Prefixes | None,
    config: NextAgentConfig,
    seed: int,
    stopping: Stopping | None,
    progress: Callable[[float], None],
) -> tuple[Parts, Stopping]:
    """Learns everything but the mixture, whose shares are left even.

    Args:
        train: prefixes to learn from.
        validation: prefixes that decide when to stop; None together with `stopping`.
        config: what to learn.
        seed: of everything drawn.
        stopping: when to stop, found in an earlier round; None together with `validation`.
        progress: told the share of the epochs that are done.
    """

    def project(moment: Moment) -> tuple[Projection, NDArray[np.float32]]:
        kept = {
            PREFILL: (config.components, config.discriminants),
            COMPLETION: (config.completion_components, config.completion_discriminants),
        }
        components, discriminants = kept[moment]
        return fit_projection(train, moment, components=components, discriminants=discriminants, seed=seed)

    # Matrix products and growing release the interpreter: both moments side by side, and the trees beside the network.
    # Each in one thread: more of them than cores only wait for each other.
    with threadpool_limits(limits=1), ThreadPoolExecutor(max_workers=len(MOMENTS)) as pool:
        fitted = dict(zip(train.states, pool.map(project, train.states), strict=True))
    projections = {moment: projection for moment, (projection, _) in fitted.items()}
    out_of_fold = {moment: projected for moment, (_, projected) in fitted.items()}
    examples = _examples(train, out_of_fold)
    held_out = examples if validation is None else _examples(validation, project_all(validation, projections))

    def grow(index: int) -> TreeEnsemble:
        return fit_trees(
            examples.inputs[index],
            examples.outcomes,
            held_out.inputs[index],
            held_out.outcomes,
            train.vocabulary.outcomes,
            config.boosting,
            seed,
            always=history_size(len(train.vocabulary.agents)) + 1 + SIZE_COUNT,
            rounds=stopping.rounds[index] if stopping is not None else None,
        )

    with threadpool_limits(limits=1), ThreadPoolExecutor(max_workers=len(MOMENTS)) as pool:
        growing = [pool.submit(grow, index) for index in range(len(MOMENTS))]
        network, epoch = fit_network(
            examples,
            held_out,
            transition_matrix(train),
            len(train.vocabulary.workflow_types),
            sum(projection.size for projection in projections.values()),
            config.network,
            seed,
            epochs=stopping.epochs if stopping is not None else None,
            progress=lambda done, _: progress(done / (stopping.epochs if stopping else config.network.epochs)),
        )
        trees = [future.result() for future in growing]
    parts = Parts(
        projections,
        network,
        (trees[0], trees[1]),
        BackoffNgram(NGRAM_ORDER).fit(train, train),
        _evidence(train),
        np.full((len(MOMENTS), 3, train.horizon), EVEN_SHARE),
    )
    return parts, Stopping(epoch, [len(ensemble) for ensemble in trees])


def _examples(prefixes: Prefixes, projected: Mapping[Moment, NDArray[np.float32]]) -> Examples:
    return Examples(prefixes.offsets, unrolled(prefixes, projected), prefixes.outcomes)


def _evidence(prefixes: Prefixes) -> NDArray[np.int32]:
    """Training steps of each agent in each workflow type, int32 [T+1, V+1]; the unknown have none."""
    vocabulary = prefixes.vocabulary
    counts = np.zeros((len(vocabulary.workflow_types) + 1, len(vocabulary.agents) + 1), np.int32)
    np.add.at(counts, (prefixes.workflow_type[prefixes.workflow], prefixes.agent), 1)
    counts[-1], counts[:, -1] = 0, 0
    return counts
