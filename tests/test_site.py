"""The documentation site: it builds without a warning, nothing in it leads nowhere, and a browser can use it."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import zlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest
from jinja2 import Template

import paceline
from paceline.callbacks.base import HOOKS
from paceline.cli.main import COMMANDS
from paceline.settings import SETTINGS
from paceline.trainer.hook_names import DATA_METHODS, MODULE_METHODS

ROOT = Path(__file__).resolve().parent.parent
versions = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "site" / "versions.py")))
#: Folders of docs/ that hold no page, or pages that a build writes.
NO_PAGES = {"site", "static", "pictures", "reference", "sources"}
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. The first worker that needs it builds it for all."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (folder / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "site").exists():
            build(folder / "checkout", folder / "built")
            (folder / "built").rename(folder / "site")
    return folder / "site"


def build(checkout: Path, out: Path) -> None:
    """Build the site from a copy of docs/, in which the build writes pages, beside the rest of the repository."""
    checkout.mkdir()
    for path in ROOT.iterdir():
        if path.name != "docs" and not path.name.startswith("."):
            (checkout / path.name).symlink_to(path)
    shutil.copytree(ROOT / "docs", checkout / "docs", ignore=shutil.ignore_patterns("__pycache__", "sources"))
    shutil.rmtree(checkout / "docs" / "reference", ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-j", "2", checkout / "docs", out]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_site_builds_without_a_warning_and_every_link_leads_somewhere(site: Path) -> None:
    found = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    pages = {path: path.read_text(encoding="utf-8") for path in found}
    anchors = {path: {"", "top", *re.findall(r'\bid="([^"]*)"', text)} for path, text in pages.items()}
    wrong = []
    for path, text in pages.items():
        for target in set(re.findall(r'<[^<>]*\b(?:href|src)="([^"]*)"', text)):
            parts = urlsplit(target)
            if parts.scheme:
                assert parts.scheme in ("https", "http", "data", "mailto"), f"{path}: {target}"
                continue
            goal = path if not parts.path else Path(os.path.normpath(path.parent / unquote(parts.path)))
            # A path that begins at the root of the server fails from file:// and below another path.
            fits = not target.startswith("/") and goal.is_file()
            if not fits or (parts.fragment and unquote(parts.fragment) not in anchors.get(goal, ())):
                wrong.append(f"{path.relative_to(site)}: {target}")
    assert not wrong, wrong
    for path in (*site.glob("_static/*.css"), *site.glob("_static/*.js")):
        assert not re.search(r'url\(["\']?/(?!/)', path.read_text(encoding="utf-8")), path


def test_every_page_can_be_found_and_every_version_is_listed(site: Path) -> None:
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    found = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))["docnames"]
    docs = ROOT / "docs"
    pages = [path.relative_to(docs) for end in ("md", "ipynb") for path in docs.rglob(f"*.{end}")]
    assert {page.with_suffix("").as_posix() for page in pages if page.parts[0] not in NO_PAGES} <= set(found)
    assert versions.read(site / versions.VERSIONS) == [paceline.__version__]
    assert {page.with_suffix("").as_posix() for page in pages if page.parts[0] not in NO_PAGES} <= set(
        versions.read(site / versions.PAGES)
    )


def test_the_reference_has_every_public_name_hook_command_and_setting(site: Path) -> None:
    head = b"".join((site / "objects.inv").read_bytes().splitlines(keepends=True)[:4])
    entries = zlib.decompress((site / "objects.inv").read_bytes()[len(head) :]).decode().splitlines()
    described = {kind: set() for kind in ("py", "std:envvar")}
    for entry in entries:
        name, kind = re.match(r"(.+?) (\w+:\w+) ", entry).groups()
        described.setdefault("py" if kind.startswith("py:") else kind, set()).add(name)
    rooms = ("callbacks", "loggers", "profilers", "strategies", "utilities", "cli", "data")
    promised = {f"paceline.{name}" for name in paceline.__all__ if name != "__version__"}
    for room in rooms:
        promised |= {f"paceline.{room}.{name}" for name in importlib.import_module(f"paceline.{room}").__all__}
    assert not promised - described["py"]
    assert not {one.variable for one in SETTINGS.values()} - described["std:envvar"]
    hooks = (site / "reference" / "hooks.html").read_text()
    entries = dict(zip(*[iter(re.split(r'<section id="([a-z-]+)">\n<h3>', hooks)[1:])] * 2, strict=True))
    names = {name.replace("_", "-") for name in (*HOOKS, *MODULE_METHODS, *DATA_METHODS)}
    assert set(entries) == names
    facts = ("When", "Ranks", "May", "Must not")
    assert not [name for name, entry in entries.items() if not all(f">{fact}<" in entry for fact in facts)]
    commands = (site / "reference" / "commands.html").read_text()
    assert not [name for name in COMMANDS if f"<h2>paceline {name}<" not in commands]
    assert "{no|fp16|bf16|fp8}" in commands
    assert commands.count("no, fp16, bf16, fp8") == 1, "only where the option's form does not list them (config)"


def test_the_reference_shows_no_remains_of_how_it_was_made(site: Path) -> None:
    """No docstring cut at its first colon, no address of an object, no type alias by a name that has no entry."""
    remains = (
        r">Type<|object at 0x|>alias of |<em>~|<em>(?:check\.)?(?:ClipAlgorithm|Policy|AverageOne|StrategyName)</em>"
    )
    pages = {path.name: path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html")}
    assert not {name: found for name, text in pages.items() if (found := re.findall(remains, text))}


def test_the_figures_of_the_start_page_are_those_of_the_benchmarks() -> None:
    start = (ROOT / "docs" / "index.md").read_text()
    shown = cells(start.partition("<!-- step overhead -->\n")[2])
    measured = (ROOT / "benchmarks" / "README.md").read_text()
    ratios = {row[0]: row[3] for row in cells(measured.partition("### Everything optional off\n\n")[2])[2:]}
    known = {"Paceline, Accelerator": "paceline accelerator", "Paceline, Trainer": "paceline"}
    for name, ratio in shown[2:]:
        name = known.get(name, "raw" if name.startswith("the loop by hand") else re.sub(r" [\d.]+$", "", name).lower())
        assert ratio == ratios.pop(name), name
    assert not ratios


def test_the_page_of_figures_has_the_values_of_the_benchmarks_and_none_is_older_than_the_last_release() -> None:
    page = (ROOT / "docs" / "figures.md").read_text()
    rows = [row for part in re.findall(r"(?<=\n\n)\|.*?(?=\n\n)", page, re.S) for row in cells(part)[2:]]
    assert all(len(row) == 5 and row[2] and row[4] in ("quiet", "busy", "exact") for row in rows)
    released = re.search(r"^## \d.* \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released
    assert not [row[0] for row in rows if not re.fullmatch(r"\d{4}-\d\d-\d\d\*?", row[3]) or row[3] < released[1]]
    measured = (ROOT / "benchmarks" / "README.md").read_text()
    bare, full = (
        {row[0]: row[2:4] for row in cells(measured.partition(f"### {title}\n\n")[2])[2:]}
        for title in (
            "Everything optional off",
            "Three logged values, TensorBoard, progress bar, checkpoint (against a loop without any)",
        )
    )
    expected = {
        "a tiny batch of Trainer over the loop by hand": (bare["paceline"][1], bare["lightning"][1]),
        "the same with three logged values": (full["paceline"][1], full["lightning"][1]),
        "a tiny batch of Accelerator over the loop by hand": (
            bare["paceline accelerator"][1],
            bare["accelerate"][1],
        ),
    }
    for claim, ratios in expected.items():
        (value,) = [row[1] for row in rows if row[0].startswith(claim)]
        assert re.findall(r"([\d.]+) times", value) == [ratio.partition("x")[0] for ratio in ratios], claim
    noise = {"a tiny batch of": bare["raw"][1], "the same with three": full["raw"][1]}
    for claim, own in noise.items():
        stated = f"noise {max(abs(1 - float(own.partition('x')[0])), 0.01):.2f}"
        assert all(stated in row[1] for row in rows if row[0].startswith(claim)), stated


def cells(text: str) -> list[list[str]]:
    """The table that a text begins with, without the marks of code."""
    lines = text.partition("\n\n")[0].splitlines()
    return [[cell.strip().replace("`", "") for cell in line.split("|")[1:-1]] for line in lines]


def opened(address: str, folder: Path, size: str = "1400,1000") -> str:
    """What a browser makes of a page; it complains about nothing."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--virtual-time-budget=5000", "--enable-logging=stderr", f"--window-size={size}", "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = [line for line in done.stderr.splitlines() if ":CONSOLE:" in line and '"[PST]' not in line]
    assert not said, f"{address}: {said}"
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_pages_and_finds_words_without_a_server(site: Path, tmp_path: Path) -> None:
    expected = {
        "index.html": "Never a lost step",
        "reference/callbacks.html": "paceline.callbacks.",
        "search.html?q=checkpoint": "Search finished, found",
    }
    for page, words in expected.items():
        seen = opened(f"{site.as_uri()}/{page}", tmp_path)
        assert words in seen, page
    assert 'class="search"><li' in seen


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_start_page_shows_in_one_screen_what_paceline_is(site: Path, tmp_path: Path) -> None:
    measure = """<script>addEventListener("load", () => {
        const bottom = (part) => document.querySelector(part).getBoundingClientRect().bottom;
        const parts = [".highlight-python", ".sd-tab-set", ".picture.only-light", ".start table"];
        document.body.append("BOTTOMS" + JSON.stringify(parts.map(bottom)) + "END");
    });</script></body>"""
    text = (site / "index.html").read_text(encoding="utf-8").replace("</body>", measure)
    page = tmp_path / "measured.html"
    page.write_text(text.replace("<head>", f'<head><base href="{site.as_uri()}/">'), encoding="utf-8")
    seen = re.search(r"BOTTOMS(.*)END</body>", opened(page.as_uri(), tmp_path, "1400,1000"))
    assert seen
    assert all(0 < bottom < 1000 for bottom in json.loads(seen[1])), seen[1]


