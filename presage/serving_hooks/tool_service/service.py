"""The tool service: hears the events of workflows, prepares what they will need, and collects it at their end.

A tool is prepared for a workflow when a step that is expected, or that runs, is likely and soon enough to need it
(`policies/preparation.py`), by what was learnt of earlier steps (`usage.py`). A workflow that asks gets the one that
was prepared for it, else one that nobody needs, else a new one. It keeps the tool until it gives it back or ends. What
was prepared for a workflow that did not need it is kept for others while that may pay, and then removed.

All state that must not be lost is in the database (`resources.py`): a tool is written there before it is started and
until it is gone, so that after a restart each is either used further or removed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from presage.errors import PresageError
from presage.serving_hooks.lifecycle.events import LifecycleEvent
from presage.serving_hooks.policies.preparation import spare_s, start_in
from presage.serving_hooks.tool_service.config import ToolServiceConfig, ToolSettings
from presage.serving_hooks.tool_service.drivers import Driver, ToolError, driver_of, remove_folder
from presage.serving_hooks.tool_service.resources import Resource, ResourceTable, WorkflowKey
from presage.serving_hooks.tool_service.usage import Usage

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.25
_RETRY_S: Final = 5.0
_ENDED_KEPT_S: Final = 24 * 3600.0
_AT_ONCE_S: Final = 0.025
"""Waiting that counts as none."""
_AT_ONCE: Final = 32
"""Tools that are started or removed at once."""
_MOST_WORKFLOWS: Final = 100_000


class NotAvailable(PresageError):  # noqa: N818  an answer rather than a fault
    """A tool cannot be handed out; `status` is that of the answer over HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True, eq=False)
class _Workflow:
    """What is known of a running workflow.

    Attributes:
        seen: when something of it was last heard, seconds since 1970.
        agent, began: agent of the step that runs or ran last, and when it began; None before the first.
        unneeded: tools that this step could still turn out to need, which the workflow did not have as it began.
        planned: what will prepare a tool later.
    """

    seen: float
    agent: str | None = None
    began: float = 0.0
    unneeded: set[str] = field(default_factory=set)
    planned: dict[str, asyncio.TimerHandle] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Tool:
    name: str
    settings: ToolSettings
    driver: Driver
    usage: Usage


