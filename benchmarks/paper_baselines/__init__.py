"""The families of PBKV's table 3: `--baselines paper_baselines:NAME`, with the folder `benchmarks` on PYTHONPATH.

PBKV (Zheng et al., arXiv 2605.06472), appendix C.2, compares kNN, a linear probe, MLPs, TCNs, Transformers and R-GCN
with its own predictor. It cites a source for the last three and leaves sizes, inputs and training open; each module
documents our choices, and docs/predictor.md lists them.

All families see the same inputs: the agents of the prefix in order, the workflow type, and the states so far, reduced
to their principal components. Sizes in tokens and characters, which Presage and boosted trees read too, are no input
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from paper_baselines.linear_probe import LinearProbe
from paper_baselines.mlp import Mlp
from paper_baselines.nearest import NearestPrefixes
from paper_baselines.neural import NeuralConfig
from paper_baselines.rgcn import Rgcn
from paper_baselines.tcn import Tcn
from paper_baselines.transformer import Transformer
from presage.training.baselines import NextAgentBaseline, NextAgentEstimator


def _of(make: Callable[[int], NextAgentEstimator]) -> NextAgentBaseline:
    """A family made from a seed; each decides something on the validation part."""
    return NextAgentBaseline(lambda seed, steps: make(seed), validates=True)


BASELINES: Final[Mapping[str, NextAgentBaseline]] = {
    "knn-5": _of(lambda seed: NearestPrefixes(5, seed=seed)),
    "knn-20": _of(lambda seed: NearestPrefixes(20, seed=seed)),
    "linear-probe": _of(lambda seed: LinearProbe(seed=seed)),
    "mlp-tiny": _of(lambda seed: Mlp("tiny", NeuralConfig(seed=seed))),
    "mlp-small": _of(lambda seed: Mlp("small", NeuralConfig(seed=seed))),
    "mlp-deep": _of(lambda seed: Mlp("deep", NeuralConfig(seed=seed))),
    "tcn-small": _of(lambda seed: Tcn("small", NeuralConfig(seed=seed))),
    "tcn-large": _of(lambda seed: Tcn("large", NeuralConfig(seed=seed))),
    "transformer-1": _of(lambda seed: Transformer(1, NeuralConfig(seed=seed))),
    "transformer-2": _of(lambda seed: Transformer(2, NeuralConfig(seed=seed))),
    "rgcn": _of(lambda seed: Rgcn(NeuralConfig(seed=seed))),
}
ALL: Final = tuple(f"{__name__}:{name}" for name in BASELINES)
"""Every family, as `--baselines` takes it."""
