"""The table that ``validate`` and ``test`` print."""

from __future__ import annotations


def show_results(results: list[dict[str, float]], fn: str) -> None:
    """Print the logged values, a column per loader."""
    from rich.console import Console
    from rich.table import Table

    names = list(dict.fromkeys(name for one in results for name in one))
    if not names:
        return
    table = Table(title=fn.capitalize())
    table.add_column("Metric")
    for idx in range(len(results)):
        table.add_column("Value" if len(results) == 1 else f"Loader {idx}", justify="right")
    for name in names:
        table.add_row(name, *(f"{one[name]:.6g}" if name in one else "" for one in results))
    Console(soft_wrap=True).print(table)
