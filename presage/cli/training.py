"""The stages shared by all training commands: read, train, write, register and print."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from presage.cli import options
from presage.cli.kinds import command_of, read, tables
from presage.cli.output import Output
from presage.predictor_kinds import KINDS
from presage.progress import Progress, say_when_compiling
from presage.registry.connect import open_registry, registry_exists

if TYPE_CHECKING:
    from presage.training.training import Training


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """What a training command is asked for: the options that all of them share, and the name of the kind."""

    kind: str
    traces: options.Traces
    test: options.Test = None
    config: options.ConfigFile = None
    settings: options.Settings = None
    seed: options.Seed = 0
    baselines: options.Baselines = "default"
    out_folder: options.OutFolder = None
    report_folder: options.ReportFolder = None
    force: options.Force = False
    name: Annotated[str, typer.Option(help="Name of the registered model.")]
    register: options.Register = True
    skip_bad: options.SkipBad = False
    tracking_uri: options.TrackingUri = None
    as_json: options.Json = False

    @cached_property
    def output(self) -> Output:
        """Where the command writes."""
        return Output(self.as_json)


def training_command(kind: str, **replaced: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a subcommand of a function of a job and options of its own: the options of all training commands follow.

    Args:
        replaced: options of a job as this command declares them; None for one that it does not have.
    """
    declared = {**get_type_hints(TrainingJob, include_extras=True), **replaced}
    shared = {
        field.name: Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=kind if field.name == "name" else Parameter.empty if field.default is MISSING else field.default,
            annotation=declared[field.name],
        )
        for field in fields(TrainingJob)
        if field.name != "kind" and declared[field.name] is not None
    }

    def decorate(train: Callable[..., None]) -> Callable[..., None]:
        _, *own = signature(train, eval_str=True).parameters.values()

        def command(**given: Any) -> None:
            job = TrainingJob(kind=kind, **{name: given.pop(name) for name in shared})
            train(job, **given)

        keyword = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in own]
        parameters = [shared["traces"], *keyword, *(shared[name] for name in shared if name != "traces")]
        command.__name__, command.__doc__ = train.__name__, train.__doc__
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def carry_out(job: TrainingJob, fit: Callable[[Any, Any, Progress], Training[Any, Any]]) -> None:
    """Train, write, register and print; `fit` makes a training of data, test data (None to split some off) and the
    progress callback.
    """
    from presage.kinds.registration import register_training
    from presage.predictors.common.artefact import foreign_entries
    from presage.registry.package import check_artifact_store, check_name
    from presage.report.data_warnings import training_warnings
    from presage.report.files import check_folder, write_metrics, write_report
    from presage.training.baselines import last_words
    from presage.training.sets import SHARED_TASKS

    kind, output = KINDS[job.kind], job.output
    with output.working() as report, tempfile.TemporaryDirectory() as scratch:
        # Check everything that can fail before spending minutes on training.
        folder = job.out_folder if job.out_folder is not None else Path(scratch) / "model"
        foreign_entries(folder)
        check_folder(folder, "--out", job.force)
        if job.report_folder is not None:
            check_folder(job.report_folder, "--report", job.force)
        registry = None
        if job.register:
            check_name(job.name)
            if registry_exists(job.tracking_uri):  # else after reading: bad traces leave no empty database
                report("opening the registry", None)
                registry = open_registry(job.tracking_uri)
                check_artifact_store(registry)
        data = read(kind, job.traces, job.skip_bad, output, report)
        test = read(kind, job.test, job.skip_bad, output, report) if job.test else None
        if job.register and registry is None:
            registry = open_registry(job.tracking_uri)
        say_when_compiling()
        training = fit(data, test, report)
        report("writing the artefact", None)
        training.save(folder)
        made = None
        if registry is not None:
            report("registering", None)
            made = register_training(registry, kind, training, folder, job.name, data)
            if job.out_folder is not None:
                training.save(folder)
        if job.report_folder is not None:
            write_metrics(job.report_folder, training.metrics)
            write_report(job.report_folder, training.metrics)
    metrics = training.metrics
    if shared := metrics["data"].get(SHARED_TASKS):  # prompts of the training set are left out of the test set
        output.note(f"test workflows whose task is in the training traces: {shared}; the figures may be too good")
    for warning in training_warnings(metrics).values():
        output.note(f"warning: {warning}")
    places = {
        "folder": str(job.out_folder) if job.out_folder is not None else None,
        "registered": made.uri if made is not None else None,
        "report": str(job.report_folder) if job.report_folder is not None else None,
    }
    lost = last_words(metrics["behind"], command_of(kind).advice)
    if output.as_json:
        for line in lost:
            output.note(line)
    shown = [*tables(kind, metrics), "", *_summary(metrics, places)] if not output.as_json else ()
    output.result({**metrics, **places}, *shown, *([""] if lost else []), *lost)


def _summary(metrics: Mapping[str, Any], places: Mapping[str, str | None]) -> list[str]:
    lines = [f"{key}: {value}" for key, value in metrics["data"].items()]
    lines.append(f"fitted in {metrics['fit_seconds']:.1f} s; artefact of {metrics['size_bytes'] / 1e6:.2f} MB")
    if places["folder"]:
        lines.append(f"artefact, metrics.json and report.html: {places['folder']}")
    if places["report"]:
        lines.append(f"the full report: {places['report']}/report.html")
    if places["registered"]:
        lines.append(f"registered as {places['registered']}")
    elif not places["folder"] and not places["report"]:
        lines.append("nothing was saved: --no-register, no --out and no --report")
    return lines
