"""How fast experts come from disk into RAM: each engine of the reader, several depths and stripe sizes.

Reads random pieces of 3 MiB at odd offsets, as experts lie in shards, past the page cache (O_DIRECT).

    python benchmarks/direct_read.py --model DIR
    python benchmarks/direct_read.py --model DIR --lanes 2 4 8 --stripe-kib 256 1024 --engine io_uring

Columns: many copies at once in GB/s; CPU seconds per GB of them (kernel and user, all threads); median time of one copy alone, as
of a miss that a layer waits for; the same while prefetches keep the disk busy. The settings take turns, round by round, since the
disk's speed drifts. Each reads 0.4 GB.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from huorn._native import Reader
from huorn.experts.reader import LANES, STRIPE_BYTES
from huorn.kernels.huge_pages import HugePages

EXPERT = 3 << 20
BLOCK = 4096
ROOM = EXPERT + 2 * BLOCK
# Copies per round and setting: 32 together, 6 one after the other, 4 of them behind 16 prefetches.
ROUNDS, MANY, ALONE, BEHIND, PREFETCHES = 2, 32, 6, 4, 16


@dataclass
class Setting:
    """One engine, depth and stripe size, and what was measured of it."""

    reader: Reader
    name: str
    bytes_s: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    behind_s: list[float] = field(default_factory=list)


class Source:
    """Random pieces of the shards of a folder, and memory for them."""

    def __init__(self, model: Path, seed: int) -> None:
        self.paths = sorted(path for path in model.glob("*.safetensors") if path.stat().st_size > 64 * EXPERT)
        if not self.paths:
            raise SystemExit(f"{model} holds no *.safetensors of at least 192 MiB")
        self.random = random.Random(seed)
        self.memory = HugePages(MANY * ROOM).take(MANY * ROOM)
        self.memory.fill_(0)

    def setting(self, engine: str, lanes: int, stripe_kib: int) -> Setting:
        reader = Reader(lanes, stripe_kib << 10, True, engine == "io_uring")
        for path in self.paths:
            if not reader.direct(reader.add_file(str(path))):
                raise SystemExit(f"{path} can not be read with O_DIRECT")
        return Setting(reader, f"{reader.engine:8} lanes {lanes:3}  stripe {stripe_kib:5} KiB")

    def submit(self, reader: Reader, key: int, demand: bool = True) -> None:
        """One copy from anywhere into place `key`."""
        file = self.random.randrange(len(self.paths))
        offset = self.random.randrange(self.paths[file].stat().st_size - EXPERT)
        address = self.memory.data_ptr() + key * ROOM
        address += (offset - address) % BLOCK
        reader.submit(key, [(file, offset, EXPERT, address)], demand)

    def measure(self, setting: Setting) -> None:
        """One round: many copies together, then some alone."""
        start, cpu, before = time.perf_counter(), time.process_time(), setting.reader.bytes_read
        for key in range(MANY):
            self.submit(setting.reader, key)
        drain(setting.reader)
        nbytes = setting.reader.bytes_read - before
        setting.bytes_s.append(nbytes / (time.perf_counter() - start))
        setting.cpu_s_per_gb.append((time.process_time() - cpu) / nbytes * 1e9)
        for key in range(ALONE):
            setting.alone_s.append(self.miss(setting.reader, key))
        for key in range(PREFETCHES):
            self.submit(setting.reader, key, demand=False)
        for key in range(PREFETCHES, PREFETCHES + BEHIND):
            time.sleep(0.003)
            setting.behind_s.append(self.miss(setting.reader, key))
        drain(setting.reader)

    def miss(self, reader: Reader, key: int) -> float:
        """Seconds until one demand copy has landed."""
        start = time.perf_counter()
        self.submit(reader, key)
        drain(reader, key)
        return time.perf_counter() - start


def drain(reader: Reader, until: int | None = None) -> None:
    """Waits for all copies, or for one."""
    while reader.in_flight:
        completions = reader.wait(1.0)
        for key, error, _, offset in completions:
            if error:
                raise SystemExit(f"copy {key} failed with error {error} at offset {offset}")
        if any(key == until for key, *_ in completions):
            return


def main() -> None:
    """Measures and prints one line per setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder with *.safetensors")
    parser.add_argument("--lanes", type=int, nargs="+", default=[LANES])
    parser.add_argument("--stripe-kib", type=int, nargs="+", default=[STRIPE_BYTES >> 10])
    parser.add_argument(
        "--engine", nargs="+", choices=("io_uring", "threads"), default=["io_uring", "threads"]
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    source = Source(arguments.model, arguments.seed)
    settings = [
        source.setting(engine, lanes, stripe)
        for engine in arguments.engine
        for lanes in arguments.lanes
        for stripe in arguments.stripe_kib
    ]
    for _ in range(ROUNDS):
        for setting in settings:
            source.measure(setting)
    for one in settings:
        print(
            f"{one.name}  {median(one.bytes_s) / 1e9:5.2f} GB/s  {median(one.cpu_s_per_gb):6.3f} CPU s/GB  "
            f"alone {1e3 * median(one.alone_s):5.2f} ms  behind prefetches {1e3 * median(one.behind_s):5.2f} ms"
        )


if __name__ == "__main__":
    main()
