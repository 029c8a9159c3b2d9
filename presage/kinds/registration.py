"""Registers a training, or the folder that it has written, as a new version of a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from presage.errors import ArtefactError
from presage.predictor_kinds import KINDS
from presage.report.files import METRICS_FILE

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.predictor_kinds import Kind
    from presage.registry.connect import Registry
    from presage.registry.package import RegisteredVersion
    from presage.training.training import Training

_MOST_BYTES = 64 << 20


def register_training(
    registry: Registry,
    kind: Kind,
    training: Training[Any, Any],
    folder: Path,
    name: str,
    data: Any,
) -> RegisteredVersion:
    """Register a training that was saved in a folder as a new version; sets "version" of its metrics.

    `data` is what it was trained on, for the input example.
    """
    return _register(registry, kind, training.metrics, training.training_data, folder, name, kind.example(data))


def register_folder(folder: Path, name: str | None, registry: Callable[[], Registry]) -> RegisteredVersion:
    """Register what a training command wrote into a folder; the metrics and report there get the version.

    Args:
        name: of the model; None: that of the training.
        registry: opens the registry, after the folder was checked.

    Raises:
        ArtefactError: it is no folder of a training, or not whole.
        RegistryError: the registry refused, or the name is invalid.
    """
    from presage.predictors.common.artefact import read_artefact, read_regular
    from presage.registry.package import check_artifact_store, check_name
    from presage.report.files import write_metrics, write_report

    content = read_artefact(folder)
    try:
        metrics = json.loads(read_regular(folder / METRICS_FILE, _MOST_BYTES))
        kind = KINDS[metrics["kind"]]
        chosen = name or str(metrics["model"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ArtefactError(
            f"{folder}: no {METRICS_FILE} of a training; give the folder that a training command wrote with --out"
        ) from None
    if metrics["kind"] != content.kind:
        raise ArtefactError(
            f"{folder}: the artefact is a {content.kind} predictor and {METRICS_FILE} is of a {metrics['kind']} one; "
            "give the folder as a training command wrote it"
        )
    check_name(chosen)
    opened = registry()
    check_artifact_store(opened)
    example = kind.example(None) if kind.reads_prompts else [_first_step(metrics)]
    metrics["model"] = chosen
    made = _register(opened, kind, metrics, content.training_data, folder, chosen, example)
    write_metrics(folder, metrics)
    write_report(folder, metrics)
    return made


def _register(
    registry: Registry,
    kind: Kind,
    metrics: dict[str, Any],
    training_data: Mapping[str, Any],
    folder: Path,
    name: str,
    example: Any,
) -> RegisteredVersion:
    from presage.registry.gates import lost_tags
    from presage.registry.package import headline, register
    from presage.report.files import report_files
    from presage.report.next_agent import flat
    from presage.training.training import DIGEST_OF

    document, data_facts = kind.report(metrics), metrics["data"]
    figures = [f"- **{card.value}** {card.label}; {card.beside}" for card in document.cards]
    # MLflow shows the data sets beside the description.
    digests = {key.removeprefix(DIGEST_OF): said for key, said in data_facts.items() if key.startswith(DIGEST_OF)}
    facts = [f"- {key}: {value}" for key, value in data_facts.items() if not key.startswith(DIGEST_OF)]
    described = {f"data.{key}": value for key, value in training_data.items()}
    made = register(
        registry,
        folder,
        name=name,
        metrics=metrics,
        params={"seed": data_facts["seed"], **described, **flat(metrics["config"])},
        tags={**kind.tags(metrics), **lost_tags(metrics)},
        input_example=example,
        report=report_files(folder),
        description="\n".join([*figures, "", document.lead, "", *facts]),
        summary=", ".join(map(" ".join, kind.headline(headline(metrics)).items())),
        datasets=digests,
    )
    metrics["version"] = made.version
    return made


def _first_step(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """An input example from the names that a training has written down; the traces are not at hand."""
    types = metrics.get("traces", {}).get("workflow_types") or {"workflow": {}}
    workflow_type, described = next(iter(types.items()))
    agent = next(iter(described.get("agents") or ["agent"]))
    return {"workflow_type": workflow_type, "workflow_id": "example", "step": 0, "agent": agent, "kind": "llm"}


def example_steps(table: pa.Table) -> list[dict[str, Any]]:
    """The first steps of one workflow: names, numbers, zero states; no text."""
    import pyarrow.compute as pc

    first = table.filter(pc.equal(table["workflow_id"], table["workflow_id"][0])).slice(0, 3)
    kept = ("workflow_type", "step", "agent", "kind", "input_tokens", "output_tokens")
    example = []
    for row in first.select(kept).to_pylist():
        row["workflow_id"] = "example"
        for state in ("prefill_state", "completion_state"):
            if state in table.column_names:
                row[state] = [0.0] * table.schema.field(state).type.list_size
        example.append(row)
    return example