#: A small page with the two lists of versions that every page has. "?choose=1.0" chooses from it, as a reader would.
SMALL = """<!DOCTYPE html><html data-content_root="{root}"><body>{switch}{switch}<p>{page} of {version}</p>
<script>DOCUMENTATION_OPTIONS = {{}};</script><script src="{root}_static/site.js"></script><script>
const chosen = new URLSearchParams(location.search).get("choose");
const [list, second] = document.querySelectorAll(".version-switch");
new MutationObserver(() => {{
  document.querySelector("p").append(" at " + location.hash + ", shown: " + !second.hidden + " " + second.value);
  if (chosen) {{
    list.value = chosen;
    list.dispatchEvent(new Event("change"));
  }}
}}).observe(second, {{ attributeFilter: ["hidden"] }});
</script></body></html>"""


@pytest.fixture
def two_versions(tmp_path: Path) -> Path:
    """Two published versions of a small site; the newer one has a page more."""
    switch = Template((ROOT / "docs" / "site" / "templates" / "version-switch.html").read_text())
    for version, pages in {"0.9": ["index", "howto/resume"], "0.10": ["index", "howto/resume", "new"]}.items():
        built = tmp_path / "built" / version
        for page in pages:
            (built / page).parent.mkdir(parents=True, exist_ok=True)
            shown = switch.render(version=version, pagename=page)
            text = SMALL.format(root="../" * page.count("/") or "./", switch=shown, page=page, version=version)
            (built / f"{page}.html").write_text(text)
        (built / "_static").mkdir()
        shutil.copy2(ROOT / "docs" / "static" / "site.js", built / "_static")
        versions.write(built / versions.PAGES, "PACELINE_PAGES", pages)
        versions.write(built / versions.VERSIONS, "PACELINE_VERSIONS", [version])
        published = versions.publish(built, tmp_path / "web" / "docs")
    assert published == ["0.10", "0.9"]
    return tmp_path / "web"


