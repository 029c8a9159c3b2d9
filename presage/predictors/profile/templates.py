"""Prompt-composition templates of a workflow type: how the next prompt of each agent begins, exactly or not at all.

A template stands for a context: the agent, which agent ran before it and how often in a row, and whether the agent has
run before in this workflow. The most specific context with enough tasks counts, if its template foresees more on
held-out prompts than that of the next wider context. Half of its tasks, the earlier ones, are learnt from, the later
ones check: a template is used up to the first gap, or to the first segment that held-out tasks contradict.

A stem is text of the application. By default only its length and digest are kept, and its text is taken from the first
prompt of the agent that is observed while serving; the digest of a short stem can be guessed. What all learning and
held-out tasks share counts as static: a date that never changed in the traces, for example, if more text follows it.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from presage.errors import ArtefactError, ConfigurationError, InputError
from presage.predictors.profile.composition import (
    RANKS,
    Case,
    PromptSegment,
    PromptSource,
    PromptStep,
    WorkflowTexts,
    common,
    compose,
    decoded,
    digest,
    piece_of,
)
from presage.wording import counted

FORMAT: Final = "presage-prompt-templates"
FORMAT_VERSION: Final = 1

MOST_REPEATS: Final = 8
MOST_EARLIER: Final = 2
PROMPTS_PER_TASK: Final = 4
"""Prompts of a task in a learning sample."""
CHECKED_BEHIND_GAPS: Final = 500
"""Held-out prompts on which segments behind a gap are checked: these cost a search and are never used to predict."""
SEEDS: Final = {"characters": 24, "tokens": 8}

Workflows = Iterable[tuple[str, Sequence[PromptStep]]]
"""The task and the steps of each workflow, in order of time."""


@dataclass(frozen=True)
class TemplateConfig:
    """What is learnt and used.

    Attributes:
        precision: share of held-out prompts that must begin as predicted.
        stem_share: share of tasks that must agree on a segment for it to be listed.
        min_tasks: learning tasks and held-out tasks that a template must have, each.
        learn_tasks: most tasks that one template is learnt from.
        keep_stems: whether texts of stems are kept, which are prompts of the application.
    """

    precision: float = 0.99
    stem_share: float = 0.9
    min_tasks: int = 5
    learn_tasks: int = 64
    keep_stems: bool = False

    def __post_init__(self) -> None:
        for name in ("precision", "stem_share"):
            if not 0.5 < getattr(self, name) <= 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; expected a share above .5, at most 1")
        if not 1 <= self.min_tasks <= self.learn_tasks:
            raise ConfigurationError(
                f"min_tasks is {self.min_tasks}, learn_tasks {self.learn_tasks}; expected 1 <= min_tasks <= learn_tasks"
            )


@dataclass(frozen=True, slots=True)
class PromptContext:
    """When a template holds; None: always.

    Attributes:
        agent: whose prompt it is.
        previous: the agent of the step before, "" at the beginning of a workflow.
        repeats: how many steps in a row the previous agent ran, at most `MOST_REPEATS`.
        earlier: earlier steps of the agent in the workflow, at most `MOST_EARLIER`.
    """

    agent: str
    previous: str | None = None
    repeats: int | None = None
    earlier: int | None = None


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """How prompts are composed in a context, with the number of tasks and prompts it was learnt from and checked on.

    `usable` leading segments, none of them a gap, are exact on held-out tasks.
    """

    context: PromptContext
    segments: tuple[PromptSegment, ...]
    usable: int
    tasks: int
    prompts: int

    def __str__(self) -> str:
        return " + ".join(map(str, self.segments))


class PredictedPrefix(NamedTuple):
    """The known beginning of the next prompt, in the form of the history; empty and not exact where none is known."""

    prefix: str | list[int]
    exact: bool


@dataclass(frozen=True)
class TemplateFigures:
    """How templates did, as sums; the shares are None where there is nothing to divide by.

    Attributes:
        prompts, predicted, exact: prompts, those with a predicted prefix, and those that begin with theirs.
        length, right: characters (tokens) of all prompts, and those in exact prefixes.
        new, right_new: the same of what no cache holds: behind the longest common prefix with an earlier prompt and its
            answer in the workflow.
    """

    prompts: int
    predicted: int
    exact: int
    length: int
    right: int
    new: int
    right_new: int

    @property
    def precision(self) -> float | None:
        """Share of predicted prefixes that the prompt begins with."""
        return _share(self.exact, self.predicted)

    @property
    def recall(self) -> float | None:
        """Predicted share of all prompts."""
        return _share(self.right, self.length)

    @property
    def recall_new(self) -> float | None:
        """Predicted share of what no cache holds."""
        return _share(self.right_new, self.new)


class PromptTemplates:
    """The templates of one workflow type.

    Attributes:
        unit: "characters" or "tokens"; None where no prompt was recorded.
        prompts, steps: recorded prompts among the steps learnt from.
    """

    def __init__(
        self, config: TemplateConfig, templates: Iterable[PromptTemplate], unit: str | None, prompts: int, steps: int
    ) -> None:
        self.config, self.unit, self.prompts, self.steps = config, unit, prompts, steps
        self.templates = {template.context: template for template in templates}
        self._of_agent: dict[str, list[PromptTemplate]] = defaultdict(list)
        self._stems: dict[str, str] = {}
        for template in self.templates.values():
            self._of_agent[template.context.agent].append(template)
            self._stems |= {s.digest: s.text for s in template.segments if s.digest and s.text is not None}

    @classmethod
    def fit(cls, workflows: Workflows, config: TemplateConfig | None = None) -> Self:
        """Learns from workflows of one type; raises InputError if some give texts and others token ids."""
        config = config or TemplateConfig()
        tasks: dict[str, int] = {}
        runs: list[tuple[int, WorkflowTexts]] = []
        for task, history in workflows:
            runs.append((tasks.setdefault(task, len(tasks)), WorkflowTexts.of(history)))
        units = {run.tokens for _, run in runs} - {None}
        if len(units) > 1:
            raise InputError("some workflows have texts, others token ids; give one form")
        unit = None if not units else "tokens" if units.pop() else "characters"
        cases: dict[PromptContext, list[tuple[int, WorkflowTexts, int]]] = defaultdict(list)
        prompts = 0
        for task_index, run in runs:
            for now, contexts in enumerate(_contexts(run)):
                if run.prompts[now]:
                    prompts += 1
                    for context in contexts:
                        cases[context].append((task_index, run, now))
        chosen: dict[PromptContext, PromptTemplate] = {}
        for context in sorted(cases, key=_width, reverse=True):
            wider = next((c for c in _wider(context) if c in cases), None)
            if wider is not None and len(cases[wider]) == len(cases[context]):
                continue
            rival = next((chosen[c] for c in _wider(context) if c in chosen), None)
            template = _learn(context, cases[context], rival, config, unit)
            if template is not None:
                chosen[context] = template
        steps = sum(len(run.agents) for _, run in runs)
        if not config.keep_stems:
            chosen = {
                context: replace(template, segments=tuple(replace(s, text=None) for s in template.segments))
                for context, template in chosen.items()
            }
        return cls(config, chosen.values(), unit, prompts, steps)

    @property
    def statement(self) -> str:
        """What these templates rest on, in a sentence."""
        if not self.prompts:
            return f"no prompt is recorded in {counted(self.steps, 'step')}: templates need texts or token ids"
        usable = sum(template.usable > 0 for template in self.templates.values())
        return (
            f"{counted(len(self.templates), 'template')} from {counted(self.prompts, 'prompt')} in "
            f"{counted(self.steps, 'step')}; {usable} with an exact prefix (precision at least {self.config.precision} "
            f"on at least {counted(self.config.min_tasks, 'held-out task')})"
        )

    def template_for(self, before: Sequence[str], agent: str) -> PromptTemplate | None:
        """The template of the next prompt, of `agent`, after steps of these agents; None if there is none."""
        run = WorkflowTexts.of([PromptStep(name, None, None) for name in before])
        fitting = (self.templates.get(context) for context in _contexts_at(run, len(before), agent))
        return next((template for template in fitting if template is not None), None)

    def predict(self, history: Sequence[PromptStep], agent: str) -> PredictedPrefix:
        """The longest beginning of the next prompt, of `agent`, that is known exactly.

        Args:
            history: the workflow's steps so far, the first one first, in the form (texts, token ids) learnt from.
        """
        run = WorkflowTexts.of(history)
        self._check_unit(run)
        prefix = self._predict(run, len(history), agent)
        return PredictedPrefix(decoded(prefix) if self.unit == "tokens" else prefix, bool(prefix))

    def observe(self, history: Sequence[PromptStep], step: PromptStep) -> None:
        """Takes the texts of stems from a prompt, where they were not kept; `history` as for `predict`."""
        run = WorkflowTexts.of([*history, step])
        self._check_unit(run)
        self._observe(run, len(history))

    def evaluate(self, workflows: Workflows) -> TemplateFigures:
        """Predicts each prompt of workflows from the steps before it, given its agent, and observes it then."""
        judge = type(self)(self.config, self.templates.values(), self.unit, self.prompts, self.steps)
        rows: list[tuple[int, int, int, int]] = []
        for _, steps in workflows:
            run = WorkflowTexts.of(steps)
            self._check_unit(run)
            earlier: list[str] = []
            for now, prompt in enumerate(run.prompts):
                if prompt is None:
                    continue
                prefix = judge._predict(run, now, run.agents[now])
                judge._observe(run, now)
                place = bisect_left(earlier, prompt)
                cached = max((common(prompt, 0, text, 0) for text in earlier[max(place - 1, 0) : place + 1]), default=0)
                rows.append((len(prompt), cached, len(prefix), common(prompt, 0, prefix, 0)))
                insort(earlier, prompt + (run.answers[now] or ""))
        length, cached_, foreseen, right = np.asarray(rows, np.int64).reshape(-1, 4).T
        used = np.where(foreseen == right, right, 0)
        return TemplateFigures(
            len(rows),
            int((foreseen > 0).sum()),
            int((used > 0).sum()),
            int(length.sum()),
            int(used.sum()),
            int((length - cached_).sum()),
            int(np.maximum(used - cached_, 0).sum()),
        )

    def to_json(self) -> dict[str, Any]:
        """Data only: numbers, names, digests, and texts of stems where the configuration keeps them."""
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "config": asdict(self.config),
            "unit": self.unit,
            "prompts": self.prompts,
            "steps": self.steps,
            "templates": [asdict(template) for template in self.templates.values()],
        }

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Raises ArtefactError for anything that `to_json` does not write."""
        if not isinstance(data, Mapping) or data.get("format") != FORMAT or data.get("version") != FORMAT_VERSION:
            raise ArtefactError(
                f"no {FORMAT} of version {FORMAT_VERSION}, the one version read; train the profile again"
            )
        try:
            _check_names(data, ("format", "version", "config", "unit", "prompts", "steps", "templates"))
            _check_names(data["config"], [field.name for field in fields(TemplateConfig)])
            _counts(data["config"], "min_tasks", "learn_tasks")
            _check(type(data["config"]["keep_stems"]) is bool, "keep_stems")
            config = TemplateConfig(**data["config"])
            _check(data["unit"] in (None, "characters", "tokens"), "unit")
            counts = _counts(data, "prompts", "steps")
            templates = [_unpacked(template, config) for template in data["templates"]]
            _check(len({template.context for template in templates}) == len(templates), "contexts, each once")
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ArtefactError(f"damaged {FORMAT}: {error}; train the profile again") from error
        return cls(config, templates, data["unit"], *counts)

    def _check_unit(self, run: WorkflowTexts) -> None:
        given = {None: None, False: "characters", True: "tokens"}[run.tokens]
        if given and self.unit and given != self.unit:
            raise InputError(f"a history of {given}; these templates are of {self.unit}")

    def _predict(self, run: WorkflowTexts, now: int, agent: str) -> str:
        template = next((self.templates[c] for c in _contexts_at(run, now, agent) if c in self.templates), None)
        if template is None or not template.usable:
            return ""
        segments = template.segments[: template.usable]
        if any(s.digest and s.digest not in self._stems for s in segments):
            own = [index for index in run.runs.get(agent, ()) if index < now and run.prompts[index]]
            if own:
                self._observe(run, own[-1])
        pieces = []
        for segment in segments:
            piece = piece_of(segment, run, now, self._stems.get(segment.digest or ""))
            if piece is None:
                break
            pieces.append(piece)
        return "".join(pieces)

    def _observe(self, run: WorkflowTexts, now: int) -> None:
        prompt = run.prompts[now] or ""
        for template in self._of_agent.get(run.agents[now], ()):
            position = 0
            for segment in template.segments[: template.usable]:
                piece = piece_of(segment, run, now, self._stems.get(segment.digest or ""))
                if piece is None and segment.digest:
                    piece = prompt[position : position + segment.length]
                    if digest(piece) != segment.digest:
                        break
                    self._stems[segment.digest] = piece
                if piece is None or not prompt.startswith(piece, position):
                    break
                position += len(piece)


