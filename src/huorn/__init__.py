"""huorn runs Qwen3.5 / Qwen3.6 mixture-of-experts models whose experts do not fit in fast memory."""

__version__ = "0.1.0"
