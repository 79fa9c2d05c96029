"""The doctor's report as text, terminal tables, JSON and an HTML page."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import messages
from ..report.html_page import Html, Section, card, paragraph, table
from ..report.html_page import page as whole_page
from ..report.svg_charts import line_chart, pie, side_by_side, stacked_bars
from .finding import Finding, duration, percent
from .findings import examine
from .measurements import WARM_UP, Facts
from .step_clock import PARTS, WORDS


@dataclass
class Report:
    """The measurements of all ranks, and the findings.

    Attributes:
        ranks: each rank's facts, in rank order.
        findings: the findings, those that take the most time first.
        trials: the changes that ``--try`` has tried, as rows of (what, samples per second, factor).
    """

    ranks: list[Facts]
    findings: list[Finding]
    trials: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, ranks: Sequence[Facts]) -> Report:
        """Create a report from the ranks' measurements."""
        ordered = sorted(ranks, key=lambda facts: facts.rank)
        return cls(ordered, examine(ordered))

    @property
    def problems(self) -> list[Finding]:
        """Findings that cost time in this run."""
        return [finding for finding in self.findings if not finding.is_note]

    # ---- text ------------------------------------------------------------------------------------------------------

    def verdict(self) -> str:
        """Summarize the report in a few sentences."""
        first = self.ranks[0]
        if not first.steps:
            return (
                f"The run was too short to diagnose, because the first {WARM_UP} batches are not measured. Train on "
                f"{WARM_UP + 1} or more batches."
            )
        speed = first.samples_per_second
        rate = f", {speed * first.world_size:,.0f} samples per second" if speed else ""
        head = f"A step takes {duration(first.step)}{rate}.{self._alone()}"
        if not self.problems:
            return f"{head} Nothing stands out, because most of the time is spent in the model.{self._tried()}"
        worst = self.problems[0]
        more = len(self.problems) - 1
        others = f" See {more} more finding{'s' if more > 1 else ''} below." if more else ""
        return f"{head} {worst.what} {worst.change}{others}{self._tried()}"

    def _alone(self) -> str:
        """Return a sentence that says which ranks the report covers, or an empty string if it covers all ranks."""
        count = self.ranks[0].world_size
        if len(self.ranks) == count:
            return ""
        return f" This report covers only rank 0 of {count} ranks, because the run ended early."

    def _tried(self) -> str:
        """Return a sentence about the changes that were tried, or an empty string if there are none."""
        best = next((row for row in self.trials if row.get("best")), None)
        if best is None:
            return ""
        if len(self.trials) > 1 and all("error" in row for row in self.trials[1:]):
            return " All changes that were tried failed; the table shows why."
        if best["factor"] == 1.0:
            return " None of the changes that were tried is faster."
        return f" Of the changes that were tried, {best['what']} is best ({best['factor']:.2f} times as fast)."

    def text(self) -> str:
        """Return the report as plain text."""
        lines = ["Doctor: " + self.verdict(), ""]
        if self.ranks[0].steps:
            lines += [messages.table(self._rows()), ""]
        for number, finding in enumerate(self.findings, start=1):
            label = "Note:" if finding.is_note else f"{number}."
            lines += [f"{label} {finding.what}", *(f"   {line}" for line in _reasons(finding)), ""]
        if self.trials:
            lines += [messages.table(self._trial_rows()), self.scaling(), ""]
        return "\n".join(lines).rstrip()

    def scaling(self) -> str:
        """Return a sentence about the scaling efficiency, or an empty string if no run with one process was tried."""
        count = self.ranks[0].world_size
        alone = next((row.get("samples_per_second") for row in self.trials if "one process" in row["what"]), None)
        together = self.trials[0].get("samples_per_second") if self.trials else None
        if not alone or not together:
            return ""
        factor = together / alone
        return (
            f"{count} processes train on {factor:.2f} times as many samples per second as one process, which is a "
            f"scaling efficiency of {percent(factor / count)}."
        )

    def _rows(self) -> list[list[str]]:
        """Return table rows with the time of each part of a step on each rank; parts that took no time are left out."""
        shown, ranks = self._shown(), self.ranks[:8]
        header = ["part of a step"]
        for facts in ranks:
            header += [f"rank {facts.rank}" if len(self.ranks) > 1 else "time", "share"]
        rows = [header]
        for name in shown:
            row = [WORDS[name]]
            for facts in ranks:
                row += [duration(facts.share(name) * facts.step), percent(facts.share(name))]
            rows.append(row)
        counts = sorted({facts.steps for facts in ranks})
        total = ["mean of " + " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) + " steps"]
        for facts in ranks:
            total += [duration(facts.step), "100 %"]
        return [*rows, total]

    def _shown(self) -> list[str]:
        """Return the parts that took time on any rank."""
        return [name for name in PARTS if any(facts.share(name) > 0.0005 for facts in self.ranks)]

    def _trial_rows(self) -> list[list[str]]:
        rows = [["tried", "samples per second", "speed", "step"]]
        for trial in self.trials:
            speed, factor = trial.get("samples_per_second"), trial.get("factor")
            rows.append(
                [
                    trial["what"],
                    f"{speed:,.0f}" if speed else trial.get("error", "failed"),
                    f"{factor:.2f} times" if factor else "-",
                    duration(trial["step_seconds"]) if trial.get("step_seconds") else "-",
                ]
            )
        return rows

    def say(self, answer: bool = False) -> None:
        """Print the report, with rich in a terminal and otherwise as plain text.

        With ``answer``, print to standard output, because the report is the command's result.
        """
        if not messages.is_rank_zero():
            return
        if not (sys.stdout if answer else sys.stderr).isatty():
            (messages.answer if answer else messages.info)(self.text())
            return
        from rich.console import Console

        Console(stderr=not answer).print(*self.rich())

    def rich(self) -> list[Any]:
        """Return the report as rich renderables."""
        from rich.markup import escape
        from rich.panel import Panel
        from rich.table import Table

        parts: list[Any] = [Panel(escape(self.verdict()), title="Doctor", border_style="cyan")]
        for rows in (self._rows() if self.ranks[0].steps else [], self._trial_rows() if self.trials else []):
            if rows:
                shown = Table(show_edge=False, pad_edge=False)
                for index, name in enumerate(rows[0]):
                    shown.add_column(escape(name), justify="left" if index == 0 else "right")
                for row in rows[1:]:
                    shown.add_row(*map(escape, row))
                parts.append(shown)
        for number, finding in enumerate(self.findings, start=1):
            title, style = ("Note", "dim") if finding.is_note else (str(number), "yellow")
            body = "\n".join([f"[bold]{escape(finding.what)}[/]", *map(escape, _reasons(finding))])
            parts.append(Panel(body, title=title, border_style=style))
        return parts

    # ---- files ------------------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return {
            "version": 1,
            "verdict": self.verdict(),
            "findings": [asdict(finding) for finding in self.findings],
            "ranks": [{**asdict(facts), "parts": facts.parts} for facts in self.ranks],
            "trials": self.trials,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """Create a report from the data in a JSON file."""
        ranks = [Facts(**{key: value for key, value in one.items() if key != "parts"}) for one in data["ranks"]]
        return cls(ranks, [Finding(**one) for one in data["findings"]], data.get("trials", []))

    def write(self, folder: str | Path | None, name: str = "doctor") -> tuple[Path, Path]:
        """Write ``<name>.html`` and ``<name>.json``, print where they are, and return their paths."""
        place = Path("." if folder is None else folder)
        place.mkdir(parents=True, exist_ok=True)
        page, data = place / f"{name}.html", place / f"{name}.json"
        page.write_text(self.html(), encoding="utf-8")
        data.write_text(json.dumps(self.as_dict(), indent=1), encoding="utf-8")
        messages.info(f"The doctor's report is in {page}; its data is in {data.name} in the same folder.")
        return page, data

    def html(self) -> str:
        """Return the report as an HTML page."""
        sections = [Section("What to change", self._cards())]
        if self.trials:
            rows = self._trial_rows()
            scaling = [paragraph(self.scaling())] if self.scaling() else []
            sections.append(Section("What was tried", [table(rows[1:], rows[0]), *scaling]))
        if self.ranks[0].steps:
            sections.append(Section("Where the time of a step goes", self._shares()))
            sections.append(Section("Step time", [self._line()]))
        named = ["", *(f"rank {facts.rank}" for facts in self.ranks[:8])]
        sections.append(Section("The run", [table(self._run_rows(), named)]))
        return whole_page("Doctor", sections, lead=self.verdict())

    def _cards(self) -> list[Html]:
        if not self.findings:
            text, kind = ("Nothing stands out.", "good") if self.ranks[0].steps else ("The run was too short.", "")
            return [card(text, [self.verdict()], kind)]
        return [card(one.what, _reasons(one), "" if one.is_note else "bad") for one in self.findings]

    def _shares(self) -> list[Html]:
        shown = self._shown()
        pies = [
            pie({WORDS[name]: facts.share(name) for name in shown}, f"rank {facts.rank}") for facts in self.ranks[:4]
        ]
        rows = self._rows()
        found = [side_by_side(pies), table(rows[1:], rows[0])]
        if len(self.ranks) > 1:
            bars = {
                f"rank {facts.rank}": {WORDS[n]: 1e3 * facts.share(n) * facts.step for n in shown}
                for facts in self.ranks[:64]
            }
            found.append(stacked_bars(bars, "ms"))
        if self.ranks[0].device_seconds:
            found.append(paragraph("The parts were timed on the device, but the whole step was timed on the host."))
        return found

    def _line(self) -> Html:
        series = {
            f"rank {facts.rank}": [(float(i), 1e3 * seconds) for i, seconds in enumerate(facts.step_seconds)]
            for facts in self.ranks[:4]
        }
        steps, shown = self.ranks[0].steps, len(self.ranks[0].step_seconds)
        every = f", one in {-(-steps // shown)} shown" if shown and steps > 2 * shown else ""
        return line_chart(series, f"step after the warmup{every}", "ms")

    def _run_rows(self) -> list[list[object]]:
        def loader(facts: Facts) -> str:
            return ", ".join(f"{name}={value}" for name, value in facts.loader.items() if value is not None)

        named = {
            "device": lambda f: f.device_name or f.device,
            "strategy": lambda f: f.strategy,
            "measured steps": lambda f: f.steps,
            "batch": lambda f: f.batch_size or "-",
            "accumulated batches": lambda f: f.accumulate,
            "loader": loader,
            "cores, threads": lambda f: f"{f.cores}, {f.threads}",
            "operators per step": lambda f: f.operators or "-",
            "garbage collection": lambda f: f"{duration(f.collection_seconds)} in {f.collections} runs",
            "whole run": lambda f: duration(f.run_seconds),
            "compiling, whole run": lambda f: duration(f.run_parts.get("compile", 0.0)),
            "torch": lambda f: f.versions.get("torch", "-"),
        }
        return [[name, *(of(facts) for facts in self.ranks[:8])] for name, of in named.items()]


def _reasons(finding: Finding) -> list[str]:
    """Return a finding's cause, suggested change and expected gain, one line each."""
    parts = (("Why", finding.why), ("Change", finding.change), ("Gain", finding.gain))
    return [f"{name}: {_after_colon(text)}" for name, text in parts]


def _after_colon(text: str) -> str:
    """Lowercase the first letter of a sentence, for use after a colon, unless the sentence starts with a name."""
    return text[0].lower() + text[1:] if re.match(r"[A-Z][a-z]*[ ,:]", text) else text
