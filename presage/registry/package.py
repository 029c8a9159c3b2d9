"""Register an artefact folder as a version that MLflow can serve.

A version is an MLflow logged model (the code of `pyfunc_model.py`, the part of Presage that forecasts, the data-only
artefact, a signature and an input example) and a run with parameters, metrics and the report. All calls use the client
that is passed in: `mlflow.pyfunc.log_model` would set the tracking URI of the whole process.
"""

import json
import platform
import re
import shutil
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlparse

from presage.errors import RegistryError
from presage.features.input_profiles import ALL_INPUTS, as_served
from presage.predictor_kinds import KINDS
from presage.predictors.common.artefact import CONFIG_FILE, TENSORS_FILE, Artefact, artefact_size_bytes, read_artefact
from presage.registry.connect import Registry, registry_errors
from presage.registry.resolve import DIGEST
from presage.version import __version__

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]
    from mlflow.entities import LoggedModel

EXPERIMENT: Final = "presage"
ARTEFACT: Final = "artefact"
"""Name of the artefact folder inside a registered version: `artifacts/artefact`."""

PACKAGE: Final = "package"
"""Presage's code inside a registered version, `artifacts/package.zip`; a zip file, because Python and Numba import from
one without unpacking it, and a remote store takes one file faster than a hundred."""

_FORECASTING: Final = ("datasets", "features", "predictors", "registry")
"""The packages that forecasts need, beside the modules of the root; import-linter keeps them independent of others."""

TABLES: Final = ("tau_distance", "pinball", "coverage", "end")
"""Tables of `metrics.json` whose numbers are headline figures: `tau_distance.all`, `coverage.0.99`, …"""

OURS: Final = "presage"
"""Our row among the baselines."""

HEADLINE: Final = "presage.headline"
"""Tag of a version, for MLflow's pages: its most important figures as a text."""

MLFLOW_RUN_NOTE: Final = "mlflow.note.content"
"""MLflow's tag for the description of a run."""

_DIGEST: Final = 36
"""Characters of a data set's digest; MLflow's limit."""

EPOCH: Final = "epoch/"
"""Prefix of the figures with one value an epoch; MLflow's pages show them together."""

_BATCH: Final = 100
"""Parameters in one call; MLflow's limit."""
_LONGEST: Final = 500
"""Characters of a parameter."""
_METRICS: Final = 1000
"""Metrics in one call; MLflow's limit."""
_LIBRARIES: Final = ("mlflow", "numpy", "pandas", "safetensors", "torch", "scikit-learn", "pyarrow", "lightgbm")
_NEEDED: Final = ("mlflow", "numpy", "pandas", "scipy", "numba", "msgspec", "pyarrow", "safetensors")
"""Libraries that forecasts need, beside those of a transformer if the predictor has one."""
_TRANSFORMER: Final = ("torch", "transformers")
_AZURE: Final = (("azure.storage.blob", "azure-storage-blob"), ("azure.identity", "azure-identity"))
_STORES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "s3": (("boto3", "boto3"),),
    "gs": (("google.cloud.storage", "google-cloud-storage"),),
    "wasbs": _AZURE,
    "abfss": (("azure.storage.filedatalake", "azure-storage-file-datalake"), _AZURE[1]),
    "sftp": (("paramiko", "paramiko"), ("pysftp", "pysftp")),
    "oss": (("aliyunstoreplugin", "aliyunstoreplugin"),),
}
"""Modules that MLflow's artifact stores need, and the packages that bring them, by the scheme of the store."""


@dataclass(frozen=True)
class RegisteredVersion:
    """A new version, its MLflow run, and its reference `models:/NAME/VERSION`."""

    name: str
    version: int
    run_id: str
    uri: str


