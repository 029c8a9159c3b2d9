"""`train-predictor profile`, `presage profile show` and `diff`, and how forecasts of a profile look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import options
from presage.cli.kinds import KindCommand
from presage.cli.output import Output, report_lines, table
from presage.cli.training import TrainingJob, carry_out, training_command
from presage.errors import ArtefactError, InputError
from presage.kinds.loaded import Loaded, load_at
from presage.progress import Progress

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.predictors.profile.predictor import ProfilePredictor
    from presage.predictors.profile.profile import TypeProfile
    from presage.training.profile.train import ProfileTraining

app = typer.Typer(no_args_is_help=True, help="What an application does: its profile, and what changed.")
_LIKELIEST = 6


@training_command("profile")
def profile(
    job: TrainingJob,
) -> None:
    """Describe what an application does: its calls as an expression and an automaton, and percentiles of its agents.

    Needs agents and their order alone; parent_steps show what runs in parallel, token counts and times give
    percentiles, prompts (input_text) give templates of how prompts begin.
    """
    from presage.predictors.profile.profile import LIMITS, ProfileConfig
    from presage.training.baselines import choose_names
    from presage.training.configuration import read_configuration
    from presage.training.profile.evaluate import PROFILE_BASELINES
    from presage.training.profile.train import train_profiles

    configuration = read_configuration(ProfileConfig, job.config, job.settings or (), LIMITS)
    wanted = choose_names(job.baselines, PROFILE_BASELINES)

    def fit(data: pa.Table, test_data: pa.Table | None, report: Progress) -> ProfileTraining:
        return train_profiles(
            data, test_data, configuration, seed=job.seed, baselines=wanted, name=job.name, progress=report
        )

    carry_out(job, fit)


Which = Annotated[
    str, typer.Argument(metavar="MODEL|FOLDER", help="models:/NAME@ALIAS, models:/NAME/VERSION, or an artefact folder.")
]
TypeOption = Annotated[str | None, typer.Option("--type", help="One workflow type. Default: all.")]


@app.command(epilog="Examples:\n\npresage profile show models:/profile@champion\n\npresage profile show model/ --json")
def show(
    which: Which,
    workflow_type: TypeOption = None,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Show the expression, the states, the agents and the templates of prompts of each workflow type."""
    from presage.report.profile import type_sections
    from presage.training.profile.evaluate import describe_profile

    out = Output(as_json)
    with out.working() as report:
        report("loading the profile", None)
        loaded, predictor = load_profile(which, tracking_uri)
        profiles = chosen_types(predictor, workflow_type, which)
        types = {name: describe_profile(predictor, name) for name in profiles}
    data = {"model": loaded.model, "version": loaded.version, "workflow_types": types}
    out.result(data, *(report_lines(type_sections(loaded.called, types)) if not as_json else ()))


