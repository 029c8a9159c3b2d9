"""How prompts are composed: an ordered list of static stems, copies of earlier texts of the workflow, and gaps.

Source: Pythia, section 4.1 (`prompt_composition`: which request, its prompt or its answer, which range), which gives no
method. Ours: all prompts of a sample are read from the left at once. At each position the longest literal that nearly
all tasks share competes with the longest range of an earlier prompt or answer, found by a seed of a few characters,
named relative to the step and extended until tasks disagree. Where neither goes on, a gap follows, up to the next place
where one does. Shares are of tasks, never of texts: an identifier that recurs within one workflow is no static part.

Token ids are read as the characters of a string, so that searching and comparing run in C. Cost is linear in the length
of the sampled prompts and of the few earlier texts in `WINDOW`; a conversation that grows is compared with its previous
prompt alone. Copies of rearranged or rewritten text (a summary, other white space) are gaps.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np

from presage.errors import InputError

PromptText = str | Sequence[int]
"""A text, or its token ids."""

WINDOW: Final = (4, 12)
"""Steps at the beginning of the workflow, and before the prompt, whose texts are searched."""
RANKS: Final = {"last": 4, "first": 1, "nth": 8, "back": 4}
"""The highest rank of a source, the most telling kinds first."""
PROBES: Final = 12
MOST_SEGMENTS: Final = 24
MOST_GAPS: Final = 4
LONGEST_STEM: Final = 50_000
LOOK_AHEAD: Final = 20_000
"""Characters or tokens after a gap that are searched for its end."""
_SURROGATES: Final = 0xD800
_SHIFT: Final = 0x800
_DATED: Final = re.compile(r"(?:\S*\d\S*\s*)+\Z")


class PromptStep(NamedTuple):
    """A step of a workflow: its agent, its whole prompt and its answer, both texts or both token ids; None: unknown."""

    agent: str
    prompt: PromptText | None
    answer: PromptText | None


@dataclass(frozen=True, slots=True)
class PromptSource:
    """An earlier text of the workflow, named relative to the prompt that is composed.

    Attributes:
        step: "first" of the workflow, "back" by `rank` steps, "last" but `rank` - 1 of `agent`, or "nth" of `agent`.
        side: the prompt of that step, or its answer.
        rank: from 1.
    """

    step: Literal["first", "back", "last", "nth"]
    side: Literal["prompt", "answer"]
    rank: int = 1
    agent: str | None = None

    def __str__(self) -> str:
        whose = f" of {self.agent}" if self.agent is not None else ""
        named = {"first": "first", "back": f"{self.rank} back", "last": "last", "nth": f"number {self.rank}"}[self.step]
        return f"{named}{f' but {self.rank - 1}' if self.step == 'last' and self.rank > 1 else ''} {self.side}{whose}"


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """A part of a template.

    Attributes:
        kind: "stem" (static), "copy" or "gap" (unknown).
        length: characters or tokens; of copies and gaps the median.
        support: share of the learning tasks whose prompts match the template up to here.
        precision: share of held-out prompts whose beginning, up to here, is exact (after a gap: that contain the
            segments in order); the lower of the mean over steps and over tasks. None: no held-out prompt got here.
        held_out_tasks: tasks behind `precision`.
        digest: of a stem, SHA-256.
        text: of a stem, if it is kept.
        source, start, end: of a copy, the range `[start:end]` as in Python; end None: to the end.
    """

    kind: Literal["stem", "copy", "gap"]
    length: int
    support: float
    precision: float | None = None
    held_out_tasks: int = 0
    digest: str | None = None
    text: str | None = None
    source: PromptSource | None = None
    start: int = 0
    end: int | None = None

    def __str__(self) -> str:
        if self.kind != "copy":
            return f"{self.kind} {self.length}"
        part = "" if (self.start, self.end) == (0, None) else f"[{self.start}:{'' if self.end is None else self.end}]"
        return f"{self.source}{part}"


@dataclass(slots=True)
class WorkflowTexts:
    """The texts of a workflow as strings, and where each agent ran."""

    agents: list[str]
    prompts: list[str | None]
    answers: list[str | None]
    runs: dict[str, list[int]]
    tokens: bool | None

    @classmethod
    def of(cls, steps: Sequence[PromptStep]) -> Self:
        """Raises InputError for texts beside token ids, and for ids that no vocabulary has."""
        texts = [text for step in steps for text in step[1:] if text is not None]
        kinds = {not isinstance(text, str) for text in texts}
        if len(kinds) > 1:
            raise InputError("a workflow has texts and token ids; give all its prompts and answers in one form")
        runs: dict[str, list[int]] = {}
        for index, step in enumerate(steps):
            runs.setdefault(step.agent, []).append(index)
        prompts, answers = [encoded(step.prompt) for step in steps], [encoded(step.answer) for step in steps]
        return cls([step.agent for step in steps], prompts, answers, runs, kinds.pop() if kinds else None)

    def text(self, source: PromptSource, now: int) -> str | None:
        """What a source is for the prompt of step `now`."""
        if source.step in ("first", "back"):
            index = 0 if source.step == "first" else now - source.rank
            runs_before = 0 <= index < now
        else:
            runs = self.runs.get(source.agent or "", [])
            earlier = bisect_left(runs, now)
            place = earlier - source.rank if source.step == "last" else source.rank - 1
            runs_before = 0 <= place < earlier
            index = runs[place] if runs_before else 0
        return (self.prompts if source.side == "prompt" else self.answers)[index] if runs_before else None

    def earlier_texts(self, now: int) -> Iterator[tuple[int, Literal["prompt", "answer"], str]]:
        """The texts in the window before step `now`."""
        for index in range(now):
            if index < WINDOW[0] or index >= now - WINDOW[1]:
                if prompt := self.prompts[index]:
                    yield index, "prompt", prompt
                if answer := self.answers[index]:
                    yield index, "answer", answer

    def names(self, index: int, side: Literal["prompt", "answer"], now: int) -> Iterator[PromptSource]:
        """All sources that are step `index` for step `now`."""
        agent = self.agents[index]
        runs = self.runs[agent]
        place, earlier = bisect_left(runs, index), bisect_left(runs, now)
        if earlier - place <= RANKS["last"]:
            yield PromptSource("last", side, earlier - place, agent)
        if index == 0:
            yield PromptSource("first", side)
        if place < RANKS["nth"]:
            yield PromptSource("nth", side, place + 1, agent)
        if now - index <= RANKS["back"]:
            yield PromptSource("back", side, now - index)


@dataclass(slots=True)
class Case:
    """A prompt of the sample, read up to `at`."""

    workflow: WorkflowTexts
    now: int
    weight: float
    at: int = 0

    @property
    def prompt(self) -> str:
        """The whole prompt."""
        return self.workflow.prompts[self.now] or ""


def encoded(text: PromptText | None) -> str | None:
    """Text as it is; token ids as characters, the code points of surrogates left out."""
    if text is None or isinstance(text, str):
        return text
    ids = np.asarray(text, np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < 0x110000 - _SHIFT:
        raise InputError(f"token ids from {ids.min()} to {ids.max()}; expected 0 to {0x110000 - _SHIFT - 1}")
    return (ids + _SHIFT * (ids >= _SURROGATES)).astype("<u4").tobytes().decode("utf-32-le")


def decoded(text: str) -> list[int]:
    """The token ids of an encoded text."""
    points = np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.int64)
    ids: list[int] = (points - _SHIFT * (points >= _SURROGATES)).tolist()
    return ids


def digest(text: str) -> str:
    """SHA-256 of a stem."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def bounds(length: int, start: int, end: int | None) -> tuple[int, int] | None:
    """First and last index of a range of a text, or None where the text is too short for it."""
    first = start if start >= 0 else length + start
    last = length if end is None else end if end >= 0 else length + end
    return (first, last) if 0 <= first <= last <= length else None


