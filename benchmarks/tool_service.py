"""How much of the set-up of tools is hidden, how often is a tool prepared in vain, and does the tool service ever leak?

Part `hidden`: workflows of a planner, a coder and a tester in front of a real tool service, whose sandbox is a process
that needs 2 s before it listens. Steps take seconds; most steps of the coder need the sandbox, which the workflow gives
back at the end of the step. Each way serves the same workflows with a service of its own:

- on demand: no events; a sandbox is set up when it is asked for
- at the start: when a workflow starts, a sandbox is prepared for it and kept until it ends (ThunderAgent, section 4.4)
- by events: `step.started`, `expected` and `ended`, as a gateway sends them, whose forecasts are counts of the agents
  that followed in the workflows before

A set-up is hidden as far as its step did not wait for it. A preparation is wrong if it was removed unused. With
`--after` the sandbox is needed so many seconds after the answer, with `--needs` in another share of the coder's steps.

Part `leaks`: `--ends` workflows of two requests to a gateway, before an engine without a model, with one or two tools,
some of which leave the session or lock their folder. All the while gateway, engine, tool service, tools, and the
process that delivers the gateway's events are killed (SIGKILL) in turn and started again, and agents ask again when
they got no answer. A killed gateway tells no ends: the tools of its workflows are removed when nothing has been heard
of them for `expire_s`. At the end all workflows have ended: whatever is left has leaked.

    python benchmarks/tool_service.py [--part hidden leaks] [--workflows 40] [--ends 2000] [--kill-every 8]

Prints a table, and one JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from presage.serving_hooks.lifecycle.cloud_events import as_cloud_event, batched
from presage.serving_hooks.lifecycle.event import LifecycleEvent
from presage.serving_hooks.lifecycle.signature import secret_keys, signed_headers
from presage.testing.servers import free_port

WAYS = ("on demand", "at the start", "by events")
ONLY_FRESH = httpx.Limits(keepalive_expiry=2.0)
"""Connections that a client uses again: the service closes those that are idle for 5 s."""
SETUP_S = 2.0
NEXT = {
    "planner": {"coder": 0.9, "tester": 0.1},
    "coder": {"coder": 0.35, "tester": 0.6, "end": 0.05},
    "tester": {"coder": 0.35, "end": 0.65},
}
FILE = """
[tools.sandbox]
most = 64
[tools.sandbox.subprocess]
command = ["sh", "-c", "sleep 2; exec {python} -m http.server {{port}} --bind 127.0.0.1"]
"""
FAST = """
[tools.plain]
setup_s = 0.05
[tools.plain.subprocess]
command = ["sleep", "1000"]

[tools.wild]
setup_s = 0.05
[tools.wild.subprocess]
command = ["sh", "-c", "setsid sleep 1000 & mkdir a; touch a/b; chmod 500 a; exec sleep 1000"]
"""


class Served:
    """`presage tools serve` in a process of its own."""

    def __init__(self, folder: Path, file: str) -> None:
        self.folder, self.port = folder / "tools", free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._file = folder / "tools.toml"
        self._file.write_text(f'listen = "127.0.0.1:{self.port}"\nfolder = "{self.folder}"\n{file}')
        self.start()

    def start(self) -> None:
        code = "from presage.cli.presage import app; app()"
        with (self._file.parent / "log").open("a") as log:
            command = [sys.executable, "-c", code, "tools", "serve", str(self._file)]
            self.process = subprocess.Popen(command, stderr=log)
        while True:
            try:
                httpx.get(self.url + "/status")
                return
            except httpx.TransportError:
                assert self.process.poll() is None, "the service has ended"
                time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def processes(self) -> list[int]:
        """Pids of all that tools have started."""
        found = []
        for process in psutil.process_iter():
            try:
                of = process.environ().get("PRESAGE_TOOL_FOLDER", "")
                if of.startswith(str(self.folder)) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except (psutil.Error, OSError):
                continue
        return found

    def folders(self) -> list[str]:
        return [path.name for path in self.folder.iterdir() if path.is_dir()]

    def resources(self) -> list[Any]:
        found: list[Any] = httpx.get(self.url + "/resources", timeout=60).json()["resources"]
        return found

    def rows(self) -> int:
        with closing(sqlite3.connect(self.folder / "tools.sqlite")) as database:
            found: int = database.execute("SELECT count(*) FROM resources").fetchone()[0]
            return found

    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


@contextmanager
def service(file: str) -> Iterator[Served]:
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder), file)
        try:
            yield served
        finally:
            served.kill()
            for pid in served.processes():
                os.kill(pid, signal.SIGKILL)


class Forecasts:
    """What `expected` holds: counts of the agents that followed, and the median time until they did."""

    def __init__(self) -> None:
        self._next: dict[str, Counter[str]] = defaultdict(Counter)
        self._returns: dict[str, list[float]] = defaultdict(list)

    def followed(self, agent: str, by: str, after_s: float) -> None:
        self._next[agent][by] += 1
        self._returns[agent].append(after_s)

    def expected(self, agent: str) -> dict[str, Any] | None:
        seen = self._next[agent]
        if not seen:
            return None
        shares = {name: count / seen.total() for name, count in seen.items()}
        returns = statistics.quantiles(self._returns[agent] * 2, n=10)
        quantiles = {"0.1": returns[0], "0.5": returns[4], "0.9": returns[8]}
        return {"end": shares.pop("end", 0.0), "next_agents": shares, "return_s": quantiles}


class Sender:
    """Sends events as a gateway's webhook does, each at once."""

    def __init__(self, url: str, secret: str) -> None:
        self._url, self._keys = url + "/events", secret_keys(secret)

    def __call__(self, kind: Any, workflow: str, agent: str = "", **given: Any) -> None:
        at = round(time.time(), 6)
        one = LifecycleEvent(
            secrets.token_hex(8), kind, "/presage/gateway/g", at, "app", workflow, 0, 0, agent, **given
        )
        body = batched([as_cloud_event(one)])
        httpx.post(self._url, content=body, headers=signed_headers(self._keys, one.id, int(at), body))


