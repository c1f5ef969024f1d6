"""Calls every kernel of one variant with small odd shapes, and the reader: what `make sanitize` runs under AddressSanitizer and
UBSan.

Not a test module: results are only looked at for being finite. `python tests/kernels/exercise.py FOLDER ISA ...`, FOLDER being
where the sanitized _native module lies.
"""

from __future__ import annotations

import errno
import importlib
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor

from huorn.schedule.plan import Plan

F8, BF16, F32 = 0, 1, 2
TOKENS = (1, 3, 5, 16, 17, 40, 70)


class Exercise:
    """One variant; `alive` keeps what kernels point to."""

    def __init__(self, native: Any, isa: str) -> None:
        self.native = native
        self.runtime = native.Runtime(2, isa)
        self.alive: list[Tensor] = []

    def keep(self, tensor: Tensor) -> int:
        self.alive.append(tensor)
        return tensor.data_ptr()

    def vector(self, *shape: int) -> int:
        return self.keep(torch.randn(*shape))

    def weight(self, rows: int, cols: int, kind: int) -> tuple[int, int]:
        """Addresses of a weight and its scales, in blocks of exactly their size."""
        if kind == F8:
            codes = torch.randint(0, 256, (rows, cols), dtype=torch.uint8)
            codes[(codes & 0x7F) == 0x7F] = 3
            return self.keep(codes), self.keep(torch.rand(-(-rows // 128), -(-cols // 128)) + 0.5)
        return self.keep(torch.randn(rows, cols).to(torch.bfloat16 if kind == BF16 else torch.float32)), 0

    def matrix(self, rows: int, cols: int, kind: int) -> Any:
        return self.native.Matrix(*self.weight(rows, cols, kind), rows, cols, kind)

    def step(self, x: Tensor, lengths: list[int]) -> Any:
        return self.native.Step(
            runtime=self.runtime, x=x.data_ptr(), lengths=lengths, columns=min(sum(lengths), 16)
        )

    def mixer(self, hidden: int) -> Any:
        """The smallest attention layer: the router runs behind a mixer."""
        return self.native.Attention(
            q=self.matrix(32, hidden, BF16), k=self.matrix(16, hidden, BF16), v=self.matrix(16, hidden, BF16),
            o=self.matrix(hidden, 16, BF16), norm_scale=self.vector(hidden), q_scale=self.vector(16),
            k_scale=self.vector(16), eps=1e-6, hidden=hidden, heads=1, kv_heads=1, head_dim=16, rotary_dim=16,
        )  # fmt: skip

    def linear(self, kind: int) -> None:
        for rows, cols in ((1, 1), (33, 1), (97, 200), (64, 130), (130, 257), (256, 512)):
            for tokens in TOKENS:
                x, y = torch.randn(tokens, cols), torch.full((tokens, rows), torch.nan)
                norm, columns = torch.ones(cols), min(tokens, 33)
                self.runtime.linear(
                    self.matrix(rows, cols, kind),
                    norm.data_ptr(),
                    1e-6,
                    x.data_ptr(),
                    tokens,
                    columns,
                    y.data_ptr(),
                )
                assert torch.isfinite(y).all()

    def head_features(self) -> None:
        """Every block of inputs, of heads whose neighbours below do not all exist, in buffers of exactly their size."""
        for layers, heads, hidden, experts, top_k, width in (
            (1, [0], 1, 1, 1, 0),
            (7, [0, 3, 6], 33, 12, 3, 5),
        ):
            inputs = 2 * hidden + 13 * experts + 1 + 2 * width
            arrays = [torch.tensor(one, dtype=torch.int32) for one in (heads, list(range(9)), [0] * layers)]
            what = self.native.HeadFeatures(
                heads=arrays[0].data_ptr(), blocks=arrays[1].data_ptr(), no_logits=arrays[2].data_ptr(), head_count=len(heads),
                block_count=9, hidden=hidden, experts=experts, top_k=top_k, table_width=width, inputs=inputs,
            )  # fmt: skip
            state, logits, prior = (
                torch.randn(layers, hidden),
                torch.randn(layers, experts),
                torch.rand(len(heads), experts),
            )
            ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(layers)]).int()
            row = torch.randn(width).bfloat16()
            x, base = torch.empty(len(heads), inputs).bfloat16(), torch.empty(len(heads), hidden).bfloat16()
            for previous in (0, ids.data_ptr()):
                self.runtime.head_features(
                    what, state.data_ptr(), logits.data_ptr(), ids.data_ptr(), previous, prior.data_ptr(), row.data_ptr(),
                    row.data_ptr(), 0.5, x.data_ptr(), base.data_ptr(),
                )  # fmt: skip
                assert torch.equal(base, state[heads].half().bfloat16())

    def score_heads(self) -> None:
        """Banks whose features, hidden size, experts and rows end anywhere."""
        for heads, features, width, hidden, experts, groups in (
            (1, 1, 128, 1, 1, 1),
            (3, 301, 128, 200, 24, 3),
            (2, 640, 256, 130, 65, 2),
        ):
            padded, hidden_padded = -(-features // 128) * 128, -(-hidden // 128) * 128
            parts = []
            for rows, cols in ((width, padded), (groups * experts + hidden, width), (experts, hidden_padded)):
                codes = torch.randint(-127, 128, (heads, rows, cols), dtype=torch.int8)
                scale, bias = torch.rand(heads, rows, cols // 128) / cols, torch.randn(heads, rows)
                places = [self.keep(tensor) for tensor in (codes, scale, bias)]
                parts.append(
                    self.native.GroupedCodes(
                        codes=places[0], scale=places[1], bias=places[2], rows=rows, cols=cols
                    )
                )
            bank = self.native.PredictorBank(
                w_in=parts[0], w_out=parts[1], w_router=parts[2], a=self.vector(heads, groups), b=self.vector(heads, groups),
                hidden=hidden, experts=experts, groups=groups,
            )  # fmt: skip
            x, base = torch.randn(heads, features).bfloat16(), torch.randn(heads, hidden).bfloat16()
            for first, count in ((0, heads), (heads - 1, 1)):
                scores, p = torch.full((2, count, groups, experts), torch.nan)
                xs, bases = x[first:].clone(), base[first:].clone()
                work = torch.empty(count * (width + groups * experts + hidden_padded))
                self.runtime.score_heads(
                    bank, first, count, xs.data_ptr(), features, bases.data_ptr(),
                    work.data_ptr(), scores.data_ptr(), p.data_ptr(),
                )  # fmt: skip
                assert torch.isfinite(scores).all()
                assert torch.isfinite(p).all()

    def coded_rows(self) -> None:
        for rows, cols in ((1, 1), (33, 1), (97, 200), (64, 130), (130, 257), (256, 512)):
            weight = torch.randn(rows, cols).bfloat16()
            codes = torch.empty(rows, cols, dtype=torch.int8)
            scale, spread = torch.empty(rows), torch.empty(rows)
            places = [part.data_ptr() for part in (codes, scale, spread)]
            assert self.runtime.code_rows(weight.data_ptr(), rows, cols, *places)
            coded = self.native.CodedRows(
                codes=places[0], scale=places[1], spread=places[2], rows=rows, cols=cols, largest_x=1e30
            )
            for tokens in TOKENS:
                x, norm = torch.randn(tokens, cols), torch.ones(cols)
                bounds = torch.full((2, tokens, rows), torch.nan)
                self.runtime.bound_rows(
                    coded,
                    norm.data_ptr(),
                    1e-6,
                    x.data_ptr(),
                    tokens,
                    bounds[0].data_ptr(),
                    bounds[1].data_ptr(),
                )
                assert torch.isfinite(bounds).all()
                ids = torch.empty(5, dtype=torch.int64)
                for k in (1, min(3, rows), rows):
                    found = self.native.candidates(
                        bounds[0].data_ptr(), bounds[1].data_ptr(), rows, k, ids.data_ptr(), len(ids)
                    )
                    assert k <= found <= rows

    def delta_net(self, kind: int) -> None:
        dense = max(kind, BF16)
        for hidden, key_heads, heads, dk, dv, kernel in (
            (72, 2, 4, 24, 20, 4),
            (33, 1, 3, 7, 33, 3),
            (64, 2, 2, 16, 48, 2),
        ):
            channels = 2 * key_heads * dk + heads * dv
            layer = self.native.DeltaNet(
                qkv=self.matrix(channels, hidden, kind), z=self.matrix(heads * dv, hidden, kind),
                b=self.matrix(heads, hidden, dense), a=self.matrix(heads, hidden, dense),
                out=self.matrix(hidden, heads * dv, kind), norm_scale=self.vector(hidden),
                taps=self.vector(kernel, channels), negative_rate=self.keep(-torch.rand(heads)),
                dt_bias=self.vector(heads), gated_scale=self.vector(dv), eps=1e-6, hidden=hidden, key_heads=key_heads,
                value_heads=heads, dk=dk, dv=dv, kernel=kernel,
            )  # fmt: skip
            for lengths in ([1], [40], [1, 2, 33]):
                tokens, count = sum(lengths), len(lengths)
                x = torch.randn(tokens, hidden)
                conv, memory = (
                    torch.randn(2, count, kernel - 1, channels),
                    torch.randn(2, count, heads, dk, dv),
                )
                states = [[t.data_ptr() for t in half] for pair in (conv, memory) for half in pair]
                step = self.step(x, lengths)
                step.linear_states(*states)
                step.delta_net(layer, None, 0)
                assert torch.isfinite(x).all()

    def attention(self, kind: int) -> None:
        for hidden, heads, kv_heads, dim, turned in (
            (72, 4, 2, 20, 10),
            (33, 3, 1, 33, 16),
            (64, 10, 2, 16, 16),
        ):
            layer = self.native.Attention(
                q=self.matrix(2 * heads * dim, hidden, kind), k=self.matrix(kv_heads * dim, hidden, kind),
                v=self.matrix(kv_heads * dim, hidden, kind), o=self.matrix(hidden, heads * dim, kind),
                norm_scale=self.vector(hidden), q_scale=self.vector(dim), k_scale=self.vector(dim), eps=1e-6,
                hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=dim, rotary_dim=turned,
            )  # fmt: skip
            for lengths, positions in (([1], [0]), ([1], [70]), ([67], [0]), ([1, 2, 30], [5, 0, 64])):
                tokens, dtype = sum(lengths), torch.float32 if kind == F32 else torch.bfloat16
                x, turn = torch.randn(tokens, hidden), torch.randn(tokens, turned // 2)
                keys = [
                    torch.randn(p + n, kv_heads, dim).to(dtype)
                    for p, n in zip(positions, lengths, strict=True)
                ]
                values = [key.clone() for key in keys]
                step = self.step(x, lengths)
                step.caches(
                    [t.data_ptr() for t in keys],
                    [t.data_ptr() for t in values],
                    positions,
                    turn.data_ptr(),
                    turn.data_ptr(),
                )
                step.attention(layer, None, 0)
                assert torch.isfinite(x).all()

    def moe(self, kind: int) -> None:
        for hidden, experts, top_k, inter, shared in (
            (72, 6, 2, 33, 20),
            (64, 8, 8, 16, 128),
            (130, 3, 1, 1, 5),
        ):
            dense = max(kind, BF16)
            router = self.native.Router(
                router=self.matrix(experts, hidden, dense), shared_gate=self.matrix(1, hidden, dense),
                norm_scale=self.vector(hidden), eps=1e-6, hidden=hidden, experts=experts, top_k=top_k,
            )  # fmt: skip
            rows = []
            for _ in range(experts):
                weights = [
                    self.weight(*shape, kind) for shape in ((inter, hidden), (inter, hidden), (hidden, inter))
                ]
                rows.append([data for data, _ in weights] + [scale for _, scale in weights])
            table = torch.tensor(rows)
            layer = self.native.ExpertLayer(
                experts=self.keep(table), format=kind, hidden=hidden, inter=inter,
                shared_gate=self.matrix(shared, hidden, kind), shared_up=self.matrix(shared, hidden, kind),
                shared_down=self.matrix(hidden, shared, kind),
            )  # fmt: skip
            for tokens in TOKENS:
                self._route_and_run(router, layer, table, hidden, experts, top_k, tokens)

    def _route_and_run(
        self, router: Any, layer: Any, table: Tensor, hidden: int, experts: int, top_k: int, tokens: int
    ) -> None:
        x, normed, logits = (
            torch.randn(tokens, hidden),
            torch.empty(tokens, hidden),
            torch.empty(tokens, experts),
        )
        ids, weights, gate = (
            torch.empty(tokens, top_k, dtype=torch.int32),
            torch.empty(tokens, top_k),
            torch.empty(tokens),
        )
        pair_out, shared_out = torch.empty(tokens * top_k, hidden), torch.empty(tokens, hidden)
        routed, said = torch.empty(2, 2, tokens, top_k, dtype=torch.int32)
        kept_normed, kept_logits = torch.empty(2, tokens, hidden), torch.empty(2, tokens, experts)
        step = self.native.Step(
            runtime=self.runtime, x=x.data_ptr(), lengths=[tokens], columns=min(tokens, 16), logits=logits.data_ptr(),
            normed=normed.data_ptr(), ids=ids.data_ptr(), weights=weights.data_ptr(), gate=gate.data_ptr(),
            pair_out=pair_out.data_ptr(), shared_out=shared_out.data_ptr(), routed=routed.data_ptr(),
            kept_normed=kept_normed.data_ptr(), kept_logits=kept_logits.data_ptr(),
        )  # fmt: skip
        mixer = self.mixer(hidden)
        caches = torch.randn(2, tokens, 1, 16).bfloat16()
        turn = torch.zeros(tokens, 8)
        step.caches(
            [caches[0].data_ptr()] * 2, [caches[1].data_ptr()] * 2, [0, 0], turn.data_ptr(), turn.data_ptr()
        )
        step.attention(mixer, router, 0)
        layers = self.native.Layers()
        layers.add(mixer, router, layer)
        layers.add(mixer, router, layer)
        step.look_ahead(said.data_ptr())
        before = x.clone()
        assert step.run(layers, 0) == 2
        late, after = int(routed[0, 0, 0]), x.clone()
        row, table[late] = table[late].clone(), 0
        x[:] = before
        assert step.run(layers, 0) == 0
        assert step.run_ready(layers, 0) > 0
        table[late] = row
        assert step.run_ready(layers, 0) == 0
        assert step.run(layers, 1) == 2
        assert torch.equal(x, after)
        assert torch.equal(routed[1], ids)
        assert int(said[0].max()) < experts
        for plan in (Plan.per_pair(ids.numpy()), Plan.bucketed(ids.numpy(), 17)):
            step.run_plan(
                layer,
                *plan.addresses,
                top_k,
                True,
            )
            step.combine(top_k, hidden)
            assert torch.isfinite(x).all()


def read_files(native: Any) -> None:
    """Copies of all kinds on both engines: whole, cancelled, promoted, failing, and left behind by a reader that ends."""
    block, count = 4096, 60
    contents = torch.randint(0, 256, (100_003,), dtype=torch.uint8).numpy().tobytes()
    with tempfile.NamedTemporaryFile() as file:
        file.write(contents)
        file.flush()
        for direct, uring in ((True, True), (False, True), (True, False), (False, False)):
            reader = native.Reader(3, block, direct, uring)
            number = reader.add_file(file.name)
            room = torch.zeros(count * 6 * block + block, dtype=torch.uint8)
            start = -(-room.data_ptr() // block) * block
            placed = {}
            for key in range(count):
                offset = key * 1_717 % 90_000
                placed[key] = offset, start + key * 6 * block + offset % block
                reader.submit(key, [(number, offset, 20_000, placed[key][1])], key % 4 == 0)
            for key in range(30, count):
                assert (reader.promote if key % 2 else reader.cancel)(key) in (True, False)
            while reader.in_flight:
                for key, error, _, where in reader.wait(10.0):
                    offset, address = placed[key]
                    if error == 0:
                        landed = room[address - room.data_ptr() :][: len(contents[offset : offset + 20_000])]
                        assert landed.numpy().tobytes() == contents[offset : offset + 20_000]
                    assert error in (0, errno.ECANCELED) or (error == -1 and where == len(contents))
            for key, (offset, address) in placed.items():
                reader.submit(key, [(number, offset, 20_000, address)], False)
            del reader


def main(folder: str, isas: list[str]) -> None:
    """Everything for each ISA that this machine has."""
    sys.path.insert(0, folder)
    native = importlib.import_module("_native")
    torch.manual_seed(0)
    read_files(native)
    print("reader: every kind of copy ran")
    for isa in isas or native.isas():
        exercise = Exercise(native, isa)
        exercise.coded_rows()
        exercise.score_heads()
        exercise.head_features()
        for kind in (F8, BF16, F32):
            exercise.linear(kind)
            exercise.delta_net(kind)
            exercise.attention(kind)
            exercise.moe(kind)
        print(f"{isa}: every kernel ran")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
