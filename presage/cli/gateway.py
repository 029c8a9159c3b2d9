"""`presage gateway`: an OpenAI-compatible front before vLLM or a router."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from presage.cli.output import Output, needing
from presage.errors import ConfigurationError
from presage.predictor_kinds import KINDS


def gateway(
    config: Annotated[
        Path | None, typer.Option(help="Gateway file (TOML): upstreams, modes, limits, models; docs/gateway.md.")
    ] = None,
    upstream: Annotated[
        list[str] | None,
        typer.Option(help="URL of an OpenAI-compatible server, such as http://127.0.0.1:8000; instead of --config."),
    ] = None,
    dialect: Annotated[
        str | None, typer.Option(help="How --upstream takes annotations: vllm, presage, vllm-router, llm-d or dynamo.")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Try it without vLLM: start an engine without a model behind it.")
    ] = False,
    model_folder: Annotated[
        list[str] | None,
        typer.Option(
            "--forecaster",
            metavar="KIND=MODEL",
            help="A model to forecast with, such as next-agent=model/ or remaining-length=models:/lengths/2. Default: "
            "the registry's champions.",
        ),
    ] = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address to listen on.")] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Record served steps here, for `presage traces ingest`.")
    ] = None,
    time_to_live: Annotated[
        float | None,
        typer.Option(help="Seconds without a request after which a workflow has ended. [default: 600]"),
    ] = None,
    workflow_type: Annotated[
        str | None,
        typer.Option(
            help="Type of workflows whose clients name none. Default: app- and a hash of the first agent; by API key, "
            "route or header in a gateway file."
        ),
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="off (proxy only), shadow (forecast and record, change nothing) or on.")
    ] = None,
    ext_proc: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Also decide for Envoy's ext_proc filter, here; needs the extra grpc."),
    ] = None,
    dynamo_planner: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Also predict requests for Dynamo's planner, here; needs the extra grpc."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Validate the settings and what they name, print them as TOML, and exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --check: print JSON.")] = False,
) -> None:
    """Serve an OpenAI-compatible API before vLLM, and forecast what each workflow does next.

    Point your clients' base URL at it; nothing else changes. It recognises workflows and agents, annotates requests
    with priorities and forecasts in the dialect of the server behind it, and can record traces. If a part fails, the
    request is forwarded as it came.
    """
    with needing("gateway", "presage gateway"):
        from presage.gateway.check import as_toml, check_settings
        from presage.gateway.config import gateway_config, read_gateway_given
        from presage.gateway.serve import listening_socket, serve, simulated
    if [config is not None, bool(upstream), simulate].count(True) != 1:
        raise ConfigurationError(
            "give one of --config FILE, --upstream URL (the address of a server) and --simulate (no server)"
        )
    given: dict[str, Any] = {}
    if config is not None:
        given = read_gateway_given(config)
        if dialect is not None:
            raise ConfigurationError("--dialect is for --upstream; in a gateway file each upstream has its dialect")
    elif simulate:
        given["upstreams"] = [{"url": simulated(), "name": "simulated"}]
    else:
        given["upstreams"] = [
            {"url": url, **({} if dialect is None else {"dialect": dialect})} for url in upstream or ()
        ]
    if listen is not None:
        given["listen"] = listen
    if record is not None:
        forecasts = given.setdefault("forecasts", {})
        forecasts["recorder"] = {"text": "off", **(forecasts.get("recorder") or {}), "folder": str(record)}
    if time_to_live is not None:
        given.setdefault("forecasts", {})["time_to_live_s"] = time_to_live
    kinds = [kind.name for kind in KINDS.values() if kind.in_gateway]
    for named in model_folder or ():
        kind, _, reference = named.partition("=")
        if kind not in kinds or not reference:
            raise ConfigurationError(f"--forecaster {named!r}: give KIND=MODEL, KIND being one of {', '.join(kinds)}")
        given.setdefault("forecasts", {})[kind.replace("-", "_")] = reference
    if workflow_type is not None:
        types = given.get("workflow_type")
        given["workflow_type"] = {**(types if isinstance(types, dict) else {}), "default": workflow_type}
    if mode is not None:
        given["modes"] = {**given.get("modes", {}), "default": mode}
    hosts = _hosts(ext_proc, dynamo_planner)
    for address in () if check else filter(None, (ext_proc, dynamo_planner)):
        listening_socket(address).close()  # gRPC says no more than that it failed
    made = gateway_config(given, "presage gateway" if config is None else str(config))
    if as_json and not check:
        raise ConfigurationError("--json is for --check")
    if check:
        for warning in check_settings(made):
            Output.note(warning)
        settings = made.model_dump(mode="json")
        Output(as_json).result(settings, as_toml(settings))
        return
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request's URL
    serve(made, hosts)


def _hosts(ext_proc: str | None, planner: str | None) -> list[Any]:
    """What runs beside the gateway's HTTP."""
    from presage.serving_hooks.addresses import host_and_port

    for option, address in (("--ext-proc", ext_proc), ("--dynamo-planner", planner)):
        if address is None:
            continue
        try:
            host_and_port(address)
        except ValueError as error:
            raise ConfigurationError(f"{option} is {error}") from None
    if ext_proc is None and planner is None:
        return []
    with needing("grpc", "presage gateway with --ext-proc or --dynamo-planner"):
        from presage.gateway.hosts import dynamo_planner
        from presage.gateway.hosts import ext_proc as envoy
    hosts: list[Any] = []
    if ext_proc is not None:
        hosts.append(lambda front: envoy.serving(front, ext_proc))
    if planner is not None:
        hosts.append(
            lambda front: dynamo_planner.serving(
                dynamo_planner.RequestPredictor(front.upstreams.demands, time.monotonic), planner
            )
        )
    return hosts
