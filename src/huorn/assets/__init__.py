"""Models that ship with the package."""

from pathlib import Path

EMBEDDED_MODEL = Path(__file__).parent / "seedling"
