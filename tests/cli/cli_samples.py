"""Running a command inside the test, and traces as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from presage.cli.presage import app as presage
from presage.cli.train_predictor import app as train_predictor


class Ran:
    """What a command did: its exit code and what it printed."""

    def __init__(self, app: typer.Typer, *arguments: object) -> None:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr

    @property
    def json(self) -> dict[str, Any]:
        """The one object on standard output."""
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def complaint(self) -> str:
        """The one line that says what is wrong: nothing on standard output, no traceback, exit code 2."""
        assert (self.code, self.out) == (2, ""), (self.code, self.out, self.err)
        assert "Traceback" not in self.err
        lines = [line for line in self.err.splitlines() if not line.endswith(("…", " left"))]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("presage: ")
        return lines[0]

    @property
    def usage_error(self) -> str:
        """What typer prints of a value that an option does not take, in one line; exit code 2."""
        assert (self.code, self.out) == (2, ""), (self.code, self.out, self.err)
        assert "Traceback" not in self.err
        return " ".join(self.err.replace("│", " ").split())


def run(*arguments: object) -> Ran:
    return Ran(presage, *arguments)


def train(*arguments: object) -> Ran:
    return Ran(train_predictor, "next-agent", *arguments)


FAST = ("--set", "network.epochs=2", "--set", "boosting.rounds=2", "--baselines", "none")


def rows(*workflows: str, workflow_type: str = "t", **more: Any) -> list[dict[str, Any]]:
    """A workflow a word, a step a letter."""
    return [
        {"workflow_type": workflow_type, "workflow_id": f"w{number}", "step": step, "agent": agent, **more}
        for number, word in enumerate(workflows)
        for step, agent in enumerate(word)
    ]


GOOD = rows("abc", "abab", "ba", "cab", "abcc", "bab")


def write(path: Path, lines: Iterable[Mapping[str, Any] | str]) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def changed(row: int, **values: Any) -> list[dict[str, Any]]:
    """The good trace with one row changed; a value of `...` takes the key out."""
    made = [dict(one) for one in GOOD]
    made[row].update(values)
    made[row] = {key: value for key, value in made[row].items() if value is not ...}
    return made
