"""Through how many files of ours does a request go, and how often from one to another?

One step of a running workflow is followed from its arrival until it has left, by `sys.setprofile`: in the gateway's
decisions (no HTTP), and where vLLM is installed in its scheduler with all policies and a recorder. A move is a call
from a function of one of our files into one of another; library code between them is passed over.

    .venv-vllm/bin/python benchmarks/request_way.py [--show]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import presage

PACKAGE: Final = str(Path(presage.__file__).parent)
TESTING: Final = f"{PACKAGE}/testing/"
EARLIER: Final = 3
"""Steps of the workflow before the one that is followed."""


class Way:
    """The files that a call enters, and its moves between them."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.moves = 0

    def follow(self, call: Callable[[], object]) -> None:
        """Makes a call and follows it."""
        sys.setprofile(self._profile)
        try:
            call()
        finally:
            sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(PACKAGE) or path.startswith(TESTING):
            return
        self.files[path.removeprefix(PACKAGE + "/")] += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        self.moves += caller is not None and caller.f_code.co_filename != path

    def figures(self) -> dict[str, int]:
        return {"files": len(self.files), "moves": self.moves, "calls": self.files.total()}


def through_gateway() -> Way:
    """The last of a workflow's steps in the gateway's decisions, with online counts."""
    from gateway_decisions import answered

    from presage.gateway.config import gateway_config
    from presage.gateway.serve import build_decisions
    from presage.serving_hooks.identity.request import ApiRequest

    sources = dict.fromkeys(("next_agent", "remaining_length", "return_time", "profile", "reload_s"))
    config = gateway_config({"upstreams": [{"url": "http://127.0.0.1:9"}], "forecasts": sources}, "")
    decisions, way = build_decisions(config), Way()

    def step(number: int) -> None:
        names = {"workflow_type": "t", "workflow_id": "w", "agent": f"agent-{number % 2}"}
        messages = [{"role": "user", "content": f"question {number}"}]
        decision = decisions.arrived(ApiRequest("chat", {"model": "m", "messages": messages, "vllm_xargs": names}))
        decisions.answered(decision, answered("an answer"))

    for number in range(EARLIER):
        step(number)
    way.follow(lambda: step(EARLIER))
    return way


def through_engine() -> Way:
    """The same in vLLM's scheduler, until its tokens are computed."""
    from presage.serving_hooks.vllm.scheduler import SyncWorkflowScheduler
    from presage.testing.engine import ScriptedEngine, ask, build

    way = Way()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        settings = {"recorder": {"folder": str(folder / "recording")}, "infer_workflows": True}
        engine = ScriptedEngine(build(folder, SyncWorkflowScheduler, blocks=200, presage=settings))

        def step(number: int) -> None:
            names = {"workflow_type": "t", "workflow_id": "w", "agent": f"agent-{number % 2}"}
            engine.scheduler.add_request(ask(f"r{number}", list(range(64 * (number + 1))), 4, **names))
            engine.run()

        for number in range(EARLIER):
            step(number)
        way.follow(lambda: step(EARLIER))
        engine.scheduler.shutdown()
    return way


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="the files, with the calls into each")
    args = parser.parse_args()
    ways = {"gateway": through_gateway}
    if importlib.util.find_spec("vllm") is not None:
        ways["engine"] = through_engine
    figures = {}
    for name, follow in ways.items():
        way = follow()
        figures[name] = way.figures()
        print(f"{name}: {len(way.files)} files, {way.moves} moves between them, {way.files.total()} calls")
        if args.show:
            print("\n".join(f"  {calls:5} {path}" for path, calls in way.files.most_common()))
    print(json.dumps({"benchmark": "request_way", **figures}))


if __name__ == "__main__":
    main()
