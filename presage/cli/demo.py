"""`presage demo`: the main job from end to end, with the commands that a user types.

Traces come from synthetic processes, so nothing is downloaded. A worse candidate is trained on purpose and must be
refused. Replay runs vLLM's scheduler; where vLLM is not installed, the demo shows the command and skips the stage.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, TextIO

import typer

from presage.cli import options
from presage.cli.output import FAILED, REFUSED
from presage.errors import OutputError
from presage.wording import install

_PROCESSES: Final = ("retry", "research", "triage")
_TRAINING, _HELD_OUT, _TOO_FEW = 200, 100, 5
"""Workflows of each process."""
_REPLAYED: Final = 40
_LENGTHS, _PROMPTS = 1200, 2000
"""Workflows with lengths, and prompts for the router; a third as many are held out."""

_STAGES: Final = 9
_REPLAY: Final = (
    "replay burst --policy stock,full --forecasts model --concurrency 16 --cache-tokens 100000 --report replay"
)
_GATEWAY_WORKFLOWS, _GATEWAY_LOAD, _GATEWAY_ROUNDS = 60, 40, 3
"""Workflows that the gateway records, those that run at once afterwards, and how often."""
_ENDED_S: Final = 4.0
"""Seconds after which the gateway takes workflows that send nothing for ended."""
_MARK: Final = ".made-by-demo"


def demo(
    to: Annotated[Path, typer.Option("--to", help="Output folder; that of an earlier demo is replaced.")] = Path(
        "demo-output"
    ),
    replay_with: Annotated[
        Path | None,
        typer.Option(help="The command presage of an environment with vLLM, for the last stage. Default: this one."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Generate traces, train all predictors, promote, refuse, forecast, route and replay, in a few minutes."""
    begun = time.monotonic()
    if find_spec("torch") is None:
        raise ModuleNotFoundError(name="torch")
    if replay_with is None and find_spec("vllm") is not None:
        replay_with = Path(sys.executable).with_name("presage")
    if to.exists() and not (to / _MARK).exists():
        raise OutputError(f"--to {to}: was not made by the demo: move it away, or choose another folder")
    try:
        shutil.rmtree(to, ignore_errors=True)
        to.mkdir(parents=True)
        (to / _MARK).touch()
    except OSError as error:
        raise OutputError(f"--to {to}: cannot be written ({error.strerror}): choose another folder") from error
    summary = _Demo(to.absolute(), sys.stderr if as_json else sys.stdout).run(replay_with)
    if as_json:
        print(json.dumps({"demo": "passed", "seconds": round(time.monotonic() - begun, 1), **summary}))


