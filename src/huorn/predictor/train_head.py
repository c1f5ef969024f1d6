"""Training of one head: the same steps whether interrupted or not, since the order of rows follows from seed, layer, epoch."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from huorn.errors import UsageError
from huorn.files import write_bytes_atomically
from huorn.predictor.bank_files.reference_scorer import assemble, base_hidden
from huorn.predictor.calibration import fit_calibration
from huorn.predictor.dataset import HeadRows, load_rows
from huorn.predictor.head import Head, RouterFit, fit_router
from huorn.predictor.recall import recall_at
from huorn.predictor.run_folder import STATE, WEIGHTS, RunSpec, head_folder, read_tensors, write_tensors
from huorn.trace.recording import Traces

SAVE_SECONDS = 30.0
WARM_STEPS = 100
ADAM = (0.9, 0.98)
EPS = 1e-8
EVAL_ROWS = 4096  # scored at once
_SCALE_ROWS = 8192  # looked at for the size of inputs
_LEAST_SIZE = 1e-3  # of inputs; smaller ones are not brought to 1

Report = Callable[[int, int, int], None]  # layer, steps done, steps in all


@dataclass
class Progress:
    """Where a head stands: steps done; validation loss of the best epoch, and which; a line of the curve per epoch."""

    step: int = 0
    best: float = float("inf")
    best_epoch: int = -1
    train_loss: float = 0.0  # summed over the epoch so far
    curve: list[dict[str, float]] = field(default_factory=list)


class HeadTraining:
    """One head between its steps. Everything that a step changes is in `tensors` and `progress`."""

    def __init__(self, traces: Traces, spec: RunSpec, table: Tensor, layer: int) -> None:
        """Loads the rows, fits the router, and starts from the seed. Raises TraceError."""
        self.spec, self.table, self.layer = spec, table, layer
        beta, pool = spec.features.ema_beta, spec.settings.pool
        states = spec.base_model.hidden_size > 0
        self.train = load_rows(traces, layer, "train", beta, pool, states=states)
        self.validation = load_rows(traces, layer, "validation", beta, states=states)
        torch.manual_seed(spec.settings.seed * 1_000_003 + layer)
        router = self._router()
        self.router_error = router.error
        groups = len(spec.settings.horizons)
        self.head = Head(spec.features, self._scale(), spec.settings.trunk, groups, router)
        self._start_from_popularity()
        self.names = [name for name, _ in self.head.named_parameters()]
        self.first = {name: torch.zeros_like(value) for name, value in self.head.named_parameters()}
        self.second = {name: torch.zeros_like(value) for name, value in self.head.named_parameters()}
        self.best = {name: value.detach().clone() for name, value in self.head.named_parameters()}
        self.progress = Progress()
        self.steps_per_epoch = -(-len(self.train.usable) // spec.settings.batch)
        # What the forecast is off by in units of the hidden state's variance.
        self.hidden_variance = (
            float(self.train.hidden[:_SCALE_ROWS, -1].float().var()) if self._hidden else 1.0
        )

    @property
    def _hidden(self) -> int:
        return self.train.hidden.shape[2]

    @property
    def steps(self) -> int:
        """At most."""
        return self.steps_per_epoch * self.spec.settings.epochs

    @property
    def finished(self) -> bool:
        """All epochs are done, or the last ones were no better."""
        epoch = self.progress.step // self.steps_per_epoch
        waited = epoch - 1 - self.progress.best_epoch
        return self.progress.step >= self.steps or (epoch > 0 and waited >= self.spec.settings.patience)

    def _router(self) -> RouterFit:
        if not self._hidden:
            return RouterFit(torch.zeros(self.train.experts, 0), torch.zeros(self.train.experts), 0.0)
        return fit_router(self.train.hidden[:, -1], self.train.logits[:, -1])

    def _scale(self) -> Tensor:
        """f32 [F]: one over the root mean square of each block, layer by layer; 0 where that is 0, so that its weights are 0 in
        the bank: any others would take the int8 scale of their group from inputs that count."""
        rows = self.train.usable[torch.randperm(len(self.train.usable))[:_SCALE_ROWS]]
        x = self._inputs(self.train, rows)[0].float()
        widths = [
            self.spec.features.block_width(block, self.spec.base_model) for block in self.spec.features.blocks
        ]
        parts = []
        for part in x.split(widths, 1):
            each = self.train.experts if part.shape[1] % self.train.experts == 0 else part.shape[1]
            for piece in part.split(each, 1):  # a layer of a window
                size = float(piece.square().mean().sqrt())
                parts.append(torch.full((piece.shape[1],), 1.0 / max(size, _LEAST_SIZE) if size else 0.0))
        return torch.cat(parts)

    def _start_from_popularity(self) -> None:
        """With all else 0, every group says how often each expert is used within its horizon."""
        rows = self.train.usable[torch.randperm(len(self.train.usable))[:_SCALE_ROWS]]
        often = self.train.targets(rows, self.spec.settings.horizons).mean(0).clamp(1e-3, 1 - 1e-3)
        with torch.no_grad():
            self.head.b_out[: often.numel()] = torch.logit(often).flatten()

    def _inputs(self, rows: HeadRows, at: Tensor) -> tuple[Tensor, Tensor]:
        """x BF16 [R, F] and base BF16 [R, D]."""
        seen = rows.rows(at)
        x = assemble(self.spec.features, [self.layer], seen, self.table)[:, 0]
        return x, base_hidden([self.layer], seen)[:, 0].to(torch.bfloat16)

    def _loss(self, rows: HeadRows, at: Tensor) -> tuple[Tensor, Tensor]:
        """(cross entropy per expert summed over groups and experts, with the forecast's error; scores f32 [R, G, E])."""
        z, forecast = self.head(*self._inputs(rows, at))
        wanted = rows.targets(at, self.spec.settings.horizons)
        # 1 for what the next token uses, and 1 for all longer horizons together.
        each = F.binary_cross_entropy_with_logits(z, wanted, reduction="none").mean((0, 2)) * 10.0
        loss = each[0] + (each[1:].mean() if len(each) > 1 else 0.0)
        if self._hidden:
            error = (forecast - rows.hidden[at + 1, -1].float()).square().mean() / self.hidden_variance
            loss = loss + self.spec.settings.forecast_weight * error
        return loss, z

    def one_step(self) -> None:
        """The next batch; at the end of an epoch also validation."""
        settings, done = self.spec.settings, self.progress
        epoch, number = divmod(done.step, self.steps_per_epoch)
        at = self._order(epoch)[number * settings.batch : (number + 1) * settings.batch]
        loss, _ = self._loss(self.train, at)
        self.head.zero_grad()
        loss.backward()
        done.step += 1
        warm, left = min(1.0, done.step / WARM_STEPS), 1.0 - (done.step - 1) / self.steps
        self._adam(settings.learning_rate * warm * left)
        done.train_loss += loss.item()
        if number + 1 == self.steps_per_epoch:
            self._close_epoch(epoch)

    def _order(self, epoch: int) -> Tensor:
        if getattr(self, "_epoch", None) != epoch:
            generator = torch.Generator().manual_seed(
                (self.spec.settings.seed * 4099 + self.layer) * 1009 + epoch
            )
            rows = self.train.usable
            self._shuffled, self._epoch = rows[torch.randperm(len(rows), generator=generator)], epoch
        return self._shuffled

    def _adam(self, rate: float) -> None:
        """Adam (Kingma and Ba 2015), with its moments in tensors that a checkpoint can hold."""
        step = self.progress.step
        fast, slow = 1 - ADAM[0] ** step, 1 - ADAM[1] ** step
        with torch.no_grad():
            for name, value in self.head.named_parameters():
                assert value.grad is not None
                first, second = self.first[name], self.second[name]
                first.lerp_(value.grad, 1 - ADAM[0])
                second.mul_(ADAM[1]).addcmul_(value.grad, value.grad, value=1 - ADAM[1])
                value.addcdiv_(first, (second / slow).sqrt_().add_(EPS), value=-rate / fast)

    def _close_epoch(self, epoch: int) -> None:
        done = self.progress
        loss, recall = self.validate()
        if not loss < float("inf"):
            raise UsageError(
                f"layer {self.layer} diverged in epoch {epoch + 1}: train with a lower learning rate"
            )
        done.curve.append(
            {"epoch": epoch + 1, "step": done.step, "train_loss": done.train_loss / self.steps_per_epoch,
             "validation_loss": loss, "recall_8": recall[0], "recall_16": recall[2]}
        )  # fmt: skip
        done.train_loss = 0.0
        if loss < done.best:
            done.best, done.best_epoch = loss, epoch
            self.best = {name: value.detach().clone() for name, value in self.head.named_parameters()}

    def validate(self) -> tuple[float, list[float]]:
        """(loss, recall of the next token's experts) on all usable validation rows."""
        rows, total, scores = self.validation.usable, 0.0, []
        with torch.no_grad():
            for at in rows.split(EVAL_ROWS):
                loss, z = self._loss(self.validation, at)
                total += loss.item() * len(at)
                scores.append(z[:, 0])
        return total / len(rows), recall_at(torch.cat(scores), self.validation.routed_next(rows))

    def save(self, path: Path) -> None:
        """Everything that the next step needs."""
        named: dict[str, dict[str, Tensor]] = {
            "first": self.first,
            "second": self.second,
            "best": self.best,
            "now": dict(self.head.named_parameters()),
        }
        write_tensors(
            path,
            {
                f"{kind}.{name}": value.detach()
                for kind, group in named.items()
                for name, value in group.items()
            },
            {"progress": json.dumps(asdict(self.progress)), "run": self.spec.digest},
        )

    def load(self, path: Path) -> None:
        """UsageError when the file is damaged or of another run."""
        tensors, metadata = read_tensors(path)
        if metadata.get("run") != self.spec.digest:
            raise UsageError(f"{path} is of another run; delete it to train this head anew")
        with torch.no_grad():
            for name, value in self.head.named_parameters():
                value.copy_(tensors[f"now.{name}"])
        for kind, group in (("first", self.first), ("second", self.second), ("best", self.best)):
            for name in self.names:
                group[name] = tensors[f"{kind}.{name}"]
        self.progress = Progress(**json.loads(metadata["progress"]))

    def finish(self) -> dict[str, Tensor]:
        """The bank's tensors of this head, F32, of its best epoch, with calibration a and b f32 [G]."""
        with torch.no_grad():
            for name, value in self.head.named_parameters():
                value.copy_(self.best[name])
            rows = self.validation.usable
            z = torch.cat([self.head(*self._inputs(self.validation, at))[0] for at in rows.split(EVAL_ROWS)])
        wanted = self.validation.targets(rows, self.spec.settings.horizons)
        fitted = [fit_calibration(z[:, group], wanted[:, group]) for group in range(z.shape[1])]
        a, b = (torch.tensor(values, dtype=torch.float32) for values in zip(*fitted, strict=True))
        return {**self.head.folded(), "a": a, "b": b}


def train_head(traces: Traces, spec: RunSpec, table: Tensor, run: Path, layer: int, report: Report) -> None:
    """Trains one head to its end, from where it was interrupted. Raises TraceError, UsageError."""
    folder = head_folder(run, layer)
    state = folder / STATE
    if (folder / WEIGHTS).exists():
        return
    training = HeadTraining(traces, spec, table, layer)
    if state.exists():
        training.load(state)
    saved = time.monotonic()
    while not training.finished:
        training.one_step()
        report(layer, training.progress.step, training.steps)
        if time.monotonic() - saved > SAVE_SECONDS:
            training.save(state)
            saved = time.monotonic()
    curve = training.progress.curve
    out = io.StringIO()
    writer = csv.DictWriter(out, list(curve[0]))
    writer.writeheader()
    writer.writerows(curve)
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(folder / "curve.csv", out.getvalue().encode())
    metadata = {
        "run": spec.digest,
        "layer": str(layer),
        "router_error": repr(training.router_error),
        "epochs": str(len(curve)),
    }
    write_tensors(folder / WEIGHTS, training.finish(), metadata)
    state.unlink(missing_ok=True)