@app.command(
    epilog="Examples:\n\npresage profile diff models:/app/1 models:/app/2\n\npresage profile diff before/ after/"
)
def diff(
    first: Which,
    second: Which,
    workflow_type: TypeOption = None,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Say what changed from the first profile to the second, in sentences with 95 % intervals.

    Workflow types are compared by name; without an equal one, by the part before an @, as in coding@1 and coding@2.
    """
    from presage.predictors.profile.drift import LEVEL, drift

    out = Output(as_json)
    with out.working() as report:
        report("loading the profiles", None)
        both = [load_profile(which, tracking_uri) for which in (first, second)]
        before, after = (
            chosen_types(profile, None, which) for (_, profile), which in zip(both, (first, second), strict=True)
        )
        pairs = _pairs(before, after)
        if workflow_type is not None:
            pairs = [pair for pair in pairs if workflow_type in pair]
        if not pairs:
            there = f"{', '.join(before)} and {', '.join(after)}"
            raise InputError(f"no workflow type is in both profiles, which have {there}; give two of one application")
        types = []
        for a, b in pairs:
            earlier, later = before[a], after[b]
            types.append(
                {
                    "workflow_types": [a, b],
                    "expressions": [earlier.text, later.text],
                    **drift(earlier.usage, later.usage).to_dict(),
                    "percentiles": _moved(earlier, later),
                }
            )
    paired = [set(names) for names in zip(*pairs, strict=True)]
    alone = {"only_in_first": sorted(before.keys() - paired[0]), "only_in_second": sorted(after.keys() - paired[1])}
    data = {"models": [loaded.called for loaded, _ in both], "types": types, **alone}
    lines: list[Any] = []
    for compared in types:
        a, b = compared["workflow_types"]
        lines += [
            f"{a if a == b else f'{a} → {b}'} ({compared['workflows'][0]} and {compared['workflows'][1]} workflows)"
        ]
        lines += [f"  before  {compared['expressions'][0]}", f"  after   {compared['expressions'][1]}"]
        changes = [*compared["sentences"], *compared["percentiles"]]
        lines += [f"  {change}" for change in changes] or [
            f"  Nothing changed beyond chance (p {compared['p']:.2g}, level {LEVEL})."
        ]
        lines += [
            f"  Distance {compared['distance']:.3f} between the agents' shares of all steps; p {compared['p']:.2g}.",
            "",
        ]
    for key, words in (("only_in_first", "no longer there"), ("only_in_second", "new")):
        lines += [f"{words}: {', '.join(alone[key])}"] if alone[key] else []
    out.result(data, *lines)


def load_profile(which: str, tracking_uri: str | None) -> tuple[Loaded, ProfilePredictor]:
    """A profile of the registry or a folder; raises ArtefactError for another kind of predictor."""
    loaded = load_at(which, tracking_uri)
    if loaded.kind.name != "profile":
        raise ArtefactError(f"{which}: a {loaded.kind.name} predictor; expected a profile (train-predictor profile)")
    return loaded, loaded.predictor


def chosen_types(predictor: ProfilePredictor, workflow_type: str | None, which: str) -> dict[str, TypeProfile]:
    """The profiles of all workflow types, or of one; raises InputError if there is none of that name."""
    if workflow_type is None:
        return predictor.profiles
    if workflow_type not in predictor.profiles:
        raise InputError(f"{which}: no workflow type {workflow_type!r}; there are {', '.join(predictor.profiles)}")
    return {workflow_type: predictor.profiles[workflow_type]}


def _pairs(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str]]:
    from presage.predictors.profile.versions import application_of

    pairs = [(name, name) for name in before if name in after]
    for name in before.keys() - after.keys():
        same = [other for other in after.keys() - before.keys() if application_of(other) == application_of(name)]
        if len(same) == 1:
            pairs.append((name, same[0]))
    return sorted(pairs)


def _moved(before: TypeProfile, after: TypeProfile) -> list[str]:
    """Sentences on the medians whose intervals do not overlap."""
    words = {"output_tokens": "output tokens", "return_s": "seconds until it returns", "input_tokens": "input tokens"}
    sentences = []
    for agent in sorted(before.numbers.keys() & after.numbers.keys()):
        for name, unit in words.items():
            a, b = (profile.numbers[agent].get(name) for profile in (before, after))
            if a is None or b is None:
                continue
            (low, high), (least, most) = a.intervals[0], b.intervals[0]
            if high < least or most < low:
                sentences.append(
                    f"{agent}: the median of its {unit} is now {b.values[0]:.4g} [{least:.4g}, {most:.4g}], before "
                    f"{a.values[0]:.4g} [{low:.4g}, {high:.4g}]."
                )
    return sentences


def _forecast(data: dict[str, Any], called: str, rows: list[dict[str, Any]]) -> list[Any]:
    last = rows[-1]
    likeliest = sorted([*data["agents"].items(), ("END", data["end"])], key=lambda entry: -entry[1])[:_LIKELIEST]
    title = f"After step {len(rows) - 1} ({last['agent']}) of {last['workflow_id']}"
    shown: list[Any] = [table(title, ["next", "probability"], [[name, f"{p:.3f}"] for name, p in likeliest if p])]
    if data["left"]:
        left = data["left"]
        shown.append(
            f"\nsteps left: {left['mean']:.1f} on average, 90 % of the workflows have {left['0.9']:.0f} or fewer"
        )
    if data["tokens"]:
        tokens = data["tokens"]
        shown.append(
            f"output tokens left, this step's included: {tokens['mean']:,.0f} on average, 90 % of the workflows have "
            f"{tokens['0.9']:,.0f} or fewer"
        )
    if data["expression"]:
        shown.append(f"the application: {data['expression']}")
    if data["workflow_type"] not in ("", last["workflow_type"]):
        shown.append(f"{last['workflow_type']} has no profile: this is that of {data['workflow_type']}")
    where = "on the graph" if data["on_graph"] else "OFF THE GRAPH: it made a call that no training workflow made there"
    shown.append(f"{called}; source {data['source']}, {data['evidence']} training visits of this state; {where}")
    return shown


PROFILE = KindCommand(
    advice="more workflows, agent names that distinguish roles, or parent_steps where steps run in parallel",
    train=profile,
    examples="train-predictor profile traces/\n\n"
    "train-predictor profile traces/ --set min_coverage=0      # prune every edge below 5 %, as Pythia does\n\n"
    "train-predictor profile traces/ --set templates=false      # learn nothing from prompts",
    forecast=_forecast,
)
