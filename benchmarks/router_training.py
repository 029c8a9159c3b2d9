"""Does the router's transformer learn a rule deep in a prompt, and how fast?

Prompts of 30 to 90 words; one word decides which of three models solve the prompt; a fifth of the labels is missing. A
ModernBERT of a third of a million parameters starts from random weights. It is judged on 400 fresh prompts with every
label, beside the same training on the first 8 words alone, which never contain the deciding word, and beside no
training. Macro mean average precision; the goal is .95 within two minutes on two cores.

    python benchmarks/router_training.py [--prompts 2000] [--epochs 1]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from scipy.special import expit

from presage.predictors.router.transformer import TransformerScorer
from presage.testing.models import MODELS, planted, save_encoder
from presage.training.router.finetune import FinetuneConfig, Labelled, finetune
from presage.training.router.metrics import measure

WAYS = {"whole prompt": (64, 64), "first 8 words": (8, 0)}


def judged(scorer: TransformerScorer, seconds: float) -> dict[str, float]:
    prompts, correct = planted(400, 4, unknown=0.0)
    figures = measure(expit(scorer.logits(prompts)), correct, MODELS, seed=0, resamples=0)
    return {"macro_map": figures.macro_map, "brier": figures.brier, "train_s": seconds}


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=1)
    chosen = parser.parse_args()
    train, validation = Labelled(*planted(chosen.prompts, 0)), Labelled(*planted(200, 1))
    config = FinetuneConfig(epochs=chosen.epochs, learning_rate=1e-3)
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        encoder = save_encoder(Path(name) / "encoder")
        for way, (head, tail) in WAYS.items():
            scorer = TransformerScorer.from_encoder(
                str(encoder), models=MODELS, head_tokens=head, tail_tokens=tail, seed=0
            )
            if not rows:
                rows["no training"] = judged(scorer, 0.0)
            begun = time.perf_counter()
            trained = finetune(scorer, train, validation, config, checkpoints=Path(name) / "checkpoints")
            rows[way] = judged(trained.scorer, time.perf_counter() - begun)
        parameters = sum(weight.numel() for weight in scorer.network.parameters())
    print(
        f"{parameters:,} parameters, {chosen.prompts} prompts, {chosen.epochs} epochs, batches of {config.batch_size}, "
        f"{torch.get_num_threads()} thread\n"
    )
    print("| | macro mAP | Brier | training s |\n|---|---|---|---|")
    for way, of in rows.items():
        print(f"| {way} | {of['macro_map']:.3f} | {of['brier']:.3f} | {of['train_s']:.0f} |")
    print(
        json.dumps({"benchmark": "router_training", "parameters": parameters, "prompts": chosen.prompts, "ways": rows})
    )


if __name__ == "__main__":
    main()
