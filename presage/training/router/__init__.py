"""The router: trained, judged beside baselines, reported."""
