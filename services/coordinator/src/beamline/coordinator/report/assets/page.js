// Draws each chart of the page.
const specs = JSON.parse(document.getElementById("specs").textContent);
for (const place of document.querySelectorAll("[data-chart]")) {
  drawChart(place, specs[place.dataset.chart]);
}
