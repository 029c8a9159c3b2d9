"""What the demo's summary says of its last stage."""

from presage.cli.demo_gateway import compared


def test_rounds_that_disagree_are_no_result() -> None:
    agree = compared([(1.7, 1.1), (1.7, 1.3), (2.2, 1.5)])
    assert agree == "complete in 1.30 s on the mean, proxied alone in 1.87 s: sooner in 3 of 3 rounds of the same load"
    one_slower = compared([(1.25, 2.69), (3.0, 1.0)])
    assert "sooner in 1 of 2 rounds" in one_slower
    assert "too busy to tell" in one_slower
