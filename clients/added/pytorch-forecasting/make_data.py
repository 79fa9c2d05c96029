"""Create random monthly sales of 50 products, with the columns of the dataset that the tests would download."""

from __future__ import annotations

import numpy as np
import pandas as pd

HOLIDAYS = [
    *("easter_day", "good_friday", "new_year", "christmas", "labor_day", "independence_day"),
    *("revolution_day_memorial", "regional_games", "beer_capital", "music_fest"),
    *("fifa_u_17_world_cup", "football_gold_cup"),
]


def main() -> None:
    """Write the file to the path that the library reads."""
    random = np.random.default_rng(0)
    rows = []
    for series in range(50):
        agency, product = divmod(series, 5)
        usual = random.uniform(50, 500)
        for month, date in enumerate(pd.date_range("2013-01-01", periods=60, freq="MS")):
            price = random.uniform(1000, 2000)
            rows.append(
                {
                    "agency": f"Agency_{agency + 1:02d}",
                    "sku": f"SKU_{product + 1:02d}",
                    "volume": float(usual * (1 + 0.3 * np.sin(month / 6)) * random.lognormal(0, 0.2)),
                    "date": date,
                    "industry_volume": int(5e8 * random.uniform(0.8, 1.2)),
                    "soda_volume": int(8e8 * random.uniform(0.8, 1.2)),
                    "avg_max_temp": random.uniform(15, 35),
                    "price_regular": price,
                    "price_actual": price * 0.9,
                    "discount": price * 0.1,
                    "avg_population_2017": 100_000 * (agency + 1),
                    "avg_yearly_household_income_2017": 120_000 + 1000 * agency,
                    **{day: int((month + i) % 12 == 0) for i, day in enumerate(HOLIDAYS)},
                    "discount_in_percent": 10.0,
                    "timeseries": series,
                }
            )
    pd.DataFrame(rows).to_parquet("pytorch_forecasting/data/stallion.parquet")


if __name__ == "__main__":
    main()
