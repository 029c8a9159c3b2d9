"""Placement of requests on the engines of a fleet: pure policies over one table of engines and programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from presage.serving_hooks.policies.routing.placement import (
    LeastLoaded,
    LongestPrefix,
    RoundRobin,
    RoutingPolicy,
    SessionAffinity,
)
from presage.serving_hooks.policies.routing.programs import ForecastPrograms, ProgramScheduling, ThunderAgent

ROUTERS: Final[Mapping[str, Callable[[], RoutingPolicy]]] = {
    "session-affinity": SessionAffinity,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "longest-prefix": LongestPrefix,
    "program-scheduling": ProgramScheduling,
    "thunderagent": ThunderAgent,
    "presage": ForecastPrograms,
}
"""By name; `capacity` and `chimera` take arguments."""
