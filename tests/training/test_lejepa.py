"""LeJEPA's terms: against float64 by hand, their expectation on Gaussian rows, and two processes against one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from sinklab.errors import InputError
from sinklab.models.vit import ViT, ViTShape
from sinklab.training.joined import JoinedBatchNorm
from sinklab.training.lejepa import LeJEPA, Weights, directions, first_not_finite, invariance, knots, sigreg

TINY = ViTShape(image=16, patch=8, dim=12, depth=3, heads=2, gate="headwise", pathway="learned", layer_scale=1.0)


def gaussian(rows: int, dim: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))


def along(dim: int = 6, count: int = 32, seed: int = 9) -> Tensor:
    return directions(dim, count, torch.Generator().manual_seed(seed))


def by_hand(rows: Tensor, lines: Tensor) -> float:
    """The statistic written out in Python's own floats."""
    total = 0.0
    t = [3 * k / 16 for k in range(17)]
    for line in lines.double().T:
        y = [float(value) for value in rows.double() @ line]
        statistic = 0.0
        for k, knot in enumerate(t):
            cosine = sum(math.cos(knot * value) for value in y) / len(y)
            sine = sum(math.sin(knot * value) for value in y) / len(y)
            window = math.exp(-(knot**2) / 2)
            width = (2 if 0 < k < 16 else 1) * 3 / 16  # trapezoid, and the half line twice
            statistic += width * window * ((cosine - window) ** 2 + sine**2)
        total += len(y) * statistic
    return total / lines.shape[1]


def test_sigreg_is_its_formula_evaluated_in_float64() -> None:
    rows, lines = 1.3 * gaussian(40) + 0.2, along(count=8)
    assert float(sigreg(rows, lines)) == pytest.approx(by_hand(rows, lines), rel=1e-4)
    assert float(sigreg(rows.double(), lines.double())) == pytest.approx(by_hand(rows, lines), rel=1e-9)


@pytest.mark.parametrize("rows", [64, 1024])
def test_on_gaussian_rows_sigreg_is_about_its_expectation_whatever_their_number(rows: int) -> None:
    t, weights, _ = knots()
    expected = float((weights * (1 - torch.exp(-t.square()))).sum())
    drawn = [float(sigreg(gaussian(rows, seed=seed), along(seed=seed))) for seed in range(60)]
    assert sum(drawn) / len(drawn) == pytest.approx(expected, rel=0.1)


def test_sigreg_grows_when_rows_collapse_shrink_grow_or_move() -> None:
    rows = gaussian(512)
    start = float(sigreg(rows, along()))
    for worse in (torch.zeros_like(rows), 0.5 * rows, 2 * rows, rows + 1, rows[:, :1].expand(-1, 6)):
        assert float(sigreg(worse, along())) > 10 * start


def test_directions_have_unit_length_and_follow_from_the_generator() -> None:
    assert torch.allclose(along().norm(dim=0), torch.ones(32))
    assert torch.equal(along(), along()) and not torch.equal(along(), along(seed=8))


def test_views_that_agree_have_no_invariance_loss_and_two_that_differ_a_quarter_of_their_squared_gap() -> None:
    one = gaussian(5)
    assert float(invariance(one.expand(4, 5, 6))) == 0
    assert float(invariance(torch.stack([one, one + 2]))) == pytest.approx(1)  # each is 1 from their mean


def built(penalty: float = 0.5, **options: Any) -> LeJEPA:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LeJEPA(
            ViT(TINY), weights=Weights(penalty=penalty, **options), classes=3, hidden=16, output=6, slices=32
        )
        for block in model.vit.blocks:
            nn.init.normal_(block.attn.qkv.weight, std=0.5)  # type: ignore[union-attr, arg-type]
    return model.double().train()


def batch(images: int = 4) -> tuple[Tensor, Tensor]:
    views = torch.randn(images, 2, 3, 16, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return views, torch.arange(images) % 3


def test_the_total_is_the_weighted_sum_of_its_terms() -> None:
    terms = built()(*batch(), along().double())
    expected = 0.02 * terms["sigreg"] + 0.98 * terms["invariance"] + terms["probe"] + 0.5 * terms["penalty"]
    assert float((terms["total"] - expected).detach()) == pytest.approx(0, abs=1e-12)


def test_the_penalty_is_the_mean_share_of_all_blocks_but_the_first() -> None:
    model, (views, _) = built(), batch()
    _, measured = model.vit(views.transpose(0, 1).flatten(0, 1), measure="gated")
    layer_shares = measured[:, 0] / (measured[:, 1] + 1e-12)
    terms = model(*batch(), along().double())
    assert float(terms["penalty"].detach()) == pytest.approx(float(layer_shares[1:].mean().detach()), rel=1e-6)


def test_the_probe_teaches_the_backbone_nothing() -> None:
    model = built(penalty=0.0)
    model(*batch(), along().double())["probe"].backward()
    assert all(p.grad is None or not p.grad.any() for p in model.vit.parameters())
    assert all(p.grad is not None and p.grad.any() for p in model.probe.parameters())  # type: ignore[union-attr]


def test_images_without_labels_leave_the_probe_out() -> None:
    model = built()
    views, labels = batch()
    terms = model(views, torch.full_like(labels, -1), along().double())
    assert float(terms["probe"]) == 0 and math.isfinite(float(terms["total"]))


def test_a_penalty_over_no_block_and_weights_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="block 3 of a network that has 3"):
        built(first_block=3)
    with pytest.raises(InputError, match="global or rank"):
        Weights(ratio="local")


