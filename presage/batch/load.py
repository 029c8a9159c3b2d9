"""Plans by their address: a Python file, and the variable in it that holds a plan or a graph of LangGraph."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from presage.batch.plan import Plan
from presage.errors import ConfigurationError, PresageError
from presage.wording import install

_MODULE: Final = "presage_batch_plan"
_CLIENTS: Final = ("langgraph", "langchain", "langchain_core", "langchain_openai", "openai")


def load_plan(where: str, fields: Sequence[str] | None = None) -> Plan:
    """The plan that a Python file makes.

    Args:
        where: `plan.py`, whose variable is called plan, or `graph.py:NAME`; it holds a Plan or a compiled graph.
        fields: of the rows, for the input of a graph; default: all that it takes.

    Raises:
        ConfigurationError: there is no such file or variable, it cannot be run, or holds something else.
    """
    path, variable = Path(where), "plan"
    if not path.is_file() and ":" in path.name:
        file, _, variable = where.rpartition(":")
        path = Path(file)
    module = _module(path)
    made = getattr(module, variable, None)
    if isinstance(made, Plan):
        return made
    if made is not None:
        from presage.batch.langgraph import input_fields, is_graph, plan_of_graph

        if is_graph(made):
            try:
                graph_fields = input_fields(made) if fields is None else fields
                code = hashlib.sha256(path.read_bytes()).hexdigest()
                return plan_of_graph(made, graph_fields, path.stem, code)
            except ConfigurationError as error:
                raise ConfigurationError(f"{path}: {variable} is {error}") from None
    raise ConfigurationError(
        f'{path}: no variable {variable} that holds a Plan; write {variable} = Plan("name", answer=...), '
        f"or name the variable of a compiled graph of LangGraph: {path.name}:graph"
    )


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(_MODULE, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path}: no such Python file; one that makes a plan is wanted, such as plan.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    sys.path.insert(0, str(path.parent))  # as for a script: what lies beside it can be imported
    try:
        spec.loader.exec_module(module)
    except PresageError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    except Exception as error:
        missing = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
        how = f"; it is in the extra clients: {install('clients')}" if missing in _CLIENTS else ""
        raise ConfigurationError(f"{path}: it raised {type(error).__name__}: {error}{how}") from None
    finally:
        sys.path.remove(str(path.parent))
    return module
