"""`presage compare`: two versions or output folders side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from presage.cli import options
from presage.cli.output import Output, table
from presage.errors import ConfigurationError
from presage.predictor_kinds import KINDS
from presage.registry.connect import open_existing
from presage.wording import counted

if TYPE_CHECKING:
    from presage.registry.connect import Registry

_WHAT = "A version number, models:/NAME@ALIAS, models:/NAME/VERSION, or an output folder of train-predictor."
_DIGITS: Final = ((1000.0, 0), (10.0, 1))
"""Decimals of a figure that is at least so large."""
_MOST_DIGITS: Final = 3


def compare(
    first: Annotated[str, typer.Argument(metavar="FIRST", help=_WHAT)],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="The same; differences are second minus first.")],
    name: Annotated[
        str | None,
        typer.Option(help="The model of the version numbers. Default: the only model that has these versions."),
    ] = None,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Show the figures of two trainings side by side, with the differences. Nothing is evaluated anew."""
    from presage.registry.compare import compare as side_by_side
    from presage.registry.compare import kept_training

    out = Output(as_json)
    with out.working() as report:
        report("reading what was kept", None)
        numbers = [int(version) for version in (first, second) if version.isdecimal()]
        if numbers and name is None:
            name = _model_with(numbers, open_existing(tracking_uri))
        references = (f"models:/{name}/{given}" if given.isdecimal() else given for given in (first, second))
        kept = [kept_training(reference, lambda: open_existing(tracking_uri)) for reference in references]
        data = side_by_side(*kept)
    out.result(data, *(_render(data) if not as_json else ()))


def _model_with(versions: list[int], registry: Registry) -> str:
    there = {name: {int(registered.version) for registered in registry.versions(name)} for name in registry.names()}
    names = [name for name, numbers in there.items() if numbers.issuperset(versions)]
    if len(names) == 1:
        return names[0]
    wanted = " and ".join(map(str, sorted(set(versions))))
    if names:
        raise ConfigurationError(f"{', '.join(names)} have version {wanted} in {registry.uri}; choose one with --name")
    there_are = ", ".join(there) or "none"
    raise ConfigurationError(
        f"no model in {registry.uri} has version {wanted}; models: {there_are}. See `presage models`"
    )


def _render(data: dict[str, Any]) -> list[Any]:
    models = data["models"]
    called = [_called(model) for model in models]
    rows = [_row(name, figure) for name, figure in data["figures"].items()]
    title = f"{data['kind']}: figures on the test set of each training [95 %]"
    shown: list[Any] = [
        table(title, ["", *called, "second minus first [95 %, unpaired]"], rows),
        f"\n{_data_note(data)}",
    ]
    if data["paired"] is not None:
        paired = data["paired"]
        head = f"\nPaired, on the same held-out data: version {paired['version']} against version {paired['against']}"
        head += f", judged under the profile {paired['profile']}" if paired["profile"] else ""
        shown.append(table(head, ["gate", "why"], list(map(list, paired["gates"].items())), left=(0, 1)))
    return shown


def _called(model: dict[str, Any]) -> str:
    if model["name"] is None:
        return str(model["reference"])
    standing = ", ".join(model["aliases"]) or model["verdict"] or "not judged"
    return f"{model['name']} {model['version']} ({standing})"


def _row(name: str, figure: dict[str, Any]) -> list[str]:
    """A figure of both, and their difference, with the same decimals."""
    largest = max(map(abs, figure["values"]))
    digits = next((few for least, few in _DIGITS if largest >= least), _MOST_DIGITS)
    values = zip(figure["values"], figure["ci95"], strict=True)
    return [
        name.replace("_", " "),
        *(_with_ends(value, ends, f",.{digits}f") for value, ends in values),
        _with_ends(figure["difference"], figure["difference_ci95"], f"+,.{digits}f"),
    ]


def _with_ends(value: float, ends: list[float] | None, form: str) -> str:
    shown = [f"{number:{form}}".replace("-", "−") for number in (value, *(ends or ()))]
    return shown[0] if ends is None else f"{shown[0]} [{shown[1]}, {shown[2]}]"


def _data_note(data: dict[str, Any]) -> str:
    """Whether the figures can be compared at all."""
    trained = {True: "the same data", False: "different data", None: "data that are not known to be the same"}
    end = f" They were trained on {trained[data['same_training_data']]}."
    if data["same_test_data"]:
        return (
            "Both were judged on the same test data, so a paired interval would be narrower than the unpaired one: "
            f"`presage promote --dry-run` makes one.{end}"
        )
    sizes = " and ".join(counted(model["judged_on"], KINDS[data["kind"]].unit) for model in data["models"])
    judged = "NOT judged on the same test data" if data["same_test_data"] is False else "not known to share test data"
    return (
        f"The two were {judged} ({sizes}): the differences come from data and predictor together. "
        f"`presage promote --dry-run` judges a version and the champion on the same.{end}"
    )
