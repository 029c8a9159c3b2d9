"""When should the tools of recorded programs be set up: once they are asked for, at the start, or by forecasts?

SWE-agent sessions (the first 30 requests of each, with their tool calls as recorded) are replayed on vLLM's own
scheduler with the costs of a data sheet. Their tools take time to set up, and a request whose tool is late comes as
much later:

- on-demand: a tool is set up when the first call needs it
- at-start: all tools as the workflow starts (ThunderAgent, section 4.4)
- expected: by online counts, with the rule of the tool service
- no-setup: in no time, a bound

Two environments: `sandbox`, in which all calls run, so that the first answer needs it; and `python`, in which only the
calls of Python run, which come late or never. Two loads: as recorded, and 52 sessions at once, where vLLM alone
thrashes. With a limit, no more tools than that are there at once.

Completion leaves out pauses, and counts waits for tools; seconds and tools are means by workflow.

    .venv-vllm/bin/python benchmarks/tool_replay.py --real FOLDER [--seeds 3] [--processes 1] [--setups 2 30]

Prints a table, and one JSON line at the end.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from regimes import CELLS, SWE, Jobs

from presage.serving_hooks.replay.policies import NO_SETUP, POLICIES, PREPARATIONS, prepared
from presage.serving_hooks.replay.runs import Setting, check_vllm, side_by_side
from presage.serving_hooks.replay.tools_file import ReplayedTool
from presage.serving_hooks.replay.workload import Arrivals

CALLS: Final[Mapping[str, list[str]]] = {"sandbox": ["*"], "python": ["bash:python"]}
LOADS: Final[Mapping[str, Arrivals]] = {"recorded": Arrivals(as_recorded=True), "52 at once": Arrivals(52)}
LIMITS: Final[Mapping[str, int]] = {"recorded": 4, "52 at once": 40}
NO_LIMIT: Final = 1000


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    tool: str
    load: str
    policy: str
    setup_s: float
    most: int
    preparation: str


def rows(tools: list[str], setups: list[float], policies: list[str]) -> list[Row]:
    """All of them; as recorded the engine is idle most of the time, so only the first policy is replayed there."""
    return [
        Row(tool, load, policy, setup_s, most, preparation)
        for tool in tools
        for load in LOADS
        for policy in (policies if load != "recorded" else policies[:1])
        for setup_s in setups
        for most in (NO_LIMIT, LIMITS[load])
        for preparation in PREPARATIONS
    ]


def setting_of(row: Row, found: Jobs) -> Setting:
    tool = ReplayedTool.model_validate({"setup_s": row.setup_s, "most": row.most, "replay": {"calls": CALLS[row.tool]}})
    return Setting(*found, LOADS[row.load], CELLS["swe"].engine, "counts", tools={row.tool: tool})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=Path, required=True, help="folder of the public traces")
    parser.add_argument("--seeds", type=int, default=3, help="orders of arrival; as recorded, there is one")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--setups", type=float, nargs="+", default=[2.0, 30.0], help="seconds")
    parser.add_argument("--tools", nargs="+", choices=list(CALLS), default=list(CALLS))
    parser.add_argument("--policies", nargs="+", default=["stock"], help="of the engine")
    args = parser.parse_args()
    check_vllm()
    found = SWE(args.real, 0)
    if found is None:
        parser.error(f"{args.real} holds no swe_agent_glm.jsonl.gz: give the folder of the public traces")
    wanted = rows(args.tools, args.setups, args.policies)
    tasks, of = [], []
    for row in wanted:
        for seed in range(1 if row.load == "recorded" else args.seeds):
            if row.preparation == NO_SETUP and row.setup_s != args.setups[0]:
                continue  # as with the first
            policy = prepared([POLICIES[row.policy]], row.preparation)[0]
            tasks.append((setting_of(row, found), policy, seed))
            of.append(row)
    done = side_by_side(tasks, args.processes)
    figures: dict[Row, list[Mapping[str, float]]] = {}
    for row, one in zip(of, done, strict=True):
        figures.setdefault(row, []).append(one.figures)
    told: list[dict[str, Any]] = []
    each = len(found[0])
    print(f"{each} sessions; seconds, and tools times seconds, by session")
    print(f"{'':50}completion  makespan    set-up  hidden      idle  there  never   limit    its")
    print(f"{'tool':8}{'load':11}{'policy':7}{'set-up':>7}{'most':>6} {'':11}{'mean s':>9}{'s':>10}", end="")
    print(f"{'waited':>10}{'':8}{'tool s':>10}{'tool s':>8}{'needed':>7}{'waits':>8}{'s':>7}")
    for row in wanted:
        runs = figures.get(row)
        if runs is None:
            continue
        mean = {name: fmean(run[name] for run in runs) for name in runs[0] if all(name in run for run in runs)}
        line = {
            "completion_mean_s": mean["completion_mean_s"],
            "makespan_s": mean["makespan_s"],
            "setup_waited_s": mean["tool_setup_waited_s"] / each,
            "hidden_share": mean.get("tool_hidden_share"),
            "idle_s": mean["tool_idle_s"] / each,
            "there_s": mean["tool_held_s"] / each,
            "unused": mean["tools_unused"],
            "limit_waits": mean["tool_limit_waits"],
            "limit_waited_s": mean["tool_limit_waited_s"] / each,
        }
        hidden = "–" if line["hidden_share"] is None else f"{line['hidden_share']:.1%}"
        print(
            f"{row.tool:8}{row.load:11}{row.policy:7}{row.setup_s:7g}{row.most if row.most < NO_LIMIT else '–':>6} "
            f"{row.preparation:11}{line['completion_mean_s']:9.2f}{line['makespan_s']:10.0f}"
            f"{line['setup_waited_s']:10.2f}{hidden:>8}{line['idle_s']:10.2f}{line['there_s']:8.1f}"
            f"{line['unused']:7.1f}{line['limit_waits']:8.1f}{line['limit_waited_s']:7.1f}"
        )
        told.append(vars(row) | line)
    print(json.dumps({"benchmark": "tool_replay", "seeds": args.seeds, "sessions": each, "rows": told}))


if __name__ == "__main__":
    main()
