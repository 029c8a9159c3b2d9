"""The kinds of predictor, and where the parts of each are: what artefacts, commands, registry and report look up."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class KindParts:
    """Where the parts of one kind of predictor are, each as `module:name`, imported on first use.

    Attributes:
        predictor: its class.
        report: makes the report page from its metrics.
        commands: the `Kind` that describes it to the commands.
        prediction: MLflow's type of `prediction` in the table that MLflow serves.
        reads_prompts: MLflow serves it on a table of prompts instead of steps of workflows.
        most_bytes: a larger artefact is not read; far above the promotion gate, a bound for the memory of readers.
    """

    predictor: str
    report: str
    commands: str
    prediction: str = "string"
    reads_prompts: bool = False
    most_bytes: int = 256 << 20


KINDS: Final = {
    "next-agent": KindParts(
        "presage.predictors.next_agent.predictor:NextAgentPredictor",
        "presage.report.next_agent:document",
        "presage.cli.next_agent:NEXT_AGENT",
    ),
    "remaining-length": KindParts(
        "presage.predictors.length.predictor:RemainingLengthPredictor",
        "presage.report.lengths:document",
        "presage.cli.remaining_length:REMAINING_LENGTH",
        prediction="double",
    ),
    "context-growth": KindParts(
        "presage.predictors.length.context:ContextGrowthPredictor",
        "presage.report.lengths:document",
        "presage.cli.context_growth:CONTEXT_GROWTH",
        prediction="double",
    ),
    "return-time": KindParts(
        "presage.predictors.return_time.predictor:ReturnTimePredictor",
        "presage.report.return_times:document",
        "presage.cli.return_time:RETURN_TIME",
        prediction="double",
    ),
    "profile": KindParts(
        "presage.predictors.profile.predictor:ProfilePredictor",
        "presage.report.profile:document",
        "presage.cli.profile:PROFILE",
    ),
    "router": KindParts(
        "presage.predictors.router.predictor:RouterPredictor",
        "presage.report.router:document",
        "presage.cli.router:ROUTER",
        reads_prompts=True,
        most_bytes=4 << 30,  # with a transformer
    ),
}
"""All kinds of predictor, by the name in artefacts and commands. Whatever depends on the kind is found here."""
