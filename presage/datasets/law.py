"""Deprecated: use `presage.datasets.synthetic.workflows`."""

import warnings

from presage.datasets.synthetic.workflows import Generated, generate

__all__ = ["Generated", "generate"]

warnings.warn(
    "presage.datasets.law is deprecated: import from presage.datasets.synthetic.workflows",
    DeprecationWarning,
    stacklevel=2,
)
