"""What may be prefilled for a workflow: its steps so far, how its agents are prompted, and what caches hold already.

Texts of running workflows are kept in memory, of those workflow types alone that have a usable template, and up to a
bound. Stems, forms of prompts and all else that is learnt from requests is a tenant's own, and apart for each salt of
the cache. Nothing is planned for an agent before two workflows have prompted it alike.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from presage.gateway.prefill.messages import (
    PlainMessage,
    PromptForm,
    StepMessages,
    Unmapped,
    form_of,
    messages_of,
    plain_messages,
    prompt_inputs,
    rendered,
)
from presage.predictors.profile.composition import PromptStep, common
from presage.predictors.profile.predictor import ProfilePredictor
from presage.predictors.profile.templates import MOST_EARLIER, PromptTemplates
from presage.serving_hooks.identity.request import ApiRequest
from presage.serving_hooks.workflows.identity import Step, tenant_of

LEAST_PROMPTS: Final = 2
"""Prompts of an agent, of different workflows, that must be alike."""
MOST_AGENTS: Final = 2000
"""Forms of prompts, and beginnings in caches, that are kept."""
FORMS_SHARE: Final = 4
"""Forms of prompts take at most one of so many parts of the memory, beside the texts of workflows."""
MOST_SCOPES: Final = 1000
MOST_STEPS: Final = 256
"""Of a workflow that is followed."""
LONGEST_BEGINNING: Final = 20_000
"""Characters of an agent's latest prompt that may be in a cache for its next one."""
LOWEST_PRIORITY: Final = 2**31 - 1

NotPlanned = Literal[
    "workflow not followed", "too few prompts of the agent alike", "server unknown", "beginning unknown",
    "little is new", Unmapped,
]  # fmt: skip

_Scope = tuple[str, str | None]
"""Workflow type with its tenant, and salt of the cache."""


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """A beginning of a prompt to prefill.

    Attributes:
        agent: whose prompt it is, as the profile calls it.
        characters, new_characters: of the beginning, and those that no cache is known to hold.
    """

    workflow: str
    stats_key: str
    agent: str
    upstream: str
    messages: tuple[PlainMessage, ...] = field(repr=False)
    inputs: Mapping[str, Any] = field(repr=False)
    salt: str | None = field(repr=False)
    characters: int
    new_characters: int

    def body(self) -> dict[str, Any]:
        """The request: one token, after all others, and the last message left open, so that the beginning is one."""
        salted = {} if self.salt is None else {"cache_salt": self.salt}
        return {
            **self.inputs,
            **salted,
            "messages": [message._asdict() for message in self.messages],
            "max_tokens": 1,
            "temperature": 0,
            "add_generation_prompt": False,
            "continue_final_message": True,
            "priority": LOWEST_PRIORITY,
        }

    def begins(self, request: ApiRequest) -> bool:
        """Whether the prompt of a request begins so."""
        messages = plain_messages(request.body)
        if messages is None or len(messages) < len(self.messages):
            return False
        *whole, last = self.messages
        real = messages[len(whole)]
        return (
            list(messages[: len(whole)]) == whole
            and (real.role, real.content[: len(last.content)]) == last
            and prompt_inputs(request.body) == self.inputs
            and _salt(request) == self.salt
        )


@dataclass(slots=True)
class _FollowedStep:
    request_id: str
    step: StepMessages
    prompt: str | None
    inputs: Mapping[str, Any]
    salt: str | None
    upstream: str = ""

    def prompt_step(self) -> PromptStep:
        return PromptStep(self.step.agent, self.prompt, self.step.answer)


@dataclass(slots=True)
class _FollowedRun:
    """A running workflow with all its steps so far."""

    workflow_type: str
    tenant: str
    steps: list[_FollowedStep] = field(default_factory=list)
    characters: int = 0

    def earlier(self) -> list[StepMessages]:
        return [followed.step for followed in self.steps]


@dataclass(slots=True)
class _AgentForm:
    form: PromptForm
    workflow: str


@dataclass(frozen=True, slots=True)
class _ScopedTemplates:
    """Templates with the stems that were seen in one scope."""

    source: PromptTemplates
    own: PromptTemplates