Step = tuple[str, float, float, bool]
"""Agent, seconds that its request runs, seconds that its tool or its client then takes, and is the sandbox needed?"""


def drawn(count: int, needs: float, seed: int) -> list[list[Step]]:
    """Workflows, of whose coder's steps such a share needs the sandbox."""
    chosen, found = random.Random(seed), []
    for _ in range(count):
        steps: list[Step] = []
        agent = "planner"
        while agent != "end" and len(steps) < 8:
            runs = {"planner": 2.5, "coder": 3.0, "tester": 1.5}[agent] * chosen.lognormvariate(0, 0.25)
            needed = agent == "coder" and chosen.random() < needs
            steps.append((agent, runs, 1.0 * chosen.lognormvariate(0, 0.3), needed))
            agent = chosen.choices([*NEXT[agent]], [*NEXT[agent].values()])[0]
        found.append(steps)
    return found


def run_way(
    way: str, workflows: Sequence[Sequence[Step]], after_s: float, learning: int, at_once: int, secret: str
) -> dict[str, Any]:
    """Serves all workflows one way; the first `learning` are not counted."""
    forecasts, waits, calls = Forecasts(), [], Counter[str]()
    with service(FILE.format(python=sys.executable)) as served:
        send = Sender(served.url, secret)

        def acquire(client: httpx.Client, name: str) -> tuple[str, float]:
            begun = time.monotonic()
            body = {"tool": "sandbox", "workflow_type": "app", "workflow_id": name}
            found = client.post("/acquire", json=body).raise_for_status().json()
            return found["id"], time.monotonic() - begun

        def run(number: int, steps: Sequence[Step]) -> None:
            name, events = f"w{number}", way == "by events"
            with httpx.Client(base_url=served.url, timeout=120, limits=ONLY_FRESH) as client:
                early: threading.Thread | None = None
                held: list[str] = []
                used = False
                if way == "at the start":
                    early = threading.Thread(target=lambda: held.append(acquire(client, name)[0]))
                    early.start()
                for place, (agent, runs_s, away_s, needed) in enumerate(steps):
                    if events:
                        send("step.started", name, agent)
                    time.sleep(runs_s)
                    finished = time.monotonic()
                    if events:
                        send("step.finished", name, agent)
                        expected = forecasts.expected(agent)
                        if expected is not None:
                            send("expected", name, agent, **expected)
                    if needed:
                        used = True
                        time.sleep(after_s)
                        tool, waited = acquire(client, name)
                        if number >= learning:
                            waits.append(waited)
                    time.sleep(away_s)
                    if needed and way != "at the start":
                        client.post("/release", json={"id": tool})
                    following = steps[place + 1][0] if place + 1 < len(steps) else "end"
                    forecasts.followed(agent, following, time.monotonic() - finished)
                if early is not None:
                    early.join()
                    client.post("/release", json={"id": held[0]})
                    if number >= learning:
                        calls["prepared"] += 1
                        calls["wrong"] += not used
                if events:
                    send("ended", name, steps[-1][0])

        with ThreadPoolExecutor(at_once) as clients:
            list(clients.map(run, range(learning), workflows[:learning]))
            before = Counter(httpx.get(served.url + "/status").json()["tools"]["sandbox"]["counts"])
            list(clients.map(run, range(learning, len(workflows)), workflows[learning:]))
        deadline = time.monotonic() + 90
        while served.resources() and time.monotonic() < deadline:
            time.sleep(0.1)
        told = httpx.get(served.url + "/status").json()["tools"]["sandbox"]
        after = Counter(told["counts"])
        after.subtract(before)
        setup = told["setup_s"]
    if way == "by events":
        calls["prepared"], calls["wrong"] = after["prepared"], after["unneeded"]
    hidden = sum(max(0.0, setup - wait) for wait in waits) / (setup * len(waits))
    return {
        "steps_that_need_it": len(waits),
        "setup_s": setup,
        "waited_mean_s": round(statistics.mean(waits), 3),
        "hidden": round(hidden, 4),
        "prepared": calls["prepared"],
        "wrong": round(calls["wrong"] / calls["prepared"], 4) if calls["prepared"] else None,
    }