def register(
    registry: Registry,
    artefact: Path,
    *,
    name: str,
    metrics: Mapping[str, Any],
    params: Mapping[str, Any],
    tags: Mapping[str, str],
    input_example: "pd.DataFrame | Sequence[Mapping[str, Any]]",
    report: Sequence[Path] = (),
    description: str = "",
    summary: str = "",
    datasets: Mapping[str, str] | None = None,
) -> RegisteredVersion:
    """Register an artefact folder as a new version. The version appears last: a failure on the way leaves none.

    Args:
        artefact: only the artefact's own files of this folder go into the version.
        name: registered model; created if new.
        metrics: the metrics of the command contract: an artifact of the run as a whole, and its headline figures as
            MLflow metrics (`prefill_accuracy_1`, …).
        params: of the training, with its seed; logged as text.
        tags: of the run.
        input_example: a few rows of the input table: steps of a trace, or prompts for a router.
        report: files of the report, logged to the run.
        description: of the run and the version, in Markdown.
        summary: the most important figures as a text, a tag of the version.
        datasets: "sha256:…" of the inputs of the run by name, such as "training traces" and "test traces".

    Raises:
        ArtefactError: not a valid artefact.
        RegistryError: the registry refused, or the name is invalid.
        TraceError: the input example lacks a required column.
    """
    from presage.registry.forms import form_of

    check_name(name)
    content = read_artefact(artefact)
    shown = {"presage.kind": content.kind, DIGEST: content.digest, **({HEADLINE: summary} if summary else {})}
    facts = {
        **shown,
        "presage.data_digest": str(content.training_data.get("digest", "")),
        "presage.size_bytes": str(artefact_size_bytes(artefact)),
        "presage.version": __version__,
    }
    figures = headline(metrics)
    with registry_errors(registry.uri, f"registering {name!r}"), tempfile.TemporaryDirectory() as scratch:
        experiment_id = _experiment(registry)
        run_name = f"{name} {time.strftime('%Y-%m-%d %H:%M')}"
        run_id = registry.client.create_run(
            experiment_id, tags={**facts, **tags, MLFLOW_RUN_NOTE: description}, run_name=run_name
        ).info.run_id
        with _on_failure(lambda: registry.client.set_terminated(run_id, status="FAILED")):
            texts = {key: str(value)[:_LONGEST] for key, value in {**params, **_versions()}.items()}
            _log_run(registry, run_id, texts, metrics, report, Path(scratch))
            example = form_of(content.kind).example(input_example)
            logged = _log_model(
                registry, experiment_id, run_id, name, artefact, content, example, texts, description, Path(scratch)
            )
            _log_figures(registry, run_id, logged.model_id, figures, metrics.get("curves", {}), datasets or {})
            _log_baselines(registry, experiment_id, run_id, metrics)
            _make_model(registry, name, content.kind)
            made = registry.client.create_model_version(
                name,
                source=_source(registry, logged),
                run_id=run_id,
                model_id=logged.model_id,
                tags=shown,
                description=description or None,
            )
            held = json.dumps([{"name": name, "version": int(made.version)}])
            registry.client.set_logged_model_tags(logged.model_id, {"mlflow.modelVersions": held})
        registry.client.set_terminated(run_id)
    return RegisteredVersion(name, int(made.version), run_id, f"models:/{name}/{made.version}")


def check_artifact_store(registry: Registry) -> None:
    """Raise RegistryError if what a server's artifact store needs here is not installed; before a training.

    A server that does not pass artifacts on lets its clients write to the store themselves.
    """
    with registry_errors(registry.uri, "finding the artifact store"):
        experiment = registry.client.get_experiment_by_name(EXPERIMENT)
        if experiment is None and registry.artifacts is None:
            from mlflow.exceptions import MlflowException

            with suppress(MlflowException):  # the default experiment may be deleted, and nothing is known then
                experiment = registry.client.get_experiment("0")
    scheme = urlparse(experiment.artifact_location).scheme if experiment is not None else ""
    for module, package in _STORES.get(scheme, ()):
        try:
            missing = find_spec(module) is None
        except ModuleNotFoundError:
            missing = True
        if missing:
            raise RegistryError(
                f"{registry.uri} keeps artifacts in {scheme}://, and {package} is not installed, which writes them: "
                f"pip install {package}. Or train with --no-register and --out, and call `presage register` later."
            )


def check_name(name: str) -> None:
    """Raise RegistryError unless a model may have this name; commands call it before they train."""
    if not re.fullmatch(r"[\w.\- ]{1,200}", name):
        raise RegistryError(
            f"model name {name!r}: wanted letters, digits, space, '-', '_' and '.' only, as in 'next-agent'."
        )


