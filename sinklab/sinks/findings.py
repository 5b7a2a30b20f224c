"""From a finished head table to what a report needs: events, summary, spectra, overlays; written by rank 0 alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sinklab.sinks.table import head_schema, sink_table, summarise

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.data.input_list import InputList, View
    from sinklab.handle import Model
    from sinklab.run import Run
    from sinklab.sinks.options import ScanOptions


def theta_table(model: Model, layers: tuple[int, ...] | None) -> pd.DataFrame:
    """Singular values of Θ = W_Q W_Kᵀ, one row per head (paper, Lemma 3)."""
    import pandas as pd

    from sinklab.sinks.spectrum import theta_spectrum

    rows: list[dict[str, Any]] = []
    for site in model.sites:
        query, key = site.parts.query_weight, site.parts.key_weight
        if query is None or key is None or (layers is not None and site.layer not in layers):
            continue
        for head, sigma in enumerate(theta_spectrum(query(), key(), site.heads, site.kv_heads).cpu()):
            energy = sigma.square()
            rows.append(
                {
                    "layer": site.layer,
                    "head": head,
                    "sigma_1": float(sigma[0]),
                    "sigma_2": float(sigma[1]) if len(sigma) > 1 else 0.0,
                    "sigma_sum": float(sigma.sum()),
                    "frobenius": float(energy.sum().sqrt()),
                    "sigma1_share": float(energy[0] / energy.sum()),
                }
            )
    return pd.DataFrame(rows, columns=["layer", "head", "sigma_1", "sigma_2", "sigma_sum", "frobenius", "sigma1_share"])


def write_findings(model: Model, images: InputList, transform: View, run: Run, options: ScanOptions) -> list[str]:
    """`sinks.parquet`, `summary.json`, `tables/*.csv` and `overlays/`; returns sentences worth keeping."""
    from sinklab.sinks.classify import with_own
    from sinklab.sinks.common_mode import common_mode_table, has_common_mode
    from sinklab.sinks.overlay import choose, write_overlays
    from sinklab.sinks.phase import phase_table

    heads = run.heads
    sinks = sink_table(heads, options.rule, with_own(options.definition))
    run.write_table("sinks.parquet", sinks)
    summary = summarise(heads, options.rule, options.definition, images.noun)
    run.write_json("summary.json", summary)
    run.write_table("tables/spectrum.csv", theta_table(model, options.layers))
    phases = phase_table(run)
    if phases is not None:
        run.write_table("tables/phase.csv", phases)
    if has_common_mode(model):
        seen = {int(index) for index in heads["image_index"].unique()}
        run.write_table("tables/common_mode.csv", common_mode_table(model, images, transform, options, seen))
    chosen = choose(sinks, summary, options.definition.name)
    notes = write_overlays(model, images, transform, run, options, chosen)
    assert list(heads.columns)[: len(head_schema().names)] == head_schema().names
    return notes
