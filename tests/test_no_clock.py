"""No test depends on how fast the machine is; what only the suite's own set-up can promise of that is tested here."""

from hypothesis import HealthCheck, settings


def test_hypothesis_judges_no_example_by_its_time() -> None:
    """Its own settings fail an example after 200 ms, which a busy machine takes for any."""
    ours = settings(max_examples=60)
    assert ours.deadline is None
    assert HealthCheck.too_slow in ours.suppress_health_check
