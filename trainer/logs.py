"""What a run says of itself: ``log.csv``, TensorBoard's events, and a picture of the loss."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intaglio.errors import OutputError, RuntimeMissingError
from intaglio.output import replaced_file

if TYPE_CHECKING:
    from intaglio.trainer.recipe import TrainSettings

Row = Mapping[str, float]
_log = logging.getLogger(__name__)


class RunLog:
    """Where the rows of the run in ``folder`` go: ``log.csv``, a plot of it, TensorBoard, ``report``.

    ``step`` is the last one that the log keeps; ``measures`` are what evaluations say beside losses. Raises
    RuntimeMissingError where a package is not installed that ``settings`` ask for.
    """

    def __init__(
        self,
        folder: Path,
        settings: TrainSettings,
        step: int,
        measures: Sequence[str],
        report: Callable[[Row], object] | None = None,
    ) -> None:
        self._path = folder / "log.csv"
        self._plot = folder / "loss.png" if settings.plot else None
        if self._plot is not None:
            require_plots()
        self._step, self._measures, self._report = step, measures, report
        self._csv: CsvLog | None = None
        self._is_drawn = True
        self._board = TensorBoardLog(folder / "tensorboard", step) if settings.tensorboard else None

    def write(self, row: Row) -> None:
        if self._csv is None:
            names = [name for name in row if not name.startswith("evaluation_")]
            parts = names[1 : names.index("learning_rate")]
            columns = [*names, *(f"evaluation_{name}" for name in [*parts, *self._measures])]
            self._csv = CsvLog(self._path, columns, self._step)
        self._csv.write(row)
        self._is_drawn = False
        if self._board is not None:
            self._board.write(row)
        if self._report is not None:
            self._report(row)

    def sync(self) -> None:
        """The rows are on the disk when this returns."""
        if self._csv is not None:
            self._csv.sync()

    def plot(self) -> None:
        """Draws the loss. A picture that cannot be drawn is no reason to end a run, and is said."""
        if self._is_drawn or self._plot is None:
            return
        rows, self._is_drawn = read_log(self._path), True
        try:
            plot_loss(rows, self._plot)
        except Exception as error:
            _log.warning("%s is not drawn (%s); the run goes on, and its log has all values", self._plot, error)

    def close(self) -> None:
        self.sync()
        self.plot()
        if self._csv is not None:
            self._csv.close()
        if self._board is not None:
            self._board.close()


class CsvLog:
    """``log.csv``, a row at a time. Rows after ``step``, which a run that was cut short wrote, are taken out first.

    The columns are those of the first row; a value that a later row lacks is left empty.
    """

    def __init__(self, path: Path, columns: Sequence[str], step: int = 0) -> None:
        kept = [row for row in read_log(path) if row["step"] <= step] if step and path.is_file() else []
        self._columns = list(columns)
        with replaced_file(path) as file:
            lines = [self._columns, *([_text(row.get(column)) for column in self._columns] for row in kept)]
            file.write("".join(",".join(line) + "\n" for line in lines).encode())
        self._file = path.open("a", encoding="utf-8", newline="")

    def write(self, row: Row) -> None:
        """One row, in the file when this returns. Raises OutputError."""
        try:
            self._file.write(",".join(_text(row.get(column)) for column in self._columns) + "\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(f"{self._file.name}: cannot be written ({error.strerror}); free space") from error

    def sync(self) -> None:
        """What was written is on the disk when this returns."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _text(value: float | None) -> str:
    # repr and not a rounded form: a resumed run is compared with the log too.
    return "" if value is None else repr(value)


def read_log(path: Path) -> list[dict[str, float]]:
    """The rows of a ``log.csv``, without empty values. A last line that was cut short is left out."""
    rows = []
    # Damage is a row that cannot be read, like a line that was cut short.
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        for line in csv.DictReader(file):
            try:
                rows.append({key: float(value) for key, value in line.items() if value})
            except (TypeError, ValueError):
                break
    return [row for row in rows if "step" in row]


class TensorBoardLog:
    """Events for TensorBoard in ``folder``. Raises RuntimeMissingError where it is not installed."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RuntimeMissingError(
                "train.tensorboard needs the package tensorboard, which is not installed: pip install "
                "'intaglio[train]', or leave the key out"
            ) from error
        # Events after ``step`` are those of a run that was cut short.
        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def write(self, row: Row) -> None:
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(row["step"]))

    def close(self) -> None:
        self._writer.close()


def require_plots() -> None:
    """Raises RuntimeMissingError where :func:`plot_loss` cannot draw."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise RuntimeMissingError(
            "the plot of the loss needs the package matplotlib, which is not installed: pip install 'intaglio[train]', "
            "or set train.plot = false"
        ) from error


def plot_loss(rows: Sequence[Row], path: Path) -> None:
    """Draws the loss over the steps, and that of the evaluation, as a PNG. Raises RuntimeMissingError, OutputError."""
    require_plots()
    from matplotlib.figure import Figure

    # A figure of its own: pyplot would keep state and look for a display.
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, label, style in (("loss", "training", "-"), ("evaluation_loss", "evaluation", "o-")):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=3)
    losses = [row[name] for row in rows for name in ("loss", "evaluation_loss") if name in row]
    if losses and min(losses) > 0:
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    if losses:
        axes.legend()
    with replaced_file(path) as file:
        figure.savefig(file, format="png", dpi=100)
