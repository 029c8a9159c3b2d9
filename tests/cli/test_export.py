"""`presage export router-profile` from traces to the files that vllm-router reads."""

import json
from pathlib import Path

from cli_samples import run

STEPS = [
    {
        "workflow_type": "review",
        "workflow_id": f"w{number}",
        "step": step,
        "agent": "coder",
        "output_tokens": 50,
        "start_time": 100.0 * number + 3 * step,
        "end_time": 100.0 * number + 3 * step + 1,
    }
    for number in range(4)
    for step in range(3)
]


def traces(folder: Path, *without: str) -> Path:
    path = folder / "steps.jsonl"
    kept = [{name: value for name, value in step.items() if name not in without} for step in STEPS]
    path.write_text("".join(json.dumps(step) + "\n" for step in kept))
    return path


def test_profile_and_settings_fit_each_other(tmp_path: Path) -> None:
    to, settings = tmp_path / "profile.json", tmp_path / "settings.json"
    ran = run(
        "export",
        "router-profile",
        traces(tmp_path),
        "--to",
        to,
        "--engine",
        "h100-8b-datasheet",
        "--settings",
        settings,
        "--json",
    )
    assert ran.code == 0, ran.err
    profile, wanted = json.loads(to.read_text()), json.loads(settings.read_text())
    assert wanted == ran.json["settings"]
    assert wanted["prediction_profile"]["profile_path"] == str(to.absolute())
    for name in ("return_time_bucket_bounds_seconds", "output_length_bucket_bounds_tokens"):
        assert wanted["prediction_profile"][name] == profile[name]
    assert wanted["token_capacity_per_target"] == 400_000
    assert (ran.json["kind"], ran.json["return_times"], ran.json["output_lengths"]) == ("router-profile", 12, 12)
    assert ran.json["keys"] == {"return_time": 5, "output_length": 4}


def test_the_table_says_what_was_written_and_what_a_prefill_costs(tmp_path: Path) -> None:
    to = tmp_path / "profile.json"
    ran = run("export", "router-profile", traces(tmp_path), "--to", to, "--engine", "h100-8b-datasheet")
    assert "return times" in ran.out
    assert f"Written to {to}." in ran.out
    assert "a cold prefill of 32,000 tokens takes 1.6 s" in ran.out


def test_bad_input_is_one_line_and_writes_nothing(tmp_path: Path) -> None:
    to, good = tmp_path / "profile.json", traces(tmp_path)
    assert "no engine file" in run("export", "router-profile", good, "--to", to, "--engine", "nowhere.toml").complaint
    assert "nowhere" in run("export", "router-profile", tmp_path / "nowhere", "--to", to).complaint
    timeless = traces(tmp_path, "start_time", "end_time")
    assert "record no started_at and ended_at" in run("export", "router-profile", timeless, "--to", to).complaint
    assert not to.exists()


def test_a_profile_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file" in run("export", "router-profile", traces(tmp_path), "--to", tmp_path / "file" / "p.json").complaint


def test_the_help_shows_how_the_router_is_started() -> None:
    ran = run("export", "router-profile", "--help")
    assert ran.code == 0
    assert "--program-scheduling-config-json" in ran.out
