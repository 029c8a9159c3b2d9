"""What a training or an evaluation leaves behind for people: `metrics.json`, `report.md` and `reliability.png`.

The report is made from the metrics alone, so no number in it can differ from `metrics.json`. Every file is written
under another name and renamed: a full disk leaves what was there before.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from presage.errors import OutputError

METRICS_FILE: Final = "metrics.json"
REPORT_FILE: Final = "report.md"
PLOT_FILE: Final = "reliability.png"

_DRAWN_FROM: Final = 20

Metrics = Mapping[str, Any]
"""`Evaluation.to_dict()`; under the key "data", lines of the caller's own, label to value: traces, split, seed."""


def write_metrics(folder: Path, metrics: Metrics) -> Path:
    """Writes `metrics.json` into `folder`, which is made where it does not exist.

    Raises:
        OutputError: the file cannot be written.
    """
    text = json.dumps(metrics, indent=1, ensure_ascii=False, allow_nan=False)
    return _write(Path(folder) / METRICS_FILE, text.encode() + b"\n")


def write_report(folder: Path, metrics: Metrics) -> Path:
    """Writes `report.md` and the plot it shows, `reliability.png`, into `folder`.

    Raises:
        OutputError: a file cannot be written.
    """
    _write(Path(folder) / PLOT_FILE, _reliability_plot(metrics))
    return _write(Path(folder) / REPORT_FILE, report(metrics).encode())


def report(metrics: Metrics) -> str:
    """The report as Markdown."""
    name = metrics["model"] or "next-agent predictor"
    version = f", version {metrics['version']}" if metrics["version"] is not None else ""
    judged = {name: metrics["moments"], **metrics["baselines"]}
    bare = [moment for moment, figures in metrics["moments"].items() if not figures["states"]]
    parts = [
        f"# Next agent: {name}{version}",
        f"Judged on {metrics['workflows']} workflows, {metrics['steps']} steps."
        + (f" Without states at {' and '.join(bare)}: ids and sizes alone." if bare else ""),
        *([_list(metrics["data"])] if metrics.get("data") else []),
        "## Accuracy by steps ahead",
        "Share of positions whose likeliest outcome came true, with its 95 % interval (bootstrap over workflows).",
        *(_accuracies(judged, moment) for moment in metrics["moments"]),
        "## Further figures",
        "Accuracy as a mean over workflows; an outcome among the two likeliest (top 2); negative log-likelihood (NLL), "
        "nats a position; expected calibration error (ECE).",
        *(_further(judged, moment) for moment in metrics["moments"]),
        _unseen(metrics),
        "## By workflow type",
        *(_by_type(metrics["by_workflow_type"], moment) for moment in metrics["moments"]),
        "## Reliability",
        "Of forecasts about as sure as the first column says, how many came true (and how many there were).",
        f"![Accuracy against confidence]({PLOT_FILE})",
        f"The plot leaves out what fewer than {_DRAWN_FROM} forecasts stand behind.",
        *(_reliability(figures["reliability"], moment) for moment, figures in metrics["moments"].items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _accuracies(judged: Mapping[str, Any], moment: str) -> str:
    rows = [
        [name, *(_with_interval(a, ends) for a, ends in zip(of["accuracy"], of["ci95"], strict=True))]
        for name, of in ((name, figures[moment]) for name, figures in judged.items())
    ]
    return _table([f"at {moment}", *_ahead(judged, moment)], rows)


def _further(judged: Mapping[str, Any], moment: str) -> str:
    keys = {"mean over workflows": "accuracy_by_workflow", "top 2": "top2", "NLL": "nll", "ECE": "ece"}
    rows = [
        [name, *(" / ".join(map(_number, figures[moment][key])) for key in keys.values())]
        for name, figures in judged.items()
    ]
    return _table([f"at {moment}, 1 / 2 / … steps ahead", *keys], rows)


def _unseen(metrics: Metrics) -> str:
    shares = metrics["moments"]["prefill"]["unseen"]
    if not any(shares):
        return ""
    return (
        f"Outcomes that are agents training never saw: {' / '.join(map(_number, shares))} of the positions. They are "
        "wrong in every accuracy above and left out of the NLL."
    )


def _by_type(types: Mapping[str, Any], moment: str) -> str:
    rows = [
        [
            name,
            str(of["workflows"]),
            *(_with_interval(a, ends) for a, ends in zip(of["accuracy"], of["ci95"], strict=True)),
            _number(of["ece"][0]),
        ]
        for name, of in ((name, figures[moment]) for name, figures in sorted(types.items()))
    ]
    return _table([f"at {moment}", "workflows", *_ahead(types, moment), "ECE, 1 step"], rows)


def _reliability(horizons: Sequence[Sequence[Metrics]], moment: str) -> str:
    found: dict[tuple[float, float], dict[int, str]] = {
        (row["low"], row["high"]): {} for horizon in horizons for row in horizon
    }
    for k, horizon in enumerate(horizons):
        for row in horizon:
            found[row["low"], row["high"]][k] = f"{row['accuracy']:.3f} ({row['positions']})"
    rows = [
        [f"{low:.2f} to {high:.2f}", *(cells.get(k, "") for k in range(len(horizons)))]
        for (low, high), cells in sorted(found.items())
    ]
    return _table([f"confidence at {moment}", *_steps(len(horizons))], rows)


def _ahead(judged: Mapping[str, Any], moment: str) -> list[str]:
    return _steps(max(len(figures[moment]["accuracy"]) for figures in judged.values()))


def _steps(horizon: int) -> list[str]:
    return ["1 step", *(f"{k} steps" for k in range(2, horizon + 1))]


def _list(lines: Metrics) -> str:
    return "\n".join(f"- {label}: {value}" for label, value in lines.items())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in (head, rule, *rows))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _with_interval(value: float | None, ends: Sequence[float | None]) -> str:
    return _number(value) if value is None else f"{_number(value)} [{_number(ends[0])}, {_number(ends[1])}]"


def _reliability_plot(metrics: Metrics) -> bytes:
    """Accuracy against confidence, a panel a moment, a line a horizon, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    moments = metrics["moments"]
    figure = Figure(figsize=(4.5 * len(moments), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, (moment, figures) in zip(
        figure.subplots(1, len(moments), squeeze=False)[0], moments.items(), strict=True
    ):
        panel.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for label, horizon in zip(_steps(len(figures["reliability"])), figures["reliability"], strict=True):
            drawn = [row for row in horizon if row["positions"] >= _DRAWN_FROM]
            confidence, accuracy = ([row[key] for row in drawn] for key in ("confidence", "accuracy"))
            panel.plot(confidence, accuracy, ".-", label=f"{label} ahead")
        panel.set(title=moment, xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1), aspect="equal")
        panel.legend(loc="upper left", frameon=False)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110, metadata={"Software": None})
    return image.getvalue()


def _write(path: Path, content: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # a full disk may show only here, and the rename must not come before the bytes
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OutputError(
            f"{path}: cannot be written ({error.strerror or error}); what was there before is untouched. "
            "Free space or choose another folder."
        ) from error
    return path
