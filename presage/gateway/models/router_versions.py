"""The version of the router that the gateway runs: resolved, tried and reloaded as the other models are.

`forecasting.reload` follows the registry in a thread and a process of its own; here a version that has passed its trial
is loaded by the process that runs the router. Until the first one is there, choices do without.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, Final

from presage.errors import PresageError, why
from presage.gateway.models.router_client import RouterClient
from presage.predictors.common.artefact import artefact_digest
from presage.serving_hooks.forecasting.reload import RegistryClient, Reload
from presage.serving_hooks.forecasting.sources import Held
from presage.serving_hooks.workflows.live import NO_MODEL

NOT_YET: Final = "no version is loaded yet, or there is no registry"


class RouterVersions:
    """Keeps the version of the router up to date.

    Args:
        reference: `models:/NAME@ALIAS`, `models:/NAME/VERSION`, an artefact folder, or None for no router.
        every_s: seconds between two checks of the registry; None checks only at the start.
    """

    def __init__(
        self, reference: str | None, client: RouterClient, registry: RegistryClient, every_s: float | None
    ) -> None:
        reason = NO_MODEL if reference is None else NOT_YET
        self._held: Held = Held(None, reference, reason=reason)
        self._client = client
        self._reload = Reload({"router": self._held}, registry, every_s, load=self._load)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._folder: asyncio.Task[None] | None = None

    @property
    def held(self) -> Held:
        """The version that is live, or why there is none."""
        renewed = self._reload.take()
        if renewed is not None:
            self._held = renewed["router"]
        return self._held

    def start(self) -> None:
        """Starts to load the version in the background, and to check the registry; called on the event loop."""
        self._loop = asyncio.get_running_loop()
        reference = self._held.reference
        if reference is not None and reference.startswith("models:"):
            threading.Thread(target=self._follow, name="presage-router", daemon=True).start()
        elif reference is not None:
            self._folder = asyncio.create_task(self._load_folder(reference))

    async def close(self) -> None:
        """Ends the process that runs the router, and the checks."""
        self._reload.close()
        await self._client.close()
        if self._folder is not None:
            await self._folder

    def status(self) -> dict[str, Any]:
        """As JSON values."""
        held = self.held
        return {
            "reference": held.reference,
            "version": held.version,
            "reason": held.reason if held.predictor is None else None,
            "starts": self._client.starts,
            "refused": dict(self._reload.refused),
            "troubles": dict(self._reload.troubles),
        }

    def _follow(self) -> None:
        self._reload.look()
        self._reload.start()

    def _load(self, kind: str, folder: Path, digest: str) -> tuple[str, ...]:
        """Loads a version that has passed its trial, in the thread of `Reload`."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._client.load(str(folder), digest), self._loop).result()

    async def _load_folder(self, reference: str) -> None:
        try:
            digest = await asyncio.to_thread(artefact_digest, Path(reference))
            models = await self._client.load(reference, digest)
        except (PresageError, OSError) as error:
            self._held = Held(None, reference, reason=why(error))
        else:
            self._held = Held(models, reference, digest=digest, folder=Path(reference))
