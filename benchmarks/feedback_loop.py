"""Does the feedback loop work: recording, training, promotion and reload into the same running engine?

The benchmark uses the commands that a user types (docs/operations.md), on vLLM's engine with a tiny model of random
weights, called through the OpenAI client. Workflows have retry loops (retry_loops.py), and the cache holds a third of
what they reuse.

1. `presage serve` with the recorder on and no model serves workflows.
2. `presage traces ingest`, `train-predictor next-agent`, `presage promote`; the running engine loads the champion.
3. The same requests go to that engine and to `vllm serve`: which finds more prompt tokens in its cache? The answers
   are compared.
4. A worse version, trained on few workflows, is refused. Another one passes, goes live and is rolled back.
5. The application changes: its agents come in another order. The engine must raise the alarm.

    python benchmarks/feedback_loop.py [--to feedback-loop-output] [--workflows 150] [--at-once 24] [--training OPTIONS]

Needs vLLM 0.32; takes some minutes. Recreates the output folder and prints one JSON line. Exit code 1 if a step fails.

With `--prometheus PROGRAM` a Prometheus scrapes the engine, runs every query of the dashboard, and the answers are
drawn as feedback-loop-output/dashboard.png (docs/metrics.md):

    python benchmarks/feedback_loop.py --prometheus prometheus
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from retry_loops import AGENTS, TYPE, Planned, draw, working_set
from served_loops import Served, serve

from presage.testing.servers import free_port, prometheus, stop

BLOCK, LENGTH = 32, 4096
STARTS_WITHIN_S, GOES_LIVE_WITHIN_S = 400.0, 120.0
MODEL = "tiny"
REFUSED = 3
TRAINING, HELD_OUT, COMPARED, CHANGED = 1, 2, 3, 4
"""Seeds that workflows are drawn by."""
SCRAPED_EVERY_S = 2
DRAW = Path(__file__).resolve().parents[1] / "docs" / "dashboard" / "draw.py"
WORDS = tuple(f"word{number}" for number in range(500))


@dataclass(frozen=True)
class Server:
    """A running server at `url`; its output is in `log`."""

    url: str
    log: Path

    def status(self) -> dict[str, Any]:
        """The status of the hooks."""
        (told,) = httpx.get(f"{self.url}/v1/workflows/status", timeout=60).raise_for_status().json()["engines"]
        return dict(told)

    def until(self, holds: Callable[[dict[str, Any]], bool], wanted: str) -> dict[str, Any]:
        """Waits for a status that meets the condition, and returns it."""
        for _ in range(int(GOES_LIVE_WITHIN_S / 0.5)):
            if holds(told := self.status()):
                return told
            time.sleep(0.5)
        raise failed(f"{wanted}: not within {GOES_LIVE_WITHIN_S:.0f} s; the engine says {json.dumps(told)}")


@dataclass
class Watched:
    """An optional Prometheus that scrapes the engine, and annotations for its dashboard.

    Attributes:
        folder: for the data of Prometheus.
        program: path of Prometheus; None for none.
        notes: Grafana annotations: ms since 1970, and a text.
    """

    folder: Path
    program: str | None
    notes: list[dict[str, Any]] = field(default_factory=list)
    _url: str = ""

    @contextmanager
    def over(self, server: Server) -> Iterator[None]:
        """Scrapes this server until the end of the block, then draws the dashboard."""
        if self.program is None:
            yield
            return
        target = httpx.URL(server.url).netloc.decode()
        with prometheus(self.program, self.folder / "prometheus", target, SCRAPED_EVERY_S) as self._url:
            yield
            time.sleep(2 * SCRAPED_EVERY_S)
            self._draw()

    def note(self, text: str) -> None:
        """Adds an annotation at the present time."""
        self.notes.append({"time": int(time.time() * 1000), "text": text})

    def _draw(self) -> None:
        notes = self.folder / "annotations.json"
        notes.write_text(json.dumps(self.notes, indent=1), encoding="utf-8")
        span = f"--since {self.notes[0]['time'] / 1000 - 5:.0f} --until {time.time():.0f}"
        line = f"python {shlex.quote(str(DRAW))} {self._url} {span} --scraped-every {SCRAPED_EVERY_S}"
        shell(self.folder, f"{line} --annotations annotations.json --to dashboard.png")


def failed(why: str) -> SystemExit:
    """The exit with an error message."""
    return SystemExit(f"feedback_loop: {why}")


def say(text: str) -> None:
    print(f"\n# {text}", flush=True)


def shell(folder: Path, line: str, *, expected: int = 0) -> None:
    """Runs a command in this folder."""
    print(f"\n$ {line}", flush=True)
    begun = time.monotonic()
    done = subprocess.run(shlex.split(line), cwd=folder, check=False, env=environment(folder))
    print(f"({time.monotonic() - begun:.0f} s)")
    if done.returncode != expected:
        raise failed(f"exit code {done.returncode} where {expected} was expected")
    if expected:
        print(f"(exit code {expected})")


def environment(folder: Path) -> dict[str, str]:
    """The environment, with this Python's commands and a registry of the benchmark's own."""
    beside = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{beside}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        "VLLM_LOGGING_LEVEL": "INFO",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # Clients let go of an idle connection after 5 s, and so does vLLM's server: on a busy machine a request may be
        # on its way over a connection that is being closed.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
        "COLUMNS": "140",
    }


@contextmanager
def started(folder: Path, command: str, blocks: int, *more: str) -> Iterator[Server]:
    """Runs a server of the model in `folder` until the end of the block."""
    port = free_port()
    options = f"--served-model-name {MODEL} --host 127.0.0.1 --port {port} --dtype float32 --enforce-eager"
    options += f" --max-model-len {LENGTH} --block-size {BLOCK} --num-gpu-blocks-override {blocks} --max-num-seqs 64"
    options += " --max-num-batched-tokens 2048 --enable-prompt-tokens-details"
    line = [*shlex.split(command), "model", *shlex.split(options), *more]
    print(f"\n$ {shlex.join(line)}", flush=True)
    log = folder / f"{command.split()[0]}.log"
    with log.open("w") as said:
        process = subprocess.Popen(
            line, cwd=folder, env=environment(folder), stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        server = Server(f"http://127.0.0.1:{port}", log)
        begun = time.monotonic()
        while not answers(server):
            if process.poll() is not None or time.monotonic() - begun > STARTS_WITHIN_S:
                raise failed(f"the server does not answer; see {log}")
            time.sleep(0.5)
        print(f"(answers after {time.monotonic() - begun:.0f} s)", flush=True)
        yield server
    finally:
        stop(process)


def answers(server: Server) -> bool:
    """Whether a server is up."""
    try:
        return httpx.get(f"{server.url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def make_model(folder: Path) -> None:
    """A model of random weights, and a tokenizer of 500 words."""
    from presage.testing.models import save_qwen, save_tokenizer

    save_qwen(folder, length=LENGTH)
    save_tokenizer(folder, [" ".join(WORDS)])


def turned(workflows: Mapping[str, Sequence[Planned]]) -> dict[str, list[Planned]]:
    """The workflows with each agent replaced by the next one."""
    plays = dict(zip(AGENTS, (*AGENTS[1:], AGENTS[0]), strict=True))
    return {name: [replace(step, agent=plays[step.agent]) for step in steps] for name, steps in workflows.items()}


def version(number: int) -> Callable[[dict[str, Any]], bool]:
    """Whether the engine reports this version of the model."""
    return lambda told: str(told["models"]["next-agent"]).endswith(f"version {number}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", type=Path, default=Path("feedback-loop-output"))
    parser.add_argument("--workflows", type=int, default=150)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--training", default="", metavar="OPTIONS", help="of train-predictor next-agent")
    parser.add_argument("--prometheus", metavar="PROGRAM", help="scrapes the engine; the dashboard is drawn")
    args = parser.parse_args()
    program = args.prometheus and shutil.which(args.prometheus)
    if args.prometheus and not program:
        raise failed(f"{args.prometheus} is no program; give the path of Prometheus")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server stays behind
    begun, folder = time.monotonic(), make_anew(args.to)
    make_model(folder / "model")
    watched = Watched(folder, program)
    compared = draw(args.workflows // 2, COMPARED)
    blocks = int(args.at_once * working_set(compared, "own") / 3 / BLOCK)
    report: dict[str, Any] = {"benchmark": "feedback_loop", "workflows": args.workflows, "blocks": blocks}

    def ask(server: Server, workflows: Mapping[str, Sequence[Planned]]) -> Served:
        served = serve(server.url, MODEL, workflows, at_once=args.at_once)
        print(
            f"{len(workflows)} workflows, {len(served.answers)} steps: {served.share:.3f} of their prompts cached",
            flush=True,
        )
        return served

    say("vLLM alone.")
    with started(folder, "vllm serve", blocks) as server:
        stock = ask(server, compared)

    say("An engine that records, and has no model.")
    settings = {"recorder": {"folder": "recording", "flush_s": 0.2}, "reload_s": 1}
    more = ["--additional-config", json.dumps({"presage": settings})]
    with ExitStack() as stack:
        server = stack.enter_context(started(folder, "presage serve", blocks, *more))
        stack.enter_context(watched.over(server))
        watched.note("no model: served and recorded")
        if not str(server.status()["models"]["next-agent"]).startswith("none"):
            raise failed("an empty registry has given a model")
        ask(server, draw(args.workflows, TRAINING))

        say("What it has served becomes a version.")
        watched.note("a version is trained")
        shell(folder, "presage traces ingest recording --to traces")
        shell(folder, f"train-predictor next-agent traces {args.training}")
        watched.note("workflows to hold it against")
        ask(server, draw(args.workflows // 2, HELD_OUT))
        shell(folder, "presage traces ingest recording --to held-out")
        shell(folder, "presage promote next-agent --version 1 --traces held-out")
        server.until(version(1), "the promoted version goes live")
        watched.note("version 1 is live, and serves")

        say("The same requests that vLLM alone has had.")
        before = server.status()["counts"].get("forecast: champion", 0)
        ours = ask(server, compared)
        report["forecasts"] = server.status()["counts"].get("forecast: champion", 0) - before
        report["cached_share"] = {"stock": round(stock.share, 3), "ours": round(ours.share, 3)}
        report["times_stock"] = round(ours.cached_tokens / stock.cached_tokens, 3)
        report["other_answers"] = sum(stock.answers[at] != said for at, said in ours.answers.items())
        if report["forecasts"] == 0 or report["other_answers"]:
            raise failed(f"the champion has not forecast, or an answer changed: {json.dumps(report)}")

        say("A worse version, on purpose.")
        watched.note("version 2 is trained and refused")
        shell(folder, "presage traces generate --law retry --workflows 5 --seed 2 --to few")
        shell(
            folder, "train-predictor next-agent few --set network.epochs=1 --set boosting.rounds=0 --baselines markov-1"
        )
        shell(folder, "presage promote next-agent --version 2 --traces held-out", expected=REFUSED)

        say("One more that passes, and back again.")
        watched.note("version 3 is trained")
        shell(folder, f"train-predictor next-agent traces --seed 1 {args.training}")
        shell(folder, "presage promote next-agent --version 3 --traces held-out")
        server.until(version(3), "the next version goes live")
        watched.note("version 3 is live")
        shell(folder, "presage rollback next-agent")
        server.until(version(1), "the roll-back goes live")
        watched.note("rolled back to version 1")

        say("The application changes.")
        watched.note("the application changes")
        ask(server, turned(draw(args.workflows, CHANGED)))
        told = server.until(lambda told: bool(told["truth"]["alarms"].get(TYPE)), "the change is noticed")
        report["alarm"] = told["truth"]["alarms"][TYPE]
        print(json.dumps(report["alarm"]))
    report["seconds"] = round(time.monotonic() - begun, 1)
    print(f"\nEverything lies in {folder}.\n")
    print(json.dumps(report))


def make_anew(folder: Path) -> Path:
    """Recreates the folder, unless something else made it."""
    mark = folder / ".made-by-feedback-loop"
    if folder.exists() and not mark.exists():
        raise failed(f"{folder.resolve()} is there and was not made by this: move it away")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mark.touch()
    return folder.resolve()


if __name__ == "__main__":
    main()
