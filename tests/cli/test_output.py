"""Results on standard output, all else on standard error, on a terminal and off it."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from cli_samples import run
from typer.testing import CliRunner

from presage import __version__
from presage.cli.output import Boundary, Output, report_lines, table
from presage.cli.presage import app
from presage.report.blocks import Document, Section, Table


def test_off_a_terminal_each_thing_that_begins_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Output(False).working() as report:
        for share in (None, 0.5, 1.0):
            report("reading", share)
        report("learning", 0.1)
        print("a library chats")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ["reading …", "learning …", "a library chats"]


def test_off_a_terminal_long_work_shows_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("presage.progress.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with Output(False).working() as report:
        report("reading", None)
        for at_s, share in ((100.0, 0.0), (110.0, 0.1), (140.0, 0.25), (150.0, 0.5)):
            now_s[0] = at_s
            report("replaying", share)
    assert capsys.readouterr().err.splitlines() == ["reading …", "replaying …", "replaying: 25%, 0:02:00 left"]


def test_a_wide_table_of_a_report_becomes_several_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a-policy-with-quite-a-long-name+stjf-oracle"
    head = ["policy", *(f"figure {n}" for n in range(9))]
    rows = [[name, *(f"{n}{n}{n}{n}.0 ± 100.0" for n in range(9))]]
    made = Document("Title", "Lead.", [Section("Figures", [Table(head, rows)], in_terminal=True)], verdict="Best: it.")
    Output(False).result({}, *report_lines(made))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    cells = [cell for line in lines if line.startswith(name) for cell in line.split("  ")[1:]]
    assert [cell for cell in cells if cell] == rows[0][1:]
    assert lines[-1] == "Best: it."


def test_on_a_terminal_there_is_a_bar_and_standard_output_stays_clean(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    out = Output(True)
    with out.working() as report:
        report("learning", 0.5)
        report("judging", None)
    out.result({"é": 1.5})
    captured = capsys.readouterr()
    assert captured.out == '{"é": 1.5}\n'
    assert "judging" in captured.err


def test_names_that_look_like_markup_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    Output(False).result({}, "traces [a/b]", table("[b]title", ["[/i]agent"], [["[/red]"]]))
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("traces [a/b]", "[b]title", "[/i]agent", "[/red]"))


def test_a_command_that_lacks_a_training_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)  # importing it raises ModuleNotFoundError
    made = typer.Typer(cls=Boundary, pretty_exceptions_enable=False)

    @made.command()
    def one() -> None:
        importlib.import_module("lightgbm")

    @made.command()
    def two() -> None:
        importlib.import_module("presage.no_such_module")

    needs, broken = (CliRunner().invoke(made, [name]) for name in ("one", "two"))
    assert (needs.exit_code, broken.exit_code) == (2, 1)
    assert "lightgbm is not installed; this command needs it: pip install '.[train]'" in needs.stderr


def test_the_version_is_printed() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.stdout.split()) == (0, ["presage", __version__])


def test_the_demo_replaces_nothing_that_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert "was not made by the demo" in run("demo", "--to", tmp_path).complaint
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_demo_names_the_extra_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("presage.cli.demo.find_spec", lambda _: None)
    ran = run("demo", "--to", tmp_path / "demo")
    assert "torch is not installed; this command needs it: pip install '.[train]'" in ran.complaint
    assert not (tmp_path / "demo").exists()
