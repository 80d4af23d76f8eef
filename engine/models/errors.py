"""The one error that loading a model can end with."""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be loaded or described. The text says what, why and what to do."""