class ToolService:
    """Runs in one event loop; drivers run in threads beside it.

    Args:
        drivers: by tool, in place of those of the settings.
        now: seconds since 1970.

    Attributes:
        counts: by tool and what happened: `acquired`, `prepared in time` and `waited` (all or a part of the set-up),
            `prepared`, `asked for` (prepared on demand), `unneeded`, `removed`, `failed`, `lost` (it died in use).
        waited_s, hidden_s: by tool, seconds for which acquirers waited, and those of set-up that they did not.

    Raises:
        OutputError: the database cannot be written.
        ConfigurationError: a driver cannot be loaded.
    """

    def __init__(
        self,
        config: ToolServiceConfig,
        now: Callable[[], float],
        drivers: Mapping[str, Driver] | None = None,
    ) -> None:
        self._config, self._now = config, now
        self._folder = Path(config.folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._table = ResourceTable(self._folder / "tools.sqlite")
        self._owner = self._named()
        self._tools = {
            name: _Tool(name, of, (drivers or {}).get(name) or driver_of(of), Usage(of.setup_s))
            for name, of in config.tools.items()
        }
        self._resources: dict[str, Resource] = {}
        self._workflows: OrderedDict[WorkflowKey, _Workflow] = OrderedDict()
        self._changed = asyncio.Event()
        self._waiting: dict[str, list[WorkflowKey]] = {name: [] for name in self._tools}
        self._threads = ThreadPoolExecutor(_AT_ONCE, "presage-tools")
        self._tasks: set[asyncio.Task[Any]] = set()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.waited_s = dict.fromkeys(self._tools, 0.0)
        self.hidden_s = dict.fromkeys(self._tools, 0.0)

    def _named(self) -> str:
        """The name of the service, which all its tools carry; the same as long as the database is there."""
        kept = self._table.fact("owner")
        if kept is None:
            kept = secrets.token_hex(8).encode()
            self._table.keep_fact("owner", kept)
        return kept.decode()

    # --- beginning and end ---

    async def start(self) -> None:
        """Finds what an earlier run has left: tools in use are used further, all others are removed."""
        for name, tool in self._tools.items():
            usage = self._table.fact(f"usage of {name}")
            if usage is not None:
                tool.usage.restore(usage)
        for resource in list(self._table):
            if resource.tool not in self._tools:
                logger.warning("tool %r is not in the file any more; its resources cannot be removed", resource.tool)
                continue
            self._resources[resource.id], tool = resource, self._tools[resource.tool]
            alive = resource.state == "used" and await self._in_thread(tool.driver.alive, resource.id, resource.handle)
            if alive and resource.workflow is not None:
                self._workflow(resource.workflow)
            else:
                self._remove(resource)
        for tool in self._tools.values():
            for stray in await self._in_thread(tool.driver.owned, self._owner) - set(self._resources):
                self._spawn(self._removed(Resource(stray, tool.name, "removing", None, self._now(), {})))
        folders = {path for path in self._folder.iterdir() if path.is_dir()}
        for path in folders - {self._folder / of for of in self._resources}:
            await self._in_thread(remove_folder, path)
        self._spawn(self._tick())

    async def stop(self) -> None:
        """Stops; tools stay, and the next run finds them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._keep_usage()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._table.close()

    # --- events ---

    def hear(self, event: LifecycleEvent) -> None:
        """Takes an event of a workflow; one that comes twice or late changes nothing."""
        key = event.tenant, event.workflow_type, event.workflow_id
        if self._table.ended_since(key, event.at):
            return
        if event.kind == "ended":
            self._end(key, event.at)
            return
        workflow = self._workflow(key)
        if event.kind == "step.started":
            if workflow.agent is None or event.at >= workflow.began:
                self._begins(key, workflow, event)
        elif event.kind == "expected" and event.next_agents is not None and event.at >= workflow.began:
            returns = sorted((event.return_s or {"0.5": 0.0}).values())
            for name in self._without(key):
                usage = self._tools[name].usage
                shares = {
                    agent: share * usage.probability(event.workflow_type, agent)
                    for agent, share in event.next_agents.items()
                }
                likeliest = max(shares, key=shares.__getitem__, default="")
                after = usage.after_s(event.workflow_type, likeliest)
                needed = [back + later for back in returns for later in after]
                self._plan(key, workflow, name, sum(shares.values()), needed, event.at)

    def _begins(self, key: WorkflowKey, workflow: _Workflow, event: LifecycleEvent) -> None:
        """A step begins; the one before has shown whether it needed tools."""
        for name in workflow.unneeded & set(self._tools):
            self._tools[name].usage.stepped(event.workflow_type, workflow.agent or "", None)
        workflow.agent, workflow.began = event.agent, event.at
        workflow.unneeded = set(self._without(key))
        for name in workflow.unneeded:
            usage = self._tools[name].usage
            probability = usage.probability(event.workflow_type, event.agent)
            self._plan(
                key, workflow, name, probability, list(usage.after_s(event.workflow_type, event.agent)), event.at
            )

    def _plan(
        self, key: WorkflowKey, workflow: _Workflow, name: str, probability: float, needed: list[float], at: float
    ) -> None:
        """Prepares a tool for a workflow now or later, or frees what is prepared for it, if it will hardly need it.

        `needed` are seconds from `at`.
        """
        tool, planned = self._tools[name], workflow.planned.pop(name, None)
        if planned is not None:
            planned.cancel()
        costs = {"idle_cost": tool.settings.idle_cost, "wait_cost": tool.settings.wait_cost}
        passed = max(0.0, self._now() - at)
        ahead = [max(0.0, seconds - passed) for seconds in needed]
        begin = start_in(ahead, min(1.0, probability), tool.usage.setup_s, **costs)
        mine = [of for of in self._of(key, name) if of.state in ("preparing", "ready")]
        if mine:
            if begin is None and key not in self._waiting[name]:
                for resource in mine:
                    self._free(resource)
        elif begin is not None and begin <= 0:
            self._prepare_for(key, name)
        elif begin is not None:
            later = asyncio.get_running_loop().call_later(begin, self._prepare_for, key, name)
            workflow.planned[name] = later

    def _prepare_for(self, key: WorkflowKey, name: str) -> None:
        """Prepares a tool for a workflow, if there is room; one that nobody needs becomes its own."""
        workflow = self._workflows.get(key)
        if workflow is None or list(self._of(key, name)):
            return
        workflow.planned.pop(name, None)
        for resource in self._resources.values():
            if resource.tool == name and resource.workflow is None and resource.state in ("preparing", "ready"):
                self._write(resource, workflow=key)
                return
        if self._room(name):
            self._create(name, key)
            self.counts[name, "prepared"] += 1

    def _end(self, key: WorkflowKey, at: float) -> None:
        """A workflow has ended: what it used is removed, what was prepared for it is for others."""
        workflow = self._workflows.pop(key, None)
        if workflow is not None:
            for planned in workflow.planned.values():
                planned.cancel()
            for name in workflow.unneeded & set(self._tools):
                self._tools[name].usage.stepped(key[1], workflow.agent or "", None)
        for resource in list(self._of(key)):
            if resource.state == "used":
                self._remove(resource)
            elif resource.state != "removing":
                self._free(resource)
        self._table.end(key, at)  # last: until then, a restart hears of the end again
        self._notify()

    # --- what clients ask for ---

    async def acquire(self, name: str, key: WorkflowKey, timeout_s: float) -> dict[str, Any]:
        """Hands a tool to a workflow, which keeps it until it is released or the workflow ends.

        A workflow that has one gets the same again.

        Returns:
            JSON values: `id`, `tool`, what its driver gives, and `waited_s`.

        Raises:
            NotAvailable: there is no such tool, no room for one within `timeout_s`, or it cannot be started.
        """
        if name not in self._tools:
            raise NotAvailable(404, f"there is no tool {name!r}; there are {', '.join(sorted(self._tools))}")
        tool, workflow, begun = self._tools[name], self._workflow(key), self._now()
        used = await self._still_used(key, tool)
        if used is not None:
            return self._shown(used, 0.0)
        if name in workflow.unneeded:
            workflow.unneeded.discard(name)
            tool.usage.stepped(key[1], workflow.agent or "", max(0.0, begun - workflow.began))
        self._waiting[name].append(key)
        try:
            resource = await asyncio.wait_for(self._handed(tool, key), timeout_s)
        except TimeoutError:
            of = f"{len(self._of_tool(name))} of {tool.settings.most}"
            told = f"no {name} within {timeout_s:g} s: {of} are prepared or in use; raise most, or wait longer"
            raise NotAvailable(503, told) from None
        finally:
            self._waiting[name].remove(key)
            self._notify()
        waited = self._now() - begun
        self.counts[name, "acquired"] += 1
        self.counts[name, "prepared in time" if waited < _AT_ONCE_S else "waited"] += 1
        self.waited_s[name] += waited
        self.hidden_s[name] += max(0.0, tool.usage.setup_s - waited)
        return self._shown(resource, waited)

    async def _handed(self, tool: _Tool, key: WorkflowKey) -> Resource:
        """The tool that this workflow gets, once it can be used; first come, first served."""
        name, mine = tool.name, None
        while True:
            changed = self._changed  # before the look, so that no change is missed
            if mine is not None and "failed" in mine.handle:
                raise NotAvailable(502, f"{name} cannot be prepared: {mine.handle['failed']}")
            mine = next((of for of in self._of(key, name) if of.state != "removing"), None)
            if mine is None and key == self._next(name):
                mine = self._spare(name)
                if mine is not None:
                    self._write(mine, workflow=key)
                elif self._room(name):
                    mine = self._create(name, key)
                    self.counts[name, "asked for"] += 1
                else:
                    self._make_room(name)
            if mine is not None and mine.state == "used":
                return mine
            if mine is not None and mine.state == "ready" and not self._full(name, key[0]):
                if await self._in_thread(tool.driver.alive, mine.id, mine.handle):
                    if mine.state == "ready" and mine.workflow == key:
                        self._write(mine, state="used", workflow=key)
                        return mine
                else:
                    self.counts[name, "lost"] += 1
                    self._remove(mine)
                continue
            await changed.wait()

    async def _still_used(self, key: WorkflowKey, tool: _Tool) -> Resource | None:
        """The tool that a workflow uses already; one that has died meanwhile is removed."""
        used = next((of for of in self._of(key, tool.name) if of.state == "used"), None)
        if used is None or await self._in_thread(tool.driver.alive, used.id, used.handle):
            return used
        self.counts[tool.name, "lost"] += 1
        self._remove(used)
        return None

    def release(self, resource_id: str) -> None:
        """A workflow gives a tool back; it is removed. One that is gone is ignored."""
        resource = self._resources.get(resource_id)
        if resource is not None and resource.state == "used":
            self._remove(resource)

    def shown(self) -> list[dict[str, Any]]:
        """All tools there are, as JSON values."""
        return [
            {
                "id": of.id,
                "tool": of.tool,
                "state": of.state,
                "tenant": of.workflow[0] if of.workflow else None,
                "workflow_type": of.workflow[1] if of.workflow else None,
                "workflow_id": of.workflow[2] if of.workflow else None,
                "age_s": round(self._now() - of.at, 3),
            }
            for of in self._resources.values()
        ]

    def status(self) -> dict[str, Any]:
        """Figures by tool, as JSON values."""
        told = {}
        for name, tool in self._tools.items():
            states = Counter(of.state for of in self._of_tool(name))
            hidden, waited = self.hidden_s[name], self.waited_s[name]
            told[name] = {
                "setup_s": round(tool.usage.setup_s, 3),
                "states": dict(states),
                "counts": {what: count for (of, what), count in sorted(self.counts.items()) if of == name},
                "hidden": round(hidden / (hidden + waited), 4) if hidden + waited > 0 else None,
            }
        return {"tools": told, "workflows": len(self._workflows)}

    # --- resources ---

    def _shown(self, resource: Resource, waited: float) -> dict[str, Any]:
        return {"id": resource.id, "tool": resource.tool, **resource.handle, "waited_s": round(waited, 4)}

    def _of_tool(self, name: str) -> list[Resource]:
        return [of for of in self._resources.values() if of.tool == name]

    def _of(self, key: WorkflowKey, name: str | None = None) -> list[Resource]:
        return [of for of in self._resources.values() if of.workflow == key and name in (None, of.tool)]

    def _without(self, key: WorkflowKey) -> list[str]:
        """The tools that a workflow does not use."""
        used = {of.tool for of in self._of(key) if of.state == "used"}
        return [name for name in self._tools if name not in used]

    def _room(self, name: str) -> bool:
        return len(self._of_tool(name)) < self._tools[name].settings.most

    def _full(self, name: str, tenant: str) -> bool:
        """Whether the workflows of a tenant use as many as they may."""
        most = self._tools[name].settings.most_per_tenant
        used = [of.workflow for of in self._of_tool(name) if of.state == "used"]
        return most is not None and sum(of is not None and of[0] == tenant for of in used) >= most

    def _next(self, name: str) -> WorkflowKey | None:
        """The workflow that has waited longest of those that may have one."""
        return next((key for key in self._waiting[name] if not self._full(name, key[0])), None)

    def _spare(self, name: str) -> Resource | None:
        """One that nobody needs, preferably ready."""
        free = [of for of in self._of_tool(name) if of.workflow is None and of.state in ("preparing", "ready")]
        return min(free, key=lambda of: (of.state != "ready", of.at), default=None)

    def _make_room(self, name: str) -> None:
        """Frees the tool that was last prepared for a workflow that has not asked for it, if there is any."""
        waiting = set(self._waiting[name])
        claimed = [of for of in self._of_tool(name) if of.state in ("preparing", "ready")]
        early = [of for of in claimed if of.workflow is not None and of.workflow not in waiting]
        if early:
            self._free(max(early, key=lambda of: of.at))

    def _write(self, resource: Resource, *, state: Any = None, workflow: WorkflowKey | None) -> None:
        if state is not None:
            resource.state = state
        resource.workflow, resource.at = workflow, self._now()
        self._table.put(resource)

    def _free(self, resource: Resource) -> None:
        """Nobody needs it at present."""
        self._write(resource, workflow=None)
        self._notify()

    def _create(self, name: str, key: WorkflowKey) -> Resource:
        resource = Resource(secrets.token_hex(8), name, "preparing", key, self._now(), {})
        self._resources[resource.id] = resource
        self._table.put(resource)
        self._spawn(self._started(resource))
        return resource

    async def _started(self, resource: Resource) -> None:
        """Starts a tool, which is in the database already."""
        tool, folder, begun = self._tools[resource.tool], self._folder / resource.id, self._now()

        def start() -> dict[str, Any]:
            folder.mkdir(mode=0o700)
            return tool.driver.start(resource.id, self._owner, folder, tool.settings.ready_within_s)

        try:
            resource.handle = await self._in_thread(start)
        except (ToolError, OSError) as error:
            self.counts[tool.name, "failed"] += 1
            logger.warning("%s cannot be prepared: %s", tool.name, error)
            resource.handle = {"failed": str(error)}
            self._remove(resource)
            return
        tool.usage.prepared(self._now() - begun)
        if resource.state == "preparing":
            self._write(resource, state="ready", workflow=resource.workflow)
        self._notify()

    def _remove(self, resource: Resource) -> None:
        if resource.state != "removing":
            self._write(resource, state="removing", workflow=resource.workflow)
            self._spawn(self._removed(resource))

    async def _removed(self, resource: Resource) -> None:
        """Removes a tool and its folder, again and again until nothing is left."""
        tool = self._tools[resource.tool]
        while True:
            try:
                await self._in_thread(tool.driver.remove, resource.id)
                await self._in_thread(remove_folder, self._folder / resource.id)
                break
            except (ToolError, OSError) as error:
                self.counts[tool.name, "failed"] += 1
                logger.warning("%s cannot be removed, and will be tried again: %s", tool.name, error)
                await asyncio.sleep(_RETRY_S)
        self._table.drop(resource.id)
        self._resources.pop(resource.id, None)
        self.counts[tool.name, "removed"] += 1
        self._notify()

    # --- the rest ---

    def _workflow(self, key: WorkflowKey) -> _Workflow:
        workflow = self._workflows.get(key)
        if workflow is None:
            workflow = self._workflows[key] = _Workflow(self._now())
            if len(self._workflows) > _MOST_WORKFLOWS:
                self._end(next(iter(self._workflows)), self._now())
        workflow.seen = self._now()
        self._workflows.move_to_end(key)
        return workflow

    async def _tick(self) -> None:
        """Collects what time decides: workflows of which nothing is heard, and tools that nobody has needed."""
        kept = self._now()
        while True:
            await asyncio.sleep(_TICK_S)
            now = self._now()
            while self._workflows:
                key, oldest = next(iter(self._workflows.items()))
                if oldest.seen > now - self._config.expire_s:
                    break
                self._end(key, now)
            for resource in list(self._resources.values()):
                tool = self._tools[resource.tool]
                costs = {"idle_cost": tool.settings.idle_cost, "wait_cost": tool.settings.wait_cost}
                spare = resource.state == "ready" and resource.workflow is None
                if spare and now - resource.at > spare_s(tool.usage.setup_s, **costs):
                    self.counts[tool.name, "unneeded"] += 1
                    self._remove(resource)
            if now - kept > _RETRY_S:
                kept = now
                self._keep_usage()
                self._table.forget_ended(now - _ENDED_KEPT_S)

    def _keep_usage(self) -> None:
        for name, tool in self._tools.items():
            self._table.keep_fact(f"usage of {name}", tool.usage.to_json())

    def _notify(self) -> None:
        """Something has changed that somebody may wait for."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
