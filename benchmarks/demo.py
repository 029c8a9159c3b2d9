"""The main job from end to end, with the commands that a user types: train, promote, refuse, forecast.

Traces come from synthetic processes, so nothing is downloaded. The output goes to ./demo-output, which is recreated. A
worse candidate is trained on purpose and must be refused. Ends with one JSON line.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

OUT = Path("demo-output")
LAWS = ("retry", "research", "triage")
TRAINING, HELD_OUT, TOO_FEW = 200, 100, 5
"""Workflows of each law."""
LENGTHS, PROMPTS = 1200, 2000
"""Workflows whose lengths follow a law, and prompts for the router; a third as many are held out."""

REFUSED = 3


def shell(line: str, *, expected: int = 0) -> str:
    """Runs a command in the demo's folder and prints its output; returns standard output."""
    print(f"\n$ {line}", flush=True)
    done = subprocess.run(shlex.split(line), cwd=OUT, stdout=subprocess.PIPE, text=True, check=False, env=environment())
    print(done.stdout, end="", flush=True)
    if done.returncode != expected:
        sys.exit(f"demo: exit code {done.returncode} where {expected} was expected")
    if expected:
        print(f"(exit code {expected})")
    return done.stdout


def environment() -> dict[str, str]:
    """The environment, with a registry of the demo's own."""
    environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    return {**environment, "COLUMNS": str(shutil.get_terminal_size((140, 24)).columns)}


def say(text: str) -> None:
    print(f"\n# {text}", flush=True)


def main() -> None:
    begun = time.monotonic()
    if OUT.exists() and not (OUT / ".made-by-demo").exists():
        sys.exit(f"demo: {OUT.resolve()} is there and was not made by the demo: move it away")
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    (OUT / ".made-by-demo").touch()

    say("Traces of three applications, and others, later, that nothing is trained on.")
    for law in LAWS:
        shell(f"presage traces generate --process {law} --workflows {TRAINING} --seed 0 --to traces")
        shell(f"presage traces generate --process {law} --workflows {HELD_OUT} --seed 1 --to held-out")
    shell("presage traces describe traces")

    say("Train, compare with every baseline on workflows set apart, and register.")
    shell("train-predictor next-agent traces --out model")
    trained = read_metrics("model")

    say("Promote it: every gate is judged on the held-out traces.")
    shell("presage promote next-agent --version 1 --traces held-out")

    say("A worse candidate, on purpose: a handful of workflows, one pass, no trees. The gates have to refuse it.")
    for law in LAWS:
        shell(f"presage traces generate --process {law} --workflows {TOO_FEW} --seed 2 --to few")
    settings = "--set network.epochs=1 --set boosting.rounds=0 --baselines markov-1"
    shell(f"train-predictor next-agent few {settings}")
    shell("presage promote next-agent --version 2 --traces held-out", expected=REFUSED)
    shell("presage models")
    listed = json.loads(shell_quietly("presage models --json"))["models"]

    say("A workflow is running. What comes next?")
    steps = [
        {"workflow_type": "retry", "workflow_id": "now", "step": step, "agent": agent, "output_tokens": tokens}
        for step, (agent, tokens) in enumerate([("planner", 180), ("retriever", 60), ("coder", 650), ("tester", 90)])
    ]
    (OUT / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    print((OUT / "steps.jsonl").read_text(), end="")
    shell("presage forecast models:/next-agent@champion steps.jsonl")
    forecast = json.loads(shell_quietly("presage forecast models:/next-agent@champion steps.jsonl --json"))

    lengths = predict_lengths()
    router = route_prompts()

    verdicts = {entry["version"]: entry["verdict"] for entry in listed}
    champion = [entry["version"] for entry in listed if "champion" in entry["aliases"]]
    if verdicts != {1: "promoted", 2: "refused"} or champion != [1]:
        sys.exit(f"demo: verdicts {verdicts} and champion {champion}; the good model should serve and no other")
    print(f"\nEverything lies in {OUT.resolve()}: open model/report.html, or run the commands above there.\n")
    summary = {
        "demo": "passed",
        "seconds": round(time.monotonic() - begun, 1),
        "accuracy": {moment: figures["accuracy"] for moment, figures in trained["moments"].items()},
        "markov-3": trained["baselines"]["markov-3"]["accuracy"],
        "latency_us": round(trained["latency_us"], 1),
        "size_bytes": trained["size_bytes"],
        "promoted": champion,
        "refused": [version for version, verdict in verdicts.items() if verdict == "refused"],
        "tau_distance": lengths["tau_distance"],
        "median-per-step": lengths["baselines"]["median-per-step"]["tau_distance"],
        "macro_map": router["macro_map"],
        "tfidf-logistic": router["baselines"]["tfidf-logistic"]["macro_map"],
        "next": max(forecast["horizons"][0]["agents"].items(), key=lambda item: item[1])[0],
    }
    print(json.dumps(summary))


def predict_lengths() -> dict[str, Any]:
    say("How much work is left? The predictor of output tokens, on traces whose lengths follow a known law.")
    shell(f"presage traces generate --process lengths --workflows {LENGTHS} --seed 0 --to long")
    shell(f"presage traces generate --process lengths --workflows {LENGTHS // 3} --seed 1 --to long-held-out")
    shell("train-predictor remaining-length long --out lengths")
    shell("presage promote remaining-length --version 1 --traces long-held-out")
    step = {"workflow_type": "codegen", "workflow_id": "now", "step": 0, "agent": "planner", "input_tokens": 900}
    (OUT / "request.jsonl").write_text(json.dumps(step) + "\n")
    shell("presage forecast models:/remaining-length@champion request.jsonl")
    return read_metrics("lengths")


def route_prompts() -> dict[str, Any]:
    say("Which model will solve it? The router, on outcomes of four models.")
    shell(f"presage outcomes generate --prompts {PROMPTS} --seed 0 --to outcomes.jsonl")
    shell(f"presage outcomes generate --prompts {PROMPTS // 3} --seed 1 --to outcomes-held-out.jsonl")
    shell("train-predictor router outcomes.jsonl --out router")
    shell("presage promote router --version 1 --traces outcomes-held-out.jsonl")
    (OUT / "costs.toml").write_text("large = 10\nslow = 14\nsmall = 1\nspecialist = 2\n")
    ask = "presage route models:/router@champion --costs costs.toml --min-quality 0.8"
    shell(f"{ask} 'a quick simple parse of one string'")
    shell(f"{ask} 'derive a rigorous minimal proof without every factor of the series'")
    return read_metrics("router")


def read_metrics(folder: str) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads((OUT / folder / "metrics.json").read_text())
    return metrics


def shell_quietly(line: str) -> str:
    """The same without printing."""
    done = subprocess.run(shlex.split(line), cwd=OUT, capture_output=True, text=True, check=True, env=environment())
    return done.stdout


if __name__ == "__main__":
    main()
