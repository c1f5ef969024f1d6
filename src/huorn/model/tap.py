"""Somebody who looks on while layers route, such as a recorder."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class LayerTap(Protocol):
    """Told what every layer of a forward on the native kernels routes. It changes nothing: the bits are the same without it."""

    def layer(
        self,
        number: int,
        hidden: NDArray[np.float32],
        logits: NDArray[np.float32],
        ids: NDArray[np.int32],
        weights: NDArray[np.float32],
    ) -> None:
        """Layer `number` has routed the T tokens of a call, and its experts run next.

        hidden [T, D] is what the router read, after the norm and before it is rounded to an operand; logits [T, E] are the
        router's; ids and weights [T, K] are the routed experts by rank. Views that are valid until it returns. What it raises
        ends the forward, which leaves the states as they were.
        """
        ...
