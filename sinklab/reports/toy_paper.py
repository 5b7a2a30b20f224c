"""The numbers that the paper prints for its controlled tasks, for setting ours beside them; None where it prints none.

Its budget is 30,000 steps of 1,024 sequences. It counts layers from 1, sinklab from 0: the keys here are sinklab's.
"""

from __future__ import annotations

TABLE_2: dict[str, dict[str, float]] = {
    "baseline": {"task_mse": 0.018694, "delta_rms_nop": 0, "delta_rms_active": 0},
    "zero": {"task_mse": 0.018669, "delta_rms_nop": 0.007849, "delta_rms_active": 0.000645},
    "donor": {"task_mse": 0.018694, "delta_rms_nop": 0, "delta_rms_active": 0},
    "ordinary": {"task_mse": 0.500093, "delta_rms_nop": 0.979167, "delta_rms_active": 0.080533},
    "route_clamped": {"task_mse": 0.143905, "delta_rms_nop": 0.499524, "delta_rms_active": 0.081149},
}
"""Edit of the sink → numbers. The paper says "routing removal"; its numbers are those of the clamped one: with the key
exactly masked, a sink that is learned so well loses as much as by an ordinary value."""

SINK: dict[str, float] = {
    "attention_nop": 0.9929,
    "attention_active": 0.0122,
    "value_norm_sink": 0.063,
    "value_norm_other": 7.87,
    "value_ratio": 0.008,
}
"""Of the unedited NOP head."""

TABLE_3: dict[tuple[int, str], dict[str, float]] = {
    (-1, "baseline"): {"task_mse": 0.0481, "donor_target_mse": 1.914},
    (0, "zero"): {"task_mse": 4.365, "delta_rms": 2.065, "shared_energy": 0.91},
    (0, "donor"): {
        "task_mse": 0.102,
        "donor_target_mse": 1.868,
        "delta_rms": 0.232,
        "shared_energy": 0.998,
        "donor_cosine": 0.162,
    },
    (0, "ordinary"): {"task_mse": 0.255, "donor_target_mse": 1.888, "delta_rms": 0.441, "shared_energy": 0.998},
    (0, "zero_ordinary"): {"task_mse": 0.055, "delta_rms": 0.065, "shared_energy": 0.51},
    (0, "route"): {"task_mse": 0.589, "delta_rms": 0.725, "shared_energy": 0.97},
    (1, "zero"): {"task_mse": 3.073, "delta_rms": 1.724},
    (1, "donor"): {"task_mse": 1.949, "donor_target_mse": 0.230, "delta_rms": 1.363, "donor_cosine": 0.944},
    (1, "ordinary"): {"task_mse": 2.013, "donor_target_mse": 2.123, "delta_rms": 1.386},
    (1, "zero_ordinary"): {"task_mse": 0.049, "delta_rms": 0.026, "shared_energy": 0.73},
    (1, "route"): {"task_mse": 2.269, "delta_rms": 1.464},
}
"""(Layer, edit of the source) → numbers of one model; in which layer a broadcast lands differs from seed to seed."""

PATHWAY: dict[str, dict[str, float]] = {
    "attention": {
        "task_mse": 0.1397,
        "inflow_0": 0.888,
        "inflow_1": 0.906,
        "delta_mse_without_attention": 2.906,
        "donor_cosine_sink": 0.962,
    },
    "global": {
        "task_mse": 0.1402,
        "inflow_0": 0.103,
        "inflow_1": 0.908,
        "delta_mse_without_attention": 2.875,
        "delta_mse_without_global": 0.515,
        "donor_cosine_sink": 0.957,
        "donor_cosine_global": 0.203,
    },
    "global+penalty": {
        "task_mse": 0.1441,
        "inflow_0": 0.062,
        "inflow_1": 0.057,
        "delta_mse_without_attention": 0.004,
        "delta_mse_without_global": 1.644,
        "donor_cosine_sink": -0.035,
        "donor_cosine_global": 0.892,
    },
}
"""Arm → means over five seeds."""

E1: dict[str, dict[str, float]] = {
    "attention": {"task_mse": 0.3093},
    "global-uniform": {"task_mse": 0.3098},
    "global-uniform+penalty": {"task_mse": 0.3648, "delta_mse_without_attention": 0, "donor_cosine_global": 0.803},
}
"""Arm → App. E.1's numbers, with γ ≡ 1 and a penalty whose denominator passes no gradient."""
E1_UPDATE_RMS = 1e-6
"""The attention update's root mean square after that penalty: the whole branch has been shrunk."""