class PrefillPlanner:
    """Plans for running workflows.

    Args:
        profile: the champion, if there is one.
        most_characters: of texts of workflows that are kept; beyond it the least recently active workflow of the tenant
            with the most is followed no more.
    """

    def __init__(self, profile: Callable[[], ProfilePredictor | None], most_characters: int) -> None:
        self._profile, self._most = profile, most_characters
        self._runs: OrderedDict[str, _FollowedRun] = OrderedDict()
        self._characters: Counter[str] = Counter()
        self._form_characters = 0
        self._forms: OrderedDict[tuple[_Scope, str, int], _AgentForm] = OrderedDict()
        self._begun: OrderedDict[tuple[_Scope, str, str], tuple[Mapping[str, Any], str]] = OrderedDict()
        self._templates: OrderedDict[_Scope, _ScopedTemplates] = OrderedDict()

    def arrived(self, request_id: str, step: Step, request: ApiRequest, first: bool) -> None:
        """A request of a workflow has arrived; `first`: the workflow begins with it."""
        run = self._runs.get(step.workflow)
        if run is None:
            if not first or self._source(step.workflow_type) is None:
                return
            run = self._runs[step.workflow] = _FollowedRun(step.workflow_type, tenant_of(step.workflow_id))
        self._runs.move_to_end(step.workflow)
        messages = plain_messages(request.body) if request.endpoint == "chat" else None
        system, text = request.texts
        prompt = None if text is None else (system or "") + text
        made = StepMessages(self.agent(step.agent), messages)
        run.steps.append(_FollowedStep(request_id, made, prompt, prompt_inputs(request.body), _salt(request)))
        self._grow(run, 2 * len(prompt or ""))
        if len(run.steps) > MOST_STEPS or run.characters > self._most:
            self.ended(step.workflow)
        while self._characters.total() > self._most:
            largest = max(self._characters, key=lambda tenant: self._characters[tenant])
            self.ended(next(workflow for workflow, followed in self._runs.items() if followed.tenant == largest))

    def answered(self, request_id: str, step: Step, answer: str | None, upstream: str) -> None:
        """A request was answered by a server; None if it was not, or its answer is unknown."""
        run = self._runs.get(step.workflow)
        place = (
            next((index for index, followed in enumerate(run.steps) if followed.request_id == request_id), None)
            if run
            else None
        )
        if run is None or place is None:
            return
        done = run.steps[place]
        done.step, done.upstream = replace(done.step, answer=answer), upstream
        self._grow(run, len(answer or ""))
        scope = step.stats_key, done.salt
        templates = self._scoped(scope, run.workflow_type)
        if templates is not None and done.prompt is not None:
            templates.observe([followed.prompt_step() for followed in run.steps[:place]], done.prompt_step())
        if done.step.messages is not None and answer is not None:
            self._learn(scope, step.workflow, run, place)

    def plan(
        self, step: Step, request: ApiRequest, agent: str, home: Callable[[str], str | None]
    ) -> PrefillPlan | NotPlanned:
        """What to prefill for a workflow whose next step is of `agent`, as forecasts call it.

        Args:
            step, request: the latest, which has been answered.
            home: the server of the workflow's next request to a model; None if it is not known.
        """
        run, agent = self._runs.get(step.workflow), self.agent(agent)
        scope = step.stats_key, _salt(request)
        templates = None if run is None else self._scoped(scope, run.workflow_type)
        if run is None or templates is None:
            return "workflow not followed"
        times = min(sum(followed.step.agent == agent for followed in run.steps), MOST_EARLIER)
        agent_form = self._forms.get((scope, agent, times))
        if agent_form is None or agent_form.form.prompts < LEAST_PROMPTS:
            return "too few prompts of the agent alike"
        upstream = home(str(agent_form.form.inputs.get("model", "")))
        if upstream is None:
            return "server unknown"
        prefix = templates.predict([followed.prompt_step() for followed in run.steps], agent)
        if not prefix.exact or not isinstance(prefix.prefix, str):
            return "beginning unknown"
        messages = messages_of(prefix.prefix, agent_form.form, run.earlier())
        if isinstance(messages, str):
            return messages
        whole = rendered(messages, open_=True)
        cached = max(
            (common(whole, 0, text, 0) for text in self._cached(scope, run, agent_form, agent, upstream)), default=0
        )
        return PrefillPlan(
            step.workflow,
            step.stats_key,
            agent,
            upstream,
            tuple(messages),
            agent_form.form.inputs,
            scope[1],
            len(whole),
            len(whole) - cached,
        )

    def agent(self, name: str) -> str:
        """An agent as the profile calls it."""
        profile = self._profile()
        return name if profile is None else profile.names.agent(name)

    def ended(self, workflow: str) -> None:
        """A workflow has ended, or is followed no more: its texts are dropped."""
        run = self._runs.pop(workflow, None)
        if run is not None:
            self._characters[run.tenant] -= run.characters
            if not self._characters[run.tenant]:
                del self._characters[run.tenant]

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {"followed workflows": len(self._runs), "forms of prompts": len(self._forms)}

    def _cached(self, scope: _Scope, run: _FollowedRun, agent_form: _AgentForm, agent: str, upstream: str) -> list[str]:
        """What the cache of a server holds, as far as it is known: prompts of the workflow with their answers, and the
        agent's latest prompt there."""
        inputs, salt = agent_form.form.inputs, scope[1]
        texts = []
        for followed in run.steps:
            if followed.step.messages and (followed.upstream, followed.inputs, followed.salt) == (
                upstream,
                inputs,
                salt,
            ):
                answer = [PlainMessage("assistant", followed.step.answer)] if followed.step.answer else []
                texts.append(rendered([*followed.step.messages, *answer]))
        begun = self._begun.get((scope, agent, upstream))
        return [*texts, begun[1]] if begun is not None and begun[0] == inputs else texts

    def _learn(self, scope: _Scope, workflow: str, run: _FollowedRun, place: int) -> None:
        done = run.steps[place]
        agent, messages, earlier = (
            done.step.agent,
            done.step.messages or (),
            [followed.step for followed in run.steps[:place]],
        )
        key = scope, agent, min(sum(step.agent == agent for step in earlier), MOST_EARLIER)
        form, agent_form = form_of(messages, done.inputs, earlier), self._forms.get(key)
        if agent_form is not None:
            form = agent_form.form.joined(form)
            if agent_form.workflow == workflow and form.prompts > 1:
                form = replace(form, prompts=agent_form.form.prompts)
        self._form_characters += form.characters - (0 if agent_form is None else agent_form.form.characters)
        self._forms[key] = _AgentForm(form, workflow)
        self._forms.move_to_end(key)
        while len(self._forms) > MOST_AGENTS or self._form_characters > self._most // FORMS_SHARE:
            self._form_characters -= self._forms.popitem(last=False)[1].form.characters
        self._begun[scope, agent, done.upstream] = done.inputs, rendered(messages)[:LONGEST_BEGINNING]
        _shorten(self._begun, (scope, agent, done.upstream), MOST_AGENTS)

    def _grow(self, run: _FollowedRun, characters: int) -> None:
        run.characters += characters
        self._characters[run.tenant] += characters

    def _source(self, workflow_type: str) -> PromptTemplates | None:
        """The templates of a workflow type, if one is usable."""
        profile = self._profile()
        templates = None if profile is None else profile.templates.get(profile.names.workflow_type(workflow_type))
        usable = (
            templates is not None
            and templates.unit == "characters"
            and any(template.usable for template in templates.templates.values())
        )
        return templates if usable else None

    def _scoped(self, scope: _Scope, workflow_type: str) -> PromptTemplates | None:
        source = self._source(workflow_type)
        if source is None:
            return None
        scoped = self._templates.get(scope)
        if scoped is None or scoped.source is not source:
            own = PromptTemplates(source.config, source.templates.values(), source.unit, source.prompts, source.steps)
            scoped = self._templates[scope] = _ScopedTemplates(source, own)
        _shorten(self._templates, scope, MOST_SCOPES)
        return scoped.own


def _salt(request: ApiRequest) -> str | None:
    salt = request.body.get("cache_salt")
    return salt if isinstance(salt, str) else None


def _shorten(table: OrderedDict[Any, Any], used: object, most: int) -> None:
    """Drops the least recently used entry of a table that is too long."""
    table.move_to_end(used)
    if len(table) > most:
        table.popitem(last=False)
