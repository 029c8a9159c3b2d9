"""The tool service: hears the events of workflows, prepares what they will need, and collects it at their end.

`planning.py` decides; this module carries it out: it starts and removes tools, and lets those wait that ask for one.

All state that must not be lost is in the database (`resources.py`): a tool is written there before it is started and
until it is gone, so that after a restart each is either used further or removed.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from presage.errors import ConfigurationError, OutputError, PresageError
from presage.serving_hooks.lifecycle.event import LifecycleEvent
from presage.tool_service.config import ToolServiceConfig, ToolSettings
from presage.tool_service.drivers import Driver, ToolError, driver_of, remove_folder
from presage.tool_service.planning import RunningWorkflow, ToolPlan
from presage.tool_service.resources import Resource, ResourceTable, WorkflowKey

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.25
_RETRY_S: Final = 5.0
_SWEEP_S: Final = 30.0
_ENDED_KEPT_S: Final = 24 * 3600.0
_AT_ONCE_S: Final = 0.025
"""Waiting that counts as none."""
_AT_ONCE: Final = 32
"""Tools that are started at once, and that are removed at once."""
_MOST_WORKFLOWS: Final = 100_000
_FOLDER: Final = re.compile(r"[0-9a-f]{16}")
"""Names of folders of tools: other folders beside the database are left alone."""


class NotAvailable(PresageError):  # noqa: N818  an answer rather than a fault
    """A tool cannot be handed out; `status` is that of the answer over HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True, eq=False)
class _Tool:
    """One tool of the file, or one that an earlier file had.

    Attributes:
        earlier: the driver of an earlier file under this name, which may have started what is still there.
    """

    name: str
    settings: ToolSettings
    driver: Driver
    earlier: Driver | None = None

    @property
    def drivers(self) -> list[Driver]:
        """All that may have started it."""
        return [self.driver] if self.earlier is None else [self.driver, self.earlier]


