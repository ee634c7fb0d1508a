// On a phone a table of more than three columns is shown as a list: each cell says its column's name (style.css).
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table:not(.autosummary)")) {
    const names = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent);
    if (names.length <= 3) continue;
    table.classList.add("wide");
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.children].forEach((cell, i) => {
        cell.dataset.column = names[i] ? names[i] + ": " : "";
        cell.classList.toggle("empty", !cell.textContent.trim());
      });
  }
});