def prompt_steps(rows: Iterable[Mapping[str, Any]]) -> list[PromptStep]:
    """The steps of a workflow from rows of a trace; a prompt is its `system_prompt` followed by its `input_text`."""
    steps = []
    for row in rows:
        system, text = row.get("system_prompt"), row.get("input_text")
        steps.append(PromptStep(row["agent"], None if text is None else (system or "") + text, row.get("output_text")))
    return steps


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _contexts_at(run: WorkflowTexts, now: int, agent: str) -> list[PromptContext]:
    """The contexts of a prompt, the narrowest first."""
    previous = run.agents[now - 1] if now else ""
    repeats = 0
    while repeats < min(now, MOST_REPEATS) and run.agents[now - 1 - repeats] == previous:
        repeats += 1
    earlier = min(bisect_left(run.runs.get(agent, []), now), MOST_EARLIER)
    narrowest = PromptContext(agent, previous, repeats, earlier)
    return [narrowest, *_wider(narrowest)]


def _contexts(run: WorkflowTexts) -> Iterable[list[PromptContext]]:
    return (_contexts_at(run, now, agent) for now, agent in enumerate(run.agents))


def _wider(context: PromptContext) -> list[PromptContext]:
    agent, previous, earlier = context.agent, context.previous, context.earlier
    all_wider = [PromptContext(agent, previous, None, earlier), PromptContext(agent, None, None, earlier)]
    return [*all_wider, PromptContext(agent)][_width(context) :]


