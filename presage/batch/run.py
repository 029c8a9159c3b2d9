"""Runs a plan over rows on OpenAI-compatible servers, and goes on where it was stopped.

Calls that are ready wait for a free place at their engine, in the order of the plan's schedule. Every answer is written
down before its value is used, so a run that was killed asks for nothing twice; a row's results are written once.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import heapq
import json
import re
import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx

from presage.batch.answers import Answers, ModelAnswer, content_key
from presage.batch.operators import Call, CallingProgram, Conditional, EachItem, Given, MapEach, RowFailedError
from presage.batch.plan import Node, Plan, as_text, evaluated, valid_text, what_and_where
from presage.batch.prefix_tree import field_tokens
from presage.batch.rows import row_id
from presage.batch.rows_under_way import RowsUnderWay
from presage.batch.schedule import SoftOrder
from presage.client import AGENT_HEADER, ID_HEADER, TYPE_HEADER
from presage.errors import ConfigurationError, EngineError, InputError, OutputError, PresageError
from presage.serving_hooks.engine_metrics import read_engine_load

_AGAIN: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_OPEN_ROWS: Final = 1000
_EVICTS: Final = re.compile(rb'^presage_policy_on\{[^}]*policy="eviction"[^}]*\} 1(\.0)?\s*$', re.MULTILINE)
"""The line of an engine whose hooks evict blocks of ended workflows first."""
_LONGEST_PAUSE_S: Final = 30.0
_UNFINISHED: Final = frozenset({"content_filter", "error", "abort", "cancelled", "tool_calls", "function_call"})
_RUN_FILE: Final = "run.db"
_LOCK: Final = ".lock"

Place = tuple[int, ...]
"""Where a call stands among the ready ones; the least goes first."""
Scope = tuple[tuple[str, int, Any], ...]
"""The items around an operator, outermost first: key of the item, position in its list, value."""


@dataclass(frozen=True)
class RunSettings:
    """How a plan runs.

    Attributes:
        concurrency: calls at each engine at a time.
        open_rows: rows under way at each engine. None: as many as its cache holds (`RowsUnderWay`), if it tells its
            size, as vLLM does; else 1,000.
        attempts: of a call that the engine does not take, or that does not reach it.
        timeout_s: for one answer.
        model: of calls that name none; "": the only one that an engine serves.
        tenant: whose answers the cache may serve.
        api_key: "": none is sent.
    """

    concurrency: int = 256
    open_rows: int | None = None
    attempts: int = 6
    timeout_s: float = 600.0
    model: str = ""
    tenant: str = ""
    api_key: str = ""

    def check(self) -> None:
        """Raise ConfigurationError if a field is out of range."""
        for name, value in asdict(self).items():
            if isinstance(value, int | float) and value <= 0:
                raise ConfigurationError(f"{name} is {value}; more than 0 is wanted")


@dataclass
class RunReport:
    """What a run did.

    Attributes:
        kept: rows with results of an earlier try.
        asked: answers that engines made in this try.
        known: answers from this run's file, from the cache, or asked for by another row just then.
        prompt_tokens, cached_tokens, output_tokens: of the answers that engines made.
        tokens_saved: prompt and output tokens of the answers that were known.
        truncated: answers that engines made in this try and that reached `max_tokens`.
        empty: answers that engines made in this try and that are empty texts.
        evicted: answers of this run that did not fit into the cache.
        failed: rows without a result; their errors are in the results.
        failures: of these, how many by the kind of their error.
    """

    rows: int = 0
    kept: int = 0
    failed: int = 0
    asked: int = 0
    truncated: int = 0
    empty: int = 0
    evicted: int = 0
    known: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    tokens_saved: int = 0
    failures: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class _Engine:
    """A server.

    Attributes:
        free: calls that it takes more.
        cache_tokens: that its cache holds; 0: unknown.
        ended_go_first: it evicts blocks of ended workflows before others.
        waiting: calls.
        left: rank and number of its rows that have not begun.
        rows, under_way, most_under_way: all of its rows; those that have begun and not ended, and how many may be.
        ends: it takes requests to end workflows.
    """

    url: str
    free: int
    models: dict[str, str] = field(default_factory=dict)
    cache_tokens: int = 0
    ended_go_first: bool = False
    left: deque[tuple[int, int]] = field(default_factory=deque)
    rows: int = 0
    under_way: int = 0
    most_under_way: int = 0
    waiting: list[tuple[Place, int, asyncio.Future[None]]] = field(default_factory=list)
    ends: bool = True

    def next(self) -> None:
        """Let calls go that wait for a free place."""
        while self.free and self.waiting:
            _, _, future = heapq.heappop(self.waiting)
            if not future.cancelled():
                self.free -= 1
                future.set_result(None)


@dataclass(frozen=True)
class _Request:
    """What an engine is asked.

    Attributes:
        body: of the chat completion, with model and messages.
        place: among the ready calls.
        sample: what tells it from others that say the same; None: they have one answer.
        call: structural hash of the plan's call; "" if a program asks.
    """

    agent: str
    body: Mapping[str, Any]
    place: Place
    sample: list[Any] | None
    call: str = ""

    @property
    def whole(self) -> bool:
        """Whether the answer is kept as the engine's whole JSON, for a program; else as its text."""
        return not self.call