def common(left: str, at: int, right: str, start: int) -> int:
    """Length of the longest common prefix of `left[at:]` and `right[start:]`."""
    most = min(len(left) - at, len(right) - start)
    low, size = 0, 64
    while (
        low < most and left[at + low : at + min(low + size, most)] == right[start + low : start + min(low + size, most)]
    ):
        low, size = min(low + size, most), size * 2
    high = min(low + size, most)
    while low < high:
        middle = (low + high + 1) // 2
        if left[at + low : at + middle] == right[start + low : start + middle]:
            low = middle
        else:
            high = middle - 1
    return max(low, 0)


def compose(cases: list[Case], *, strict: float, share: float, seed: int) -> list[PromptSegment]:
    """The template of prompts, stems with their texts.

    Args:
        cases: prompts, weighted so that each task counts alike.
        strict: share of tasks that agree on a segment; where none is so common, `share` must.
        seed: characters or tokens that two texts must have in common to be aligned.
    """
    total = _weight(cases)
    segments: list[PromptSegment] = []
    gaps = 0
    while not all(case.at >= len(case.prompt) for case in cases) and len(segments) < MOST_SEGMENTS:
        segment = _next(cases, strict, seed) or _next(cases, share, seed)
        if segment is not None:
            cases = _advance(cases, segment)
            if segment.kind == "copy" and segments[-1:] and segments[-1].kind == "stem":
                stem = segments.pop()
                shared, segment = _joined(stem, segment, cases)
                rest = (stem.text or "")[: stem.length - shared]
                segments += [replace(_stem_segment(rest), support=stem.support)] if rest else []
        else:
            left = [len(case.prompt) - case.at for case in cases]
            gaps += 1
            after = _resume(cases, share, seed) if gaps <= MOST_GAPS else []
            if after:
                left = [new.at - old.at for new, old in after]
                cases = [new for new, _ in after]
            segment = PromptSegment("gap", int(np.median(left)), 0)
            if not after:
                segments.append(replace(segment, support=_weight(cases) / total))
                break
        segments.append(replace(segment, support=_weight(cases) / total))
    return segments


