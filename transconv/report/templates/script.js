(function () {
  "use strict";
  var root = document.documentElement, bar = document.getElementById("tools");
  bar.hidden = false;
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  var toggle = document.getElementById("theme");
  function isDark() { return root.dataset.theme ? root.dataset.theme === "dark" : dark.matches; }
  function tell() {
    toggle.textContent = isDark() ? "Light" : "Dark";
    toggle.setAttribute("aria-label", "Switch to the " + (isDark() ? "light" : "dark") + " scheme");
  }
  toggle.addEventListener("click", function () {
    root.dataset.theme = isDark() ? "light" : "dark";
    tell();
  });
  dark.addEventListener("change", tell);
  tell();
  var fold = document.getElementById("fold");
  fold.addEventListener("click", function () {
    var open = fold.getAttribute("aria-pressed") !== "true";
    document.querySelectorAll("details").forEach(function (d) { d.open = open; });
    fold.setAttribute("aria-pressed", String(open));
    fold.textContent = open ? "Fold all" : "Unfold all";
  });
  function reveal() {
    var at = location.hash && document.getElementById(location.hash.slice(1));
    for (var d = at; d; d = d.parentElement) { if (d.tagName === "DETAILS") { d.open = true; } }
    if (at) { at.scrollIntoView(); }
  }
  window.addEventListener("hashchange", reveal);
  if (location.hash) { reveal(); }
})();
