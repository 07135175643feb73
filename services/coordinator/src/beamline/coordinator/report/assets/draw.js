// How every page draws a chart from its specification. Colours come from the page's CSS variables.
globalThis.drawChart = (place, spec) => {
  const config = {
    background: "transparent",
    font: getComputedStyle(document.body).fontFamily,
    view: { stroke: "transparent" },
    line: { strokeWidth: 2 },
    axis: {
      labelColor: "var(--muted)", titleColor: "var(--muted)", titleFontWeight: "normal", labelFontSize: 12, titleFontSize: 12,
      gridColor: "var(--grid)", domainColor: "var(--grid)", tickColor: "var(--grid)", tickCount: 6,
    },
    axisX: { grid: false },
    legend: { labelColor: "var(--text)", labelFontSize: 12, symbolType: "circle" },
  };
  const common = { width: "container", height: 220, autosize: { type: "fit-x", contains: "padding" }, description: place.dataset.title };
  // ast: expressions are interpreted, since the page's policy allows no eval; it may allow no style elements either.
  const options = { renderer: "svg", actions: false, ast: true, mode: "vega-lite", defaultStyle: false, tooltip: { disableDefaultStyle: true } };
  return window.vegaEmbed(place, { ...common, ...spec, config }, options)
    .catch((error) => { place.textContent = `This chart could not be drawn: ${error.message}`; });
};
