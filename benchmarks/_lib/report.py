"""One benchmark's result: what was compared, whether it holds, the figures behind it; as JSON and as a table."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from benchmarks._lib import machine
from benchmarks._lib.stats import Summary, summarize


@attrs.frozen
class Target:
    """What must hold: at most or at least `bound`, in the ratio's or figure's own unit."""

    relation: str
    bound: float

    def holds(self, value: float) -> bool:
        """Whether `value` is on the right side."""
        return value <= self.bound if self.relation == "at most" else value >= self.bound

    def __str__(self) -> str:
        return f"{self.relation} {self.bound:,g}"


def at_most(bound: float) -> Target:
    """Lower is better."""
    return Target("at most", bound)


def at_least(bound: float) -> Target:
    """Higher is better."""
    return Target("at least", bound)


@attrs.frozen
class Finding:
    """A ratio against a bound or an alternative, or a figure (`unit`) that must hold by itself."""

    what: str
    value: float
    against: str = ""
    unit: str = "x"
    target: Target | None = None

    def verdict(self) -> bool | None:
        """Whether the target holds; None without one."""
        return None if self.target is None else self.target.holds(self.value)


@attrs.define(eq=False)
class Report:
    """Collects one benchmark. `method` says what is timed and how, for someone who wants to doubt it."""

    benchmark: str
    title: str
    quick: bool
    method: Sequence[str] = ()
    findings: list[Finding] = attrs.field(factory=list)
    figures: list[dict[str, Any]] = attrs.field(factory=list)
    missing: list[str] = attrs.field(factory=list)
    machine: dict[str, Any] = attrs.field(factory=machine.facts)
    started: float = attrs.field(factory=time.time)

    def samples(self, what: str, arm: str, unit: str, samples: Sequence[float]) -> Summary:
        """Note an arm's samples, already in `unit`, and return their summary."""
        summary = summarize(samples)
        self.figures.append({"what": what, "arm": arm, "unit": unit, **attrs.asdict(summary)})
        return summary

    def figure(self, what: str, arm: str, unit: str, value: float) -> None:
        """Note a single number."""
        self.figures.append({"what": what, "arm": arm, "unit": unit, "n": 1, "p50": value})

    def find(
        self, what: str, value: float, *, against: str = "", unit: str = "x", target: Target | None = None
    ) -> None:
        """Note a ratio, or a figure with a target."""
        self.findings.append(Finding(what, value, against, unit, target))

    def missed(self) -> list[Finding]:
        """What does not hold. A quick run proves that a benchmark runs, so it judges nothing."""
        return [] if self.quick else [each for each in self.findings if each.verdict() is False]

    def as_json(self) -> dict[str, Any]:
        """Plain data; no path and no host name is in it."""
        return {
            "benchmark": self.benchmark,
            "title": self.title,
            "quick": self.quick,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started)),
            "seconds": round(time.time() - self.started, 1),
            "machine": self.machine,
            "method": list(self.method),
            "findings": [
                {
                    "what": each.what,
                    "value": each.value,
                    "unit": each.unit,
                    "against": each.against,
                    "target": str(each.target) if each.target else None,
                    "holds": None if self.quick else each.verdict(),
                }
                for each in self.findings
            ],
            "figures": self.figures,
            "missing": self.missing,
        }

    def write(self, directory: Path) -> None:
        """Write `<benchmark>.json`."""
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.as_json(), indent=1, ensure_ascii=False)
        (directory / f"{self.benchmark}.json").write_text(text + "\n", encoding="utf-8")

    def show(self, console: Console) -> None:
        """Print the ratios, then the figures, then what was not measured."""
        console.print(f"\n[bold]{self.benchmark}[/bold]  {self.title}", highlight=False)
        facts = self.machine
        console.print(
            f"{facts['cores']} cores, {facts['cpu']}, {facts['system']} {facts['kernel']}, Python {facts['python']}, "
            f"load {facts['load_1min']}",
            style="dim",
            highlight=False,
        )
        for line in self.method:
            console.print(f"  {line}", style="dim", highlight=False, markup=False)
        console.print(self._findings_table())
        console.print(self._figures_table())
        for line in self.missing:
            console.print(f"not measured: {line}", style="bold red", highlight=False, markup=False)
        if self.quick:
            console.print("a quick run: it shows that everything runs; the figures mean nothing", style="yellow")

    def _findings_table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title, side in (
            ("what", "left"),
            ("measured", "right"),
            ("against", "left"),
            ("must be", "left"),
            ("", "left"),
        ):
            table.add_column(title, justify="right" if side == "right" else "left")
        for each in self.findings:
            verdict = None if self.quick else each.verdict()
            mark = {None: "", True: "[green]holds[/green]", False: "[bold red]MISSED[/bold red]"}[verdict]
            value = f"{each.value:.2f} x" if each.unit == "x" else f"{_number(each.value)} {each.unit}"
            table.add_row(each.what, value, each.against, str(each.target or ""), mark)
        return table

    def _figures_table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
        for title in ("figure", "arm"):
            table.add_column(title)
        for title in ("p50", "p90", "p99", "min", "max", "unit", "n"):
            table.add_column(title, justify="left" if title == "unit" else "right")
        for each in self.figures:
            cells = [_number(each[key]) if key in each else "" for key in ("p50", "p90", "p99", "low", "high")]
            table.add_row(each["what"], each["arm"], *cells, each["unit"], f"{each['n']:,}")
        return table


def _number(value: float) -> str:
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"
