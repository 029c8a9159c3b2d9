"""What is wrong with an engine or a gateway, and what to do: one list for `presage status` and for the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from presage.serving_hooks.counts import ERRORS, EVENTS, METADATA_LEFT_OUT
from presage.serving_hooks.status import AgainstCountsStatus, EngineStatus, MonitorStatus, read_status

Problem = tuple[str, str]
"""What, and what there is to say of it: how often, why, or a remedy."""


def problems(engine: EngineStatus) -> list[Problem]:
    """Parts that are off, failures, names left out, drift, and what is lost."""
    listed = [(f"{part} is off", why) for part, why in engine.off.items()]
    listed += [(f"{what}: {reason}", str(times)) for (what, reason), times in engine.by_labels(ERRORS).items()]
    for (name, reason), times in engine.by_labels(METADATA_LEFT_OUT).items():
        key = engine.examples.get(f"{name}: {reason}", name)
        listed.append((f"{name} left out: {reason}", f"{times}" + (f", for example {key}" if key != name else "")))
    listed += [(event, str(times)) for (event,), times in engine.by_labels(EVENTS).items()]
    listed += broken(engine)
    for name, share in engine.one_step.items():
        told = f"{share:.0%} of its workflows; if runs have several, docs/recognised.md says what joins them"
        listed.append((f"one step: {name}", told))
    if engine.recorder is not None and engine.recorder.losing:
        listed.append(("recorder", "loses most steps; recorder.counts of --json says why"))
    if (webhook := engine.webhook) is not None and (webhook.problem or webhook.dropped):
        listed.append(("webhook", f"latest delivery: {webhook.problem or 'taken'}; {webhook.dropped} events dropped"))
    return listed


def broken(engine: EngineStatus) -> list[Problem]:
    """Alarms, broken promises with their likely causes, and types for which a model stands back."""
    monitor = engine.monitor or MonitorStatus()
    listed = [("drift", name or "(no type)") for name in monitor.alarms]
    for name, promise in monitor.promised.items():
        if promise.kept is False:
            listed.append(("below its promise", name or "(no type)"))
        listed += [(f"likely cause: {name or '(no type)'}", f"{cause.text}; {cause.mend}") for cause in promise.causes]
    for who, by_type in against_counts(monitor):
        for name, compared in by_type.items():
            if compared.stands_back:
                told = f"{name or '(no type)'}: online counts forecast it until it recovers"
                listed.append((f"{who}stands back", told))
    return listed


def against_counts(monitor: MonitorStatus) -> tuple[tuple[str, Mapping[str, AgainstCountsStatus]], ...]:
    """The comparisons of the model and of the profile with online counts, each with how a row begins."""
    return ("", monitor.against_counts), ("profile ", monitor.profile_against_counts)


def with_problems(shown: Mapping[str, Any]) -> dict[str, Any]:
    """A status as JSON, with `problems`: pairs of what and what to say of it, for whom the status is shown to."""
    return {**shown, "problems": problems(read_status(shown) or EngineStatus())}
