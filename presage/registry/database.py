"""The versions of a registry in a SQLite database, read without MLflow, whose import takes about two seconds.

Only the answer "here it is" is given: for a server, a remote artefact, another schema, a locked database, or a name,
alias or version that is not there, `resolve_at` asks MLflow, whose answer or error then counts.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from presage.registry.connect import default_uri, open_existing, sqlite_file
from presage.registry.resolve import DIGEST, ResolvedModel, artefact_of, check_artefact, local_path, parse, resolve

_VERSION = """
    SELECT v.version, coalesce(nullif(v.storage_location, ''), v.source), t.value FROM model_versions v
    LEFT JOIN model_version_tags t ON t.name = v.name AND t.version = v.version AND t.key = :digest
    WHERE v.name = :name AND v.current_stage IS NOT 'Deleted_Internal' AND v.version =
"""
_NUMBERED = _VERSION + ":version"
_BEHIND_ALIAS = _VERSION + "(SELECT version FROM registered_model_aliases WHERE name = :name AND alias = :alias)"


class _Registered(NamedTuple):
    """A version: its number, the location of its files, and the digest of its artefact (None: not recorded)."""

    version: int
    location: str
    digest: str | None


def resolve_at(reference: str, uri: str | None) -> ResolvedModel:
    """`resolve` in the existing registry at an MLflow tracking URI (None: the default one); raises the same errors."""
    if reference.startswith("models:"):
        name, alias, version = parse(reference)
        registered = _registered(uri or default_uri(), name, alias, version)
        location = None if registered is None else local_path(registered.location)
        if registered is not None and location is not None and (folder := artefact_of(location)).is_dir():
            check_artefact(folder, registered.digest)
            return ResolvedModel(folder, name, registered.version, reference)
    return resolve(reference, lambda: open_existing(uri))


def _registered(uri: str, name: str, alias: str | None, version: int | None) -> _Registered | None:
    """The one version that an alias or a number means; None where that has to be asked of MLflow."""
    database = sqlite_file(uri)
    if database is None or not database.is_file():
        return None
    wanted = {"name": name, "alias": alias, "version": version, "digest": DIGEST}
    try:
        with closing(sqlite3.connect(_read_only(database), uri=True, timeout=1.0)) as connection:
            rows = connection.execute(_NUMBERED if alias is None else _BEHIND_ALIAS, wanted).fetchall()
    except sqlite3.Error:
        return None
    # More than one: versions of the same name in several workspaces.
    return _Registered(*rows[0]) if len(rows) == 1 and rows[0][1] else None


def _read_only(database: Path) -> str:
    return f"file:{quote(str(database))}?mode=ro"
