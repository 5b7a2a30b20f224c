"""Names and thresholds of what `synchrony` measures where values are phases; light enough for a report to import."""

from __future__ import annotations

REST = 0.05
"""Radians, root mean square over a head's phases: a token whose update before the bound is no larger is at rest."""
SATURATED = 0.9
"""A bound is saturated where what it gives is this share of its radius, or more."""
WAYS = ("at_rest_self", "at_rest_cancelled", "at_rest_locked", "at_rest_velocity")
"""In the order of the four sizes: an angle that nothing stands behind says nothing."""
MEASURES = (
    *("order", "order_reference", "agreement_before", "agreement_after", "repulsion", "saturated"),
    *("global_order_before", "global_order_after", "update_rms", *WAYS, "acts"),
)