def test_the_term_that_is_not_finite_is_named() -> None:
    assert first_not_finite({"total": 1.0, "sigreg": 2.0}) is None
    assert first_not_finite({"total": math.nan, "sigreg": 1.0, "penalty": math.nan}) == "penalty"
    assert first_not_finite({"total": math.inf, "sigreg": 1.0}) == "total"


def _one_of_two(rank: int, folder: str) -> None:
    """Half of the joined batch, through DDP; rank 0 saves loss and gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        model = built()
        wrapped = nn.parallel.DistributedDataParallel(model)
        views, labels = batch()
        mine = slice(2 * rank, 2 * rank + 2)
        terms = wrapped(views[mine], labels[mine], along().double())
        terms["total"].backward()
        means = {name: value.detach().clone() for name, value in terms.items()}
        for value in means.values():
            dist.all_reduce(value)
        if rank == 0:
            torch.save(
                {
                    "terms": {name: value / 2 for name, value in means.items()},
                    "gradients": {name: p.grad for name, p in model.named_parameters()},
                    "buffers": dict(model.named_buffers()),
                },
                Path(folder) / "joined.pt",
            )
    finally:
        dist.destroy_process_group()


def test_two_processes_compute_the_loss_and_gradients_of_one_with_the_joined_batch(tmp_path: Path) -> None:
    mp.spawn(_one_of_two, args=(str(tmp_path),), nprocs=2)
    joined = torch.load(tmp_path / "joined.pt")
    model = built()
    terms = model(*batch(), along().double())
    terms["total"].backward()
    for name, value in terms.items():
        assert float(joined["terms"][name]) == pytest.approx(float(value), rel=1e-5), name
    for name, parameter in model.named_parameters():
        assert torch.allclose(joined["gradients"][name], parameter.grad, rtol=1e-4, atol=1e-7), name
    for name, value in model.named_buffers():
        assert torch.allclose(joined["buffers"][name].double(), value.double(), rtol=1e-6), name


def test_alone_the_joined_batch_norm_is_torchs_own() -> None:
    x = gaussian(8)
    assert torch.equal(JoinedBatchNorm(6)(x), nn.BatchNorm1d(6)(x))


def test_the_penalty_can_be_on_the_update_without_its_output_gate() -> None:
    model, (views, labels) = built(update="ungated"), batch()
    with torch.no_grad():
        for block in model.vit.blocks:
            block.attn.gate.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(5))  # type: ignore[union-attr, operator]
    pixels = views.transpose(0, 1).flatten(0, 1)
    gated, ungated = (model.vit(pixels, measure=kind)[1] for kind in ("gated", "ungated"))
    found = float(model(views, labels, along().double())["penalty"].detach())
    assert found == pytest.approx(float((ungated[1:, 0] / ungated[1:, 1]).mean().detach()), rel=1e-6)
    assert abs(found - float((gated[1:, 0] / gated[1:, 1]).mean().detach())) > 1e-4


def test_in_bfloat16_the_objective_is_still_computed_in_float32() -> None:
    exact, rounded = built().float(), built().float()
    rounded.low_precision = True
    views, labels = batch()
    terms, rough = (model(views.float(), labels, along()) for model in (exact, rounded))
    assert all(value.dtype == torch.float32 for value in rough.values())
    assert float(rough["total"].detach()) == pytest.approx(float(terms["total"].detach()), rel=0.05)
    assert float(rough["invariance"].detach()) != float(terms["invariance"].detach())


def test_the_projector_has_as_many_parameters_as_the_paper_says() -> None:
    """Two hidden layers of 2048 with batch norm, then 128: 1024·2048 + 2048² + 2048·128 weights, biases and norms."""
    with torch.device("meta"):
        projector = LeJEPA(
            ViT(ViTShape(dim=1024, heads=16, depth=1)), weights=Weights(sigreg=0.02), classes=2
        ).projector
    count = sum(parameter.numel() for parameter in projector.parameters())
    assert count == 1024 * 2048 + 2048**2 + 2048 * 128 + 2 * 2048 + 128 + 4 * 2048 and round(count / 1e6, 2) == 6.57