@dataclass(frozen=True)
class _Demo:
    """The stages, their folder, and where they print."""

    folder: Path
    screen: TextIO

    def run(self, replay_with: Path | None) -> dict[str, Any]:
        """Run all stages and print the summary; returns its figures."""
        self.stage(1, "Traces. Three applications to learn from, and later workflows of theirs that no training sees.")
        for process in _PROCESSES:
            self.shell(f"presage traces generate --process {process} --workflows {_TRAINING} --seed 0 --to traces")
            self.shell(f"presage traces generate --process {process} --workflows {_HELD_OUT} --seed 1 --to held-out")
        self.shell("presage traces describe traces")

        self.stage(
            2, "Train. The command compares with counting and trees on workflows set apart, so you see what it gains."
        )
        self.shell("train-predictor next-agent traces --out model")
        trained = self.metrics_of("model")

        self.stage(3, "Promote. Gates judge the version on the held-out traces before any engine may load it.")
        self.shell("presage promote next-agent --version 1 --traces held-out")

        self.stage(
            4, "Refuse. A worse candidate, made on purpose from a handful of workflows: the champion has to stay."
        )
        for process in _PROCESSES:
            self.shell(f"presage traces generate --process {process} --workflows {_TOO_FEW} --seed 2 --to few")
        self.shell("train-predictor next-agent few --set network.epochs=1 --set boosting.rounds=0 --baselines markov-1")
        self.shell("presage promote next-agent --version 2 --traces held-out", expected=REFUSED)
        self.shell("presage models")
        listed = json.loads(self.quiet("presage models --json"))["models"]

        self.stage(5, "Forecast. A workflow is running: which agents come next?")
        agents = [("planner", 180), ("retriever", 60), ("coder", 650), ("tester", 90)]
        self.write_steps(
            "steps.jsonl",
            [
                {"workflow_type": "retry", "workflow_id": "now", "step": step, "agent": agent, "output_tokens": tokens}
                for step, (agent, tokens) in enumerate(agents)
            ],
        )
        print((self.folder / "steps.jsonl").read_text(), end="", file=self.screen)
        self.shell("presage forecast models:/next-agent@champion steps.jsonl")
        forecast = json.loads(self.quiet("presage forecast models:/next-agent@champion steps.jsonl --json"))

        self.stage(
            6, "Remaining length. How many tokens are still to come? A scheduler that knows runs short work first."
        )
        self.shell(f"presage traces generate --process lengths --workflows {_LENGTHS} --seed 0 --to long")
        self.shell(f"presage traces generate --process lengths --workflows {_LENGTHS // 3} --seed 1 --to long-held-out")
        self.shell("train-predictor remaining-length long --out lengths")
        self.shell("presage promote remaining-length --version 1 --traces long-held-out")
        request = {"workflow_type": "code-repair", "workflow_id": "now", "step": 0, "agent": "planner"}
        self.write_steps(
            "request.jsonl", [{**request, "input_tokens": 857, "input_text": "please sort this list and check it"}]
        )
        self.shell("presage forecast models:/remaining-length@champion request.jsonl")
        lengths = self.metrics_of("lengths")

        self.stage(7, "Route. Which is the cheapest model that will solve a prompt?")
        self.shell(f"presage outcomes generate --prompts {_PROMPTS} --seed 0 --to outcomes.jsonl")
        self.shell(f"presage outcomes generate --prompts {_PROMPTS // 3} --seed 1 --to outcomes-held-out.jsonl")
        self.shell("train-predictor router outcomes.jsonl --out router")
        self.shell("presage promote router --version 1 --traces outcomes-held-out.jsonl")
        (self.folder / "costs.toml").write_text("large = 10\nslow = 14\nsmall = 1\nspecialist = 2\n")
        with (self.folder / "outcomes-held-out.jsonl").open() as outcomes:
            prompt = json.loads(outcomes.readline())["prompt"]
        self.shell(f"presage route models:/router@champion --costs costs.toml --min-quality 0.8 {shlex.quote(prompt)}")
        router = self.metrics_of("router")

        self.stage(8, "Replay. What would it do to completion times? Forty other workflows, in vLLM's own scheduler.")
        self.shell(f"presage traces generate --process retry --workflows {_REPLAYED} --seed 3 --to burst")
        replayed = self.replay(replay_with)

        self.stage(
            9, "Gateway. Applications that name nothing, before an engine without a model: recognise, record, learn."
        )
        completed = self.gateway()

        verdicts = {entry["version"]: entry["verdict"] for entry in listed}
        champion = [entry["version"] for entry in listed if "champion" in entry["aliases"]]
        if verdicts != {1: "promoted", 2: "refused"} or champion != [1]:
            _fail(f"verdicts {verdicts} and champion {champion}; the good model should serve and no other")
        self.summarize(trained, lengths, router, replayed, completed)
        return {
            "accuracy": {moment: figures["accuracy"] for moment, figures in trained["moments"].items()},
            "markov-3": trained["baselines"]["markov-3"]["completion"]["accuracy"],
            "latency_us": round(trained["latency_us"], 1),
            "size_bytes": trained["size_bytes"],
            "promoted": champion,
            "refused": [version for version, verdict in verdicts.items() if verdict == "refused"],
            "tau_distance": lengths["tau_distance"],
            "median-per-step": lengths["baselines"]["median-per-step"]["tau_distance"],
            "macro_map": router["macro_map"],
            "tfidf-logistic": router["baselines"]["tfidf-logistic"]["macro_map"],
            "replay": replayed,
            "gateway": [{"off": off, "on": on} for off, on in completed],
            "next": max(forecast["horizons"][0]["agents"].items(), key=lambda item: item[1])[0],
        }

    def replay(self, command: Path | None) -> dict[str, Any] | None:
        """The verdict, and the mean completion time in seconds by policy; None without vLLM."""
        if command is None:
            self.show(
                f"\nvLLM is not installed, so the demo skips: presage {_REPLAY}\nTo install it: {install('serve')}"
            )
            return None
        self.shell(f"presage {_REPLAY}", program=command.absolute())
        metrics = self.metrics_of("replay")
        completion_s = {name: figures["completion_mean_s"]["mean"] for name, figures in metrics["policies"].items()}
        return {"verdict": metrics["verdict"]["text"], "completion_mean_s": completion_s}

    def gateway(self) -> list[tuple[float, float]]:
        """Mean completion times in seconds, of each round: with the gateway proxying alone, and with its forecasts."""
        import asyncio

        from presage.cli.demo_gateway import compare, drive, running

        environment = _environment()
        watching = ("--mode", "shadow", "--record", "served", "--time-to-live", "2")
        forecasting = ("--forecaster", "remaining-length=served-lengths")
        self.show(f"\n$ presage gateway --simulate {' '.join(watching)} &   # and an application of its own")
        with running(self.folder, environment, *watching) as url:
            asyncio.run(drive(url, _GATEWAY_WORKFLOWS, seed=0))
            time.sleep(_ENDED_S)
        self.shell("presage traces ingest served --to served-traces")
        self.shell("presage traces describe served-traces")
        self.shell(
            "train-predictor remaining-length served-traces --out served-lengths --name served-lengths "
            "--estimator ridge --baselines median-per-step"
        )
        for mode in ("off", "on"):
            self.show(f"\n$ presage gateway --simulate --mode {mode} {' '.join(forecasting)} &")
        with (
            running(self.folder, environment, "--mode", "off", *forecasting) as alone,
            running(self.folder, environment, "--mode", "on", *forecasting) as forecast,
        ):
            pairs = asyncio.run(compare(alone, forecast, _GATEWAY_LOAD, _GATEWAY_ROUNDS))
        for off, on in pairs:
            self.show(f"mean completion of {_GATEWAY_LOAD} workflows at once: off {off:.2f} s, on {on:.2f} s")
        return pairs

    def summarize(
        self,
        trained: dict[str, Any],
        lengths: dict[str, Any],
        router: dict[str, Any],
        replayed: dict[str, Any] | None,
        completed: list[tuple[float, float]],
    ) -> None:
        """Print what was gained, on held-out workflows and prompts, and where everything is."""
        from presage.cli.demo_gateway import APPLICATIONS, compared

        ours = trained["moments"]["completion"]["accuracy"]
        counting = trained["baselines"]["markov-3"]["completion"]["accuracy"]
        saved = lengths["queue"]["saved"]["shortest total, predicted"]
        wrong, median = (
            figures["tau_distance"]["all"] for figures in (lengths, lengths["baselines"]["median-per-step"])
        )
        rows = {
            "next agent": f"{ours[0]:.0%} right one step ahead after the output (counting: {counting[0]:.0%}), "
            f"{ours[-1]:.0%} {len(ours)} steps ahead (counting: {counting[-1]:.0%})",
            "remaining length": f"{wrong:.0%} of pairs of steps in the wrong order (median per step: {median:.0%}); on "
            f"one busy server, shortest first completes workflows {saved:.0%} sooner than first come",
            "router": f"{router['picked_accuracy']:.0%} of prompts solved by the model it picks "
            f"(the best single model: {router['best_single']:.0%})",
            "replay": "skipped: vLLM is not installed" if replayed is None else replayed["verdict"],
            "gateway": f"{len(APPLICATIONS)} unchanged applications recorded; with priorities their workflows "
            + compared(completed),
            "reports": "model/report.html, lengths/report.html, router/report.html"
            + (", replay/report.html" if replayed else ""),
            "registry": "mlflow.db; mlflow ui --backend-store-uri sqlite:///mlflow.db shows it",
        }
        self.show(f"\nWhat was gained (everything is in {self.folder})\n")
        for name, gained in rows.items():
            self.show(f"  {name:17} {gained}")

    def stage(self, number: int, why: str) -> None:
        """Announce a stage in one line: what it does and why."""
        self.show(f"\n[{number}/{_STAGES}] {why}")

    def shell(self, line: str, *, expected: int = 0, program: Path | None = None) -> None:
        """Run a command in the demo's folder and show it with its output; `program` replaces its first word."""
        self.show(f"\n$ {line}")
        words = shlex.split(line)
        called = [*([str(program)] if program else words[:1]), *words[1:]]
        done = subprocess.run(called, cwd=self.folder, check=False, env=_environment(), stdout=self.screen)
        if done.returncode != expected:
            _fail(f"exit code {done.returncode} where {expected} was expected")
        if expected:
            self.show(f"(exit code {expected})")

    def quiet(self, line: str) -> str:
        """Run a command in the demo's folder and return its output."""
        return subprocess.run(
            shlex.split(line), cwd=self.folder, capture_output=True, text=True, check=True, env=_environment()
        ).stdout

    def show(self, text: str) -> None:
        """Print at once, before the output of the next command."""
        print(text, file=self.screen, flush=True)

    def write_steps(self, name: str, steps: list[dict[str, Any]]) -> None:
        """Write steps as JSONL."""
        (self.folder / name).write_text("".join(json.dumps(step) + "\n" for step in steps))

    def metrics_of(self, folder: str) -> dict[str, Any]:
        """The metrics that a command kept."""
        metrics: dict[str, Any] = json.loads((self.folder / folder / "metrics.json").read_text())
        return metrics


def _fail(why: str) -> NoReturn:
    print(f"presage: demo: {why}", file=sys.stderr)
    raise typer.Exit(FAILED)


def _environment() -> dict[str, str]:
    """The environment, with a registry of the demo's own, and the commands of this Python first."""
    inherited = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    path = os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", os.defpath)])
    return {**inherited, "PATH": path, "COLUMNS": str(shutil.get_terminal_size((120, 24)).columns)}
