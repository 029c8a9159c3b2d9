"""Files of the tool service (TOML): its tools, what waiting costs, and limits.

listen = "127.0.0.1:8790"
folder = "tools"                # its database, and the folders of prepared tools

[tools.sandbox]
wait_cost = 10.0                # a second in which a step waits costs as much as 10 in which a sandbox is idle
most = 16

[tools.sandbox.subprocess]
command = ["python", "-m", "http.server", "{port}"]

[tools.browser.docker]
image = "chromium:latest"
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import which
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from presage.errors import ConfigurationError
from presage.serving_hooks.addresses import host_and_port
from presage.serving_hooks.settings import STRICT

_Seconds = Annotated[float, Field(gt=0)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
_Command = Annotated[Sequence[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class SubprocessSettings(BaseModel):
    """A process of this machine, in a folder and a session of its own. In arguments, {id}, {folder} and {port}, a free
    port, stand for those of the tool; the process finds them as PRESAGE_TOOL_ID, _FOLDER and _PORT too."""

    model_config = STRICT

    command: _Command
    """the program and its arguments"""
    ready: _Command | None = None
    """program that succeeds once the tool can be used; by default it can once something listens on {port}, if `command`
    names it, and else at once"""


class DockerSettings(BaseModel):
    """A container, started by the program `docker`."""

    model_config = STRICT

    image: Annotated[str, Field(min_length=1, pattern="^[^-]")]
    """its image"""
    command: Sequence[str] = ()
    """what it runs in place of the command of the image"""
    options: Sequence[str] = ()
    """further options of docker run, such as --memory=2g"""
    ready: _Command | None = None
    """program in the container that succeeds once the tool can be used; by default it can at once"""
    program: Annotated[str, Field(min_length=1)] = "docker"
    """another program that takes the same commands, such as podman"""


class CustomSettings(BaseModel):
    """Another driver."""

    model_config = STRICT

    driver: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """module:class; the class takes the options and has the methods of `drivers.Driver`"""
    options: Mapping[str, Any] = {}
    """what it is made with"""


class ToolSettings(BaseModel):
    """One tool: exactly one of `subprocess`, `docker` and `custom`."""

    model_config = STRICT

    subprocess: SubprocessSettings | None = None
    docker: DockerSettings | None = None
    custom: CustomSettings | None = None
    wait_cost: Annotated[float, Field(gt=0)] = 10.0
    """seconds in which one is prepared and not used that cost as much as a second in which a step waits for one"""
    setup_s: _Seconds = 2.0
    """how long preparing takes, until that is measured"""
    ready_within_s: _Seconds = 120.0
    """preparing that takes longer has failed"""
    most: Annotated[int, Field(ge=1)] = 32
    """prepared and used at once"""
    most_per_tenant: Annotated[int, Field(ge=1)] | None = None
    """used by the workflows of one tenant at once"""

    @model_validator(mode="after")
    def _one_driver(self) -> Self:
        if sum(table is not None for table in (self.subprocess, self.docker, self.custom)) != 1:
            raise ValueError("give one of the tables subprocess, docker and custom")
        return self


class ToolServiceConfig(BaseModel):
    """The whole file."""

    model_config = STRICT

    listen: Annotated[str, AfterValidator(host_and_port)] = "127.0.0.1:8790"
    """address that it listens on; anybody who reaches it can start tools, unless there is a token"""
    folder: Annotated[str, Field(min_length=1)] = "tools"
    """where its database and the folders of prepared tools are"""
    secret_variable: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = "PRESAGE_WEBHOOK_SECRET"
    """environment variable with the secret of the webhooks; without it, no events are taken"""
    token_variable: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = "PRESAGE_TOOLS_TOKEN"
    """environment variable with the token that clients send as `Authorization: Bearer`; without it, none is needed"""
    tenants: Mapping[str, Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]] = {}
    """environment variable with the token of each tenant, by its name in events: it gets, sees and gives back tools of
    its own workflows alone; the token above is the operator's, who acts for all"""
    expire_s: _Seconds = 3600.0
    """seconds without an event or a call after which a workflow has ended: of one whose server is gone"""
    tools: Annotated[Mapping[_Name, ToolSettings], Field(min_length=1)]
    """its tools by name"""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)


def check_named(config: ToolServiceConfig) -> list[str]:
    """Warnings of what a file names and is not there yet: secrets, which may come with the service's environment.

    Raises:
        ConfigurationError: a program of a tool is missing, which no start of it would survive.
    """
    for name, tool in config.tools.items():
        process, container = tool.subprocess, tool.docker
        programs = [] if container is None else [("docker.program", container.program)]
        if process is not None:
            commands = (("subprocess.command", process.command), ("subprocess.ready", process.ready))
            programs = [(setting, command[0]) for setting, command in commands if command]
        for setting, program in programs:
            plain = "/" not in program or Path(program).is_absolute()  # others are of the tool's folder, made later
            if plain and "{" not in program and which(program) is None:
                raise ConfigurationError(
                    f"tools.{name}.{setting}: there is no program {program!r}; install it, or correct it"
                )
    wanted = {config.secret_variable: "no events are taken", **dict.fromkeys(config.tenants.values(), "no start")}
    return [f"{variable} is not set: {without}" for variable, without in wanted.items() if variable not in os.environ]


def read_config(file: Path) -> ToolServiceConfig:
    """Reads a file of the tool service.

    Raises:
        ConfigurationError: it cannot be read, or a value is not what is wanted.
    """
    try:
        given = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{file}: cannot be read ({type(error).__name__}); give a file of the tool service"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{file}: is no TOML ({error}); correct it") from None
    try:
        return ToolServiceConfig.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ConfigurationError(f"{file}: {where}: {first['msg'].removeprefix('Value error, ')}") from None
