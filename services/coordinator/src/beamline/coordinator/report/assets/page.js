// Draws each chart of the page from its specification. Colours come from the page's CSS variables.
const specs = JSON.parse(document.getElementById("specs").textContent);
const font = getComputedStyle(document.body).fontFamily;
const config = {
  background: "transparent",
  font,
  view: { stroke: "transparent" },
  line: { strokeWidth: 2 },
  axis: {
    labelColor: "var(--muted)", titleColor: "var(--muted)", titleFontWeight: "normal", labelFontSize: 12, titleFontSize: 12,
    gridColor: "var(--grid)", domainColor: "var(--grid)", tickColor: "var(--grid)", tickCount: 6,
  },
  axisX: { grid: false },
  legend: { labelColor: "var(--text)", labelFontSize: 12, symbolType: "circle" },
};

for (const place of document.querySelectorAll("[data-chart]")) {
  const spec = { width: "container", height: 220, autosize: { type: "fit-x", contains: "padding" }, description: place.dataset.title };
  // ast: expressions are interpreted, since the page's policy allows no eval.
  window.vegaEmbed(place, { ...spec, ...specs[place.dataset.chart], config }, { renderer: "svg", actions: false, ast: true, mode: "vega-lite" })
    .catch((error) => { place.textContent = `This chart could not be drawn: ${error.message}`; });
}
