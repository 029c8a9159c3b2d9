"""Every error a user of Presage can meet. Each message says what came, what was wanted and what to do.

    PresageError
    ├── InputError (ValueError)      bad input or usage: exit code 2
    │   ├── TraceError               a trace, or a table of outcomes, breaks its schema: names file, row and column
    │   ├── ConfigurationError       an option or a configuration file is not what a command takes
    │   ├── ArtefactError            a model folder is missing a file, altered, or of an unknown version
    │   ├── RegistryError            the registry is down, or has no such model, version or alias
    │   │   └── AliasMovedError      an alias moved while a version was judged against its holder: exit code 3
    │   ├── EngineError              the engine beside us is not one the hooks know
    │   └── WebhookError             a delivery of events is not signed as it should be, or cannot be read
    └── OutputError (OSError)        a result could not be written (disk full, no permission): exit code 2

A gate that refuses a promotion is not an error: the command returns a verdict and exits with 3.
"""

import re
from typing import Final

_USER: Final = re.compile(r"(?<=://)[^\s/?#'\"<>]*@")
_SECRET: Final = re.compile(r"([?&;][^=&;\s]*(?:pass|pwd|token|secret|key)[^=&;\s]*=)[^&;\s'\"]*", re.IGNORECASE)


def without_passwords(text: str) -> str:
    """A text in which addresses have no user, password or token, as MLflow and databases allow them."""
    return _SECRET.sub(r"\1***", _USER.sub("", text)) if "://" in text else text


class PresageError(Exception):
    """Base of all errors raised on purpose; the commands print it as one line, without a traceback."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(without_passwords(value) if isinstance(value, str) else value for value in arguments))


class InputError(PresageError, ValueError):
    """Bad input or usage."""


class TraceError(InputError):
    """A trace, or a table of outcomes, breaks its schema."""


class ConfigurationError(InputError):
    """An option or a configuration file is not what the command takes."""


class ArtefactError(InputError):
    """A model folder cannot be trusted or read."""


class RegistryError(InputError):
    """The registry cannot be reached, or does not hold what was asked for."""


class AliasMovedError(RegistryError):
    """The alias has another holder than the one that the version was judged against."""


class EngineError(InputError):
    """The serving engine is not one the hooks know."""


class WebhookError(InputError):
    """A delivery of lifecycle events cannot be trusted or read."""


class OutputError(PresageError, OSError):
    """A result could not be written; what was there before is untouched."""


def why(error: Exception) -> str:
    """What an operator is told of an error of artefacts and registries, never of one that a request brought about."""
    return str(error) if isinstance(error, PresageError) else without_passwords(f"{type(error).__name__}: {error}")
