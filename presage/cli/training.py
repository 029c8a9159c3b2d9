"""The stages shared by all training commands: read, train, write, register and print."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from presage.cli import options
from presage.cli.kinds import Kind
from presage.cli.output import Output, Report


class Trained(Protocol):
    """A finished training."""

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the command contract."""
        ...

    @property
    def training_data(self) -> dict[str, Any]:
        """The description of the training data that the artefact keeps."""
        ...

    def save(self, folder: Path) -> None:
        """Write artefact, `metrics.json` and report."""
        ...


Fit = Callable[[Any, Any, Report], Trained]
"""(data, test data or None to split some off, progress) -> training."""


@dataclass(frozen=True)
class TrainingJob:
    """Inputs and outputs of a training.

    Attributes:
        kind: of the predictor.
        data: files to train on.
        test: files to evaluate on; empty: a part of `data`.
        skip_bad: skip workflows or prompts with a bad row.
        out: folder for artefact, metrics and report, or None.
        report: folder for the full report, or None.
        name: registered model.
        register: whether to register a version.
        tracking_uri: the registry.
    """

    kind: Kind
    data: list[Path]
    test: list[Path]
    skip_bad: bool
    out: Path | None
    report: Path | None
    name: str
    register: bool
    tracking_uri: str | None


def carry_out(
    job: TrainingJob,
    fit: Fit,
    output: Output,
    *,
    params: Mapping[str, Any],
    tags: Callable[[Mapping[str, Any]], dict[str, str]],
) -> None:
    """Train, write, register and print.

    Args:
        job: inputs and outputs.
        fit: trains the predictor.
        output: of the command.
        params: MLflow parameters beside the configuration.
        tags: makes the tags of the version from the metrics.
    """
    from presage.registry.package import check_name
    from presage.training.baselines import last_words
    from presage.training.report.files import check_folder, write_metrics, write_report

    with output.working() as report, tempfile.TemporaryDirectory() as scratch:
        # Check everything that can fail before spending minutes on training.
        folder = job.out if job.out is not None else Path(scratch) / "model"
        _check_out(folder)
        if job.report is not None:
            check_folder(job.report, "--report")
        registry = None
        if job.register:
            check_name(job.name)
            report("asking the registry", None)
            registry = options.open_registry(job.tracking_uri)
        data = job.kind.data.read(job.data, job.skip_bad, output, report)
        test = job.kind.data.read(job.test, job.skip_bad, output, report) if job.test else None
        training = fit(data, test, report)
        report("writing the artefact", None)
        training.save(folder)
        made = None
        if registry is not None:
            report("registering", None)
            made = _register(
                registry, folder, training, job.name, job.kind.data.example(data), params, tags(training.metrics)
            )
            training.metrics["version"] = made.version
            if job.out is not None:
                training.save(folder)
        if job.report is not None:
            write_metrics(job.report, training.metrics)
            write_report(job.report, training.metrics)
    metrics = training.metrics
    for warning in job.kind.warnings(metrics):
        output.note(warning)
    places = {
        "folder": str(job.out) if job.out is not None else None,
        "registered": made.uri if made is not None else None,
        "report": str(job.report) if job.report is not None else None,
    }
    lost = last_words(metrics["behind"], job.kind.advice)
    if output.as_json:
        for line in lost:
            output.note(line)
    tables = [*job.kind.tables(metrics), "", *_summary(metrics, places)] if not output.as_json else ()
    output.result({**metrics, **places}, *tables, *([""] if lost else []), *lost)


def _check_out(folder: Path) -> None:
    """Check that the artefact can be written there."""
    from presage.predictors.common.artefact import foreign_entries
    from presage.training.report.files import check_folder

    check_folder(folder, "--out")
    foreign_entries(folder)


def _register(
    registry: Any,
    folder: Path,
    training: Trained,
    name: str,
    example: list[dict[str, Any]],
    params: Mapping[str, Any],
    tags: dict[str, str],
) -> Any:
    from presage.registry.gates import floor_tags
    from presage.registry.package import register
    from presage.training.report.files import report_files

    return register(
        registry,
        folder,
        name=name,
        metrics=training.metrics,
        params={
            **params,
            **{f"data.{key}": value for key, value in training.training_data.items()},
            **dict(_flat(training.metrics["config"])),
        },
        tags={**tags, **floor_tags(training.metrics)},
        input_example=example,
        report=report_files(folder),
    )


def _flat(config: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat = []
    for key, value in config.items():
        flat += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return flat


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
