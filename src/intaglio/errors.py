"""Every error that a user can meet. Each message says what was found, what was expected and what to do."""

from __future__ import annotations


class IntaglioError(Exception):
    """Base of all errors raised on purpose. The command line prints the message and exits with code 2."""


class CheckpointError(IntaglioError):
    """A checkpoint file is damaged, incomplete, or in a format that is not read."""


class ConfigError(IntaglioError):
    """A model configuration lacks a needed key or asks for something that is not built."""


class WeightsError(IntaglioError):
    """The tensors of a checkpoint do not match what its architecture declares."""


class DataError(IntaglioError):
    """Training data is damaged, empty, or not what its settings say."""


class OutputError(IntaglioError):
    """A result could not be written: a full disk, a folder that may not be replaced, missing permissions."""


class BundleError(IntaglioError):
    """A bundle folder is missing, damaged, or of another schema version."""


class CompileError(IntaglioError):
    """A stage could not be compiled for a target."""


class EngineError(IntaglioError):
    """An engine is missing, does not match its bundle or this machine, or failed while running."""


class InputError(IntaglioError):
    """An argument is out of range: a prompt too long, a sampling parameter that means nothing, an unknown name."""


class TrainingError(IntaglioError):
    """A run of training cannot go on: a loss that is no number, nothing to learn from, ranks that do not fit."""


class RuntimeMissingError(IntaglioError):
    """A package that is not always needed, such as onnxruntime, is not installed."""


class CancelledError(IntaglioError):
    """A progress callback asked to stop."""