@dataclass
class _RunProgress:
    """The share of a run that is done, which answers make as well as rows: a plan may end all of its rows at its end.

    Attributes:
        calls: expected of a row; 1 where nobody knows.
        answers: of rows that have not ended, at most `calls` of each.
    """

    report: Callable[[str, float | None], None]
    rows: int
    calls: int
    done: int = 0
    answers: int = 0

    def answered(self, count: int) -> None:
        """A row has so many answers."""
        self.answers += count <= self.calls
        self._tell()

    def ended(self, count: int) -> None:
        """A row with so many answers has ended."""
        self.done += 1
        self.answers -= min(count, self.calls)
        self._tell()

    def _tell(self) -> None:
        self.report("running", (self.done + self.answers / self.calls) / self.rows)


class BatchRun:
    """One run of a plan, in a folder of its own.

    Args:
        rows: each with the fields that the plan reads; `id` names it, else its number does.
        folder: of the run; what is there already is kept.
        order: of rows and calls; None: as they come.
        cache: answers of other runs.
        transport: of the HTTP client, for tests.

    Raises:
        ConfigurationError: the folder holds a run of another plan or other rows, or with another model.
        OutputError: nothing can be written there.
    """

    def __init__(
        self,
        plan: Plan,
        rows: Sequence[Mapping[str, Any]],
        engines: Sequence[str],
        folder: Path,
        *,
        order: SoftOrder | None = None,
        settings: RunSettings | None = None,
        cache: Answers | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.plan, self.rows, self.settings = plan, rows, settings or RunSettings()
        self.name = folder.resolve().name
        self.settings.check()
        self.report = RunReport(rows=len(rows))
        self._order = order or SoftOrder({}, range(len(rows)))
        self._under_way = RowsUnderWay(plan, field_tokens(plan, rows)) if order is not None else None
        self._cache, self._transport = cache, transport
        self._engines = [_Engine(url.rstrip("/").removesuffix("/v1"), self.settings.concurrency) for url in engines]
        if not self._engines:
            raise ConfigurationError("no engine to run on; give its address, such as http://127.0.0.1:8000")
        self._answers = Answers(folder / _RUN_FILE)
        try:
            self._results = Results(folder / _RUN_FILE, plan, rows, self.settings.model)
        except ConfigurationError:
            self._answers.close()
            raise
        self._asked: dict[str, asyncio.Task[ModelAnswer]] = {}
        self._programs = any(isinstance(node.operator, CallingProgram) for node in plan.nodes)
        self._progress: _RunProgress | None = None
        self._context = copy_context()
        self._number = 0

    async def run(self, progress: Callable[[str, float | None], None] | None = None) -> RunReport:
        """Compute what is missing; raises EngineError if an engine is not there or goes away."""
        if self._programs:  # their synchronous code waits for answers in threads
            threads = ThreadPoolExecutor(len(self._engines) * self.settings.concurrency)
            asyncio.get_running_loop().set_default_executor(threads)
        done = self._results.done()
        self.report.kept = len(done)
        left = [number for number in self._order.rows if number not in done]
        headers = {"authorization": f"Bearer {self.settings.api_key}"} if self.settings.api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=1000)
        async with httpx.AsyncClient(
            headers=headers, timeout=self.settings.timeout_s, limits=limits, transport=self._transport
        ) as self._client:
            if left:
                await asyncio.gather(*map(self._meet, self._engines))
            self._share_out(left)
            going_on = True
            if progress is not None:
                self._progress = _RunProgress(progress, len(left), max(len(self.plan.calls), 1))

            async def work(engine: _Engine) -> None:
                nonlocal going_on
                try:
                    while engine.under_way <= engine.most_under_way and (taken := self._taken(engine)):
                        rank, number = taken
                        name = await self._row(number, rank, engine)
                        if self._under_way is not None and self._under_way.ended(name):
                            self._begin()
                except BaseException:
                    going_on = False
                    raise
                finally:
                    engine.under_way -= 1

            try:
                async with asyncio.TaskGroup() as group:

                    def begin() -> None:
                        for engine in self._engines if going_on else ():
                            engine.most_under_way = self._open_rows(engine, len(left))
                            while engine.under_way < engine.most_under_way:
                                engine.under_way += 1
                                group.create_task(work(engine))

                    self._begin = begin
                    begin()
            except ExceptionGroup as errors:  # one of each row that was under way
                raise errors.exceptions[0] from None
            finally:
                left_over = list(self._asked.values())
                for task in left_over:
                    task.cancel()
                await asyncio.gather(*left_over, return_exceptions=True)
        return self.report

    def results(self) -> Iterator[dict[str, Any]]:
        """Every row's outputs, or its error, in the order of the rows."""
        return self._results.all()

    def close(self) -> None:
        """Close the run's file."""
        self._answers.close()
        self._results.close()

    def _share_out(self, left: list[int]) -> None:
        """Rank and number of the rows of each engine: neighbours, since they begin alike."""
        for rank, number in enumerate(left):
            engine = self._engines[rank * len(self._engines) // len(left)]
            engine.left.append((rank, number))
            engine.rows += 1

    def _taken(self, engine: _Engine) -> tuple[int, int] | None:
        """The next row of an engine; one that has no more takes the last ones of another."""
        if engine.left:
            return engine.left.popleft()
        most = max(self._engines, key=lambda other: len(other.left))
        return most.left.pop() if most.left else None

    def _open_rows(self, engine: _Engine, rows: int) -> int:
        fit = None
        if engine.cache_tokens and self._under_way is not None:
            fit = self._under_way.that_fit(engine.cache_tokens, engine.rows, ended_go_first=engine.ended_go_first)
        return min(self.settings.open_rows or fit or _OPEN_ROWS, rows)

    async def _meet(self, engine: _Engine) -> None:
        """Ask an engine for its models; what it says of one is the model's version in the cache."""
        try:
            answer = await self._client.get(f"{engine.url}/v1/models", timeout=30)
            answer.raise_for_status()
            served = answer.json()["data"]
            engine.models = {model["id"]: str(model.get("root") or "") for model in served}
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise EngineError(
                f"{engine.url}: no OpenAI-compatible server answers there ({type(error).__name__}); give its address"
            ) from None
        try:
            page = await self._client.get(f"{engine.url}/metrics", timeout=30)
            load = read_engine_load(page.content) if page.is_success else None
            engine.ended_go_first = _EVICTS.search(page.content) is not None
        except (httpx.HTTPError, InputError):
            load = None
        engine.cache_tokens = (load.cache_tokens if load is not None else None) or 0
        if missing := [name for name in self._named() if name not in engine.models]:
            raise EngineError(f"{engine.url}: it does not serve {missing[0]!r}; it serves {', '.join(engine.models)}")
        if len(engine.models) != 1 and not self.settings.model and not all(call.model for call in self._calls()):
            models = ", ".join(engine.models) or "no model"
            raise EngineError(f"{engine.url}: it serves {models}; name the one for calls that name none")

    def _calls(self) -> list[Call]:
        return [node.operator for node in self.plan.calls if isinstance(node.operator, Call)]

    def _named(self) -> list[str]:
        return sorted({name for name in (self.settings.model, *(call.model for call in self._calls())) if name})

    async def _row(self, number: int, rank: int, engine: _Engine) -> str:
        """Compute a row, and write down its results; its name at the engine."""
        row = _Row(self, number, rank, engine)
        try:
            values = await asyncio.gather(*(row.value(node, ()) for node in self.plan.outputs.values()))
            self._results.put(number, dict(zip(self.plan.outputs, values, strict=True)), None)
        except RowFailedError as error:
            self._failed(number, str(error), error.kind)
        except PresageError:
            raise
        except Exception as error:  # of a value of the plan's; the other rows go on
            kind = f"{type(error).__name__} in this row"
            self._failed(number, f"{kind}{what_and_where(error)}", kind)
        finally:
            row.end()
        if self._progress is not None:
            self._progress.ended(row.answers)
        await self._ended(row)
        return row.name

    def _failed(self, number: int, error: str, kind: str) -> None:
        self.report.failed += 1
        self.report.failures[kind] = self.report.failures.get(kind, 0) + 1
        self._results.put(number, None, error)

    async def _ended(self, row: _Row) -> None:
        """Tell an engine with our hooks that the workflow has ended; another one is asked once only."""
        if row.engine.ends and row.calls:
            path = f"/v1/workflows/{quote(row.name, safe='')}/end?workflow_type={quote(self.plan.name, safe='')}"
            try:
                answer = await self._client.post(row.engine.url + path, timeout=30)
                row.engine.ends = answer.is_success
            except httpx.HTTPError:
                row.engine.ends = False

    async def answered(self, row: _Row, node: Node, scope: Scope, messages: list[dict[str, str]]) -> str:
        """The answer of a call: a known one, or the engine's."""
        call = node.operator
        assert isinstance(call, Call)
        model = call.model or self.settings.model or next(iter(row.engine.models))
        body = {"model": model, "messages": messages, **call.parameters}
        sample = None if call.deterministic else [row.name, node.key, [place for _, place, _ in scope]]
        place = self._order.place(row.number, row.rank, node.key)
        return (await self._answer(row, _Request(call.agent, body, place, sample, node.key))).text

    async def answered_program(
        self, row: _Row, node: Node, agent: str, body: Mapping[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        """The answer to a request of a program, as `Ask`: what the engine refuses is for the program to judge.

        Raises:
            EngineError: the engine does not serve the model, or went away.
        """
        if (model := body.get("model")) not in row.engine.models:
            served = ", ".join(row.engine.models)
            raise EngineError(f"{row.engine.url}: {agent} asks {model!r}; it serves {served}")
        sample = None
        if body.get("temperature") != 0:  # servers sample where none is given
            said = json.dumps([agent, body], sort_keys=True)
            sample = [row.name, node.key, agent, row.samples[said]]
            row.samples[said] += 1
        if self._under_way is not None:
            self._under_way.asked(row.name, body["messages"])
        try:
            answer = await self._answer(row, _Request(agent, body, (0, row.rank, 0), sample))
        except RowFailedError as refused:
            return refused.status, {"error": {"message": str(refused)}}
        whole: dict[str, Any] = json.loads(answer.text)
        return 200, whole

    async def _answer(self, row: _Row, request: _Request) -> ModelAnswer:
        answer = await self._known_or_asked(row, request)
        row.answers += 1
        if self._progress is not None:
            self._progress.answered(row.answers)
        return answer

    async def _known_or_asked(self, row: _Row, request: _Request) -> ModelAnswer:
        parameters = {name: value for name, value in request.body.items() if name not in ("model", "messages")}
        model, messages = request.body["model"], request.body["messages"]
        key = content_key(self.settings.tenant, model, row.engine.models[model], parameters, messages)
        if request.whole or request.sample is not None:
            own = [key, *(["whole"] if request.whole else []), *(request.sample or [])]
            key = hashlib.sha256(json.dumps(own).encode()).hexdigest()
        cache = self._cache if request.sample is None else None
        if (answer := self._answers.get(key)) is None and cache is not None:
            answer = cache.get(key)
            if answer is not None:
                self._answers.put(key, answer)
        if answer is None and key not in self._asked:
            asking = self._ask(row, request, key)
            task = self._asked[key] = asyncio.get_running_loop().create_task(asking, context=self._context)
            task.add_done_callback(_retrieved)
            task.add_done_callback(lambda _: self._asked.pop(key))
            return await asyncio.shield(task)  # another row may wait for it, so it goes on if this one fails
        if answer is None:
            answer = await asyncio.shield(self._asked[key])
        self.report.known += 1
        self.report.tokens_saved += answer.prompt_tokens + answer.output_tokens
        return answer

    async def _ask(self, row: _Row, request: _Request, key: str) -> ModelAnswer:
        engine = row.engine
        await self._place(engine, request.place)
        names = {TYPE_HEADER: self.plan.name, ID_HEADER: row.name, AGENT_HEADER: request.agent}
        headers = {name: quote(valid_text(value), safe="") for name, value in names.items()}
        headers["content-type"] = "application/json"
        try:
            said = await self._sent(engine, request, headers)
        finally:
            engine.free += 1
            engine.next()
        row.calls += 1
        usage = said.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        counts = int(usage.get("prompt_tokens") or 0), int(cached), int(usage.get("completion_tokens") or 0)
        choice = said["choices"][0]
        report = self.report
        report.asked += 1
        report.truncated += choice.get("finish_reason") == "length"
        report.prompt_tokens += counts[0]
        report.cached_tokens += counts[1]
        report.output_tokens += counts[2]
        text = json.dumps(said) if request.whole else answer_text(choice, request.agent)
        report.empty += not text
        answer = ModelAnswer(text, *counts)
        self._answers.put(key, answer)
        if request.sample is None and self._cache is not None:
            report.evicted += self._cache.put(key, answer)
        if self._under_way is not None and self._under_way.answered(
            request.call, answer.prompt_tokens, answer.output_tokens
        ):
            self._begin()
        return answer

    async def _sent(self, engine: _Engine, request: _Request, headers: dict[str, str]) -> dict[str, Any]:
        """The engine's answer; a call that it does not take now is sent again, later and later."""
        content = valid_text(json.dumps(request.body, ensure_ascii=False)).encode()
        for attempt in range(1, self.settings.attempts + 1):
            pause = min(2.0 ** (attempt - 1), _LONGEST_PAUSE_S)
            try:
                answer = await self._client.post(f"{engine.url}/v1/chat/completions", content=content, headers=headers)
            except httpx.HTTPError as error:
                if attempt == self.settings.attempts:
                    raise EngineError(
                        f"{engine.url}: it does not answer ({type(error).__name__}); "
                        "all answers are kept: run the same command to go on"
                    ) from None
            else:
                if answer.is_success:
                    try:
                        said: dict[str, Any] = answer.json()
                        said["choices"][0]["message"].get("content")
                    except (ValueError, LookupError, TypeError, AttributeError):
                        kind = f"call of {request.agent}: the answer is no chat completion"
                        raise RowFailedError(f"{kind}: {_reason(answer)}", kind=kind) from None
                    return said
                if answer.status_code not in _AGAIN or attempt == self.settings.attempts:
                    kind = f"call of {request.agent}: HTTP {answer.status_code}"
                    raise RowFailedError(f"{kind}: {_reason(answer)}", answer.status_code, kind=kind)
                with_header = answer.headers.get("retry-after", "")
                pause = min(float(with_header), _LONGEST_PAUSE_S) if with_header.isdigit() else pause
            await asyncio.sleep(pause)
        raise AssertionError(attempt)

    async def _place(self, engine: _Engine, place: Place) -> None:
        """Wait for a free place, in the order of places."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._number += 1
        heapq.heappush(engine.waiting, (place, self._number, future))
        engine.next()
        await future


class _Row:
    """The values of one row's operators, each computed once, and only if something asks for it."""

    def __init__(self, run: BatchRun, number: int, rank: int, engine: _Engine) -> None:
        self.run, self.number, self.rank, self.engine = run, number, rank, engine
        self.row = run.rows[number]
        # Unique to the run, at an engine that forecasts.
        self.name = valid_text(f"{run.name}/{row_id(self.row, number)}")
        self.calls = self.answers = 0
        self.samples: Counter[str] = Counter()  # how often a program asked the same
        self._values: dict[tuple[str, Place], asyncio.Task[Any]] = {}

    async def value(self, node: Node, scope: Scope) -> Any:
        """The value of an operator."""
        seen = tuple(entry for entry in scope if entry[0] in node.items)
        key = node.key, tuple(place for _, place, _ in seen)
        if key not in self._values:
            self._values[key] = asyncio.ensure_future(self._computed(node, seen))
            self._values[key].add_done_callback(_retrieved)
        return await self._values[key]

    def end(self) -> None:
        """Stop what nothing waits for any more: the other calls of a row that has failed."""
        for task in self._values.values():
            task.cancel()

    async def _computed(self, node: Node, scope: Scope) -> Any:
        match node.operator:
            case Given(name):
                if name not in self.row:
                    raise RowFailedError(f"the row has no field {name!r}, which the plan reads")
                return self.row[name]
            case EachItem():
                return next(value for item, _, value in scope if item == node.key)
            case Conditional():
                condition = await self.value(node.parts[0], scope)
                return await self.value(node.parts[1 if condition else 2], scope)
            case MapEach():
                over, each_item, body = node.parts
                items = await self.value(over, scope)
                if not isinstance(items, list | tuple):
                    raise RowFailedError(f"map_each: a list is wanted; came {type(items).__name__}")
                each = [self.value(body, (*scope, (each_item.key, place, item))) for place, item in enumerate(items)]
                return list(await asyncio.gather(*each))
            case Call(_, messages):
                texts = await asyncio.gather(*(self.value(part, scope) for part in node.parts))
                said = [
                    {"role": role, "content": as_text(text)} for (role, _), text in zip(messages, texts, strict=True)
                ]
                return await self.run.answered(self, node, scope, said)
            case CallingProgram(names, _, run):
                texts = await asyncio.gather(*(self.value(part, scope) for part in node.parts))
                ask = partial(self.run.answered_program, self, node)
                return await run(dict(zip(names, texts, strict=True)), ask)
            case operator:
                values = await asyncio.gather(*(self.value(part, scope) for part in node.parts))
                return evaluated(operator, list(values))


class Results:
    """The results of a run's rows in its SQLite file, each written once."""

    def __init__(self, path: Path, plan: Plan, rows: Sequence[Mapping[str, Any]], model: str) -> None:
        self._lock = (path.parent / _LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the end of the process, also by a kill
        except OSError:
            self._lock.close()
            raise ConfigurationError(f"{path.parent}: another run works in this folder; wait for its end") from None
        self._file = sqlite3.connect(path, timeout=30, isolation_level=None)
        self._ids: list[Any] = []
        self._outputs = list(plan.outputs)
        lines = hashlib.sha256()
        for number, row in enumerate(rows):
            self._ids.append(row_id(row, number))
            lines.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        said = json.dumps([plan.key, lines.hexdigest(), model])
        self._file.execute("CREATE TABLE IF NOT EXISTS run (said TEXT PRIMARY KEY)")
        self._file.execute("CREATE TABLE IF NOT EXISTS results (row INTEGER PRIMARY KEY, outputs TEXT, error TEXT)")
        earlier = self._file.execute("SELECT said FROM run").fetchone()
        if earlier is not None and earlier[0] != said:
            if self._file.execute("SELECT 1 FROM results WHERE error IS NULL").fetchone():
                self.close()
                raise ConfigurationError(
                    f"{path.parent} holds a run of another plan or other rows, or with another --model; "
                    "give another folder, or delete it"
                )
            self._file.execute("DELETE FROM run")  # without a result: its engine was not there, or all rows failed
        self._file.execute("INSERT OR IGNORE INTO run VALUES (?)", (said,))
        self._file.execute("DELETE FROM results WHERE error IS NOT NULL")  # they are tried again

    def done(self) -> set[int]:
        """Rows that have results."""
        return {row for (row,) in self._file.execute("SELECT row FROM results")}

    def put(self, row: int, outputs: dict[str, Any] | None, error: str | None) -> None:
        """Write down a row's outputs, or its error; raises RowFailedError if an output is no JSON value."""
        try:
            said = None if outputs is None else valid_text(json.dumps(outputs, ensure_ascii=False))
        except (TypeError, ValueError, RecursionError) as problem:
            raise RowFailedError(f"an output is no JSON value ({problem})", kind="an output is no JSON value") from None
        try:
            error = None if error is None else valid_text(error)
            self._file.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?)", (row, said, error))
        except sqlite3.Error as problem:
            raise OutputError(f"results cannot be kept ({problem}); run the same command to go on") from None

    def all(self) -> Iterator[dict[str, Any]]:
        """All rows in order: id, outputs, error."""
        missing = dict.fromkeys(self._outputs)
        for row, said, error in self._file.execute("SELECT row, outputs, error FROM results ORDER BY row"):
            yield {"id": self._ids[row], **(missing if said is None else json.loads(said)), "error": error}

    def close(self) -> None:
        """Close the file, and leave the folder to others."""
        self._file.close()
        self._lock.close()


def _retrieved(task: asyncio.Task[Any]) -> None:
    """Look at a task's error, so that none is reported that a row's first one stands for."""
    if not task.cancelled():
        task.exception()


def answer_text(choice: Mapping[str, Any], agent: str) -> str:
    """The text of an answer, which may come in parts.

    Raises:
        RowFailedError: it has none, or not all of it: it asks for a tool, was refused or filtered, or ended unfinished.
    """
    message, reason = choice["message"], choice.get("finish_reason")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        refused = message.get("refusal") or any(part.get("refusal") for part in parts)
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        content = "".join(texts) if texts else None
    else:
        refused = message.get("refusal")
    if refused:
        why = "the model refused"
    elif message.get("tool_calls") or message.get("function_call"):
        why = "an answer that calls a tool, which a batch has not"
    elif reason in _UNFINISHED:
        why = f"an answer that ended unfinished (finish_reason {reason})"
    elif not isinstance(content, str) or (not content and reason == "length"):
        thought = reason == "length" and (message.get("reasoning_content") or message.get("reasoning"))
        why = f"an answer without text (finish_reason {reason})"
        why += "; its tokens went into reasoning: raise max_tokens" if thought else ""
    else:
        return valid_text(content)
    raise RowFailedError(f"call of {agent}: {why}")


def _reason(answer: httpx.Response) -> str:
    """What a server says of an error, shortly."""
    try:
        said = answer.json()
        said = said.get("error", said)
        text = str(said.get("message") if isinstance(said, dict) else said)
    except (ValueError, AttributeError):
        text = answer.text
    return text[:300]
