"""The log: what a resumed run takes out of it, what a killed one left of a line, and the picture."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from intaglio.trainer.logs import CsvLog, TensorBoardLog, plot_loss, read_log


def test_rows_after_the_step_of_a_resume_are_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    log = CsvLog(path, ["step", "loss", "evaluation_loss"])
    for step in range(1, 6):
        log.write({"step": step, "loss": 1 / 3 / step, **({"evaluation_loss": 0.5} if step == 2 else {})})
    log.close()
    path.write_text(path.read_text() + "6.0,0.")  # a killed writer's
    log = CsvLog(path, ["step", "loss", "evaluation_loss"], step=3)
    log.write({"step": 4, "loss": float("inf")})
    log.close()
    assert read_log(path) == [
        {"step": 1.0, "loss": 1 / 3},
        {"step": 2.0, "loss": 1 / 6, "evaluation_loss": 0.5},
        {"step": 3.0, "loss": 1 / 9},
        {"step": 4.0, "loss": float("inf")},
    ]
    assert path.read_text().splitlines()[0] == "step,loss,evaluation_loss"


def test_tensorboard_has_every_value_but_those_that_a_resume_writes_anew(tmp_path: Path) -> None:
    for begin, value in ((0, 1.0), (3, 2.0)):
        log = TensorBoardLog(tmp_path, begin)
        for step in range(begin + 1, 6):
            log.write({"step": step, "loss": value})
        log.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]


def test_plot_shows_both_losses(tmp_path: Path) -> None:
    rows = [{"step": float(i), "loss": 5.0 / i} for i in range(1, 50)]
    plot_loss(rows, tmp_path / "one.png")
    plot_loss(
        [*rows, {"step": 20.0, "evaluation_loss": 1.0}, {"step": 40.0, "evaluation_loss": 0.7}], tmp_path / "two.png"
    )
    plot_loss([], tmp_path / "none.png")
    sizes = [Image.open(tmp_path / f"{name}.png").size for name in ("one", "two", "none")]
    assert sizes == [(800, 500)] * 3
    colors = [
        {pixel for _, pixel in Image.open(tmp_path / f"{name}.png").convert("RGB").getcolors(1 << 20) or []}
        for name in ("one", "two")
    ]
    orange = (255, 127, 14)  # the second line's
    assert orange in colors[1] and orange not in colors[0]