def _weight(cases: list[Case]) -> float:
    return sum(case.weight for case in cases)


def _shared(values: Sequence[int], weights: Sequence[float], share: float) -> int:
    """The largest number that `share` of the weight reaches."""
    order = np.argsort(values)[::-1]
    reached = np.cumsum(np.asarray(weights, float)[order])
    return int(values[int(order[np.searchsorted(reached, share * reached[-1] - 1e-9)])])


def _next(cases: list[Case], share: float, seed: int) -> PromptSegment | None:
    """The longest segment at the cases' positions that `share` of the tasks agree on."""
    stem = _stem(cases, share)
    copy, length = _copy(cases, share, seed)
    if copy is not None and length > 1.01 * len(stem) and (length >= seed / 2 or (copy.start, copy.end) == (0, None)):
        return copy
    if stem and cases[0].workflow.tokens is False:
        after = _advance(cases, _stem_segment(stem))
        if any(case.at < len(case.prompt) for case in after) and _copy(after, share, seed)[0] is None:
            stem = _DATED.sub("", stem)  # what ends in a date or a number is likely to go on being one
    return _stem_segment(stem) if stem else None


def _stem_segment(stem: str) -> PromptSegment:
    return PromptSegment("stem", len(stem), 0, digest=digest(stem), text=stem)


def _stem(cases: list[Case], share: float) -> str:
    """The longest literal that `share` of the cases go on with: a beginning of their median, as more than half do."""
    tails = sorted(((case.prompt[case.at : case.at + LONGEST_STEM], case.weight) for case in cases), key=lambda t: t[0])
    weights = [weight for _, weight in tails]
    middle = tails[int(np.searchsorted(np.cumsum(weights), sum(weights) / 2))][0]
    return middle[: _shared([common(tail, 0, middle, 0) for tail, _ in tails], weights, share)]