def headline(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The headline figures of a `metrics.json`, those that an engine gets (`as_served`), under flat names, as MLflow
    metrics. Where all inputs of the traces give others, these have the prefix ALL_INPUTS.

    `moments.prefill.accuracy = [a, b]` gives `prefill_accuracy_1` and `prefill_accuracy_2`, `tau_distance = {"all": a}`
    gives `tau_distance_all`; top-level numbers keep their names.
    """
    served, every = _flat(as_served(metrics)), _flat(metrics)
    return served | {f"{ALL_INPUTS}{name}": value for name, value in every.items() if served.get(name) != value}


def _flat(metrics: Mapping[str, Any]) -> dict[str, float]:
    flat = {key: float(value) for key, value in metrics.items() if _is_number(value) and key != "version"}
    for moment, figures in metrics.get("moments", {}).items():
        for figure, values in figures.items():
            if isinstance(values, list) and values and all(map(_is_number, values)):
                flat |= {f"{moment}_{figure}_{step}": float(value) for step, value in enumerate(values, start=1)}
    for table in TABLES:
        values_by_key = metrics.get(table)
        if isinstance(values_by_key, Mapping):  # of a profile, the coverage is one number
            flat |= {f"{table}_{key}": float(value) for key, value in values_by_key.items() if _is_number(value)}
    return flat


def headline_of_all(metrics: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The headline figures of "presage", as an engine gets them, and of each baseline, under the same names."""
    headlines = {OURS: _flat(as_served(metrics))}
    for name, baseline in metrics.get("baselines", {}).items():
        moments = {key: value for key, value in baseline.items() if isinstance(value, Mapping) and "accuracy" in value}
        headlines[name] = _flat({**baseline, "moments": moments} if moments else baseline)
    return headlines


def _experiment(registry: Registry) -> str:
    experiment = registry.client.get_experiment_by_name(EXPERIMENT)
    if experiment is not None:
        return str(experiment.experiment_id)
    tags = {"mlflow.experimentKind": "custom_model_development"}  # MLflow's pages for models, not those for LLM traces
    return str(registry.client.create_experiment(EXPERIMENT, artifact_location=registry.artifacts, tags=tags))


@contextmanager
def _on_failure(mark: Callable[[], object]) -> Iterator[None]:
    """Mark what was begun as failed."""
    try:
        yield
    except BaseException:
        with suppress(Exception):  # keep the original error
            mark()
        raise


def _log_run(
    registry: Registry,
    run_id: str,
    params: Mapping[str, str],
    metrics: Mapping[str, Any],
    report: Sequence[Path],
    scratch: Path,
) -> None:
    from mlflow.entities import Param

    texts = [Param(key, value) for key, value in params.items()]
    for start in range(0, len(texts), _BATCH):
        registry.client.log_batch(run_id, params=texts[start : start + _BATCH])
    path = scratch / "metrics.json"
    path.write_text(json.dumps(metrics, indent=1, sort_keys=True, ensure_ascii=False))
    registry.client.log_artifact(run_id, str(path))
    for file in report:
        registry.client.log_artifact(run_id, str(file))


def _log_figures(
    registry: Registry,
    run_id: str,
    model_id: str,
    figures: Mapping[str, float],
    curves: Mapping[str, Sequence[float | None]],
    datasets: Mapping[str, str],
) -> None:
    """Log the data sets and the model as inputs and output of the run; to both the figures, and the curves by epoch."""
    from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelOutput, Metric

    inputs, judged_on = [], {}
    for name, digest in datasets.items():
        whole = digest.removeprefix("sha256:")
        data = Dataset(name, whole[:_DIGEST], "presage", json.dumps({}), profile=json.dumps({"sha256": whole}))
        context = name.partition(" ")[0]
        inputs.append(DatasetInput(data, [InputTag("mlflow.data.context", context)]))
        if context == "test":
            judged_on = {"dataset_name": data.name, "dataset_digest": data.digest}
    if inputs:
        registry.client.log_inputs(run_id, inputs)
    registry.client.log_outputs(run_id, [LoggedModelOutput(model_id, step=0)])
    now_ms = int(time.time() * 1000)
    both = {"model_id": model_id, "run_id": run_id}
    logged = [Metric(key, value, now_ms, 0, **both, **judged_on) for key, value in figures.items()]
    logged += [
        Metric(f"{EPOCH}{name}", value, now_ms, epoch, **both)
        for name, values in curves.items()
        for epoch, value in enumerate(values, start=1)
        if value is not None
    ]
    for start in range(0, len(logged), _METRICS):
        registry.client.log_batch(run_id, metrics=logged[start : start + _METRICS])


def _log_baselines(registry: Registry, experiment_id: str, run_id: str, metrics: Mapping[str, Any]) -> None:
    """A child run a baseline, with the same names of figures: MLflow's compare page puts them side by side."""
    from mlflow.entities import Metric

    now_ms = int(time.time() * 1000)
    for name, figures in headline_of_all(metrics).items():
        if name != OURS:
            tags = {"mlflow.parentRunId": run_id, "presage.baseline": name}
            child = registry.client.create_run(experiment_id, tags=tags, run_name=name).info.run_id
            registry.client.log_batch(child, metrics=[Metric(key, value, now_ms, 0) for key, value in figures.items()])
            registry.client.set_terminated(child)


def _log_model(
    registry: Registry,
    experiment_id: str,
    run_id: str,
    name: str,
    artefact: Path,
    content: Artefact,
    example: "pd.DataFrame",
    params: Mapping[str, str],
    description: str,
    scratch: Path,
) -> "LoggedModel":
    import mlflow.pyfunc
    from mlflow.models import Model

    from presage.registry.forms import form_of

    staged = scratch / ARTEFACT
    staged.mkdir()
    for file in (CONFIG_FILE, TENSORS_FILE, *content.files):  # other files of the folder are the run's
        shutil.copyfile(artefact / file, staged / file)
    # MLflow allows dots in names of registered models, not of logged models.
    logged = registry.client.create_logged_model(
        experiment_id,
        name=name.replace(".", "-"),
        source_run_id=run_id,
        params=dict(params),
        tags={MLFLOW_RUN_NOTE: description},
    )
    with _on_failure(lambda: registry.client.finalize_logged_model(logged.model_id, "FAILED")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow's advice on type hints
            mlflow.pyfunc.save_model(
                scratch / "model",
                python_model=str(Path(__file__).with_name("pyfunc_model.py")),
                artifacts={ARTEFACT: str(staged), PACKAGE: str(_package(scratch / f"{PACKAGE}.zip"))},
                signature=form_of(content.kind).signature(KINDS[content.kind].prediction),
                input_example=example,
                pip_requirements=_requirements(content.config),
                model_config={"predictions_only": False},
                mlflow_model=Model(artifact_path=logged.artifact_location, run_id=run_id, model_id=logged.model_id),
            )
        registry.client.log_model_artifacts(logged.model_id, str(scratch / "model"))
        registry.client.finalize_logged_model(logged.model_id, "READY")
    return logged


def _source(registry: Registry, logged: "LoggedModel") -> str:
    """The source of a version: a model id on a server, a path for a database.

    For a database MLflow 3 resolves `models:/ID` through the global tracking URI, not the client's (a TODO of theirs),
    which would create an `mlflow.db` in the working directory. A server resolves ids itself and refuses paths.
    """
    from mlflow.store.db.db_types import DATABASE_ENGINES

    is_database = urlparse(registry.uri).scheme.split("+")[0] in DATABASE_ENGINES
    return str(logged.artifact_location) if is_database else f"models:/{logged.model_id}"


def _make_model(registry: Registry, name: str, kind: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        described = (
            f"Versions of a {kind} predictor of Presage. Engines load the alias `champion`; `presage promote` moves it."
        )
        registry.client.create_registered_model(name, description=described)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "presage": __version__}
    for library in _LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return {f"version.{library}": version for library, version in versions.items()}


def _requirements(config: Mapping[str, Any]) -> list[str]:
    """Explicit, because inferring them loads the model in a new process (half a minute).

    Without the local part of a version, such as `+cpu`: package indexes have no such builds.
    """
    encodes = (
        config.get("states", {}).get("kind") == "encoder"
        or config.get("predictor", {}).get("head") == "transformer"
        or config.get("scorer", {}).get("encoder") is not None
    )
    needed = (*_NEEDED, *_TRANSFORMER) if encodes else _NEEDED
    return [f"{library}=={metadata.version(library).partition('+')[0]}" for library in needed]


def _package(file: Path) -> Path:
    """Write the code that forecasts to a zip file."""
    root = Path(__file__).parents[1]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for files in (root.glob("*.py"), *((root / name).rglob("*.py") for name in _FORECASTING)):
            for path in sorted(files):
                archive.write(path, path.relative_to(root.parent))
    return file


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
