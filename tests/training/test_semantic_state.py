"""Which semantic state is read: what tells nothing is left out, what tells something is kept."""

import random
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.datasets.read import read_traces
from presage.features.prefixes import prefixes_of
from presage.features.states import SKETCH
from presage.features.vocabulary import Vocabulary
from presage.predictors.next_agent.boosting import BoostingConfig
from presage.predictors.next_agent.network_weights import NetworkConfig
from presage.predictors.next_agent.parts import NextAgentConfig
from presage.training.next_agent.semantic_state import TrainingTraces, choose_states
from presage.training.next_agent.train import train
from presage.training.selection import simplest

CONFIG = NextAgentConfig(boosting=BoostingConfig(rounds=60))


def loops(seed: int, *, word: bool, ticket: bool, state: bool = False, workflows: int = 160) -> pa.Table:
    """Loops of coder and tester that go on with a chance that one word of the request tells."""
    rng = random.Random(seed)
    chance = {"fix": 0.1, "add": 0.85}
    found = []
    for number in range(workflows):
        kind = rng.choice(list(chance))
        asked = (f"{kind} it" if word else "do it") + (f" ticket {rng.randrange(10**6)}" if ticket else "")
        path = ["triage", "coder", "tester"]
        while rng.random() < chance[kind] and len(path) < 20:
            path += ["coder", "tester"]
        for step, agent in enumerate(path):
            row = {"workflow_type": "t", "workflow_id": f"{seed}-{number}", "step": step, "agent": agent}
            row |= {"input_text": f"You are {agent}. {asked}", "output_text": "ok", "output_tokens": rng.randrange(9)}
            if state:
                row["prefill_state"] = [float(kind == "fix"), 1.0, rng.random(), rng.random()]
            found.append(row)
    return read_traces(pd.DataFrame(found)).table


def chosen(table: pa.Table) -> str:
    prefixes = prefixes_of(table, Vocabulary.from_table(table), 3)
    traces = TrainingTraces(table, prefixes, 0, SKETCH)
    return choose_states(traces, "auto", CONFIG, 0, lambda _: None).name


def test_a_text_that_holds_identifiers_alone_is_not_read() -> None:
    assert chosen(loops(0, word=False, ticket=True)) == "none"


@pytest.mark.parametrize("ticket", [False, True])
def test_a_text_that_tells_what_follows_is_read(ticket: bool) -> None:
    assert chosen(loops(0, word=True, ticket=ticket)) in ("text", "relevant text")


def test_hidden_states_go_before_texts_that_tell_the_same() -> None:
    assert chosen(loops(0, word=True, ticket=True, state=True)) == "captured"


def test_the_simplest_within_one_standard_error_is_kept() -> None:
    """By hand: four tasks of one step and one label each; the losses differ by .1, .1, .1 and .5 (mean .2)."""
    task = np.arange(4, dtype=np.int32)
    labels = np.ones(4)
    worse = np.array([1.1, 1.1, 1.1, 1.5])
    name, table = simplest({"none": np.stack([worse, labels]), "text": np.stack([np.ones(4), labels])}, task)
    error = np.sqrt(4 / 3 * (3 * 0.1**2 + 0.3**2)) / 4
    assert table["none"] == pytest.approx((1.2, error))
    assert table["text"] == pytest.approx((1.0, 0.0))
    assert (name, error < 0.2) == ("text", True)
    close = np.array([0.9, 1.1, 0.9, 1.5])  # mean 1.1, standard error .14: not told apart
    assert simplest({"none": np.stack([close, labels]), "text": np.stack([np.ones(4), labels])}, task)[0] == "none"


@given(st.lists(st.floats(0.1, 3.0), min_size=2, max_size=30), st.integers(0, 2**31))
def test_law_equal_losses_keep_thesimplest(losses: list[float], seed: int) -> None:
    task = np.random.default_rng(seed).integers(0, 5, len(losses)).astype(np.int32)
    of = np.stack([np.array(losses), np.ones(len(losses))])
    assert simplest({"none": of, "captured": of, "text": of}, task)[0] == "none"


QUICK = NextAgentConfig(network=NetworkConfig(epochs=10), boosting=BoostingConfig(rounds=60))


@cache
def unmarked() -> tuple[pa.Table, pa.Table, Any]:
    """Workflows to learn from, others to judge on, and figures of a model without anything unique in their prompts."""
    plain, held = (loops(seed, word=True, ticket=False, workflows=count) for seed, count in ((0, 240), (1, 400)))
    return plain, held, train(plain, held, QUICK, baselines=()).metrics["moments"]["prefill"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ticket", "uuid", "email", "paragraph"])
def test_property_identifiers_cost_nothing(kind: str) -> None:
    """The same workflows with and without something unique to a workflow in each prompt."""

    def marked(table: pa.Table) -> pa.Table:
        words = random.Random(7)
        names = ["".join(words.choices("bcdfgaeiou", k=6)) for _ in range(1500)]
        made: dict[str, str] = {}
        rng = random.Random(3)
        for workflow in table["workflow_id"].to_pylist():
            made[workflow] = (
                made.get(workflow)
                or {
                    "ticket": f"ticket {rng.randrange(10**6)}",
                    "uuid": f"request {rng.getrandbits(32):08x}-1b2c-4d3e-8f4a-{rng.getrandbits(48):012x}",
                    "email": f"from {rng.choice(names)}.{rng.choice(names)}@{rng.choice(names)}.org",
                    "paragraph": " ".join(rng.choices(names, k=50)),
                }[kind]
            )
        texts = [
            f"{text} {made[workflow]}"
            for text, workflow in zip(table["input_text"].to_pylist(), table["workflow_id"].to_pylist(), strict=True)
        ]
        place = table.schema.get_field_index("input_text")
        return table.set_column(place, table.schema.field(place), pa.array(texts, table.schema.field(place).type))

    plain, held, without = unmarked()
    found = train(marked(plain), marked(held), QUICK, baselines=("markov-1", "markov-3")).metrics
    figures = found["moments"]["prefill"]
    assert found["behind"] == []
    for k, accuracy in enumerate(figures["accuracy"]):
        assert accuracy > without["accuracy"][k] - 0.025
        assert figures["ece"][k] < 0.08
