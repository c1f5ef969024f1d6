"""Cache policies written the slow way: everything is computed anew from the history, and every resident is looked at."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass
class SlowPolicy:
    """`half_life` 1 or None, without end; other half-lives have no exact powers."""

    name: str
    layers: int
    experts: int
    slots: int
    half_life: int | None = 1
    history: list[tuple[int, list[list[int]]]] = field(default_factory=list)
    residents: set[int] = field(default_factory=set)

    def worth(self, key: int) -> Fraction:
        layer, expert = divmod(key, self.experts)
        if self.name.endswith("lru"):
            pairs = [(there, e) for there, tokens in self.history for token in tokens for e in token]
            uses = [number for number, pair in enumerate(pairs, 1) if pair == (layer, expert)]
            return Fraction(max(uses, default=0))
        tokens = [token for there, tokens in self.history if there == layer for token in tokens]
        ages = [len(tokens) - number for number, token in enumerate(tokens, 1) if expert in token]
        return Fraction(sum(Fraction(1, 2**age) if self.half_life else Fraction(1) for age in ages))

    def least(self, keys: set[int]) -> int | None:
        return min(keys, key=lambda key: (self.worth(key), key), default=None)

    def victim(self, layer: int, protected: Container[int]) -> int | None:
        free = {key for key in self.residents if key not in protected}
        if not self.name.startswith("layer-"):
            return self.least(free)
        of_layer = {
            there: {key for key in free if key // self.experts == there} for there in range(self.layers)
        }
        over = {
            there: sum(key // self.experts == there for key in self.residents)
            - len(range(there, self.slots, self.layers))
            for there in range(self.layers)
        }
        if over[layer] >= 0 and of_layer[layer]:
            return self.least(of_layer[layer])
        givers = [there for there in range(self.layers) if of_layer[there]]
        return self.least(of_layer[max(givers, key=lambda there: (over[there], -there))]) if givers else None