def part_hidden(count: int, needs: float, after_s: float, learning: int, at_once: int, secret: str) -> dict[str, Any]:
    workflows = drawn(count + learning, needs, seed=24)
    result = {}
    print(f"{count} workflows after {learning} that are learnt from, {at_once} at a time; set-up {SETUP_S} s\n")
    print(f"{'':14}{'hidden':>8}{'waited':>10}{'prepared':>10}{'wrong':>8}")
    with ThreadPoolExecutor(len(WAYS)) as beside:  # each has its own service, and all of them mostly sleep
        measured = beside.map(lambda way: run_way(way, workflows, after_s, learning, at_once, secret), WAYS)
    for way, of in zip(WAYS, measured, strict=True):
        result[way] = of
        wrong = "-" if of["wrong"] is None else f"{of['wrong']:.1%}"
        print(f"{way:14}{of['hidden']:8.1%}{of['waited_mean_s']:8.2f} s{of['prepared']:10}{wrong:>8}", flush=True)
    return result


EXPIRE_S = 20.0
EXPIRES = f"expire_s = {EXPIRE_S}\n"
ENGINE = """
import uvicorn
from presage.gateway.simulated_engine import SimulatedEngine
uvicorn.run(SimulatedEngine(slots=64).app(), port={port}, log_level="error")
"""


class Restarted:
    """A process that listens on a port, and is started again whenever it was killed."""

    def __init__(self, folder: Path, port: int, arguments: Sequence[str]) -> None:
        self.port, self._folder, self._arguments = port, folder, arguments
        self.start()

    def start(self) -> None:
        with (self._folder / "log").open("a") as log:
            self.process = subprocess.Popen([sys.executable, *self._arguments], stderr=log, cwd=self._folder)
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=10)
                return
            except httpx.TransportError:
                assert self.process.poll() is None, (self._folder / "log").read_text()[-2000:]
                time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def again(self) -> None:
        self.kill()
        self.start()


@contextmanager
def gateway(folder: Path, receiver: str, events: Path) -> Iterator[tuple[Restarted, Restarted]]:
    """A gateway that delivers its events, and the engine behind it."""
    running: list[Restarted] = []
    port, engine = free_port(), free_port()
    file = folder / "gateway.toml"
    file.write_text(f"""
listen = "127.0.0.1:{port}"
[[upstreams]]
url = "http://127.0.0.1:{engine}"
[webhook]
url = "{receiver}"
file = "{events}"
longest_retry_s = 0.5
""")
    command = "from presage.cli.presage import app; app()"
    try:
        running.append(Restarted(folder, engine, ["-c", ENGINE.format(port=engine)]))
        running.append(Restarted(folder, port, ["-c", command, "gateway", "--config", str(file)]))
        yield running[1], running[0]
    finally:
        for one in running:
            one.kill()


def senders(of: Restarted) -> list[psutil.Process]:
    """The processes that deliver events."""
    found = []
    for child in psutil.Process(of.process.pid).children():
        with suppressed():
            if "presage.serving_hooks.lifecycle.sender" in child.cmdline():
                found.append(child)
    return found


def waiting(events: Path) -> int:
    """Events that are not delivered."""
    with closing(sqlite3.connect(events)) as database:
        found: int = database.execute("SELECT count(*) FROM events").fetchone()[0]
        return found