def test_a_published_version_is_replaced_and_the_newest_release_is_the_start(two_versions: Path) -> None:
    folder, built = two_versions / "docs", two_versions.parent / "built"
    (built / "0.9" / "index.html").write_text("mended")
    assert versions.publish(built / "0.9", folder) == ["0.10", "0.9"]
    assert (folder / "0.9" / "index.html").read_text() == "mended"
    assert {tuple(versions.read(folder / one / versions.VERSIONS)) for one in ("0.9", "0.10")} == {("0.10", "0.9")}
    assert "url=0.10/index.html" in (folder / "index.html").read_text()
    (built / "0.9").rename(built / "0.11rc1")
    versions.write(built / "0.11rc1" / versions.VERSIONS, "PACELINE_VERSIONS", ["0.11rc1"])
    assert versions.publish(built / "0.11rc1", folder) == ["0.11rc1", "0.10", "0.9"]
    assert "url=0.10/index.html" in (folder / "index.html").read_text(), "a release candidate is not what readers want"


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("served", [False, True], ids=["from a file", "below a path of a server"])
def test_the_list_of_versions_leads_to_the_same_page_and_back(two_versions: Path, tmp_path: Path, served: bool) -> None:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(two_versions))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}" if served else two_versions.as_uri()
        expected = {
            "0.10/howto/resume.html?choose=0.9#kill": "howto/resume of 0.9 at #kill, shown: true 0.9",
            "0.9/howto/resume.html?choose=0.10": "howto/resume of 0.10 at , shown: true 0.10",
            "0.10/new.html?choose=0.9#new": "index of 0.9 at , shown: true 0.9",
        }
        for address, words in expected.items():
            assert f"<p>{words}</p>" in opened(f"{base}/docs/{address}", tmp_path), address
        server.shutdown()


