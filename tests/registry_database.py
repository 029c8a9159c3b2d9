"""New MLflow databases for tests: copies of one, since MLflow takes seconds to make the tables of each."""

import os
import shutil
from importlib.metadata import version
from pathlib import Path

TEMPLATE = Path(__file__).resolve().parents[1] / "build" / "tests" / f"mlflow-{version('mlflow-skinny')}.db"
"""Tables without a row. Once made it stays, as compiled code does."""


def new_database(file: Path) -> str:
    """Makes the file a database of MLflow with all tables and without a row; returns its URI."""
    if not TEMPLATE.exists():
        from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore

        TEMPLATE.parent.mkdir(parents=True, exist_ok=True)
        part = TEMPLATE.with_suffix(f".{os.getpid()}")
        SqlAlchemyStore(f"sqlite:///{part}").engine.dispose()
        part.replace(TEMPLATE)
    shutil.copy(TEMPLATE, file)
    return f"sqlite:///{file}"