def part_leaks(ends: int, kill_every: float) -> dict[str, Any]:
    chosen, kills, done, stop = random.Random(24), Counter[str](), Counter[str](), threading.Event()
    with (
        tempfile.TemporaryDirectory() as folder,
        service(EXPIRES + FAST) as served,
        gateway(Path(folder), served.url + "/events", events := Path(folder) / "events.sqlite") as (front, engine),
    ):

        def asked(url: str, body: dict[str, Any]) -> httpx.Response | None:
            """The answer; whoever gets none, or that of a server whose engine is away, asks again."""
            for _ in range(300):
                try:
                    answer = httpx.post(url, json=body, timeout=30)
                except httpx.TransportError:
                    done["no answer"] += 1
                    time.sleep(0.3)
                    continue
                done[f"{url.rpartition('/')[2]} {answer.status_code}"] += 1
                if answer.status_code < 500 or url.startswith(served.url):
                    return answer
                time.sleep(0.3)
            return None

        def run(number: int) -> None:
            name = f"w{number}"

            def step(agent: str, ends: bool) -> None:
                sent = {"workflow_type": "app", "workflow_id": name, "agent": agent, "workflow_end": ends}
                message = {"role": "user", "content": f"{agent} of {name}"}
                body = {"model": "simulated", "messages": [message], "max_tokens": 4, "vllm_xargs": sent}
                asked(f"http://127.0.0.1:{front.port}/v1/chat/completions", body)

            step("planner", False)
            for tool in ("plain", "wild")[: 1 + number % 2]:
                body = {"tool": tool, "workflow_type": "app", "workflow_id": name, "timeout_s": 20}
                answer = asked(served.url + "/acquire", body)
                if answer is not None and answer.status_code == 200 and number % 5 == 0:
                    asked(served.url + "/release", {"id": answer.json()["id"]})
            step("coder", True)
            done["ends"] += 1

        def kill() -> None:
            while not stop.wait(kill_every * chosen.uniform(0.5, 1.5)):
                what = ("gateway", "service", "engine", "tools", "sender")[kills.total() % 5]
                kills[what] += 1
                if what == "service":
                    served.kill()
                    served.start()
                elif what == "gateway":
                    front.again()
                elif what == "engine":
                    engine.again()
                elif what == "tools":
                    for pid in served.processes()[:8]:
                        with suppressed():
                            os.kill(pid, signal.SIGKILL)
                else:
                    for child in senders(front):
                        with suppressed():
                            child.kill()

        warm_up = min(200, ends)
        for number in range(warm_up):  # so that the size before is that of a database in use
            run(number)
        size, begun = served.bytes(), time.monotonic()
        killer = threading.Thread(target=kill)
        killer.start()
        with ThreadPoolExecutor(8) as clients:
            list(clients.map(run, range(warm_up, warm_up + ends)))
        stop.set()
        killer.join()
        took = time.monotonic() - begun
        front.again()  # once more, with the last events on their way
        served.kill()
        served.start()
        deadline = time.monotonic() + 120 + EXPIRE_S
        while time.monotonic() < deadline:
            if not (waiting(events) or served.resources() or served.processes() or served.folders()):
                break
            time.sleep(0.2)
        left = {"processes": len(served.processes()), "folders": len(served.folders()), "rows": served.rows()}
        result = {
            "ends": ends,
            "seconds": round(took, 1),
            "kills": dict(kills),
            "answers": dict(done),
            "leaked": left | {"events": waiting(events)},
            "bytes_before": size,
            "bytes_after": served.bytes(),
        }
    print(f"\n{ends} ends in {took:.0f} s; killed: {dict(kills)}; answers: {dict(done)}")
    print(f"leaked: {result['leaked']}; folder {size:,} bytes before, {result['bytes_after']:,} after")
    return result


@contextmanager
def suppressed() -> Iterator[None]:
    """What is to be killed may be gone."""
    with suppress(psutil.Error, OSError):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=("hidden", "leaks"), default=["hidden", "leaks"])
    parser.add_argument("--workflows", type=int, default=60)
    parser.add_argument("--needs", type=float, default=0.9, help="share of the coder's steps that need the sandbox")
    parser.add_argument("--after", type=float, default=0.0, help="seconds from the answer until they need it")
    parser.add_argument("--learning", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--ends", type=int, default=2000)
    parser.add_argument("--kill-every", type=float, default=8.0, help="seconds, on average")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and leave no process behind
    secret = os.environ["PRESAGE_WEBHOOK_SECRET"] = "whsec_" + b64encode(secrets.token_bytes(32)).decode()
    os.environ.pop("PRESAGE_TOOLS_TOKEN", None)
    result: dict[str, Any] = {}
    if "hidden" in given.part:
        result["hidden"] = part_hidden(given.workflows, given.needs, given.after, given.learning, given.at_once, secret)
    if "leaks" in given.part:
        result["leaks"] = part_leaks(given.ends, given.kill_every)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
