const fromFile = window.location.protocol === "file:";

// From file://, a browser may not read other pages, so the search page cannot show their text.
if (fromFile) {
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
}

// The list of versions. Each url in switcher.json is relative to the start page, so the site works at any address.
async function fillVersionSwitch(list) {
  const root = new URL(document.documentElement.dataset.content_root, window.location.href);
  const response = await fetch(new URL("_static/switcher.json", root));
  const versions = response.ok ? await response.json() : [];
  for (const { version, url } of versions) {
    list.add(new Option(version, new URL(url, root), false, version === list.dataset.version));
  }
  list.hidden = versions.length < 2;
  list.addEventListener("change", async () => {
    const page = new URL(list.dataset.page, list.value);
    const there = await fetch(page, { method: "HEAD" });
    window.location.href = there.ok ? page : list.value;
  });
}

// Phones show no scroll bar, so a table that is wider than the screen says that it goes on.
function sayWhatScrolls() {
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
  sayWhatScrolls();
  const list = document.getElementById("version-switch");
  if (list && !fromFile) {
    fillVersionSwitch(list);
  }
});
