"""What do missing token counts cost a predictor of remaining length if they are estimated, and if steps drop out?

One process, its training traces with all counts (`full`), without both counts on 30 % of the steps (`random`) or on all
steps of some agents, as where answers are streamed without usage (`streamed`); each with texts, whose characters a
token differ by agent and step, and without. Missing counts are `estimated` (`features/missing_counts.py`), or left
unknown, so that every step before one has no label (`dropped`). Each predictor is judged on the same workflows with all
counts. `pinball` is the mean loss over .5 and .9, `labels` the mean length of training workflows, `medians` the mean
median forecast at arrival, all as a share of that of `full`; `labelled` is the share of training steps with a label.

    python benchmarks/missing_counts.py [--workflows 800] [--judged 800] [--seeds 3]

Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.datasets.synthetic.lengths import generate_lengths
from presage.features.lengths import LengthEncoder, length_rows
from presage.features.missing_counts import COUNTS, CountEstimates
from presage.predictors.length.predictor import RemainingLengthPredictor
from presage.predictors.quantiles.choice import QuantileConfig
from presage.training.quantile_trainings import SELECTION_FRACTION
from presage.training.sets import tasks_apart

QUANTILES = (0.5, 0.9)
SHARE = 0.3
STREAMED = ("coder", "reader", "verifier")
CODE = ("coder", "tester")
"""Agents whose answers have 3.4 characters a token; those of others have 4.2."""

Figures = dict[str, float]


def with_texts(table: pa.Table, seed: int) -> pa.Table:
    """The trace with prompts and answers as long as their counts make them, up to noise of a tenth a step."""
    rng = np.random.default_rng([seed, 1])
    per_token = {
        "input_text": np.full(len(table), 4.0),
        "output_text": np.where(np.isin(table["agent"].to_numpy(zero_copy_only=False), CODE), 3.4, 4.2),
    }
    for (name, ratio), count in zip(per_token.items(), COUNTS, strict=True):
        characters = table[count].to_numpy() * ratio * np.exp(0.1 * rng.standard_normal(len(table)))
        texts = ["x" * max(1, round(length)) for length in characters.tolist()]
        table = _with(table, name, pa.array(texts, table.schema.field(name).type))
    return table


def without_texts(table: pa.Table) -> pa.Table:
    return _with(table, "input_text", pa.nulls(len(table), table.schema.field("input_text").type))


def without_counts(table: pa.Table, missing: NDArray[np.bool_]) -> pa.Table:
    """The trace without both counts where `missing`, bool [rows]."""
    for name in COUNTS:
        table = _with(table, name, pa.array(table[name].to_numpy(), pa.int32(), mask=missing))
    return table


def _with(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)


def judged(train: pa.Table, test: pa.Table, seed: int) -> Figures:
    """Figures of a predictor that learnt from `train`; labels and medians in tokens."""
    encoder = LengthEncoder.fit(train)
    rows, fresh = length_rows(train, encoder), length_rows(test, encoder)
    apart = tasks_apart(rows.task, rows.workflow_type, SELECTION_FRACTION, seed)
    predictor = RemainingLengthPredictor(QuantileConfig(quantiles=QUANTILES), seed)
    predictor.fit(rows.take(~apart), rows.take(apart), encoder=encoder)
    forecast, truth = predictor.predict(fresh).astype(np.float64), fresh.label.astype(np.float64)
    error = truth[:, None] - forecast
    levels = np.array(QUANTILES)
    arrival = fresh.step == 0
    return {
        "pinball": float(np.maximum(levels * error, (levels - 1) * error).mean()),
        "coverage": float((truth <= forecast[:, 1]).mean()),
        "labels": float(rows.label[rows.labelled & (rows.step == 0)].mean()),
        "medians": float(forecast[arrival, 0].mean()),
        "labelled": float(rows.labelled.mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workflows", type=int, default=800, help="that train each predictor")
    parser.add_argument("--judged", type=int, default=800, help="workflows that judge them")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, list[Figures]] = {}
    for seed in range(args.seeds):
        plain, fresh = (
            generate_lengths(*drawn).table for drawn in ((args.workflows, seed), (args.judged, 1000 + seed))
        )
        missing = {
            "random": np.random.default_rng([seed, 2]).random(len(plain)) < SHARE,
            "streamed": np.asarray(pc.is_in(plain["agent"], pa.array(STREAMED)).to_numpy()),
        }
        for texts in ("with texts", "without texts"):
            if texts == "with texts":
                whole, test = with_texts(plain, seed), with_texts(fresh, 1000 + seed)
            else:
                whole, test = without_texts(plain), without_texts(fresh)
            full = judged(whole, test, seed)
            found.setdefault(f"full, {texts}", []).append(_beside(full, full))
            for name, rows in missing.items():
                table = without_counts(whole, rows)
                for how, train in (
                    ("estimated", CountEstimates.fit(table, seed).fill(table).table),
                    ("dropped", table),
                ):
                    of = found.setdefault(f"{name}, {texts}, {how}", [])
                    of.append(_beside(judged(train, test, seed), full))
    figures = {name: {key: float(np.mean([one[key] for one in of])) for key in of[0]} for name, of in found.items()}
    print(f"{'missing counts':36} {'pinball':>8} {'within .9':>10} {'labels':>8} {'medians':>8} {'labelled':>9}")
    for name, of in figures.items():
        print(
            f"{name:36} {of['pinball']:8.3f} {of['coverage']:10.3f} {of['labels']:8.3f} {of['medians']:8.3f} "
            f"{of['labelled']:9.1%}"
        )
    print(
        json.dumps(
            {"benchmark": "missing_counts", "workflows": args.workflows, "seeds": args.seeds, **_rounded(figures)}
        )
    )


def _beside(of: Figures, full: Figures) -> Figures:
    return {key: value / full[key] if key in ("pinball", "labels", "medians") else value for key, value in of.items()}


def _rounded(figures: dict[str, Figures]) -> dict[str, Any]:
    return {name: {key: round(value, 4) for key, value in of.items()} for name, of in figures.items()}


if __name__ == "__main__":
    main()
