"""From routing to a plan, and the column counts that kernels work best with."""
