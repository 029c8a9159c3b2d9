"""Whether a version of a router may take an alias: figures in, a verdict out (see `gates.py`).

Against the champion, and against the base rates of the models (which always pick the best single one): does it order
prompts better for each model (macro mean average precision), are its probabilities nearer to what came (Brier score),
and is the model it picks right more often? Each by a paired interval over prompts. And are its probabilities honest?
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from presage.registry.gates import sampling_ece
from presage.registry.verdict import Gate, Verdict, budget_gate, evidence_gate, pickle_gate, schema_gate


@dataclass(frozen=True)
class RouterBudget:
    """The limits of the gates; the defaults are those of `docs/router.md` for a linear router.

    Attributes:
        latency_ms: median of one prompt, milliseconds.
        size_bytes: the artefact's own files.
        ece: expected calibration error, on top of what sampling alone explains.
        prompts: how many prompts must stand behind the figures.
    """

    latency_ms: float = 20.0
    size_bytes: int = 100_000_000
    ece: float = 0.05
    prompts: int = 100


@dataclass(frozen=True)
class RouterSchema:
    """What a version promises to those that use it.

    Attributes:
        version: of the artefact's format.
        models: those it knows.
    """

    version: int
    models: frozenset[str]


@dataclass(frozen=True)
class Compared:
    """One figure of a candidate beside a rival's, NaN where nothing was judged.

    Attributes:
        mine, its: the candidate's and the rival's.
        ci95: of candidate − rival, over prompts, paired.
    """

    mine: float
    its: float
    ci95: tuple[float, float]


@dataclass(frozen=True)
class RouterComparison:
    """A candidate beside a rival on the same prompts and the models that both know.

    Attributes:
        rival: in words, such as "the champion".
        macro_map: mean over models of the average precision.
        picked_accuracy: how right the picked models were.
        brier: mean squared error of the probabilities.
    """

    rival: str
    macro_map: Compared
    picked_accuracy: Compared
    brier: Compared


@dataclass(frozen=True)
class RouterEvidence:
    """What was measured of one version on some held-out outcomes.

    Attributes:
        labels: how many labels stand behind the figures.
        prompts: how many prompts have one.
        ece: expected calibration error, 0..1.
        latency_ms: median of one prompt, milliseconds.
        size_bytes: the artefact's own files.
        schema: what the version promises.
        floor: beside the base rates of the models.
        pickles: names of files that are or may hide a pickle.
    """

    labels: int
    prompts: int
    ece: float
    latency_ms: float
    size_bytes: int
    schema: RouterSchema
    floor: RouterComparison
    pickles: tuple[str, ...] = ()


def judge_router(
    candidate: RouterEvidence,
    champion: tuple[RouterSchema, RouterComparison] | None,
    budget: RouterBudget,
    *,
    name: str,
    version: int,
) -> Verdict:
    """Judge a candidate against the present champion and against the base rates.

    Args:
        candidate: figures of the version that asks for promotion.
        champion: what the present holder of the alias promises, and the candidate beside it; None for the first.
        budget: the limits.
        name: registered model.
        version: the candidate's version.
    """
    gates = [
        evidence_gate(candidate.prompts, budget.prompts, "prompts"),
        schema_gate(None if champion is None else _broken(candidate.schema, champion[0])),
    ]
    if champion is not None:
        gates += _no_worse("", champion[1])
    gates += _no_worse("floor-", candidate.floor)
    gates.append(_calibration(candidate, budget))
    gates.append(budget_gate("latency", candidate.latency_ms, budget.latency_ms, "ms for one prompt"))
    gates.append(budget_gate("size", candidate.size_bytes, budget.size_bytes, "bytes of artefact"))
    gates.append(pickle_gate(candidate.pickles))
    return Verdict(name, version, tuple(gates))


def _broken(mine: RouterSchema, its: RouterSchema) -> Sequence[str]:
    broken = []
    if mine.version != its.version:
        broken.append(f"format version {mine.version}, the champion's is {its.version}")
    if forgotten := sorted(its.models - mine.models):
        broken.append(f"does not know {len(forgotten)} of the champion's models: {', '.join(forgotten[:5])}")
    return broken


def _no_worse(prefix: str, beside: RouterComparison) -> Iterator[Gate]:
    """Refused where the whole 95 % interval of candidate − rival lies on the wrong side of zero."""
    for figure, of, higher in (
        ("macro-map", beside.macro_map, True),
        ("picked-accuracy", beside.picked_accuracy, True),
        ("brier", beside.brier, False),
    ):
        name, end = f"{prefix}{figure}", of.ci95[1] if higher else of.ci95[0]
        if math.isnan(end):
            reason = "no prompt has the labels to judge this by"
            yield Gate(name, passed=True, value=None, limit=None, reason=reason)
            continue
        reason = (
            f"{of.mine:.4f} against {of.its:.4f} of {beside.rival}, {'higher' if higher else 'lower'} is better: "
            f"difference {of.mine - of.its:+.4f}, 95 % interval [{of.ci95[0]:+.4f}, {of.ci95[1]:+.4f}]"
        )
        yield Gate(name, end >= 0 if higher else end <= 0, end, 0.0, reason)


def _calibration(candidate: RouterEvidence, budget: RouterBudget) -> Gate:
    sampling = sampling_ece(candidate.labels)
    limit = budget.ece + sampling
    wanted = f"at most {budget.ece} + {sampling:.4f} that sampling explains"
    reason = f"calibration error {candidate.ece:.4f}, wanted {wanted}"
    return Gate("calibration", candidate.ece <= limit, candidate.ece, limit, reason)
