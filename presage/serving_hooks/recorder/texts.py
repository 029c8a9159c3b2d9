"""Texts on their way into a recording: decoded where they are token ids, and through the operator's redaction.

A text that cannot be redacted is not kept. The log hears the kind of an error and never its message.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from presage.serving_hooks.recorder.config import Redact

_log = logging.getLogger(__name__)


class Texts:
    """What is kept of texts; of the thread that writes.

    Args:
        redact: the operator's; None keeps texts as they are.
        decode: makes a text of token ids; None for engines that give texts.

    Attributes:
        counts: texts that were not kept, by reason.
    """

    def __init__(self, redact: Redact | None, decode: Callable[[Sequence[int]], str] | None) -> None:
        self._redact, self._decode = redact, decode
        self.counts: Counter[str] = Counter()

    def kept(self, given: str | Sequence[int] | None, column: str) -> str | None:
        """What may stand in a column; None where nothing may."""
        if given is None:
            return None
        try:
            text = given if isinstance(given, str) else self._decoded(given)
            if text is not None and self._redact is not None:
                redacted = self._redact(text, column)
                if redacted is not None and not isinstance(redacted, str):
                    self._lost(f"redaction gave {type(redacted).__name__}, no str")
                    return None
                text = redacted
        except (Exception, SystemExit) as error:  # the latter would end the thread that writes
            self._lost(f"decoding or redaction failed with {type(error).__name__}")
            return None
        # Lone surrogates are no text a file can hold.
        return None if text is None else text.encode("utf-8", "replace").decode()

    def _decoded(self, ids: Sequence[int]) -> str | None:
        if self._decode is None:
            self._lost("nobody decodes token ids")
            return None
        return self._decode(ids)

    def _lost(self, why: str) -> None:
        reason = f"text not kept: {why}"
        if reason not in self.counts:
            _log.warning("recorder: %s", reason)
        self.counts[reason] += 1
