"""Accounts as a decision reads them: in columns, of which only the rows that have changed are written again.

A working set depends on what steps are like on average, which moves with every step of anybody: so what an account
knows of its own is written when it changes, and the rest is put to it for all at once, just before a decision.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from presage.serving_hooks.policies.admission import NUMBER, TOOL, WorkflowColumns
from presage.serving_hooks.policies.workload import Workload
from presage.serving_hooks.vllm.admission_accounts import Account

_TERMS: Final = np.dtype([("known", "f8"), ("outputs", "f8"), ("news", "f8"), ("agent", "i8")])


class Columns:
    """Keeps a crowd up to date.

    Args:
        crowd: of the policy.
        workload: what steps are like.
        block_tokens: tokens of one block hash.
    """

    def __init__(self, crowd: WorkflowColumns, workload: Workload, block_tokens: int) -> None:
        self._crowd, self._workload, self._block_tokens = crowd, workload, block_tokens
        self._terms = np.zeros(0, _TERMS)
        self._changed: dict[str, Account] = {}

    def changed(self, name: str, account: Account) -> None:
        """This account is not as it was."""
        self._changed[name] = account

    def ended(self, name: str) -> None:
        """This workflow has ended."""
        self._changed.pop(name, None)

    def refresh(self) -> WorkflowColumns:
        """All workflows as they are now."""
        self._write()
        workload, facts, terms = self._workload, self._crowd.facts, self._terms
        output = np.minimum(workload.output_tokens, facts["remaining"])
        facts["footprint"] = terms["known"] + terms["outputs"] * output + terms["news"] * workload.new_tokens
        facts["pause"] = np.where(facts["phase"] == TOOL, workload.pauses_s()[terms["agent"]], np.nan)
        return self._crowd

    def _write(self) -> None:
        """All rows at once: to set one of an array takes as long as to set a dozen."""
        if not self._changed:
            return
        crowd, workload = self._crowd, self._workload
        rows, facts, terms = [], [], []
        for name, account in self._changed.items():
            rows.append(crowd.place(name))
            facts.append((NUMBER[account.phase], account.since, 0.0, account.remaining_tokens, math.nan))
            agent = workload.agent(account.workflow_type, account.agent)
            terms.append((*account.seen(self._block_tokens), agent))
        self._changed.clear()
        missing = len(crowd.facts) - len(self._terms)
        if missing:
            self._terms = np.concatenate([self._terms, np.zeros(missing, _TERMS)])
        crowd.facts[rows] = np.array(facts, crowd.facts.dtype)
        self._terms[rows] = np.array(terms, _TERMS)
