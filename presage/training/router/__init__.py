"""The router: trained, judged beside baselines, told."""
