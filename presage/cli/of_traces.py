"""What the kinds of predictors that forecast workflows have in common: they learn from traces and answer steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from presage.cli import options
from presage.cli.kinds import Loaded
from presage.cli.output import Output, Report

if TYPE_CHECKING:
    import pyarrow as pa


class OfTraces:
    """See `presage.cli.kinds.Kind`."""

    unit = "workflows"

    def read(self, paths: list[Path], skip_bad: bool, out: Output, report: Report) -> pa.Table:
        """The traces as one valid table."""
        return options.read(paths, skip_bad, out, report)

    def held_out(self, data: pa.Table, predictors: list[Any]) -> tuple[pa.Table, int]:
        """The workflows of tasks that none of the predictors learnt from."""
        from presage.training.sets import held_out

        return held_out(data, *predictors)

    def digest(self, data: pa.Table) -> str:
        """Of the rows, whatever files they came in."""
        from presage.datasets.schema import digest

        return f"sha256:{digest(data)}"

    def example(self, data: pa.Table) -> list[dict[str, Any]]:
        """The first steps of one workflow: names and numbers, no text, and states of zeros."""
        import pyarrow.compute as pc

        first = data.filter(pc.equal(data["workflow_id"], data["workflow_id"][0])).slice(0, 3)
        kept = ("workflow_type", "step", "agent", "kind", "input_tokens", "output_tokens")
        example = []
        for row in first.select(kept).to_pylist():
            row["workflow_id"] = "example"
            for state in ("prefill_state", "completion_state"):
                if state in data.column_names:
                    row[state] = [0.0] * data.schema.field(state).type.list_size
            example.append(row)
        return example

    def warnings(self, metrics: dict[str, Any]) -> list[str]:
        """Test workflows that run a task which something was trained on."""
        from presage.training.sets import SHARED_TASKS

        shared = metrics["data"][SHARED_TASKS]
        said = f"{shared} test workflows run a task that is in the training traces: the figures may be too good"
        return [said] if shared else []

    def at_precision(self, loaded: Loaded, precision: str) -> Loaded:
        """None of these has a precision to choose."""
        from presage.errors import ConfigurationError

        raise ConfigurationError(
            f"--precision {precision}: {loaded.called} is no router with a transformer; leave the option out"
        )

    def ask(self, predictor: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Of the whole workflow so far."""
        found: dict[str, Any] = predictor.forecast(rows).to_dict()
        return found