def test_a_hook_of_the_reference_has_its_own_name_and_what_its_docstring_permits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "site")
    page = runpy.run_path(str(ROOT / "docs" / "site" / "tables.py"))["hooks"]()
    entries = dict(zip(*[iter(re.split(r"^(\w+)\n~+\n", page, flags=re.M)[1:])] * 2, strict=True))
    assert not [name for name, entry in entries.items() if set(re.findall(r"def (\w+)\(", entry)) != {name}]
    facts = {name: dict(re.findall(r"^:([\w ]+): (.*)$", entry, re.M)) for name, entry in entries.items()}
    permissions = re.compile(r"\b(may|must not)\b|[.] [a-z]")
    assert not {name: one["When"] for name, one in facts.items() if permissions.search(one["When"])}
    assert facts["setup"]["May"] == "add layers or data"
    assert facts["setup"]["Must not"] == "assume that the module is already on its device"
    assert facts["on_train_epoch_start"]["May"].endswith("loaders and ``trainer.accumulate_grad_batches``")
    assert facts["on_validation_start"]["May"].startswith("log values and swap the weights")
    assert facts["prepare_data"]["May"] == "download or unpack data"
    assert facts["on_exception"]["Ranks"] == "Each rank that fails calls the hook independently."


#: What readers search, and the page that should be among the first three results.
SEARCHED = {
    "nan loss": "howto/diverging_run",
    "out of memory": "howto/model_too_large",
    "write callback": "howto/callback",
    "tensorboard": "loggers",
    "torch 2.15": "versions",
    "install": "first_fit",
    "pip": "first_fit",
    "own loop": "own_loop",
    "GAN": "optimization",
    "bf16": "precision",
    "overhead": "figures",
    "launch options": "reference/commands",
    "ModelCheckpoint": "reference/callbacks",
    "validate less often": "howto/evaluate_and_predict",
    "convert model to ONNX": "howto/evaluate_and_predict",
    "inference server": "howto/evaluate_and_predict",
    "IterableDataset": "data",
    "dataset without length": "data",
    "padding tokens loss": "optimization",
    "freeze layers": "callbacks",
    "quick test": "first_fit",
    "test few batches": "first_fit",
    "M1": "devices",
    "low gpu utilization": "howto/slow_run",
    "unknown length": "data",
    "validate every 1000 steps": "howto/evaluate_and_predict",
    "save every 30 minutes": "checkpoints",
    "hugging face": "checkpoints",
    "ray tune": "howto/sweep",
    "optuna": "howto/sweep",
    "gradient checkpointing": "howto/model_too_large",
    "gradient norm": "logging",
}


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_first_results_of_a_search_have_the_page_that_answers_it(site: Path, tmp_path: Path) -> None:
    scripts = ("_static/doctools.js", "_static/searchtools.js", "_static/language_data.js", "searchindex.js")
    loaded = "".join(f'<script src="{(site / name).as_uri()}"></script>' for name in scripts)
    (tmp_path / "searches.html").write_text(f"""<html><body><input name="q">
        <script>const DOCUMENTATION_OPTIONS = {{}}, SPHINX_HIGHLIGHT_ENABLED = false;</script>{loaded}
        <script>
        const first = (query) => {{
          document.querySelector("input").value = query;
          return Search._performSearch(...Search._parseQuery(query)).slice(-3).map((result) => result[0]);
        }};
        const found = Object.fromEntries({json.dumps(list(SEARCHED))}.map((query) => [query, first(query)]));
        document.body.append("FOUND" + JSON.stringify(found) + "END");
        </script></body></html>""")
    seen = re.search(r"FOUND(.*)END</body>", opened((tmp_path / "searches.html").as_uri(), tmp_path))
    assert seen, "the search of the site ran"
    found = json.loads(seen[1])
    assert not {query: found[query] for query, page in SEARCHED.items() if page not in found[query]}


def test_tables_call_pages_what_the_sidebar_calls_them() -> None:
    for name in ("guides", "learn", "tutorial", "howto/index", "migrate/index"):
        page = ROOT / "docs" / f"{name}.md"
        for title, target in re.findall(r"^\| \[(.*?)\]\((\S+[.]md)\) \|", page.read_text(), re.M):
            head = (page.parent / target).read_text().partition("\n")[0]
            assert head == f"# {title}", f"{name}: {target}"


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_the_plots_the_bar_and_the_report_of_notebooks(site: Path, tmp_path: Path) -> None:
    first = opened(f"{site.as_uri()}/notebooks/first_fit.html", tmp_path)
    plots = [name for name in re.findall(r'<img [^>]*src="([^"]+[.]png)"', first) if "_images" in name]
    assert len(plots) == 2, "the digits, and those that are hard to read"
    assert all((site / "notebooks" / name).stat().st_size > 2000 for name in plots)
    assert "Epoch 7/7: 22/22 (100%)" in first
    assert "of the digits are read correctly" in first
    report = opened(f"{site.as_uri()}/notebooks/what_is_slow.html", tmp_path)
    assert "Waiting for data takes" in report
    assert re.search(r'<iframe [^>]*srcdoc="[^"]*How it went', report)
