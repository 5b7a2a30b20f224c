"""The reference itself, against numbers worked by hand and against torch's own attention."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from reference import FLOATS, reference_statistics
from torch import Tensor

LOG3 = math.log(3.0)


def two_keys(logits: list[list[float]], value: list[list[float]], **options) -> dict[str, np.ndarray]:
    """One head whose logits are given: q = logits, k = identity, scale 1, W_O = identity unless it is given."""
    rows = torch.tensor(logits, dtype=torch.float64)
    values = torch.tensor(value, dtype=torch.float64)
    options.setdefault("weight", torch.eye(values.shape[1], dtype=torch.float64))
    keys = torch.eye(rows.shape[1], dtype=torch.float64)
    return reference_statistics(rows[None, None], keys[None, None], values[None, None], scale=1.0, **options)


def test_every_statistic_of_two_tokens_is_the_number_worked_by_hand():
    # exp(log 3) = 3, so the rows are (3/4, 1/4) and (1/2, 1/2).
    # inflow = ((3/4 + 1/2)/2, (1/4 + 1/2)/2) = (5/8, 3/8): s = 0, margin 1/4; both queries give it >= 1/2.
    # v = (3, 4), (0, 1): norms 5 and 1, ratio 5. W = diag(1, 2), gamma = (1, 1/2) undo each other in the second
    # channel, so u = v and the output ratio is 5 too.
    # U_0 = (9/4, 13/4), U_1 = (3/2, 5/2). |U_0|^2 = 250/16, |U_1|^2 = 34/4; trace = 193/8 = 24.125;
    # det = (9/4*5/2 - 13/4*3/2)^2 = (3/4)^2 = 9/16; sigma_1^2 = (24.125 + sqrt(24.125^2 - 9/4))/2.
    found = two_keys(
        [[LOG3, 0.0], [0.0, 0.0]],
        [[3.0, 4.0], [0.0, 1.0]],
        weight=torch.tensor([[1.0, 0.0], [0.0, 2.0]]),
        layer_scale=torch.tensor([1.0, 0.5]),
    )
    largest = (24.125 + math.sqrt(24.125**2 - 2.25)) / 2
    expected = {
        "queries": 2,
        "sink_index": 0,
        "inflow": 5 / 8,
        "inflow_margin": 1 / 4,
        "routed_count": 2,
        "routed_fraction": 1.0,
        "min_attention": 1 / 2,
        "entropy": ((0.75 * math.log(4 / 3) + 0.25 * math.log(4)) + math.log(2)) / 2,
        "value_norm_head": 5.0,
        "value_ratio_head": 5.0,
        "value_ratio_out": 5.0,
        "update_norm": (math.sqrt(250) / 4 + math.sqrt(34) / 2) / 2,
        "stable_rank": 24.125 / largest,
        "rank1_energy": largest / 24.125,
        "stable_rank_head": 24.125 / largest,
    }
    assert found["finite"].all()
    for name, number in expected.items():
        assert found[name][0, 0] == pytest.approx(number, rel=1e-12), name


def test_output_projection_and_layer_scale_enter_the_output_ratio_only():
    # u = gamma * W v: W swaps the channels, gamma = (2, 10). v_0 = (3, 4) -> (8, 30); v_1 = (0, 1) -> (2, 0).
    found = two_keys(
        [[LOG3, 0.0], [0.0, 0.0]],
        [[3.0, 4.0], [0.0, 1.0]],
        weight=torch.tensor([[0.0, 1.0], [1.0, 0.0]]),
        layer_scale=torch.tensor([2.0, 10.0]),
    )
    assert found["value_ratio_head"][0, 0] == pytest.approx(5.0)
    assert found["value_ratio_out"][0, 0] == pytest.approx(math.sqrt(8**2 + 30**2) / 2)


def test_a_causal_query_with_one_key_is_in_no_statistic():
    # Causal, three tokens, equal logits: query 0 sees one key and is left out. Query 1: (1/2, 1/2), query 2: thirds.
    # inflow_0 = inflow_1 = (1/2 + 1/3)/2 = 5/12; inflow_2 = 1/3 over its one query. The tie goes to key 0.
    found = two_keys([[0.0] * 3] * 3, [[1.0], [1.0], [4.0]], is_causal=True)
    assert (found["queries"][0, 0], found["sink_index"][0, 0], found["routed_count"][0, 0]) == (2, 0, 1)
    assert found["inflow"][0, 0] == pytest.approx(5 / 12)
    assert found["inflow_margin"][0, 0] == pytest.approx(0.0, abs=1e-15)
    assert found["min_attention"][0, 0] == pytest.approx(1 / 3)
    assert found["value_ratio_head"][0, 0] == pytest.approx(1 / 2.5)
    assert found["entropy"][0, 0] == pytest.approx((math.log(2) + math.log(3)) / 2)
    # z_1 = (1 + 1)/2 = 1, z_2 = (1 + 1 + 4)/3 = 2; z_0 = 1 would pull the mean to 4/3.
    assert found["update_norm"][0, 0] == pytest.approx(1.5)


def test_a_late_causal_key_that_one_query_prefers_is_not_the_sink():
    # Query 2 alone sees key 2 and gives it 3/5, half of that in the mean over both queries; key 0 gets (1/2 + 1/5)/2.
    found = two_keys([[0.0] * 3, [0.0] * 3, [0.0, 0.0, LOG3]], [[1.0], [1.0], [1.0]], is_causal=True)
    assert (found["queries"][0, 0], found["sink_index"][0, 0]) == (2, 0)
    assert found["inflow"][0, 0] == pytest.approx(7 / 20)
    assert found["inflow_margin"][0, 0] == pytest.approx(0)  # key 1 is paid as much


def test_a_fully_masked_row_counts_nowhere_and_leaves_no_nan():
    # Row 1 sees nothing, key 2 is seen by nobody: what is left is rows 0 and 2 over keys 0 and 1, (1/2, 1/2) each.
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, False]])
    found = two_keys([[0.0] * 3] * 3, [[2.0], [1.0], [100.0]], mask=mask)
    assert found["finite"].all()
    assert found["pattern"][0, 0, 1].tolist() == [0.0, 0.0, 0.0]
    assert (found["queries"][0, 0], found["routed_count"][0, 0]) == (2, 2)
    assert found["inflow"][0, 0] == pytest.approx(0.5)
    assert found["value_ratio_head"][0, 0] == pytest.approx(2.0)  # the unseen key's 100 is not in the mean
    assert found["entropy"][0, 0] == pytest.approx(math.log(2))


@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.float32).min])
def test_an_additive_mask_hides_as_the_boolean_mask_does(hidden: float):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, 3) for _ in range(3))
    boolean = torch.rand(2, 1, 5, 5) > 0.4
    additive = torch.zeros(2, 1, 5, 5).masked_fill(~boolean, hidden)
    weight = torch.randn(7, 6)
    plain = reference_statistics(q, k, v, weight=weight, mask=boolean)
    for name, numbers in reference_statistics(q, k, v, weight=weight, mask=additive).items():
        np.testing.assert_array_equal(numbers, plain[name], err_msg=name)


def test_a_finite_bias_belongs_to_the_logits():
    bias = torch.tensor([[LOG3, 0.0], [LOG3, 0.0]], dtype=torch.float64)
    found = two_keys([[0.0, 0.0], [0.0, 0.0]], [[1.0], [1.0]], mask=bias)
    assert found["min_attention"][0, 0] == pytest.approx(3 / 4)


@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "grouped"])
def test_the_pattern_gives_what_torch_s_own_attention_gives(kind: str):
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 4, 6, 8).double(), torch.randn(2, 2, 6, 8).double(), torch.randn(2, 2, 6, 8).double()
    mask = torch.rand(6, 6) > 0.3 if kind == "mask" else None
    if mask is not None:
        mask[:, 0] = True
    if kind != "grouped":
        k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
    options = {"attn_mask": mask, "is_causal": kind == "causal", "enable_gqa": kind == "grouped"}
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    found = reference_statistics(q, k, v, weight=torch.randn(5, 32), mask=mask, is_causal=kind == "causal")
    whole_v = v.repeat_interleave(4 // v.shape[1], dim=1)
    torch.testing.assert_close(torch.from_numpy(found["pattern"]) @ whole_v, expected, rtol=1e-12, atol=1e-12)


def test_shares_of_heads_add_up_to_the_whole_update():
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, 3, 6, 4).double() for _ in range(3))
    weight, gamma = torch.randn(10, 12).double(), torch.randn(10).double()
    pattern = torch.from_numpy(reference_statistics(q, k, v, weight=weight, layer_scale=gamma)["pattern"])
    joined = (pattern @ v).transpose(1, 2).reshape(6, 12) @ weight.T * gamma
    shares = sum(pattern[0, h] @ (v[0, h] @ weight[:, 4 * h : 4 * h + 4].T * gamma) for h in range(3))
    torch.testing.assert_close(shares, joined)


def test_a_zero_update_has_no_stable_rank_and_is_finite_all_the_same():
    found = two_keys([[LOG3, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]])
    assert found["finite"].all()
    assert np.isnan([found[name][0, 0] for name in ("stable_rank", "rank1_energy", "stable_rank_head")]).all()
    assert (found["value_ratio_head"][0, 0], found["value_ratio_out"][0, 0], found["update_norm"][0, 0]) == (0, 0, 0)


def test_a_tiny_layer_scale_changes_no_rank():
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 1, 6, 4) for _ in range(3))
    weight = torch.randn(9, 4)
    plain = reference_statistics(q, k, v, weight=weight)
    tiny = reference_statistics(q, k, v, weight=weight, layer_scale=torch.full((9,), 1e-9))
    np.testing.assert_allclose(tiny["stable_rank"], plain["stable_rank"], rtol=1e-9)


def test_one_query_has_stable_rank_one_and_one_key_is_refused():
    torch.manual_seed(4)
    q, k, v = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    pooled = reference_statistics(q, k, v, weight=torch.randn(6, 4))
    assert pooled["finite"].all() and pooled["queries"][0, 0] == 1
    assert pooled["stable_rank"][0, 0] == pytest.approx(1.0)
    alone = reference_statistics(q, k[:, :, :1], v[:, :, :1], weight=torch.randn(6, 4))
    assert not alone["finite"].any()
    assert (alone["sink_index"][0, 0], alone["queries"][0, 0], alone["routed_count"][0, 0]) == (-1, 0, 0)


@pytest.mark.parametrize("where", ["q", "k", "v", "mask", "weight", "layer_scale"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_number_marks_the_heads_that_read_it_and_no_other(where: str, bad: float):
    torch.manual_seed(5)
    parts: dict[str, Tensor] = {name: torch.randn(2, 2, 5, 3) for name in ("q", "k", "v")}
    parts |= {"mask": torch.zeros(2, 2, 5, 5), "weight": torch.randn(4, 6), "layer_scale": torch.ones(4)}
    parts[where][(1, 1, 2, 0) if parts[where].ndim == 4 else (1, 5) if where == "weight" else 1] = bad
    # W_O's columns 3 to 5 belong to head 1 of every image; the layer scale to every head
    expected = np.array([[True, True], [True, False]])
    expected = {"weight": np.array([[True, False]] * 2), "layer_scale": np.zeros((2, 2), bool)}.get(where, expected)
    found = reference_statistics(parts.pop("q"), parts.pop("k"), parts.pop("v"), **parts)
    np.testing.assert_array_equal(found["finite"], expected)
    for name in FLOATS:
        np.testing.assert_array_equal(np.isnan(found[name]), ~expected, err_msg=name)


def test_a_mask_beside_the_causal_flag_is_refused():
    with pytest.raises(ValueError, match="is_causal"):
        two_keys([[0.0, 0.0]], [[1.0], [1.0]], mask=torch.ones(1, 2, dtype=torch.bool), is_causal=True)
