// Which search results come first: how-to pages, guides and the tutorial before the reference, and pages whose title has
// the words that are searched. Sphinx puts this into the index of the site.
const TOPICS = [
  [/^howto\//, 12],
  [/^(migrate|tutorial|notebooks)\//, 4],
  [/^(lightning_names|accelerate_names|differences)$/, -10],
  [/^reference\//, 0],
  [/^sources\//, -8],
  [/^[^/]+$/, 9],
];

const stems = (text) => {
  const stemmer = new Stemmer();
  return text
    .toLowerCase()
    .split(/[^a-z0-9_]+/)
    .filter((word) => word.length > 1 && !stopwords.has(word))
    .map((word) => stemmer.stemWord(word));
};

var Scorer = {
  score: ([page, title, , , score, , kind]) => {
    const asked = document.querySelector('input[name="q"]')?.value || "";
    const wanted = stems(asked);
    const [, area] = TOPICS.find(([pattern]) => pattern.test(page)) || [null, 0];
    if (kind === "object") {
      // Somebody who writes a name as the code does, such as ModelCheckpoint or save_state, wants its description.
      const exact = title.split(".").pop() === asked.trim() && /[A-Z_]/.test(asked);
      return exact ? 100 : score - 10;
    }
    const named = new Set(stems(title));
    const shared = wanted.filter((word) => named.has(word)).length;
    return score + area + (shared ? (20 * shared) / wanted.length + (5 * shared) / named.size : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
