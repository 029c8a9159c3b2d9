"""The modes of policies and workflow types: which of several settings holds."""

import pytest

from presage.serving_hooks.modes import Mode, Modes
from presage.serving_hooks.status import ModesStatus


@pytest.mark.parametrize(
    ("said", "policy", "name", "mode"),
    [
        ({}, "priority", "t", Mode.ON),
        ({"default": "shadow", "policies": {"eviction": "on"}}, "eviction", "t", Mode.ON),
        ({"default": "shadow", "policies": {"eviction": "on"}}, "priority", "t", Mode.SHADOW),
        ({"default": "shadow", "workflow_types": {"t": "on"}}, "priority", "t", Mode.ON),
        ({"policies": {"eviction": "off"}, "workflow_types": {"t": "on"}}, "eviction", "t", Mode.OFF),
        ({"policies": {"eviction": "on"}, "workflow_types": {"t": "shadow"}}, "eviction", "t", Mode.SHADOW),
        ({"policies": {"eviction": "shadow"}}, "prefetch", "t", Mode.SHADOW),
    ],
)
def test_what_is_said_of_less_goes_before_what_is_said_of_more(said: dict, policy: str, name: str, mode: Mode) -> None:  # type: ignore[type-arg]
    assert Modes(**said).of(policy, name) is mode


def test_both_together_go_before_each_and_everything_takes_all_back() -> None:
    modes = Modes()
    modes.set("off", "eviction")
    modes.set("on", "eviction", "t")
    assert (modes.of("eviction", "t"), modes.of("eviction", "u")) == (Mode.ON, Mode.OFF)
    assert modes.whole == {"priority": Mode.ON, "eviction": Mode.ON, "admission": Mode.ON, "prefetch": Mode.ON}
    modes.set("off")
    assert set(modes.whole.values()) == {Mode.OFF}
    assert modes.of("eviction", "t") is Mode.OFF
    assert modes.status() == ModesStatus("off", [], dict.fromkeys(modes.whole, "off"))
