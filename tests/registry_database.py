"""New MLflow databases for tests: copies of one, since MLflow takes seconds to make the tables of each."""

import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path


def new_database(file: Path) -> str:
    """Makes the file a database of MLflow with all tables and without a row; returns its URI.

    The template is made once for this environment, beside its compiled code.
    """
    template = Path(sys.prefix) / "compiled" / f"mlflow-{version('mlflow-skinny')}.db"
    if not template.exists():
        from mlflow.store.db.utils import _initialize_tables
        from sqlalchemy import create_engine

        template.parent.mkdir(exist_ok=True)
        part = template.with_suffix(f".{os.getpid()}")
        engine = create_engine(f"sqlite:///{part}")
        _initialize_tables(engine)
        engine.dispose()
        part.replace(template)
    shutil.copy(template, file)
    return f"sqlite:///{file}"
