"""What does one remaining-length forecast cost, and a batch of 1,024, and how large is the model?

One thread, warm, medians; traces of the synthetic process, about 20,000 training rows. "A row" forecasts all quantiles
from the features of one step; "a request" starts from the raw steps with a short prompt, including the sketch of its
text. The reference is quantile-forest's own `predict` on a forest of the same trees.

    python benchmarks/length_latency.py [--rows 20000]

Prints a table of microseconds, training seconds and bytes per estimator, and one JSON line.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from quantile_forest import RandomForestQuantileRegressor

from presage.datasets.synthetic.lengths import generate_lengths
from presage.features.lengths import LengthEncoder, length_rows
from presage.features.rows import LabelledRows
from presage.predictors.common.artefact import artefact_size_bytes
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.quantiles.choice import ESTIMATORS, QuantileConfig
from presage.predictors.quantiles.estimator import ERROR_FOLDS
from presage.predictors.quantiles.forest import FOLD_TREES, INPUT_SHARE, LEAF_ROWS
from presage.training.length.train import LengthTexts
from presage.training.training import median_us

BATCH = 1024
LEAST_ROWS = 2500
STEPS_A_WORKFLOW = 4.0


def latency(
    model: RemainingLengthPredictor, batch: LabelledRows, requests: list[list[dict[str, object]]]
) -> dict[str, float]:
    at = [(int(t), int(a), int(m)) for t, a, m in zip(batch.workflow_type, batch.agent, batch.model, strict=True)]
    one = model.estimator.predict_one
    return {
        "row_us": median_us(lambda i: one(*at[i % BATCH], batch.numbers[i % BATCH]), 2000),
        "request_us": median_us(lambda i: model.forecast(requests[i % BATCH]), 2000),
        "batch_us": median_us(lambda _: model.predict(batch), 25),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    chosen = parser.parse_args()
    if chosen.rows < LEAST_ROWS:
        parser.error(f"--rows {chosen.rows}: the reference forest learns from 2,000; give {LEAST_ROWS} or more")
    table = generate_lengths(round(chosen.rows / STEPS_A_WORKFLOW), 0).table
    encoder = LengthEncoder.fit(table)
    texts = LengthTexts.of(table, length_rows(table, encoder), 0)
    assert texts is not None
    encoder, every = texts.fit(encoder, relevant=False, seed=0)
    held = every.task % 5 == 0
    train, selection = every.take(~held), every.take(held)
    batch = every.take(np.arange(BATCH))
    steps = table.slice(0, BATCH).to_pylist()
    requests = [[*steps[i - steps[i]["step"] : i], steps[i] | {"output_tokens": None}] for i in range(BATCH)]
    rows: dict[str, dict[str, float]] = {}
    for name in ESTIMATORS:
        begun = time.perf_counter()
        fitted = RemainingLengthPredictor(QuantileConfig(estimator=name), 0).fit(train, selection, encoder=encoder)
        seconds = time.perf_counter() - begun
        with tempfile.TemporaryDirectory() as folder:
            fitted.save(folder + "/model")
            size = artefact_size_bytes(Path(folder) / "model")
            model = RemainingLengthPredictor.load(folder + "/model")
        rows[name] = {
            **latency(model, batch, requests),
            "train_s": seconds,
            "bytes": size,
        }
    few = every.take(np.arange(2_000))
    inputs, labels = np.nan_to_num(few.numbers), np.log1p(few.label)
    reference = RandomForestQuantileRegressor(
        FOLD_TREES * ERROR_FOLDS,
        min_samples_leaf=LEAF_ROWS,
        max_samples_leaf=None,
        max_features=INPUT_SHARE,
        random_state=0,
    ).fit(inputs, labels)
    theirs = median_us(lambda i: reference.predict(inputs[i % BATCH][None], quantiles=[0.5, 0.9, 0.99]), 100)
    print(f"{len(train)} training rows, {len(selection)} for selection, {len(encoder.names)} numbers a row\n")
    print("| estimator | a row µs | a request µs | 1,024 rows ms | training s | artefact MB |")
    print("|---|---|---|---|---|---|")
    for name, of in rows.items():
        print(
            f"| {name} | {of['row_us']:.1f} | {of['request_us']:.1f} | {of['batch_us'] / 1000:.1f} | "
            f"{of['train_s']:.1f} | {of['bytes'] / 1e6:.2f} |"
        )
    print(f"| quantile-forest's own predict (2,000 rows) | {theirs:,.1f} | – | – | – | – |")
    print(json.dumps({"benchmark": "length_latency", "rows": len(train), "quantile_forest_us": theirs, **rows}))


if __name__ == "__main__":
    main()
