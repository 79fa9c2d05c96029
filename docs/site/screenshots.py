"""Take screenshots of the built site with headless Chromium: python docs/site/screenshots.py, after make docs.

The pictures are in build/screenshots: start page (light and dark), a guide, a reference page, search results, and a
phone's width.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SITE, FOLDER = ROOT / "build" / "docs", ROOT / "build" / "screenshots"
DESKTOP, PHONE = (1400, 1000), (500, 1000)  # Chromium has no narrower window
#: Name of the picture: page, size of the window, further options of Chromium.
PICTURES = {
    "start": ("index.html", DESKTOP, []),
    "start-dark": ("index.html", DESKTOP, ["--blink-settings=preferredColorScheme=0"]),
    "guide": ("checkpoints.html", DESKTOP, []),
    "reference": ("reference/trainer.html", DESKTOP, []),
    "search": ("search.html?q=resume", DESKTOP, []),
    "phone": ("strategies.html", PHONE, []),
}


def main() -> None:
    """Take all pictures."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None or not SITE.exists():
        sys.exit("This needs Chromium on the path and a site in build/docs: run make docs first.")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (page, (width, height), options) in PICTURES.items():
        with tempfile.TemporaryDirectory() as profile:
            command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *options]
            command += [f"--user-data-dir={profile}", "--virtual-time-budget=8000", f"--window-size={width},{height}"]
            command += [f"--screenshot={FOLDER / name}.png", f"{SITE.as_uri()}/{page}"]
            subprocess.run(command, check=True, capture_output=True)
        print(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
