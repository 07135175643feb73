"""The diagnosis in a terminal: the sentence first, then causes and readings as tables."""

from rich.console import Console
from rich.table import Table

from beamline.coordinator.doctor.diagnosis import Diagnosis
from beamline.coordinator.doctor.page import GAP_COLUMNS, gap_cells


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print everything but the page's path."""
    console.print(diagnosis.sentence, highlight=False, markup=False)
    console.print(
        f"{diagnosis.num_tokens:,} tokens of {diagnosis.num_trajectories} trajectories, {diagnosis.dtype}, routing: "
        f"{diagnosis.routing}, temperature {diagnosis.temperature:g}",
        highlight=False,
        markup=False,
    )
    for note in diagnosis.notes:
        console.print(note, highlight=False, markup=False)
    causes = Table("cause", "share", "evidence", box=None)
    for cause in diagnosis.causes:
        causes.add_row(cause.name, "–" if diagnosis.agrees else f"{cause.share:.0%}", cause.evidence)
    readings = Table("reading", *GAP_COLUMNS, box=None)
    for reading in diagnosis.readings:
        name = f"{reading.name} (the run's)" if reading.own else reading.name
        readings.add_row(name, *gap_cells(reading.gap))
    console.print(causes)
    console.print(readings)
    if diagnosis.layers:
        worst = sorted(diagnosis.layers, key=lambda layer: layer.agreement)[:4]
        shares = ", ".join(f"layer {layer.layer} {layer.agreement:.1%}" for layer in worst)
        console.print(f"same experts on both sides, lowest first: {shares}", highlight=False)
