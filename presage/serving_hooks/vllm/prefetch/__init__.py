"""Prefetch, a guest: off by default, and named nowhere else but in settings, modes, status and metrics.

`scheduler.py` joins it to the scheduler of an engine that is configured for it, `prefetcher.py` starts and ends
prefetches, and `prompts.py` knows which prompts come next.
"""
