"""Three laws after three kinds of application: code repair, research with sources, and customer triage.

They are tuned to the mechanisms and accuracies that were measured on the design's synthetic laws, not to any real
application: see `law.py` for the figures and `tests/datasets/test_law.py` for the check that holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from presage.datasets.law_graph import END, Branch, Law

_RETRY: Final = Law(
    name="retry",
    start="planner",
    intents=(0.3, 0.3, 0.25, 0.15),
    max_retries=3,
    signal=1.0,
    next_signal=1.5,
    graph={
        "planner": (
            Branch("retriever", 0.5, (3.0, 1.0, 0.3, 0.6)),
            Branch("coder", 0.35, (0.4, 1.5, 2.5, 0.3)),
            Branch("reader", 0.15, (0.5, 1.0, 0.5, 5.0)),
        ),
        "retriever": (
            Branch("reader", 0.75, (1.4, 1.0, 0.8, 1.0)),
            Branch("coder", 0.25, (0.3, 1.2, 2.5, 1.0), after={"planner": 0.5}),
        ),
        "reader": (
            Branch("coder", 0.5, (1.2, 2.0, 1.5, 0.2), after={"retriever": 1.5}),
            Branch("retriever", 0.3, (1.2, 0.3, 0.3, 1.0), after={"retriever": 0.35}, retry=0.7),
            Branch("writer", 0.2, (0.2, 0.3, 0.3, 5.0)),
        ),
        "coder": (
            Branch("tester", 0.8, (1.0, 1.5, 1.0, 0.6), after={"reviewer": 0.5}),
            Branch("reviewer", 0.2, (1.0, 0.3, 2.5, 3.0), after={"tester": 3.0}),
        ),
        "tester": (
            Branch("coder", 0.5, (0.4, 2.2, 0.5, 0.5), retry=0.75, counts=True),
            Branch("reviewer", 0.35, (1.5, 0.5, 2.2, 1.0)),
            Branch("retriever", 0.15, (2.2, 0.3, 0.3, 0.5), retry=1.2, counts=True),
        ),
        "reviewer": (
            Branch("writer", 0.5, (1.0, 1.0, 1.0, 2.0), after={"coder": 0.7}, retry=1.3),
            Branch("coder", 0.3, (0.6, 1.2, 1.6, 0.3), after={"tester": 0.6}, counts=True),
            Branch(END, 0.2, (0.5, 1.5, 0.5, 1.0)),
        ),
        "writer": (
            Branch(END, 0.8),
            Branch("reviewer", 0.2, (1.5, 0.5, 0.5, 2.5), after={"reviewer": 0.4}),
        ),
    },
    tokens={
        "planner": (420, 180),
        "retriever": (160, 60),
        "reader": (1400, 240),
        "coder": (900, 650),
        "tester": (500, 120),
        "reviewer": (700, 260),
        "writer": (450, 380),
    },
)

_RESEARCH: Final = Law(
    name="research",
    start="planner",
    intents=(0.4, 0.35, 0.25),
    max_retries=4,
    signal=1.0,
    next_signal=1.5,
    graph={
        "planner": (
            Branch("searcher", 0.6, (2.5, 0.8, 0.4)),
            Branch("analyst", 0.25, (0.3, 1.0, 3.0)),
            Branch("reader", 0.15, (0.5, 2.5, 0.5)),
        ),
        "searcher": (
            Branch("reader", 0.7, (1.2, 1.4, 0.5)),
            Branch("searcher", 0.15, (1.5, 0.4, 0.6), after={"searcher": 0.2}, counts=True),
            Branch("analyst", 0.15, (0.3, 0.5, 4.0), after={"verifier": 2.0}),
        ),
        "reader": (
            Branch("verifier", 0.5, (1.8, 0.6, 0.8), after={"searcher": 1.4}),
            Branch("reader", 0.2, (0.3, 2.5, 0.3), after={"reader": 0.5}, retry=0.8, counts=True),
            Branch("analyst", 0.3, (0.4, 1.2, 2.0), after={"reader": 2.0}),
        ),
        "analyst": (
            Branch("verifier", 0.45, (1.5, 1.0, 0.4)),
            Branch("critic", 0.3, (0.4, 0.5, 2.5), after={"critic": 0.4}),
            Branch("writer", 0.25, (0.6, 1.8, 0.6), after={"critic": 2.5}),
        ),
        "verifier": (
            Branch("searcher", 0.45, (2.0, 0.5, 0.4), retry=0.7, counts=True),
            Branch("reader", 0.2, (0.5, 2.0, 0.4), after={"reader": 0.5}, retry=0.8, counts=True),
            Branch("writer", 0.35, (0.6, 1.0, 1.6), retry=1.2),
        ),
        "critic": (
            Branch("analyst", 0.55, (0.5, 0.8, 1.8), retry=0.75, counts=True),
            Branch("writer", 0.45, (1.5, 1.2, 0.6), retry=1.2),
        ),
        "writer": (
            Branch("critic", 0.35, (0.4, 0.4, 2.5), after={"critic": 0.2}, retry=0.9),
            Branch("editor", 0.3, (0.5, 2.0, 0.5)),
            Branch(END, 0.35, (2.0, 0.5, 0.7), after={"critic": 2.0}),
        ),
        "editor": (
            Branch(END, 0.75),
            Branch("writer", 0.25, retry=0.6, counts=True),
        ),
    },
    tokens={
        "planner": (380, 210),
        "searcher": (120, 40),
        "reader": (2200, 300),
        "analyst": (800, 520),
        "verifier": (640, 110),
        "critic": (700, 260),
        "writer": (900, 900),
        "editor": (1000, 700),
    },
)

_TRIAGE: Final = Law(
    name="triage",
    start="greeter",
    intents=(0.35, 0.3, 0.2, 0.15),
    max_retries=3,
    signal=1.0,
    next_signal=1.5,
    graph={
        "greeter": (
            Branch("user", 0.8),
            Branch("router", 0.2),
        ),
        "user": (
            Branch("router", 0.35, (0.8, 0.8, 1.0, 2.0), after={"greeter": 3.0, "resolver": 0.4}),
            Branch("resolver", 0.35, (1.0, 1.0, 1.8, 0.3), after={"resolver": 2.5, "greeter": 0.2}),
            Branch("lookup", 0.2, (2.2, 0.4, 0.4, 0.4), after={"resolver": 0.6}),
            Branch(END, 0.1, (1.5, 1.5, 0.3, 1.0), after={"greeter": 0.0, "router": 0.1}, retry=1.5),
        ),
        "router": (
            Branch("lookup", 0.45, (2.5, 0.5, 0.6, 0.3)),
            Branch("refunds", 0.3, (0.3, 3.0, 0.4, 0.4)),
            Branch("resolver", 0.15, (0.5, 0.4, 3.5, 0.5)),
            Branch("human", 0.1, (0.2, 0.3, 0.4, 7.0), retry=1.4),
        ),
        "lookup": (
            Branch("resolver", 0.6, (1.2, 0.5, 1.5, 0.6)),
            Branch("lookup", 0.15, (1.5, 0.5, 0.5, 0.5), after={"lookup": 0.3}, counts=True),
            Branch("refunds", 0.15, (0.2, 4.0, 0.3, 0.5)),
            Branch("router", 0.1, (0.5, 0.5, 0.5, 4.0), counts=True),
        ),
        "refunds": (
            Branch("user", 0.4, (1.0, 0.8, 1.0, 1.0), after={"user": 0.6}),
            Branch("lookup", 0.35, (1.5, 0.8, 1.0, 0.5), after={"lookup": 0.15}),
            Branch("resolver", 0.25, (0.8, 1.6, 0.8, 0.3), after={"lookup": 2.5}, retry=1.2),
        ),
        "resolver": (
            Branch("user", 0.6, (0.7, 0.6, 2.2, 0.6), after={"user": 0.7}, retry=0.7, counts=True),
            Branch(END, 0.3, (1.6, 1.4, 0.3, 0.5), retry=1.3),
            Branch("human", 0.1, (0.3, 0.5, 0.6, 6.0)),
        ),
        "human": (
            Branch(END, 0.55),
            Branch("user", 0.3, retry=0.7, counts=True),
            Branch("refunds", 0.15, (0.5, 3.0, 0.3, 1.0), after={"refunds": 0.2}),
        ),
    },
    tokens={
        "greeter": (200, 40),
        "user": (60, 45),
        "router": (260, 25),
        "lookup": (300, 90),
        "refunds": (420, 140),
        "resolver": (650, 220),
        "human": (150, 80),
    },
)

LAWS: Final[Mapping[str, Law]] = MappingProxyType({law.name: law for law in (_RETRY, _RESEARCH, _TRIAGE)})
