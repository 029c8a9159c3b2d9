"""Which workflows a replay runs, and what its forecasts were learnt from: never the same tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from presage.cli import options
from presage.cli.output import Output, Report

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.serving_hooks.replay.policies import Policy
    from presage.serving_hooks.replay.taught import Taught
    from presage.serving_hooks.replay.workload import Convention

_TAUGHT: Final = 0.5
"""Share of the traces that is replayed where the rest has to teach."""


class Parts(NamedTuple):
    """What is replayed and who foretells.

    Attributes:
        table: workflows to be replayed.
        forecasts: as `source` takes it.
        lengths: folder of a remaining-length model; None for none.
        taught: what a training part teaches; None where nobody wants to know.
        rule: how the replayed ones were chosen; None where all are replayed.
    """

    table: pa.Table
    forecasts: str
    lengths: str | None
    taught: Taught | None
    rule: str | None


def divide(
    table: pa.Table,
    policies: Sequence[Policy],
    forecasts: str,
    lengths: str | None,
    train_traces: list[Path] | None,
    convention: Convention,
    skip_bad: bool,
    tracking_uri: str | None,
    out: Output,
    report: Report,
) -> Parts:
    """Leaves out what models and baselines have learnt from, or will.

    Args:
        table: the traces.
        policies: that are compared; what none of them asks for is not made.
        forecasts, lengths: references as the user gave them.
        train_traces: that teach in place of a part of the traces.
        convention: prompts are assembled by.
        skip_bad: leave out broken workflows of `train_traces`.
        tracking_uri: of the registry.
        out: told what was left out.
        report: told what is being done.
    """
    from presage.serving_hooks.replay.forecasts import MARKOV, check_lengths, known

    check_lengths(forecasts, lengths)
    wanted = {who for policy in policies for who in policy.foretellers}
    rules = []
    folders: list[str | None] = [forecasts, None]
    if "asked" in wanted and (lengths is not None or not known(forecasts)):
        table, folders, left_out = _models(table, forecasts, lengths, tracking_uri, report)
        if left_out:
            rules.append(f"{left_out} workflows left out: a model was trained on them")
    taught = None
    if "transitions" in wanted or ("asked" in wanted and forecasts == MARKOV):
        table, taught, rule = _teach(table, train_traces, convention, skip_bad, out, report)
        rules.append(rule)
    for rule in rules:
        out.note(rule)
    return Parts(table, folders[0] or forecasts, folders[1], taught, "; ".join(rules) or None)


def _models(
    table: pa.Table, forecasts: str, lengths: str | None, tracking_uri: str | None, report: Report
) -> tuple[pa.Table, list[str | None], int]:
    from presage.predictors.next_agent import NextAgentPredictor
    from presage.predictors.remaining_length import RemainingLengthPredictor
    from presage.registry.resolve import resolve
    from presage.serving_hooks.replay.forecasts import known
    from presage.training.sets import LearntFrom, held_out

    report("loading the models", None)

    def found(name: str) -> Path:
        return resolve(name, lambda: options.open_registry(tracking_uri)).folder

    folders: list[str | None] = [None, None]
    models: list[LearntFrom] = []
    if not known(forecasts):
        folder = found(forecasts)
        folders[0] = str(folder)
        models.append(NextAgentPredictor.load(folder))
    if lengths is not None:
        folder = found(lengths)
        folders[1] = str(folder)
        models.append(RemainingLengthPredictor.load(folder))
    table, left_out = held_out(table, *models)
    return table, folders, left_out


def _teach(
    table: pa.Table,
    train_traces: list[Path] | None,
    convention: Convention,
    skip_bad: bool,
    out: Output,
    report: Report,
) -> tuple[pa.Table, Taught, str]:
    import numpy as np
    import pyarrow as pa

    from presage.datasets.split import split
    from presage.datasets.tasks import task_keys
    from presage.errors import TraceError
    from presage.serving_hooks.replay.taught import teach
    from presage.serving_hooks.replay.workload import workload

    if train_traces:
        training = options.read(train_traces, skip_bad, out, report)
        own = np.isin(task_keys(table), task_keys(training), invert=True)
        if not own.any():
            raise TraceError("all workflows are of tasks that --train-traces hold too: give others to be replayed")
        replayed = table.filter(pa.array(own))
    else:
        parts = split(table, _TAUGHT, 0)
        training, replayed = parts.train, parts.test
    learnt = workload(training, convention, 0.0).jobs
    how = "--train-traces taught" if train_traces else f"{len(learnt)} workflows of other tasks taught"
    rule = f"{_workflows(replayed)} of {_workflows(table)} workflows are replayed; {how} transitions and the trigram"
    return replayed, teach(training, learnt), rule


def _workflows(table: pa.Table) -> int:
    import pyarrow.compute as pc

    return int(pc.sum(pc.equal(table["step"], 0)).as_py())
