"""A plan's file from a workflow profile: what the traces show, written in operators for a person to edit.

The profile's expression gives calls, fan-outs, loops and branches, its templates the prompts, and percentiles the
lengths. What traces do not show is a function marked EDIT: when a loop is over (until then it runs its bound), which
branch is taken (until then it raises NotImplementedError), and what fills the gaps of a prompt.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from presage.errors import ConfigurationError
from presage.predictors.profile.composition import PromptSegment, PromptSource
from presage.predictors.profile.expression import (
    Expression,
    OneStep,
    ParallelSteps,
    RepeatedSteps,
    StepChain,
    StepChoice,
    names,
    text,
)
from presage.predictors.profile.profile import TypeProfile
from presage.predictors.profile.templates import PromptTemplates

MOST_ROUNDS: Final = 25
"""Of a loop in a plan, which is written out when it is compiled."""
_TASK: Final = "task"
_LEAST_TOKENS: Final = 16
_HEAD: Final = '''"""The plan of {name}, written from the profile of {workflows} recorded workflows.

    {expression}

Edit it: functions marked EDIT hold what traces do not show. Rows need the field {task!r}: what a workflow is asked.
System prompts and messages are one text here, as the traces joined them.
"""

from presage.batch import Plan, branch, call, function, given, join, loop, map_each, template
'''


def plan_file(name: str, profile: TypeProfile, templates: PromptTemplates | None, *, prompts: bool = True) -> str:
    """The text of a plan's file.

    Args:
        name: of the workflow type.
        templates: with the texts of stems (`keep_stems`); None: the profile has none.
        prompts: False: prompts are left to write, each the answer before it.

    Raises:
        ConfigurationError: the profile has no texts of prompts.
    """
    if prompts:
        _check_texts(name, templates)
    writer = _Writer(profile, templates if prompts else None)
    last = writer.write(profile.expression, _Place())
    head = _HEAD.format(name=name, workflows=profile.workflows, expression=profile.text, task=_TASK)
    made = [*writer.functions, *writer.lines, "", f"plan = Plan({name!r}, answer={last.value})", ""]
    return head + "\n" + "\n".join(made)


def _check_texts(name: str, templates: PromptTemplates | None) -> None:
    stems = [] if templates is None else [s for t in templates.templates.values() for s in t.segments if s.digest]
    why = ""
    if templates is None:
        why = "learnt no prompts: traces with input_text are needed, and --set keep_stems=true"
    elif templates.unit == "tokens":
        why = "knows prompts as token ids: traces with texts (input_text) are needed"
    elif any(stem.text is None for stem in stems):
        why = "keeps no texts of prompts: learn it again with --set keep_stems=true"
    if why:
        raise ConfigurationError(f"the profile of {name!r} {why}; or write the prompts yourself (--without-prompts)")


@dataclass(frozen=True)
class _Step:
    """A call before the place that is written: names of its prompt and its answer; "" where none can be named."""

    agent: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class _Place:
    """What can be named at a place of the file.

    Attributes:
        value: the answer before it; "" at the beginning.
        steps: before it.
        item: of the `map_each` around it.
        depth: of functions around it.
    """

    value: str = ""
    steps: tuple[_Step, ...] = ()
    item: str = ""
    depth: int = 0

    @property
    def before(self) -> str:
        """The value before, as an argument."""
        return self.value or f'given("{_TASK}")'


@dataclass
class _Writer:
    profile: TypeProfile
    templates: PromptTemplates | None
    lines: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)

    def write(self, of: Expression, place: _Place) -> _Place:
        """Write a part of the expression; the place behind it."""
        match of:
            case OneStep(agent):
                return self._call(agent, place)
            case StepChain(parts):
                for part in parts:
                    place = self.write(part, place)
                return place
            case ParallelSteps():
                return self._parallel(of, place)
            case StepChoice(options):
                return self._choice(options, place)
            case RepeatedSteps(body, 0, 1):
                asked = self._function(f"whether_{_first(body)}_runs", "answer", text(body), raises=True)
                then = self.write(body, place)
                made = f"branch(function({asked}, {place.before}), {then.value}, {place.before})"
                return self._joined(made, place, [_Step(_agents(body)[-1], "", "")])
            case RepeatedSteps(body, low, high):
                return self._loop(body, low, high, place)

    def _call(self, agent: str, place: _Place) -> _Place:
        answer = self._name(agent)
        prompt = self._name(f"{agent}_prompt")
        self._line(place, f"{prompt} = {self._prompt(agent, place)}")
        self._line(place, f"{answer} = call({agent!r}, {prompt}{self._lengths(agent)})")
        return replace(place, value=answer, steps=(*place.steps, _Step(agent, prompt, answer)))

    def _lengths(self, agent: str) -> str:
        tokens = self.profile.numbers.get(agent, {}).get("output_tokens")
        if tokens is None:
            return ""
        median, _, most = tokens.values
        return f", max_tokens={max(_LEAST_TOKENS, math.ceil(most))}, output_tokens={median:.0f}"

    def _prompt(self, agent: str, place: _Place) -> str:
        """The operator of a prompt: the agent's template, with what its gaps and copies are here."""
        template = None
        if self.templates is not None:
            template = self.templates.template_for([step.agent for step in place.steps], agent)
        if template is None:
            return f'template("{{before}}", before={place.item or place.before})'
        texts: list[str] = []
        values: dict[str, str] = {}
        gaps = 0
        for segment in template.segments:
            if segment.kind == "stem":
                texts.append((segment.text or "").replace("{", "{{").replace("}", "}}"))
                continue
            gaps += segment.kind == "gap"
            value = self._filled(agent, segment, place, gaps)
            key = f"part{len(values) + 1}"
            values[key] = value
            texts.append(f"{{{key}}}")
        pieces = " ".join(map(repr, "".join(texts).splitlines(keepends=True))) or "''"
        given = "".join(f", {key}={value}" for key, value in values.items())
        return f"template({pieces}{given})"

    def _filled(self, agent: str, segment: PromptSegment, place: _Place, gap: int) -> str:
        """What fills a copy or a gap."""
        if segment.source is not None:
            named = _named(segment.source, place.steps)
            if named and (segment.start, segment.end) == (0, None):
                return named
            if named:
                end = "" if segment.end is None else segment.end
                return f"function(lambda text: text[{segment.start}:{end}], {named})"
            what = f"the {segment.source}, which cannot be named here"
        elif not place.steps:
            return f'given("{_TASK}")' if gap == 1 else f'given("{_TASK}_{gap}")'
        elif place.item:
            return place.item
        else:
            what = f"about {segment.length} characters that differ from workflow to workflow"
        filler = self._function(f"{agent}_part", "answer", what, returns='""')
        return f"function({filler}, {place.before})"

    def _parallel(self, parallel: ParallelSteps, place: _Place) -> _Place:
        bounds = f"in the traces {parallel.low} to {parallel.high} of {', '.join(parallel.agents)} run at once"
        steps: list[_Step] = []
        if len(parallel.agents) == 1:
            (agent,) = parallel.agents
            over = self._function(f"parts_for_{agent}", "answer", f"a list; {bounds}", returns="[answer]")
            body, item = self._name(f"each_{agent}"), self._name("part")
            self._line(place, "")
            self._line(place, f"def {body}({item}):")
            inner = self._call(agent, replace(place, item=item, depth=place.depth + 1))
            self._line(inner, f"return {inner.value}")
            self._line(place, "")
            steps.append(_Step(agent, "", ""))
            made = f"map_each(function({over}, {place.before}), {body})"
        else:
            self._line(place, f"# EDIT: {bounds}; here each runs once")
            for agent in parallel.agents:
                steps.append(self._call(agent, place).steps[-1])
            made = f"[{', '.join(step.answer for step in steps)}]"
        return self._joined(f"join({made})", place, steps)

    def _choice(self, options: Sequence[Expression], place: _Place) -> _Place:
        written = [(option, self.write(option, place)) for option in options]
        made = written[-1][1].value
        for option, then in reversed(written[:-1]):
            asked = self._function(f"whether_{_first(option)}_runs", "answer", text(option), raises=True)
            made = f"branch(function({asked}, {place.before}), {then.value}, {made})"
        return self._joined(made, place, [_Step(_agents(options[0])[-1], "", "")])

    def _loop(self, body: Expression, low: int, high: int, place: _Place) -> _Place:
        """The body as a function of the answer before; of an earlier round nothing else can be named."""
        called, before = self._name(f"round_of_{_first(body)}"), self._name("before")
        earlier = [_Step(agent, "", "") for agent in _agents(body)]
        earlier[-1] = replace(earlier[-1], answer=before)
        self._line(place, "")
        self._line(place, f"def {called}({before}):  # {text(body)}: {low} to {high} times in the traces")
        inside = replace(place, value=before, steps=(*place.steps, *earlier), depth=place.depth + 1)
        end = self.write(body, inside)
        self._line(end, f"return {end.value}")
        self._line(place, "")
        least, most = min(low, MOST_ROUNDS), min(high, MOST_ROUNDS)
        value = self._name(f"after_{called}")
        self._line(place, f"{value} = {place.before}")
        if least:
            self._line(place, f"for _ in range({least}):")
            self._line(replace(place, depth=place.depth + 1), f"{value} = {called}({value})")
        if most > least:
            bound = most - least
            done = self._function(f"{called}_is_done", "answer", f"when to stop before {bound} more", returns="False")
            self._line(place, f"{value} = loop({value}, {called}, until={done}, at_most={bound})")
        steps = (*place.steps, *earlier[:-1], replace(earlier[-1], answer=value))
        return replace(place, value=value, steps=steps)

    def _joined(self, made: str, place: _Place, steps: Sequence[_Step]) -> _Place:
        """What was made of several calls, under a name of its own; where one of them ran, its answer is that."""
        value = self._name("answer")
        self._line(place, f"{value} = {made}")
        with_answers = [step if step.answer or len(steps) > 1 else replace(step, answer=value) for step in steps]
        return replace(place, value=value, steps=(*place.steps, *with_answers))

    def _function(self, wanted: str, argument: str, what: str, *, returns: str = "", raises: bool = False) -> str:
        name = self._name(wanted)
        body = f'raise NotImplementedError("{name}")' if raises else f"return {returns}"
        note = f"whether this comes next: {what}" if raises else what
        self.functions += ["", f"def {name}({argument}):", f"    # EDIT: {' '.join(note.split())}", f"    {body}", ""]
        return name

    def _name(self, wanted: str) -> str:
        plain = re.sub(r"\W+", "_", wanted).strip("_") or "agent"
        plain = f"agent_{plain}" if plain[0].isdigit() or keyword.iskeyword(plain) or plain in _IMPORTED else plain
        name, number = plain, 1
        while name in self.taken:
            number += 1
            name = f"{plain}_{number}"
        self.taken.add(name)
        return name

    def _line(self, place: _Place, line: str) -> None:
        self.lines.append(("    " * place.depth + line).rstrip())


_IMPORTED: Final = frozenset(
    ["Plan", "branch", "call", "function", "given", "join", "loop", "map_each", "template", "plan"]
)


def _named(source: PromptSource, steps: Sequence[_Step]) -> str:
    """The name of an earlier text; "" if it has none here."""
    of_agent = [step for step in steps if step.agent == source.agent]
    choose: dict[str, Callable[[], _Step]] = {
        "first": lambda: steps[0],
        "back": lambda: steps[-source.rank],
        "last": lambda: of_agent[-source.rank],
        "nth": lambda: of_agent[source.rank - 1],
    }
    try:
        step = choose[source.step]()
    except IndexError:
        return ""
    return step.prompt if source.side == "prompt" else step.answer


def _agents(expression: Expression) -> list[str]:
    """Agents of an expression in their order, one round of each loop, the first of each choice."""
    match expression:
        case OneStep(agent):
            return [agent]
        case ParallelSteps(agents):
            return list(agents)
        case StepChain(parts):
            return [agent for part in parts for agent in _agents(part)]
        case StepChoice(options):
            return _agents(options[0])
        case RepeatedSteps(body):
            return _agents(body)


def _first(expression: Expression) -> str:
    return _agents(expression)[0] if names(expression) else "nothing"