def _probes(cases: list[Case]) -> list[Case]:
    return [cases[i] for i in np.unique(np.linspace(0, len(cases) - 1, PROBES).astype(int))]


def _copy(cases: list[Case], share: float, seed: int) -> tuple[PromptSegment | None, float]:
    """The copy at the cases' positions that is longest over all cases, and its mean length."""
    probes = _probes(cases)
    votes: Counter[tuple[PromptSource, int]] = Counter()
    for case in probes:
        anchor = case.prompt[case.at : case.at + seed]
        copies: set[tuple[PromptSource, int]] = set()
        for index, side, text in case.workflow.earlier_texts(case.now):
            starts = {text.find(anchor), text.rfind(anchor)} if len(anchor) == seed else {-1}
            if case.prompt.startswith(text, case.at):
                starts.add(0)
            for source in case.workflow.names(index, side, case.now) if max(starts) >= 0 else ():
                copies |= {(source, start) for start in starts if start >= 0}
                copies |= {(source, start - len(text)) for start in starts if start > 0}
        votes.update(copies)
    best, longest, most = None, 0.0, 0.0
    for (source, start), count in sorted(votes.items(), key=_most_telling)[:PROBES]:
        if count >= len(probes) / 2:
            segment, length = _range(cases, source, start, share)
            worth = length * (1.05 if segment is not None and (segment.start, segment.end) == (0, None) else 1)
            if worth > 1.01 * most:
                best, longest, most = segment, length, worth
    return best, longest


def _most_telling(vote: tuple[tuple[PromptSource, int], int]) -> tuple[Any, ...]:
    (source, start), count = vote
    return -count, list(RANKS).index(source.step), source.rank, source.agent or "", source.side, start < 0, start


def _range(cases: list[Case], source: PromptSource, start: int, share: float) -> tuple[PromptSegment | None, float]:
    """The longest range of a source from `start` on that `share` of the cases continue with, and its mean length."""
    front, back, lengths, weights = [], [], [], []
    for case in cases:
        text = case.workflow.text(source, case.now)
        if text is None:
            continue
        first = start if start >= 0 else len(text) + start
        fits = 0 <= first <= len(text)
        upto = first + common(case.prompt, case.at, text, first) if fits else 0
        front.append(upto)
        back.append(upto - len(text) if fits else -1_000_000_000)
        lengths.append(len(text))
        weights.append(case.weight)
    if sum(weights) < _weight(cases) / 2:
        return None, 0.0
    best, longest = None, 0.0
    for values, whole in ((back, 0), (front, None)):
        shared = _shared(values, weights, share)
        reaching = [(value, weight) for value, weight in zip(values, weights, strict=True) if value >= shared]
        if shared != whole and sum(w for v, w in reaching if v == shared) < sum(w for _, w in reaching) / 2:
            continue  # the least of values that vary, no place where the copy ends
        end = None if shared == whole else shared
        ranges = [bounds(length, start, end) for length in lengths]
        sizes = [last - first for first, last in filter(None, ranges) if last > first]
        if sum(sizes) / len(lengths) > 1.01 * longest:
            best = PromptSegment("copy", int(np.median(sizes)), 0, source=source, start=start, end=end)
            longest = sum(sizes) / len(lengths)
    return best, longest


