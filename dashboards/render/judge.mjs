// What is wrong with a page: `titles` should be there, `seen` is what each panel of the page showed ({title, isCut, isLegendCut, words,
// isDrawn}).
const NOTHING = 'No data';

export function judge(titles, seen, mayBeEmpty) {
  const wrong = [];
  const told = [];
  titles.forEach((title, number) => {
    const panel = seen[number];
    if (panel?.title !== title) wrong.push(`not shown: ${title}`);
    else if (panel.words.includes(NOTHING)) (mayBeEmpty.includes(title) ? told : wrong).push(`without data: ${title}`);
    else if (!panel.isDrawn || !panel.words.length) wrong.push(`nothing drawn: ${title}`);
    if (panel?.isLegendCut) told.push(`legend cut: ${title}`);
    if (panel?.isCut) wrong.push(`title cut: ${title}`);
  });
  if (seen.length > titles.length) wrong.push(`${seen.length} panels instead of ${titles.length}`);
  return { wrong, told };
}