class ToolService:
    """Runs in one event loop; drivers run in threads beside it.

    Args:
        drivers: by tool, in place of those of the settings.
        now: seconds since 1970.

    Attributes:
        counts: by tool and what happened: `acquired`, `prepared in time` and `waited` (all or a part of the set-up),
            `failed`, `lost` (it died in use), and those of `ToolPlan`.
        waited_s, hidden_s: by tool, seconds for which acquirers waited, and those of set-up that they did not.

    Raises:
        OutputError: the database cannot be written.
        ConfigurationError: a driver cannot be loaded, or another service uses the folder.
    """

    def __init__(
        self,
        config: ToolServiceConfig,
        now: Callable[[], float],
        drivers: Mapping[str, Driver] | None = None,
    ) -> None:
        self._config, self._now = config, now
        self._folder = Path(config.folder).absolute()
        private = (config.secret_variable, config.token_variable)
        self._tools = {
            name: _Tool(name, settings, (drivers or {}).get(name) or driver_of(settings, private))
            for name, settings in config.tools.items()
        }
        self._lock = _locked(self._folder)
        self._table = ResourceTable(self._folder / "tools.sqlite")
        self._owner = self._named()
        self._gone: dict[str, _Tool] = {}
        """Tools that only an earlier file had."""
        self._remember_settings()
        self._plan = ToolPlan(config.tools, self)
        self._changed = asyncio.Event()
        self._starting, self._removing = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stuck: dict[str, str] = {}
        """By tool, why the last removal has failed."""
        self.counts = self._plan.counts
        self.waited_s = dict.fromkeys(self._tools, 0.0)
        self.hidden_s = dict.fromkeys(self._tools, 0.0)

    def _named(self) -> str:
        """The name of the service, which all its tools carry; the same as long as the database is there."""
        kept = self._table.fact("owner")
        if kept is None:
            kept = secrets.token_hex(8).encode()
            self._table.keep_fact("owner", kept)
        return kept.decode()

    def _remember_settings(self) -> None:
        """Keeps the settings of all tools, so that one that leaves the file, or gets another driver, can be removed."""
        kept = self._table.fact("settings")
        for name, text in (msgspec.json.decode(kept) if kept is not None else {}).items():
            try:
                given = msgspec.json.decode(text)  # perhaps with settings that only an earlier version had
                settings = ToolSettings.model_validate(
                    {option: given[option] for option in given.keys() & ToolSettings.model_fields}
                )
                if name not in self._tools:
                    self._gone[name] = _Tool(name, settings, driver_of(settings))
                elif _kind(settings) != _kind(self._tools[name].settings):
                    self._tools[name].earlier = driver_of(settings)
            except (ConfigurationError, ValueError) as error:
                logger.warning("what the tool %r of an earlier file has left cannot be removed: %s", name, error)
        dumped = {name: tool.settings.model_dump_json() for name, tool in {**self._gone, **self._tools}.items()}
        self._table.keep_fact("settings", msgspec.json.encode(dumped))

    def _any_tool(self, name: str) -> _Tool:
        return self._tools.get(name) or self._gone[name]

    # --- beginning and end ---

    async def start(self) -> None:
        """Finds what an earlier run has left: tools in use are used further, all others are removed."""
        for name, usage in self._plan.usage.items():
            kept = self._table.fact(f"usage of {name}")
            if kept is not None:
                usage.restore(kept)
        for resource in list(self._table):
            if resource.tool not in self._tools and resource.tool not in self._gone:
                continue  # its settings cannot be read; logged above
            self._plan.resources[resource.id] = resource
            if resource.state == "used" and resource.workflow is not None and await self._alive(resource, True):
                self._plan.workflow(resource.workflow)
            else:
                resource.state = "removing"  # as it may be already: what was removing it is gone
                self._spawn(self._removed(resource))
        self._spawn(self._tick())
        self._spawn(self._sweep())

    async def stop(self) -> None:
        """Stops at once; tools stay, and the next run finds them. What is being started is not waited for."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            self._keep_usage()
        finally:
            self._table.close()
            os.close(self._lock)

    # --- events ---

    def hear(self, event: LifecycleEvent) -> None:
        """Takes an event of a workflow; one that comes twice or late changes nothing."""
        key = event.tenant, event.workflow_type, event.workflow_id
        if self._table.ended_since(key, event.at):
            return
        if event.kind == "ended":
            running = self._plan.workflows.get(key)
            if running is not None and event.at < running.began:  # late: another run has begun under the same id
                self._table.end(key, event.at)
            else:
                self._end(key, event.at)
            return
        self._plan.hear(key, event)
        self._bound()

    def _end(self, key: WorkflowKey, at: float) -> None:
        """A workflow has ended."""
        self._plan.end(key)
        self._table.end(key, at)  # last: until then, a restart hears of the end again
        self.changed()

    # --- what clients ask for ---

    async def acquire(self, name: str, key: WorkflowKey, timeout_s: float) -> dict[str, Any]:
        """Hands a tool to a workflow, which keeps it until it is released or the workflow ends.

        A workflow that has one gets the same again.

        Returns:
            JSON values: `id`, `tool`, what its driver gives, and `waited_s`.

        Raises:
            NotAvailable: there is no such tool, no room for one within `timeout_s`, it cannot be started, or the
                workflow ended while it waited.
        """
        if name not in self._tools:
            raise NotAvailable(404, f"there is no tool {name!r}; there are {', '.join(sorted(self._tools))}")
        workflow, begun = self._plan.workflow(key), self._now()
        self._bound()
        used = await self._still_used(key, name)
        if used is not None:
            return self._shown(used, 0.0)
        self._plan.asks(key, name)
        try:
            resource = await asyncio.wait_for(self._handed(name, key, workflow), timeout_s)
        except TimeoutError:
            raise NotAvailable(503, f"no {name} within {timeout_s:g} s: {self._why_none(name, key[0])}") from None
        finally:
            self._plan.leaves(key, name)  # nobody came for what is prepared for it in time, or the client has left
        waited = self._now() - begun
        self.counts[name, "acquired"] += 1
        self.counts[name, "prepared in time" if waited < _AT_ONCE_S else "waited"] += 1
        self.waited_s[name] += waited
        self.hidden_s[name] += max(0.0, self._plan.usage[name].setup_s - waited)
        return self._shown(resource, waited)

    def _why_none(self, name: str, tenant: str) -> str:
        settings = self._tools[name].settings
        if self._plan.full(name, tenant):
            return f"the tenant uses the {settings.most_per_tenant} of most_per_tenant; give one back, or wait longer"
        states = Counter(resource.state for resource in self._plan.of_tool(name))
        there = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        told = f"{states.total()} of {settings.most} are there ({there})"
        if states["removing"] and name in self._stuck:
            return f"{told}, and cannot be removed: {self._stuck[name]}"
        return f"{told}; raise most, or wait longer"

    async def _handed(self, name: str, key: WorkflowKey, workflow: RunningWorkflow) -> Resource:
        """The tool that this workflow gets, once it can be used."""
        mine: Resource | None = None
        made: Resource | None = None
        while True:
            changed = self._changed  # before the look, so that no change is missed
            if self._plan.workflows.get(key) is not workflow:
                raise NotAvailable(410, f"the workflow ended while it waited for {name}")
            if mine is not None and "failed" in mine.handle:
                raise NotAvailable(502, f"{name} cannot be prepared: {mine.handle['failed']}")
            mine, begun = self._plan.claim(key, name)
            made = mine if begun else made
            if mine is not None and mine.state == "used":
                return mine
            if mine is not None and self._plan.may_use(key, mine):
                if not await self._alive(mine, False):
                    self._lost(mine)
                    if mine is made:
                        raise NotAvailable(502, f"{name} ended as soon as it could be used")
                elif self._plan.may_use(key, mine):
                    self._plan.hand(key, mine)
                    return mine
                continue
            await changed.wait()

    async def _alive(self, resource: Resource, unknown: bool) -> bool:
        """Whether a tool can be used; `unknown` where its driver cannot find that out."""
        try:
            driver = self._any_tool(resource.tool).driver
            alive: bool = await self._in_thread(driver.alive, resource.id, resource.handle)
        except Exception as error:
            logger.warning("%s: whether it can be used cannot be found out: %s", resource.tool, error)
            return unknown
        return alive

    def _lost(self, resource: Resource) -> None:
        """A tool has died."""
        if resource.state in ("ready", "used"):
            self.counts[resource.tool, "lost"] += 1
            self._plan.remove(resource)

    async def _still_used(self, key: WorkflowKey, name: str) -> Resource | None:
        """The tool that a workflow uses already; one that has died meanwhile is removed."""
        used = self._plan.used(key, name)
        if used is None:
            return None
        if await self._alive(used, True):
            return used if used.state == "used" else None
        self._lost(used)
        return None

    def release(self, resource_id: str, tenant: str | None = None) -> None:
        """A workflow gives a tool back; it is removed. One that is gone, or another tenant's, is ignored."""
        resource = self._plan.resources.get(resource_id)
        if resource is not None and resource.state == "used" and _belongs(resource, tenant):
            self._plan.remove(resource)

    def _shown(self, resource: Resource, waited: float) -> dict[str, Any]:
        return {"id": resource.id, "tool": resource.tool, **resource.handle, "waited_s": round(waited, 4)}

    def shown(self, tenant: str | None = None) -> list[dict[str, Any]]:
        """All tools there are, or those of a tenant, as JSON values."""
        return [
            {
                "id": resource.id,
                "tool": resource.tool,
                "state": resource.state,
                "tenant": resource.workflow[0] if resource.workflow else None,
                "workflow_type": resource.workflow[1] if resource.workflow else None,
                "workflow_id": resource.workflow[2] if resource.workflow else None,
                "age_s": round(self._now() - resource.at, 3),
            }
            for resource in self._plan.resources.values()
            if _belongs(resource, tenant)
        ]

    def status(self) -> dict[str, Any]:
        """Figures by tool, as JSON values."""
        told = {}
        for name, usage in self._plan.usage.items():
            states = Counter(resource.state for resource in self._plan.of_tool(name))
            hidden, waited = self.hidden_s[name], self.waited_s[name]
            told[name] = {
                "setup_s": round(usage.setup_s, 3),
                "states": dict(states),
                "counts": {what: count for (tool, what), count in sorted(self.counts.items()) if tool == name},
                "hidden": round(hidden / (hidden + waited), 4) if hidden + waited > 0 else None,
            }
        return {"tools": told, "workflows": len(self._plan.workflows)}

    # --- what the plan decides ---

    def now(self) -> float:
        """Seconds since 1970."""
        return self._now()

    def later(self, seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Calls after so many seconds."""
        return asyncio.get_running_loop().call_later(seconds, call)

    def keep(self, resource: Resource) -> None:
        """Writes a tool into the database."""
        self._table.put(resource)

    def set_up(self, name: str, key: WorkflowKey) -> Resource:
        """Writes a tool into the database, and begins to prepare it."""
        resource = Resource(secrets.token_hex(8), name, "preparing", key, self._now(), {})
        self._table.put(resource)
        self._spawn(self._started(resource))
        return resource

    def remove(self, resource: Resource) -> None:
        """Begins to remove a tool."""
        self._spawn(self._removed(resource))
        self._table.put(resource)

    def changed(self) -> None:
        """Something has changed that somebody may wait for."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _started(self, resource: Resource) -> None:
        """Starts a tool, which is in the database already."""
        tool, folder = self._tools[resource.tool], self._folder / resource.id

        def start() -> dict[str, Any]:
            folder.mkdir(mode=0o700)
            return tool.driver.start(resource.id, self._owner, folder, tool.settings.ready_within_s)

        try:
            async with self._starting:
                begun = self._now()
                resource.handle = await self._in_thread(start)
        except Exception as error:  # a driver of another package may raise anything
            self.counts[tool.name, "failed"] += 1
            logger.warning("%s cannot be prepared: %s", tool.name, _told(error))
            resource.handle = {"failed": _told(error)}
            self._plan.remove(resource)
            self.changed()
            return
        self._plan.ready(resource, self._now() - begun)

    async def _removed(self, resource: Resource) -> None:
        """Removes a tool and its folder, again and again until nothing is left."""
        tool = self._any_tool(resource.tool)
        while True:
            try:
                async with self._removing:
                    for driver in tool.drivers:
                        await self._in_thread(driver.remove, resource.id)
                    await self._in_thread(remove_folder, self._folder / resource.id)
                self._stuck.pop(tool.name, None)
                break
            except Exception as error:  # a driver of another package may raise anything
                self.counts[tool.name, "failed"] += 1
                self._stuck[tool.name] = _told(error)
                logger.warning("%s cannot be removed, and will be tried again: %s", tool.name, _told(error))
                if "failed" in resource.handle:  # it hardly began: the sweep finds what it may have left
                    break
                await asyncio.sleep(_RETRY_S)
        self._table.drop(resource.id)
        self._plan.gone(resource)

    # --- the rest ---

    def _bound(self) -> None:
        """Ends the workflow that was heard of least recently, if there are too many."""
        if len(self._plan.workflows) > _MOST_WORKFLOWS:
            self._end(next(iter(self._plan.workflows)), self._now())

    async def _tick(self) -> None:
        """Collects what time decides, again and again."""
        kept = self._now()
        while True:
            await asyncio.sleep(_TICK_S)
            now = self._now()
            try:
                self._collect(now)
                if now - kept > _RETRY_S:
                    kept = now
                    self._keep_usage()
                    self._table.forget_ended(now - _ENDED_KEPT_S, _MOST_WORKFLOWS)
            except Exception:
                logger.exception("what has expired cannot be collected, and will be tried again")

    def _collect(self, now: float) -> None:
        """Ends workflows of which nothing is heard."""
        for waiting in self._plan.waiting.values():
            for key in waiting:
                if key in self._plan.workflows:
                    self._plan.workflow(key)
        while self._plan.workflows:
            key, oldest = next(iter(self._plan.workflows.items()))
            if oldest.seen > now - self._config.expire_s:
                break
            self._end(key, now)

    async def _sweep(self) -> None:
        """Removes what is there without being known: what a service that was killed has just begun to start."""
        while True:
            for tool in [*self._tools.values(), *self._gone.values()]:
                for driver in tool.drivers:
                    listed = set(self._plan.resources)
                    try:
                        owned = await self._in_thread(driver.owned, self._owner)
                    except Exception as error:
                        logger.warning("%s: what is left of it cannot be found: %s", tool.name, _told(error))
                        continue
                    for stray in owned - listed - set(self._plan.resources):
                        self._take_out(stray, tool.name)
            for path in self._folder.iterdir():
                if _FOLDER.fullmatch(path.name) and path.name not in self._plan.resources:
                    self._take_out(path.name, next(iter(self._tools)))
            await asyncio.sleep(_SWEEP_S)

    def _take_out(self, resource_id: str, name: str) -> None:
        stray = self._plan.resources[resource_id] = Resource(resource_id, name, "removing", None, self._now(), {})
        self._spawn(self._removed(stray))

    def _keep_usage(self) -> None:
        for name, usage in self._plan.usage.items():
            self._table.keep_fact(f"usage of {name}", usage.to_json())

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """In a thread of its own, so that slow drivers do not hold up others, nor the end of the process."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def run() -> None:
            result, failed = None, None
            try:
                result = function(*args)
            except BaseException as error:
                failed = error
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, result, failed)

        threading.Thread(target=run, name="presage-tools", daemon=True).start()
        return await done

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _locked(folder: Path) -> int:
    """Makes the folder, and keeps other services from it as long as the process lives; a file descriptor."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OutputError(f"{folder}: tools cannot be kept there ({error.strerror}); give another folder") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigurationError(
            f"{folder}: another tool service keeps its tools there; stop it, or give another folder"
        ) from None
    return lock


def _belongs(resource: Resource, tenant: str | None) -> bool:
    """Whether a tool is a tenant's; None: the operator's, to whom all belong."""
    return tenant is None or (resource.workflow is not None and resource.workflow[0] == tenant)


def _kind(settings: ToolSettings) -> str:
    """What removes its tools."""
    if settings.docker is not None:
        return f"docker {settings.docker.program}"
    return "subprocess" if settings.custom is None else f"custom {settings.custom.model_dump_json()}"


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {error}"
