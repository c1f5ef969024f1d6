"""The compiled module (native/module.cpp): kernels on raw addresses."""

from collections.abc import Sequence

def isas() -> list[str]: ...
def has_nan_code(codes: int, count: int) -> bool: ...

class Matrix:
    def __init__(self, data: int, scale: int, rows: int, cols: int, format: int) -> None: ...

class CodedRows:
    def __init__(
        self, *, codes: int, scale: int, spread: int, rows: int, cols: int, largest_x: float
    ) -> None: ...

class GroupedCodes:
    def __init__(self, *, codes: int, scale: int, bias: int, rows: int, cols: int) -> None: ...

class PredictorBank:
    def __init__(
        self,
        *,
        w_in: GroupedCodes,
        w_out: GroupedCodes,
        w_router: GroupedCodes,
        a: int,
        b: int,
        hidden: int,
        experts: int,
        groups: int,
    ) -> None: ...

class HeadFeatures:
    def __init__(
        self,
        *,
        heads: int,
        blocks: int,
        no_logits: int,
        head_count: int,
        block_count: int,
        hidden: int,
        experts: int,
        top_k: int,
        table_width: int,
        inputs: int,
    ) -> None: ...

def candidates(lower: int, upper: int, rows: int, k: int, ids: int, room: int) -> int: ...

class DeltaNet:
    def __init__(
        self,
        *,
        qkv: Matrix,
        z: Matrix,
        b: Matrix,
        a: Matrix,
        out: Matrix,
        norm_scale: int,
        taps: int,
        negative_rate: int,
        dt_bias: int,
        gated_scale: int,
        eps: float,
        hidden: int,
        key_heads: int,
        value_heads: int,
        dk: int,
        dv: int,
        kernel: int,
    ) -> None: ...

class Attention:
    def __init__(
        self,
        *,
        q: Matrix,
        k: Matrix,
        v: Matrix,
        o: Matrix,
        norm_scale: int,
        q_scale: int,
        k_scale: int,
        eps: float,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary_dim: int,
    ) -> None: ...

class Router:
    def __init__(
        self,
        *,
        router: Matrix,
        shared_gate: Matrix,
        norm_scale: int,
        eps: float,
        hidden: int,
        experts: int,
        top_k: int,
    ) -> None: ...

class ExpertLayer:
    def __init__(
        self,
        *,
        experts: int,
        format: int,
        hidden: int,
        inter: int,
        shared_gate: Matrix,
        shared_up: Matrix,
        shared_down: Matrix,
    ) -> None: ...

class Layers:
    def __init__(self) -> None: ...
    def add(self, mixer: DeltaNet | Attention, router: Router, experts: ExpertLayer) -> None: ...

class Runtime:
    def __init__(self, threads: int, isa: str) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def counters(self) -> tuple[int, int]: ...
    def seconds(self) -> float: ...
    def linear(
        self, matrix: Matrix, norm_scale: int, eps: float, x: int, tokens: int, columns: int, y: int
    ) -> None: ...
    def embed(self, table: int, format: int, hidden: int, ids: int, tokens: int, x: int) -> None: ...
    def code_rows(self, weight: int, rows: int, cols: int, codes: int, scale: int, spread: int) -> bool: ...
    def bound_rows(
        self, rows: CodedRows, norm_scale: int, eps: float, x: int, tokens: int, lower: int, upper: int
    ) -> None: ...
    def score_heads(
        self,
        bank: PredictorBank,
        first: int,
        heads: int,
        x: int,
        features: int,
        base: int,
        work: int,
        scores: int,
        probabilities: int,
    ) -> None: ...
    def head_features(
        self,
        what: HeadFeatures,
        hidden: int,
        logits: int,
        routed: int,
        previous: int,
        prior: int,
        token: int,
        next_token: int,
        position: float,
        x: int,
        base: int,
    ) -> None: ...
    def read_memory(self, data: int, bytes: int) -> float: ...
    def multiply(self, rounds: int) -> float: ...

class Step:
    def __init__(
        self,
        *,
        runtime: Runtime,
        x: int,
        lengths: Sequence[int],
        columns: int,
        logits: int = ...,
        normed: int = ...,
        ids: int = ...,
        weights: int = ...,
        gate: int = ...,
        pair_out: int = ...,
        shared_out: int = ...,
        routed: int = ...,
        kept_normed: int = ...,
        kept_logits: int = ...,
    ) -> None: ...
    def linear_states(
        self,
        conv_in: Sequence[int],
        conv_out: Sequence[int],
        memory_in: Sequence[int],
        memory_out: Sequence[int],
    ) -> None: ...
    def caches(
        self, keys: Sequence[int], values: Sequence[int], positions: Sequence[int], cosine: int, sine: int
    ) -> None: ...
    def delta_net(self, layer: DeltaNet, router: Router | None, number: int) -> None: ...
    def attention(self, layer: Attention, router: Router | None, number: int) -> None: ...
    def look_ahead(self, ids: int) -> None: ...
    def run(self, layers: Layers, first: int) -> int: ...
    def run_ready(self, layers: Layers, number: int) -> int: ...
    def run_plan(
        self,
        layer: ExpertLayer,
        pairs: int,
        pair_count: int,
        chunks: int,
        chunk_count: int,
        top_k: int,
        with_shared: bool,
    ) -> None: ...
    def combine(self, top_k: int, hidden: int) -> None: ...

class Reader:
    def __init__(
        self,
        lanes: int,
        stripe_bytes: int,
        direct: bool,
        uring: bool,
        ahead_lanes: int = ...,
        link_bytes_s: float = ...,
    ) -> None: ...
    def add_file(self, path: str) -> int: ...
    def direct(self, file: int) -> bool: ...
    @property
    def engine(self) -> str: ...
    def submit(self, key: int, segments: Sequence[tuple[int, int, int, int]], demand: bool) -> None: ...
    def promote(self, key: int) -> bool: ...
    def cancel(self, key: int) -> bool: ...
    def wait(self, timeout_s: float) -> list[tuple[int, int, int, int]]: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def busy_s(self) -> float: ...
    @property
    def in_flight(self) -> int: ...
