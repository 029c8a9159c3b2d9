"""Registers a training as a new version of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from presage.predictor_kinds import Kind
    from presage.registry.connect import Registry
    from presage.registry.package import RegisteredVersion
    from presage.training.training import Training


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
    from presage.registry.gates import lost_tags
    from presage.registry.package import headline, register
    from presage.report.files import report_files
    from presage.report.next_agent import flat
    from presage.training.training import named_digests

    document, data_facts = kind.report(training.metrics), training.metrics["data"]
    figures = [f"- **{card.value}** {card.label}; {card.beside}" for card in document.cards]
    inputs = named_digests(training.digests)  # MLflow shows the data sets beside the description
    facts = [f"- {key}: {value}" for key, value in data_facts.items() if key not in inputs]
    described = {f"data.{key}": value for key, value in training.training_data.items()}
    made = register(
        registry,
        folder,
        name=name,
        metrics=training.metrics,
        params={"seed": data_facts["seed"], **described, **flat(training.metrics["config"])},
        tags={**kind.tags(training.metrics), **lost_tags(training.metrics)},
        input_example=kind.example(data),
        report=report_files(folder),
        description="\n".join([*figures, "", document.lead, "", *facts]),
        summary=", ".join(map(" ".join, kind.headline(headline(training.metrics)).items())),
        datasets=training.digests,
    )
    training.metrics["version"] = made.version
    return made


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
