"""What does choosing the model by confidence and load bring: accuracy against mean completion?

Chimera on a fleet of engines that serve different models. Prompts, and which model answers them right, are those of
the public outcome sets; engines are the shipped `h100-8b-datasheet`, with costs times the stated size of the model. The
sets record no output tokens, so lengths are an ASSUMPTION: log-normal by prompt (median 250, σ 0.6), equal for all
models; predicted lengths have a log-normal error of σ 0.5. Each prompt is a workflow of one request; the paper's
workflows have one to four. Confidences: TF-IDF and logistic regression, a model each, learnt on other prompts. The
load is a share of what all engines can decode. Differences of accuracy to "router only" are paired by prompt, ± 95 %.
"Sooner" is its mean completion divided by a policy's. Engines run by first come, except in the rows "stjf" (hooks,
predicted lengths), "oracle lengths" (hooks, true lengths) and "mlfq" (`mlfq.py`).

    .venv-vllm/bin/python benchmarks/fleet_models.py --outcomes FOLDER
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from mlfq import MLFQ
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from presage.serving_hooks.policies.routing.chimera import Chimera, PricedModels, PublishedChimera
from presage.serving_hooks.policies.routing.fleet import Fleet, Placement, RoutingRequest
from presage.serving_hooks.policies.routing.placement import Immediate, LeastLoaded, RoundRobin
from presage.serving_hooks.replay.engine_file import EngineFile, read_engine
from presage.serving_hooks.replay.fleet_file import FleetMember
from presage.serving_hooks.replay.metrics import PolicyRun, interval
from presage.serving_hooks.replay.policies import POLICIES, Policy
from presage.serving_hooks.replay.runs import Setting, run_one
from presage.serving_hooks.replay.workload import Arrivals, PromptConvention, RecordedRequest, ReplayJob, assemble
from presage.serving_hooks.workflows.identity import Step

SETS: Final[Mapping[str, Mapping[str, float]]] = {
    "mmlu_pro": {"Meta-Llama-3_1-70B-Instruct": 4.0, "Meta-Llama-3_1-8B-Instruct": 1.0, "mathstral-7B": 1.0},
    "routerbench_subset": {
        "gpt-4-1106-preview": 4.0,
        "mistralai/mixtral-8x7b-chat": 2.0,
        "mistralai/mistral-7b-chat": 1.0,
    },
    "routerdc7": {
        "cognitivecomputations/dolphin-2.9-llama3-8b": 1.0,
        "meta-math/MetaMath-Mistral-7B": 1.0,
        "HuggingFaceH4/zephyr-7b-beta": 1.0,
    },
    "gsm8k": {"gpt-4-1106-preview": 4.0, "mistralai/Mixtral-8x7B-Instruct-v0.1": 2.0, "openai/6b_verification": 1.0},
    "mmlu_routellm": {"gpt-4-1106-preview": 4.0, "mistralai/Mixtral-8x7B-Instruct-v0.1": 2.0},
}
"""Models of each set, and the factor on the 8B engine's costs: an assumption where sizes are secret."""

MOST_REQUESTS: Final = 64
PRICES: Final = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02)
SLACKS: Final = (1.0, 10.0, math.inf)
TRAIN: Final = 3000


@dataclass(frozen=True)
class Outcomes:
    """Replayed prompts: tokens, who is right [prompts, models], and the router's confidence [prompts, models]."""

    tokens: list[int]
    right: np.ndarray
    confidence: np.ndarray


