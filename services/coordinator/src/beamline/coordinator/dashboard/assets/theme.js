// Before anything is drawn: the scheme that was chosen on this page before; without one the system's holds.
const chosen = localStorage.getItem("beamline-theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
addEventListener("DOMContentLoaded", () => {
  const choice = document.getElementById("theme");
  choice.value = document.documentElement.dataset.theme ?? "";
  choice.addEventListener("change", () => {
    localStorage.setItem("beamline-theme", choice.value);
    if (choice.value) document.documentElement.dataset.theme = choice.value;
    else delete document.documentElement.dataset.theme;
  });
});
// The token has become a cookie: it need not stay where a screenshot or a history shows it.
if (location.search.includes("token=")) history.replaceState(null, "", location.pathname + location.hash);
