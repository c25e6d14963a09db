// How the search orders what it finds: what people look things up in comes before what explains the code.
var Scorer = {
  score: ([page, title, anchor, description, score]) => {
    const places = [
      ["howto/", 30],
      ["reference/parameters", 25],
      ["reference/kdnotes", 20],
      ["reference/commands", 20],
      ["lessons/", 15],
      ["results/", 5],
      ["project/", -20],
      ["bench/", -10],
    ];
    const place = places.find(([start]) => page.startsWith(start));
    return score + (place ? place[1] : 0);
  },

  // the rest is as Sphinx has it
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