def _width(context: PromptContext) -> int:
    return [context.previous, context.repeats, context.earlier].count(None)


_Case = tuple[int, WorkflowTexts, int]
"""The number of the task, the workflow, and the step whose prompt it is."""


def _learn(
    context: PromptContext,
    cases: list[_Case],
    rival: PromptTemplate | None,
    config: TemplateConfig,
    unit: str | None,
) -> PromptTemplate | None:
    """The template of a context; None if `rival`, of a wider context, does as well, or if there is nothing to say.

    The earlier half of the tasks is learnt from. Where they are too few, the rival's template remains as far as it is
    right.
    """
    present = sorted({task for task, _, _ in cases})
    boundary = present[(len(present) - 1) // 2]
    early = [case for case in cases if case[0] <= boundary]
    late = [case for case in cases if case[0] > boundary]
    by_task: dict[int, list[_Case]] = defaultdict(list)
    for case in early:
        by_task[case[0]].append(case)
    learnt = [list(by_task)[i] for i in _spread(len(by_task), config.learn_tasks)]
    enough = min(len(by_task), len({task for task, _, _ in late})) >= config.min_tasks
    if rival is not None and rival.usable:
        theirs, reached = _checked(rival.segments[: rival.usable], late if enough else cases)
        right = _leading([(s.precision or 0) >= config.precision or not s.held_out_tasks for s in theirs])
    if not enough:
        limited = rival is not None and rival.usable and right < rival.usable
        return replace(rival, context=context, usable=right) if rival is not None and limited else None
    sample = []
    for task in learnt:
        taken = [by_task[task][i] for i in _spread(len(by_task[task]), PROMPTS_PER_TASK)]
        sample += [Case(run, now, 1 / len(taken)) for _, run, now in taken]
    drafts = compose(sample, strict=config.precision, share=config.stem_share, seed=SEEDS[unit or "characters"])
    checked, exact = _checked(drafts, late)
    usable = _leading(
        [
            s.kind != "gap"
            and all(
                (checked.precision or 0) >= config.precision and checked.held_out_tasks >= config.min_tasks
                for checked in (s, own)
            )
            for s, own in zip(checked, _checked(drafts, early)[0], strict=True)
        ]
    )
    if rival is not None:
        ours = exact[:, usable - 1].mean() if usable else 0.0
        if not rival.usable:
            if not usable:
                return None
        elif right == rival.usable and ours <= 1.01 * reached[:, -1].mean():
            return None
    return PromptTemplate(context, tuple(checked), usable, len(learnt), len(cases))


def _leading(right: list[bool]) -> int:
    return [*right, False].index(False)


def _spread(number: int, most: int) -> list[int]:
    """At most `most` of the first `number` indices, evenly spread."""
    return np.unique(np.linspace(0, number - 1, min(number, most)).astype(int)).tolist() if number else []


def _checked(segments: Sequence[PromptSegment], cases: list[_Case]) -> tuple[list[PromptSegment], NDArray[np.int64]]:
    """Segments with their precision on cases, and int64 [cases, segments]: length of the prefix so far, 0 if wrong.

    Where a segment is unknown (no such step before), the prefix ends.
    """
    leading = _leading([segment.kind != "gap" for segment in segments])
    tasks = np.unique([task for task, _, _ in cases], return_inverse=True)[1]
    reached = np.zeros((len(cases), len(segments)), bool)
    right = np.zeros((len(cases), len(segments)), bool)
    prefix_length = np.zeros((len(cases), len(segments)), np.int64)
    for row, (_, run, now) in enumerate(cases):
        prompt, position, length = run.prompts[now] or "", 0, 0
        for column, segment in enumerate(segments):
            behind = column >= leading
            piece = "" if segment.kind == "gap" else piece_of(segment, run, now, segment.text)
            if piece is None or (behind and row >= CHECKED_BEHIND_GAPS):
                prefix_length[row, column:] = length if position >= 0 else 0
                break
            if position >= 0:
                place = (
                    prompt.find(piece, position) if behind else position if prompt.startswith(piece, position) else -1
                )
                position = place + len(piece) if place >= 0 else -1
            length += len(piece)
            reached[row, column], right[row, column] = True, position >= 0
            prefix_length[row, column] = length if position >= 0 else 0
    done = []
    for there, exact, segment in zip(reached.T, right.T, segments, strict=True):
        number = np.bincount(tasks[there])
        shares = np.bincount(tasks[there], exact[there])[number > 0] / number[number > 0]
        precision = min(float(exact[there].mean()), float(shares.mean())) if there.any() else None
        done.append(replace(segment, precision=precision, held_out_tasks=len(shares)))
    return done, prefix_length


def _unpacked(data: Any, config: TemplateConfig) -> PromptTemplate:
    _check_names(data, [field.name for field in fields(PromptTemplate)])
    _check_names(data["context"], [field.name for field in fields(PromptContext)])
    context = PromptContext(**data["context"])
    _check(isinstance(context.agent, str), "agent")
    _check(context.previous is None or isinstance(context.previous, str), "previous")
    _counts(data["context"], *(name for name in ("repeats", "earlier") if data["context"][name] is not None))
    segments = tuple(_unpacked_segment(segment, config) for segment in data["segments"])
    usable, tasks, prompts = _counts(data, "usable", "tasks", "prompts")
    _check(usable <= len(segments) and all(s.kind != "gap" for s in segments[:usable]), "usable")
    return PromptTemplate(context, segments, usable, tasks, prompts)


def _unpacked_segment(data: Any, config: TemplateConfig) -> PromptSegment:
    _check_names(data, [field.name for field in fields(PromptSegment)])
    source = data["source"]
    if source is not None:
        _check_names(source, [field.name for field in fields(PromptSource)])
        _check(source["step"] in RANKS and source["side"] in ("prompt", "answer"), "step and side")
        _check(1 <= _counts(source, "rank")[0] <= RANKS[source["step"]], "rank")
        _check(isinstance(source["agent"], str) == (source["step"] in ("last", "nth")), "agent of a source")
        source = PromptSource(**source)
    segment = PromptSegment(**{**data, "source": source})
    _counts(data, "length", "held_out_tasks")
    _check(0 <= data["support"] <= 1 and (data["precision"] is None or 0 <= data["precision"] <= 1), "shares")
    _check(type(data["start"]) is int and (data["end"] is None or type(data["end"]) is int), "range")
    _check(segment.kind in ("stem", "copy", "gap") and (segment.kind == "copy") == (source is not None), "kind")
    stem = segment.kind == "stem"
    _check(bool(re.fullmatch("[0-9a-f]{64}", segment.digest or "")) if stem else segment.digest is None, "digest")
    if segment.text is not None:
        of_stem = stem and config.keep_stems and len(segment.text) == segment.length
        _check(of_stem and digest(segment.text) == segment.digest, "text")
    return segment


def _check(right: bool, what: str) -> None:
    if not right:
        raise ValueError(f"wrong {what}")


def _check_names(data: Any, names: Sequence[str]) -> None:
    _check(isinstance(data, Mapping) and sorted(data) == sorted(names), f"names of fields; expected {', '.join(names)}")


def _counts(data: Mapping[str, Any], *names: str) -> list[int]:
    values = [data[name] for name in names]
    _check(all(type(value) is int and value >= 0 for value in values), f"count among {', '.join(names)}")
    return values
