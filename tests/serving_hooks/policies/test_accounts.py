"""What admission keeps: of a workflow its phase, waits and blocks; of agents the prefixes that workflows share."""

import hashlib
from itertools import accumulate

from presage.serving_hooks.policies.accounts import Account, SharedPrefixes
from presage.serving_hooks.policies.admission import Phase


def hashes(*blocks: int) -> list[bytes]:
    """As an engine has them: of each block together with all before it."""
    found = accumulate(blocks, lambda before, block: hashlib.sha256(before + b"%d" % block).digest(), initial=b"")
    return list(found)[1:]


def test_a_workflow_is_ready_runs_and_is_away_and_is_held_only_while_it_is_ready() -> None:
    account = Account("t", 0.0)
    assert account.hold(True, 1.0)
    assert not account.waits()
    account.arrives("r", "a", 100, 40, 2.0)
    assert (account.phase, account.since, account.waits(), account.own_tokens(16)) == (Phase.READY, 2.0, True, 60)
    assert account.hold(False, 5.0)
    assert not account.hold(False, 6.0)
    assert account.waited_s(9.0) == 3.0
    request = account.begins("r", hashes(1, 2, 3, 4), 6.0)
    assert (account.phase, account.since, account.own_tokens(16)) == (Phase.STEP, 6.0, 64)
    assert (account.steps, request.step, account.waited_for_s(request, 9.0)) == (1, 1, 3.0)
    account.leaves("r", hashes(1, 2, 3, 4, 5), 8.0)
    assert (account.phase, account.since, account.own_tokens(16)) == (Phase.TOOL, 8.0, 80)
    account.arrives("r2", "b", 100, 0, 9.0)
    account.begins("r2", hashes(7), 9.0)
    assert [account.apart("a", blocks) for blocks in (5, 6)] == [2, 1], "its own conversation, or what all have read"


def test_what_two_workflows_begin_with_is_shared_until_other_agents_have_taken_its_place() -> None:
    prefixes = SharedPrefixes(most=3)
    assert not prefixes.first_prompt("t", "a", hashes(1, 2, 3))
    assert prefixes.first_prompt("t", "a", hashes(1, 2, 4)) == hashes(1, 2)
    assert len(prefixes) == 2
    for number in range(4):
        prefixes.first_prompt("u", f"a{number}", hashes(number))
    assert len(prefixes) == 0
    assert not prefixes.first_prompt("t", "a", hashes(1, 2, 4))