def _joined(stem: PromptSegment, copy: PromptSegment, cases: list[Case]) -> tuple[int, PromptSegment]:
    """How much of a stem belongs to the copy behind it, and the copy that begins there.

    All texts that a copy draws on may begin alike, or follow the same wording: from the last line break on, that is no
    part of the stem.
    """
    before = stem.text or ""
    for case in cases:
        text = case.workflow.text(copy.source, case.now) if copy.source else None
        if text is not None:
            start = copy.start if copy.start >= 0 else len(text) + copy.start
            before = before[len(before) - common(before[::-1], 0, text[max(start - len(before), 0) : start][::-1], 0) :]
    if len(before) != copy.start:
        before = before.rpartition("\n")[2]
    return len(before), replace(copy, start=copy.start - len(before), length=copy.length + len(before))


def _advance(cases: list[Case], segment: PromptSegment) -> list[Case]:
    """The cases that go on with a segment, moved behind it."""
    moved = []
    for case in cases:
        piece = piece_of(segment, case.workflow, case.now, segment.text)
        if piece is not None and case.prompt.startswith(piece, case.at):
            moved.append(replace(case, at=case.at + len(piece)))
    return moved


def piece_of(segment: PromptSegment, workflow: WorkflowTexts, now: int, stem: str | None) -> str | None:
    """The text of a segment in the prompt of step `now`, or None if it is unknown."""
    if segment.source is None:
        return stem
    text = workflow.text(segment.source, now)
    if text is None or (range_ := bounds(len(text), segment.start, segment.end)) is None:
        return None
    return text[range_[0] : range_[1]]


def _resume(cases: list[Case], share: float, seed: int) -> list[tuple[Case, Case]]:
    """The cases behind a gap, where `share` of them have a literal or a whole earlier text, each with its old."""
    options = [_places_of_copy(cases, seed), _places_of_literal(cases, share, seed)]
    best: list[tuple[Case, Case]] = []
    nearest = float("inf")
    for places in options:
        moved = (
            [(replace(case, at=place), case) for case, place in zip(cases, places, strict=True) if place >= 0]
            if places
            else []
        )
        if moved and _weight([old for _, old in moved]) >= share * _weight(cases):
            mean = float(np.mean([new.at - old.at for new, old in moved]))
            if 0 < mean < nearest:
                best, nearest = moved, mean
    return best


def _places_of_copy(cases: list[Case], seed: int) -> list[int]:
    """Where the commonest whole copy of an earlier text is found in each case's rest (-1: nowhere)."""
    votes: Counter[tuple[PromptSource, int]] = Counter()
    for case in _probes(cases):
        for index, side, text in case.workflow.earlier_texts(case.now):
            if len(text) >= seed and case.prompt.find(text, case.at) >= 0:
                votes.update((source, 0) for source in case.workflow.names(index, side, case.now))
    if not votes:
        return []
    source = min(votes.items(), key=_most_telling)[0][0]
    texts = [case.workflow.text(source, case.now) for case in cases]
    return [case.prompt.find(text, case.at) if text else -1 for case, text in zip(cases, texts, strict=True)]


def _places_of_literal(cases: list[Case], share: float, seed: int) -> list[int]:
    """Where the first literal that `share` of the cases have in their rests begins in each (-1: nowhere)."""
    rests = [case.prompt[case.at : case.at + LOOK_AHEAD] for case in cases]
    model = sorted(rests, key=len)[len(rests) // 2]
    allowed = (1 - share) * _weight(cases) + 1e-9
    for start in range(0, len(model) - seed + 1, max(seed // 2, 1)):
        needle = model[start : start + seed]
        places, missing = [], 0.0
        for case, rest in zip(cases, rests, strict=True):
            places.append(rest.find(needle))
            missing += case.weight if places[-1] < 0 else 0.0
            if missing > allowed:
                break
        if missing <= allowed and max(places) > 0:
            left = 0  # the literal begins before the needle where all go back alike
            while (
                left < start
                and len(
                    {
                        rest[place - left - 1 : place - left]
                        for rest, place in zip(rests, places, strict=True)
                        if place >= 0
                    }
                )
                == 1
            ):
                left += 1
            return [case.at + place - left if place >= 0 else -1 for case, place in zip(cases, places, strict=True)]
    return []
