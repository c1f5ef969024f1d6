"""The model that ships with the package, and its expert predictor."""

from pathlib import Path

EMBEDDED_MODEL = Path(__file__).parent / "seedling"
EMBEDDED_BANK = Path(__file__).parent / "seedling_bank"  # its expert predictor
