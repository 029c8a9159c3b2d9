"""The profile of an application as a predictor: one profile a workflow type.

Pythia (§4.1) mines the traces of an application into a probabilistic automaton, a bounded regular expression and the
percentiles of its agents. The artefact has `profiles.json` with these, by workflow type, and, where prompts were
recorded, `templates.json` with how those of each agent begin (`templates.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from presage.datasets.schema.names import NO_NAMES, NameMapping
from presage.errors import ArtefactError, TraceError
from presage.features.agent_names import AgentNames
from presage.features.input_profiles import Sources
from presage.features.sequences import TypeSequences
from presage.features.vocabulary import Vocabulary
from presage.predictors.common import Progress
from presage.predictors.common.artefact import read_artefact, rebuilding, write_artefact
from presage.predictors.common.forecast import Source
from presage.predictors.common.steps import check_steps
from presage.predictors.profile.automaton import QUANTILES, LeftAtState, ProfilePlace
from presage.predictors.profile.profile import ProfileConfig, TypeProfile, profile_of
from presage.predictors.profile.templates import PromptTemplates, TemplateConfig, Workflows
from presage.predictors.profile.versions import application_of, latest_versions

KIND: Final = "profile"
PROFILES_FILE: Final = "profiles.json"
TEMPLATES_FILE: Final = "templates.json"


@dataclass(frozen=True)
class ProfileForecast:
    """What a profile says of a running workflow.

    Attributes:
        source: `champion`; `back-off` if the profile is not confident, or of another version, the state is rare, or the
            workflow has left the graph; `none` for an unknown workflow type, or an agent that no state has.
        workflow_type: whose profile it is, that of another version where the own type has none; "" if unknown.
        evidence: training visits of the state.
        state: its number in the automaton; None if unknown.
        on_graph: whether every step so far took a known edge.
        agents, end: probabilities of the next step.
        left: mean and quantiles of the steps that are left; empty if unknown.
        tokens: the same of the output tokens that are left, the last step's own included.
        distance: fewest steps to the end; None if unknown.
        expression: of the workflow type; "" if unknown.
    """

    source: Source
    workflow_type: str
    evidence: int
    state: int | None
    on_graph: bool
    agents: Mapping[str, float]
    end: float
    left: Mapping[str, float]
    tokens: Mapping[str, float]
    distance: int | None
    expression: str

    @property
    def prediction(self) -> str:
        """The likeliest next agent, or "END"; "" if nothing is known."""
        likeliest = max(self.agents, key=lambda agent: self.agents[agent], default="")
        return likeliest if self.agents.get(likeliest, 0.0) >= self.end and likeliest else "END" if self.end else ""

    def to_dict(self) -> dict[str, Any]:
        """As `presage forecast --json` prints it."""
        return {**vars(self), "agents": dict(self.agents), "left": dict(self.left), "tokens": dict(self.tokens)}


class ProfilePredictor:
    """The profiles of workflow types; create one with `fit` or `load`."""

    reads: Sources = frozenset()
    """It needs agents and their order alone."""
    profiles: dict[str, TypeProfile]
    templates: dict[str, PromptTemplates]
    """Of the workflow types with recorded prompts."""
    trained_on: NDArray[np.uint64]
    names: NameMapping = NO_NAMES
    """How names of workflow types and agents are folded before they are looked up."""
    agent_names: AgentNames | None = None
    """It learns no system prompts."""

    def __init__(self, config: ProfileConfig | None = None, seed: int = 0) -> None:
        self.config = config or ProfileConfig()
        self.seed = seed
        self.templates = {}

    def fit(
        self,
        sequences: Mapping[str, TypeSequences],
        *,
        prompts: Mapping[str, Workflows] | None = None,
        names: NameMapping = NO_NAMES,
        trained_on: NDArray[np.uint64] | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Profile each workflow type; raises TraceError without a workflow.

        Args:
            prompts: as `recorded_prompts` gives them, for templates.
            names: how the names in the sequences were folded.
            trained_on: the keys of the tasks.
        """
        if not sequences:
            raise TraceError("no workflow; a profile needs at least one")
        report = progress or (lambda _, __: None)
        self.trained_on = np.unique(trained_on) if trained_on is not None else np.zeros(0, np.uint64)
        self.profiles, self.templates, self.names = {}, {}, names
        wanted = prompts if prompts and self.config.templates else {}
        for number, (name, of_type) in enumerate(sequences.items()):
            report("profiling", number / len(sequences))
            self.profiles[name] = profile_of(of_type, self.config)
            if name in wanted:
                report("learning how prompts begin", number / len(sequences))
                self.templates[name] = self._learn_templates(wanted[name], self.profiles[name])
        return self

    def _learn_templates(self, workflows: Workflows, profile: TypeProfile) -> PromptTemplates:
        """The templates of the agents that are known by name: run numbers in names would give as many templates."""
        templates = PromptTemplates.fit(workflows, TemplateConfig(keep_stems=self.config.keep_stems))
        named = [
            template
            for template in templates.templates.values()
            if profile.alphabet.name(template.context.agent) == template.context.agent
        ]
        return PromptTemplates(templates.config, named, templates.unit, templates.prompts, templates.steps)

    @property
    def vocabulary(self) -> Vocabulary:
        """Workflow types and agents of the training traces."""
        agents = {agent for profile in self.profiles.values() for agent in profile.usage.agents}
        return Vocabulary(tuple(self.profiles), tuple(agents), names=self.names)

    def forecast(self, steps: Sequence[Mapping[str, Any]]) -> ProfileForecast:
        """What follows the given steps of one workflow, in order, keyed by column names of traces.

        `parent_steps` are read where present. Raises InputError for no step, steps of different workflows, or a step
        without an agent.
        """
        steps = check_steps(steps)
        name = self.described_by(steps[0]["workflow_type"])
        if name is None:
            return ProfileForecast("none", "", 0, None, False, {}, 0.0, {}, {}, None, "")
        profile, place = self.profiles[name], ProfilePlace()
        for index, step in enumerate(steps):
            parents = step.get("parent_steps")
            agent, waited = self.names.agent(step["agent"]), None if parents is None else tuple(parents)
            place = profile.automaton.step(place, agent, index, waited, profile.alphabet)
        return self.forecast_at(name, place, own=name == self.names.workflow_type(steps[0]["workflow_type"]))

    def described_by(self, workflow_type: str) -> str | None:
        """The workflow type whose profile describes this one: itself, else the latest version of its application."""
        name = self.names.workflow_type(workflow_type)
        return name if name in self.profiles else latest_versions(self.profiles).get(application_of(name))

    def forecast_at(self, name: str, place: ProfilePlace, own: bool = True) -> ProfileForecast:
        """The forecast at a place of the profile of a workflow type, its `own` or that of another version."""
        profile = self.profiles[name]
        if place.state is None:
            return ProfileForecast("none", name, 0, None, False, {}, 0.0, {}, {}, None, profile.text)
        state = profile.automaton.states[place.state]
        outcomes = profile.automaton.outcomes(place)
        return ProfileForecast(
            "champion" if own and self.sure(profile, place) else "back-off",
            name,
            state.visits,
            place.state,
            place.on_graph,
            {agent: p for agent, p in outcomes.items() if agent is not None},
            outcomes.get(None, 0.0),
            _by_name(state.left),
            _by_name(state.tokens),
            state.distance,
            profile.text,
        )

    def sure(self, profile: TypeProfile, place: ProfilePlace) -> bool:
        """Whether to act on a forecast there: the profile is confident, and the place on the graph and well known."""
        well_known = (
            place.state is not None and profile.automaton.states[place.state].visits >= self.config.min_evidence
        )
        return well_known and place.on_graph and profile.confident

    def save(self, folder: str | Path, training_data: Mapping[str, Any] | None = None) -> None:
        """Write the artefact: config.json, model.safetensors (keys of the training tasks) and the files named above."""
        files = {PROFILES_FILE: _packed({name: profile.to_dict() for name, profile in self.profiles.items()})}
        if self.templates:
            files[TEMPLATES_FILE] = _packed({name: templates.to_json() for name, templates in self.templates.items()})
        write_artefact(
            Path(folder),
            kind=KIND,
            config={
                "predictor": asdict(self.config),
                "seed": self.seed,
                **({"names": self.names.to_dict()} if self.names else {}),
            },
            tensors={"tasks": self.trained_on},
            training_data=training_data or {},
            files=files,
        )

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Load an artefact folder; raises ArtefactError unless it is a valid artefact of this kind."""
        artefact = read_artefact(Path(folder), kind=KIND)
        with rebuilding(folder, KIND):
            predictor = cls(ProfileConfig(**artefact.config["predictor"]), artefact.config["seed"])
            predictor.trained_on = artefact.tensors["tasks"].astype(np.uint64)
            if "names" in artefact.config:
                predictor.names = NameMapping.from_dict(artefact.config["names"])
            profiles = json.loads(artefact.files[PROFILES_FILE])
            predictor.profiles = {name: TypeProfile.from_dict(profile) for name, profile in profiles.items()}
            if TEMPLATES_FILE in artefact.files:
                templates = json.loads(artefact.files[TEMPLATES_FILE])
                predictor.templates = _templates_of(templates, predictor.profiles, Path(folder) / TEMPLATES_FILE)
        return predictor


def _by_name(left: LeftAtState | None) -> dict[str, float]:
    """Mean and quantiles; empty if unknown."""
    return {} if left is None else {"mean": left.mean, **dict(zip(map(str, QUANTILES), left.quantiles, strict=True))}


def _templates_of(data: Any, profiles: Mapping[str, Any], path: Path) -> dict[str, PromptTemplates]:
    if not isinstance(data, dict) or not data.keys() <= profiles.keys():
        raise ArtefactError(f"{path}: expected an object by workflow type, of {PROFILES_FILE}; train the profile again")
    try:
        return {name: PromptTemplates.from_json(templates) for name, templates in data.items()}
    except ArtefactError as error:
        raise ArtefactError(f"{path}: {error}") from error


def _packed(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True).encode()