def outcomes(path: Path, models: tuple[str, ...], replayed: int) -> Outcomes:
    """Half of the prompts teach (at most TRAIN), of the others `replayed` are drawn."""
    answers: dict[str, dict[str, int]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row["model"] in models:
                answers.setdefault(" ".join(row["prompt"].lower().split()), {})[row["model"]] = int(row["correct"])
    prompts = sorted(prompt for prompt, of in answers.items() if len(of) == len(models))
    order = np.random.default_rng(0).permutation(len(prompts))
    learnt, held = order[: min(TRAIN, len(order) // 2)], order[len(order) // 2 :][:replayed]
    vectors = TfidfVectorizer(sublinear_tf=True, min_df=2, ngram_range=(1, 2), max_features=30_000)
    seen = vectors.fit_transform([prompts[i] for i in learnt])
    new = vectors.transform([prompts[i] for i in held])
    right = np.array([[answers[prompts[i]][model] for model in models] for i in held])
    confidence = np.empty(right.shape)
    for column, model in enumerate(models):
        fitted = LogisticRegression(C=1.0, max_iter=500).fit(seen, [answers[prompts[i]][model] for i in learnt])
        confidence[:, column] = fitted.predict_proba(new)[:, 1]
    return Outcomes([max(16, len(prompts[i]) // 4) for i in held], right, confidence)


class Chosen(Immediate):
    """The model with the highest score of a request, whatever the load; of equals, the one that answers first."""

    def __init__(self, scores: np.ndarray) -> None:
        super().__init__()
        self._scores = scores

    def choose(self, request: RoutingRequest, fleet: Fleet, engines: list[int]) -> Placement:
        """Its engine."""
        of = self._scores[request.id[0]]
        return Placement(max(engines, key=lambda e: (of[e], -fleet.engines[e].queue_s, -e)), "highest score")


class Lengths:
    """Predicted lengths, as a source of remaining tokens."""

    def __init__(self, lengths: np.ndarray, jobs: Sequence[ReplayJob], clock: Callable[[], float]) -> None:
        self._lengths = lengths

    def remaining_tokens(self, step: Step, input_tokens: int) -> float:
        """Of the one request of a workflow."""
        return float(self._lengths[int(step.workflow_id)])


def scaled(engine: EngineFile, size: float) -> EngineFile:
    """The engine with the costs of a larger model."""
    cost = engine.cost
    bigger = {name: getattr(cost, name) * size for name in ("iteration_s", "prefill_token_s", "decode_token_s")}
    return engine.model_copy(update={"cost": cost.model_copy(update=bigger), "most_requests": MOST_REQUESTS})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outcomes", type=Path, required=True, help="folder of the public outcome sets")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--prompts", type=int, default=600)
    parser.add_argument("--load", type=float, default=0.7, help="share of what all engines can decode")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    found = {name: cell(name, args) for name in args.sets}
    print(json.dumps({"benchmark": "fleet_models", "load": args.load, "prompts": args.prompts, "sets": found}))


def cell(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The frontier of one set."""
    models = tuple(SETS[name])
    of = outcomes(args.outcomes / f"{name}.jsonl.gz", models, args.prompts)
    count = len(of.tokens)
    rng = np.random.default_rng(1)
    output = np.clip(np.exp(rng.normal(math.log(250), 0.6, count)), 8, 4000).astype(int)
    guess = output * np.exp(rng.normal(0.0, 0.5, count))
    convention = PromptConvention("history-first")
    jobs = tuple(
        ReplayJob("q", f"{n}", assemble([RecordedRequest("a", of.tokens[n], int(output[n]), (), 0.0)], convention))
        for n in range(count)
    )
    base = read_engine("h100-8b-datasheet")
    files = [scaled(base, size) for size in SETS[name].values()]
    per_s = sum(MOST_REQUESTS / file.cost.seconds(0, MOST_REQUESTS, 500 * MOST_REQUESTS) for file in files)
    rate = args.load * per_s / output.mean()

    def scores(request: RoutingRequest) -> dict[str, float]:
        return dict(zip(models, of.confidence[request.id[0]].tolist(), strict=True))

    def predicted(request: RoutingRequest) -> float:
        return float(guess[request.id[0]])

    alone = np.eye(len(models))
    policies: dict[str, Any] = {"router only": partial(Chosen, of.confidence)}
    policies |= {
        f"only {model.rpartition('/')[2]}": partial(Chosen, np.tile(alone[n], (count, 1)))
        for n, model in enumerate(models)
    }
    policies["random"] = partial(Chosen, np.random.default_rng(2).random((count, len(models))))
    policies["round-robin"], policies["least-loaded"] = RoundRobin, LeastLoaded
    policies["oracle router"] = partial(Chosen, of.right.astype(float))
    for price in PRICES:
        policies[f"priced λ {price:g}"] = partial(PricedModels, models, scores, predicted, price)
    for slack in SLACKS:
        policies[f"published τ {slack:g}"] = partial(PublishedChimera, models, scores, predicted, slack)
    for slack in SLACKS:
        policies[f"chimera τ {slack:g}"] = partial(Chimera, models, scores, predicted, slack)
    stjf = POLICIES["shortest-job"]
    hooks = {"stjf": replace(stjf, ranked=partial(Lengths, guess)), "oracle lengths": stjf, "mlfq": MLFQ}
    policies |= {f"router only, {order}": policies["router only"] for order in hooks}
    print(f"\n{name}: {count} prompts, {len(models)} models, {rate:.1f} a second ({args.load:g} of capacity)")
    print(f"{'':32}{'accuracy':>9}{'beside router':>17}{'completion s':>13}{'sooner':>8}{'first token s':>14}")
    found: dict[str, Any] = {}
    rights: dict[str, np.ndarray] = {}
    times: dict[str, float] = {}
    for policy, make in policies.items():
        order = hooks.get(policy.rpartition(", ")[2], POLICIES["stock"])
        members = tuple(FleetMember(f"e{n}", file, order) for n, file in enumerate(files))
        setting = Setting(jobs, convention, Arrivals(rate=rate), files[0], "oracle", fleet=members)
        seconds, first_s, right = [], [], np.zeros(count)
        for seed in range(args.seeds):
            runs: list[PolicyRun] = []
            figures = run_one(setting, Policy(policy, None, routing=make), seed, on_run=runs.append).figures
            for one in runs[0].asked:
                right[one.job] += of.right[one.job, one.engine] / args.seeds
            seconds.append(figures["completion_mean_s"])
            first_s.append(figures["ttft_mean_s"])
        rights[policy] = right
        times[policy] = float(np.mean(seconds))
        lost = right - rights.get("router only", right)
        error = 1.96 * float(lost.std()) / math.sqrt(count)
        beside = f"{lost.mean():+.3f} ± {error:.3f}" if "router only" in rights else ""
        sooner = times.get("router only", math.nan) / times[policy]
        found[policy] = {"accuracy": float(right.mean()), "completion_s": interval(seconds)}
        found[policy]["first_token_s"] = float(np.mean(first_s))
        if "router only" in rights:
            found[policy] |= {"accuracy_beside_router": [float(lost.mean()), error], "sooner_than_router": sooner}
        print(
            f"{policy:32}{right.mean():9.3f}{beside:>17}{times[policy]:13.2f}{sooner:8.2f}{np.mean(first_s):14.2f}",
            flush=True,
        )
    return found


if __name__ == "__main__":
    main()
