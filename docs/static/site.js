// From file://, a browser may not read other pages, so the search page cannot show their text.
if (window.location.protocol === "file:") {
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
}

// Loads a script and returns the variable that it sets. Unlike fetch, this works from file:// too.
function loadValue(url, name) {
  return new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = url;
    script.onload = () => resolve(window[name]);
    script.onerror = () => resolve([]);
    document.head.append(script);
  });
}

// The lists of versions: one in the header, one in the menu of phones. Each version's folder has its own list of pages,
// so the same page opens if that version has it.
async function fillVersionSwitches(lists) {
  const root = new URL(document.documentElement.dataset.content_root, window.location.href);
  const versions = await loadValue(new URL("_static/versions.js", root), "PACELINE_VERSIONS");
  for (const list of lists) {
    const select = () => {
      list.value = list.dataset.version;
    };
    for (const version of versions) {
      list.add(new Option(version));
    }
    select();
    list.hidden = versions.length < 2;
    list.addEventListener("change", () => openVersion(list.dataset.page, new URL(`../${list.value}/`, root)));
    // After "back", the browser shows the page as the reader left it, with the other version chosen.
    window.addEventListener("pageshow", select);
  }
}

async function openVersion(page, version) {
  const pages = await loadValue(new URL("_static/pages.js", version), "PACELINE_PAGES");
  const { search, hash } = window.location;
  const found = pages.includes(page) ? page : "index";
  window.location.href = new URL(`${found}.html${{ index: "", search }[found] ?? hash}`, version);
}

// Phones show no scroll bar, so a hint above a table that is wider than the screen says that it scrolls.
function hintAtScrolling() {
  for (const table of document.querySelectorAll(".bd-article .table")) {
    if (table.scrollWidth > table.clientWidth + 1) {
      const hint = document.createElement("p");
      hint.className = "scroll-hint";
      hint.textContent = "Scroll the table sideways to see all columns.";
      table.before(hint);
    }
  }
}

document.addEventListener("DOMContentLoaded", () => {
  hintAtScrolling();
  fillVersionSwitches(document.querySelectorAll(".version-switch"));
});
