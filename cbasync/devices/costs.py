"""How long things take on a machine: cost models for the virtual clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from cbasync.timeline import Timeline
from cbasync.trace import PHASES, Work

HOST_PHASES = ("schedule", "prepare", "update")
WAITS = ("launch_us", "return_us", "wake_us")  # the host's, in no phase


@dataclass(frozen=True)
class PhaseCost:
    """What a phase costs: a fixed part, and parts that grow with the work.

    >>> PhaseCost(fixed_us=2.0, per_request_us=0.5).us(Work(num_requests=32))
    18.0
    """

    fixed_us: float = 0.0
    per_request_us: float = 0.0
    per_token_us: float = 0.0
    per_context_us: float = 0.0  # per token in the cache
    per_byte_us: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not 0 <= value < float("inf"):
                raise ValueError(
                    f"{item.name} is {value!r}, a cost is finite and not negative: "
                    "give microseconds"
                )

    def us(self, work: Work) -> float:
        """Length of the phase for this much work."""
        return (
            self.fixed_us
            + self.per_request_us * work.num_requests
            + self.per_token_us * work.num_tokens
            + self.per_context_us * work.num_context
            + self.per_byte_us * work.num_bytes
        )


@dataclass(frozen=True)
class CostModel:
    """The machine being modelled: a cost a phase, one a launch, one a wait of the host.

    >>> ARTICLE.duration_us("compute", Work(num_requests=32))
    27890.0
    """

    name: str
    schedule: PhaseCost = PhaseCost()
    prepare: PhaseCost = PhaseCost()
    h2d: PhaseCost = PhaseCost()
    compute: PhaseCost = PhaseCost()
    d2h: PhaseCost = PhaseCost()
    update: PhaseCost = PhaseCost()
    launch_us: float = 0.0  # host time to put one op in a queue
    return_us: float = 0.0  # until a launch of `compute` returns, which may run by then
    wake_us: float = 0.0  # until a host that slept for an event goes on
    note: str = ""  # where the numbers are from

    def duration_us(self, phase: str, work: Work) -> float:
        """How long a phase takes for this much work."""
        cost: PhaseCost = getattr(self, phase)
        return cost.us(work)

    def with_host_us(self, host_us: float) -> CostModel:
        """The same machine with another host time per step, split as before.

        >>> ARTICLE.with_host_us(1000.0).host_us(Work())
        1000.0
        """
        before = self.host_us(Work())
        share = {
            phase: (getattr(self, phase).fixed_us / before if before else 1 / 3)
            for phase in HOST_PHASES
        }
        schedule, prepare, update = (
            PhaseCost(fixed_us=host_us * share[phase]) for phase in HOST_PHASES
        )
        return replace(
            self,
            schedule=schedule,
            prepare=prepare,
            update=update,
            launch_us=0.0,
            return_us=0.0,
        )

    def host_us(self, work: Work) -> float:
        """Host time of one step: three phases and three launches."""
        phases = sum(self.duration_us(phase, work) for phase in HOST_PHASES)
        return phases + 3 * self.launch_us + self.return_us

    # ------------------------------------------------------------------ files

    def save(self, path: str | Path) -> None:
        """Write the model as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read a model that `save` wrote, or one inside a results file."""
        try:
            data = json.loads(Path(path).read_text())
            data = data.get("cost_model", data)
            for phase in PHASES:
                data[phase] = PhaseCost(**data.get(phase, {}))
            return cls(**data)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} holds no cost model ({error}): give article, laptop or a "
                "file written by CostModel.save"
            ) from error

    # ------------------------------------------------------------------ fitting

    @classmethod
    def fit(cls, timeline: Timeline, name: str = "fitted") -> CostModel:
        """The cost model that a recorded timeline follows best.

        Each phase is fitted by itself: lengths by least squares against what grew
        in that run, of requests, tokens, context and bytes. The median decides where
        nothing grew, so that a single hiccup does not count.
        """
        schedule, prepare, h2d, compute, d2h, update = (
            _fit_phase(timeline, phase) for phase in PHASES
        )
        note = f"fitted to {timeline.name or 'a run'}"
        return cls(name, schedule, prepare, h2d, compute, d2h, update, note=note)


_PARTS: dict[str, Callable[[Work], int]] = {
    "per_request_us": lambda work: work.num_requests,
    "per_token_us": lambda work: work.num_tokens,
    "per_context_us": lambda work: work.num_context,
    "per_byte_us": lambda work: work.num_bytes,
}


def _fit_phase(timeline: Timeline, phase: str) -> PhaseCost:
    spans = [s for s in timeline.spans if s.phase == phase and s.batch >= 0]
    if not spans:
        return PhaseCost()
    lengths = [span.duration_us for span in spans]
    columns = {
        part: [float(count(span.work)) for span in spans]
        for part, count in _PARTS.items()
    }
    # A part that never changes cannot be told from the fixed one, and two parts that
    # change together cannot be told apart: take the one that explains most.
    best = PhaseCost(fixed_us=_median(lengths))
    least = _absolute_error(best, [s.work for s in spans], lengths)
    for part, values in columns.items():
        if min(values) == max(values):
            continue
        fixed, slope = _line(values, lengths)
        if fixed < 0 or slope < 0:
            continue
        candidate = PhaseCost(**{"fixed_us": fixed, part: slope})
        error = _absolute_error(candidate, [s.work for s in spans], lengths)
        if error < least:
            best, least = candidate, error
    return best


def _absolute_error(
    cost: PhaseCost, works: Sequence[Work], lengths: Sequence[float]
) -> float:
    return sum(abs(cost.us(w) - y) for w, y in zip(works, lengths, strict=True))


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of the least-squares line."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    return mean_y - slope * mean_x, slope


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


ARTICLE = CostModel(
    name="article",
    schedule=PhaseCost(fixed_us=1000.0),
    prepare=PhaseCost(fixed_us=6810.0),
    compute=PhaseCost(fixed_us=27_890.0),
    update=PhaseCost(fixed_us=1000.0),
    note=(
        "the published run: 300.6 s over 8192 steps, 76.0 % of it active; how its "
        "8.81 ms of host time split into phases was not published"
    ),
)

LAPTOP = CostModel(
    name="laptop",
    schedule=PhaseCost(fixed_us=20.0, per_request_us=1.0),
    prepare=PhaseCost(fixed_us=60.0, per_request_us=0.5),
    h2d=PhaseCost(fixed_us=8.0, per_byte_us=1 / 12_000),
    compute=PhaseCost(fixed_us=6000.0, per_token_us=30.0, per_context_us=0.3),
    d2h=PhaseCost(fixed_us=8.0, per_byte_us=1 / 12_000),
    update=PhaseCost(fixed_us=15.0, per_request_us=1.0),
    launch_us=8.0,
    note="round figures for a small model on a laptop's GPU",
)

COST_MODELS = {model.name: model for model in (ARTICLE, LAPTOP)}


def cost_model(name: str | Path) -> CostModel:
    """A preset by its name, or a model from a file.

    >>> cost_model("abacus")
    Traceback (most recent call last):
    ...
    ValueError: cost is 'abacus', neither a preset (article, laptop) nor a file: use one
    """
    if str(name) in COST_MODELS:
        return COST_MODELS[str(name)]
    if not Path(name).exists():
        raise ValueError(
            f"cost is {str(name)!r}, neither a preset ({', '.join(COST_MODELS)}) nor a "
            "file: use one"
        )
    return CostModel.load(name)
